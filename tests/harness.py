"""Run a trainer deterministically on a tiny model and write down what it did.

Two trainers that are compared get the same weights, the same prompts, the same scripted completions (ragged, some
truncated) and the same rewards, so that every difference between them is the trainers' own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from tiny import tiny_tokenizer
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_grpo_ext import GroupRelativeConfig, GroupRelativeTrainer

# `Trainer.train` collects garbage once: 0.3 s of walking over torch's and transformers' own objects, unless they are
# set apart. That is most of the time of a run this small.
gc.collect()
gc.freeze()
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func warns at each construction

EOS = 2
# The values that make our trainer TRL's.
EXTRAS_OFF: dict[str, Any] = {
    "max_tokens_per_micro_batch": 0,
    "max_tokens_per_generation_batch": 0,
    "skip_dead_groups": False,
    "shared_prefix_forward": False,
    "rollout_engine": "trl",
    "oom_max_halvings": 0,
    "memory_metrics": False,
    "reward_isolation": "off",
    "reward_abstention": "zero",
    "float32_adapters": False,
    "watch_updates": False,
}
# What most tests leave out, so that they watch the window alone: TRL's forward pass is replaced or counted, and rewards
# write down what they saw, which a worker process could not do.
WINDOW_ALONE: dict[str, Any] = {
    name: v for name, v in EXTRAS_OFF.items() if not name.startswith(("max_", "skip_", "oom_", "memory_"))
}
ALL_EXTRAS: dict[str, Any] = {"shared_prefix_forward": True, "reward_isolation": "never"}
TRL_FIELDS = frozenset(field.name for field in dataclasses.fields(GRPOConfig))
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")


def settings(**overrides: Any) -> dict[str, Any]:
    """Return the arguments of a short CPU run; ``overrides`` win."""
    fields: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,  # the recorder must see the gradient, not the clipped one
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 11,
    }
    fields.update(overrides)
    return fields


def prompt_rows(num: int, dead: tuple[int, ...] = ()) -> list[dict[str, str]]:
    """Return ``num`` prompts of different lengths; ``scripted_reward`` pays the groups in ``dead`` a constant."""
    return [
        {"prompt": f"{'dead ' if index in dead else ''}{'long ' * (index % 3)}{index} + {index % 7}"}
        for index in range(num)
    ]


def scripted_reward(prompts: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return multiples of 1/8 that depend on the tokens, or 0.5 where the prompt says dead: both exact in float32."""
    return [
        0.5 if "dead" in str(prompt) else ((sum(ids) + 3 * len(ids)) % 13) / 8
        for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


class ScriptedRollouts:
    """A ``rollout_func`` whose completions depend on the call's number and the row's number among all processes.

    Args:
        max_length: completions have 2 to ``max_length`` tokens; every fifth one is cut off at the maximum without EOS.
        row_ids: True writes the row's number (over all calls) into the first token, for ``LogpTable``.
        env_mask: True marks some tokens as the environment's, which the loss must leave out.
        truncate_all: every completion is cut off, so that ``mask_truncated_completions`` leaves nothing.
    """

    def __init__(
        self,
        max_length: int = 8,
        *,
        row_ids: bool = False,
        env_mask: bool = False,
        truncate_all: bool = False,
        vocab_size: int = 300,
    ) -> None:
        self.max_length, self.row_ids, self.env_mask = max_length, row_ids, env_mask
        self.truncate_all, self.vocab_size = truncate_all, vocab_size
        self.num_rows = 0
        self.tokenizer = tiny_tokenizer()

    def completion(self, row: int) -> list[int]:
        """Return the tokens of the ``row``-th completion of the run."""
        draw = random.Random(f"completion {row}")
        length = draw.randint(2, self.max_length - 1)
        tokens = [draw.randrange(3, self.vocab_size) for _ in range(self.max_length)]
        if self.row_ids:
            tokens[0] = 3 + row
        truncated = self.truncate_all or row % 5 == 4
        return tokens if truncated else [*tokens[:length], EOS]

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        accelerator = trainer.accelerator
        first = self.num_rows + accelerator.process_index * len(prompts)
        self.num_rows += accelerator.num_processes * len(prompts)
        completions = [self.completion(first + index) for index in range(len(prompts))]
        output: dict[str, Any] = {
            "prompt_ids": [self.tokenizer(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": completions,
            "logprobs": None,
        }
        if self.env_mask:
            output["env_mask"] = [[int(index % 4 != 2) for index in range(len(ids))] for ids in completions]
        return output


@dataclass
class Record(TrainerCallback):
    """What a run did, one entry per optimiser step."""

    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.gradients.append(
            {
                name.removeprefix("module."): (torch.zeros_like(p) if p.grad is None else p.grad.clone())
                for name, p in model.named_parameters()
                if p.requires_grad
            }
        )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def build(
    ours: bool,
    directory: Any,
    *,
    model: Any,
    rows: list[dict[str, Any]],
    rollouts: Callable[..., Any] | None = None,
    reward: Any = scripted_reward,
    peft_config: Any = None,
    **fields: Any,
) -> tuple[GRPOTrainer, Record]:
    """Return a trainer, ours or TRL's, and the record that its run will fill.

    Args:
        ours: True for ``GroupRelativeTrainer``, with the extras of ``WINDOW_ALONE`` unless ``fields`` says otherwise.
        directory: output directory.
        model: a model, or the path of a checkpoint (needed when ``beta`` > 0: TRL loads the reference from it).
        rows: the data set.
        rollouts: a ``rollout_func``, or None to sample from the model.
        reward: reward function, or a list of them.
        peft_config: an adapter to train.
        **fields: of the config, on top of ``settings``. Ours alone are dropped when ``ours`` is False.
    """
    config_class = GroupRelativeConfig if ours else GRPOConfig
    trainer_class = GroupRelativeTrainer if ours else GRPOTrainer
    known = {**WINDOW_ALONE, **fields} if ours else {name: v for name, v in fields.items() if name in TRL_FIELDS}
    if isinstance(model, str):  # TRL loads a checkpoint in its own dtype only when it is told to
        known.setdefault("model_init_kwargs", {"dtype": "float32"})
    record = Record()
    trainer = trainer_class(
        model=model,
        reward_funcs=reward,
        args=config_class(output_dir=str(directory), **settings(**known)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny_tokenizer(),
        rollout_func=rollouts,
        callbacks=[record],
        peft_config=peft_config,
    )
    return trainer, record


def gradient_gap(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between two gradients over the largest entry of the second (0 if both are 0)."""
    assert ours.keys() == theirs.keys(), "not the same parameters"
    scale = max(float(value.abs().max()) for value in theirs.values())
    worst = max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
    return worst / scale if scale else worst


class LogpTable:
    """Stands in for the forward pass: log-probabilities and entropies are looked up in float64 tables that are trained.

    The gradient of a window with respect to each token's log-probability then appears in the table's ``grad``, without
    any model's rounding, and optimiser steps move the policy, so that ratios leave 1. Rows are told apart by their
    first token (``ScriptedRollouts(row_ids=True)``).
    """

    def __init__(self, trainer: GRPOTrainer, num_rows: int, max_length: int = 8, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        shape = (num_rows, max_length)
        # Drawn in float32: TRL takes the entropy quantile in float32, and a tie must stay a tie.
        self.logps = torch.nn.Parameter(-3 * torch.rand(shape, generator=draw).double())
        self.entropies = torch.nn.Parameter(4 * torch.rand(shape, generator=draw).double())
        self.reference = self.logps.detach() + 0.3 * torch.randn(shape, generator=draw).double()
        trainer.model.register_parameter("table_logps", self.logps)
        trainer.model.register_parameter("table_entropies", self.entropies)

    @staticmethod
    def rows(completion_ids: torch.Tensor) -> torch.Tensor:
        """Return the (B,) numbers of the rows."""
        return completion_ids[:, 0] - 3

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace TRL's forward pass; a trainer of ours arrives here when it calls TRL's."""

        def look_up(
            trainer: GRPOTrainer,
            model: Any,
            input_ids: torch.Tensor,
            attention_mask: torch.Tensor,
            logits_to_keep: int,
            batch_size: int | None = None,
            compute_entropy: bool = False,
            compute_aux_loss: bool = False,
            **_: Any,
        ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
            rows = self.rows(input_ids[:, -logits_to_keep:])
            is_reference = trainer.ref_model is not None and model is trainer.ref_model
            logps = (self.reference if is_reference else self.logps)[rows, :logits_to_keep]
            return logps, self.entropies[rows, :logits_to_keep] if compute_entropy else None, None

        with mock.patch.object(GRPOTrainer, "_get_per_token_logps_and_entropies", look_up):
            yield


@contextlib.contextmanager
def plain_forward() -> Iterator[None]:
    """Compute log-probabilities and entropies with torch's own functions, in the model's dtype.

    Two sources of noise are removed. TRL's fused head adds up in float32 even for a float64 model. And positions are
    counted from the first real token: counted from the left padding, as TRL does, the width of the padding changes the
    angles of the rotary embedding, which transformers rounds to float32.
    """

    def score(
        trainer: GRPOTrainer,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=input_ids, attention_mask=attention_mask, position_ids=positions).logits
        logits = logits[:, -logits_to_keep - 1 : -1]
        log_p = torch.log_softmax(logits / trainer.temperature, dim=-1)
        logps = log_p.gather(2, input_ids[:, -logits_to_keep:].unsqueeze(-1)).squeeze(-1)
        return logps, -(log_p.exp() * log_p).sum(-1) if compute_entropy else None, None

    with mock.patch.object(GRPOTrainer, "_get_per_token_logps_and_entropies", score):
        yield
