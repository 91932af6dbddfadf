"""Builders that the tests of the PPO layer share: tiny models, rows, settings, trainers with given responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from datasets import Dataset
from tiny import tiny_config, tiny_model, tiny_tokenizer
from transformers import AutoModelForSequenceClassification, TrainerCallback

from trl_grpo_ext.compat.ppo import PPOConfig, PPOTrainer

EOS = 2


def reward_model(seed: int = 3, **overrides: Any) -> Any:
    """Return a random sequence classifier with one label."""
    config = tiny_config("llama", num_labels=1, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForSequenceClassification.from_config(config).eval()


def id_rows(num: int = 16) -> Dataset:
    """Return ``num`` prompts as token ids only, of different lengths."""
    tokenizer = tiny_tokenizer()
    texts = [f"{'long ' * (i % 3)}What is {i} + {i}?" for i in range(num)]
    return Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"] for text in texts]})


def v2_config(directory: Any, **fields: Any) -> PPOConfig:
    """Return the settings of a short CPU run of the v2 era; ``fields`` win."""
    values: dict[str, Any] = {
        "output_dir": str(directory),
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_ppo_epochs": 1,
        "total_episodes": 16,
        "response_length": 6,
        "learning_rate": 1e-3,
        "num_sample_generations": 0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    # Workers would import this test suite, and with it transformers, before they score anything.
    values["grpo_kwargs"] = {"reward_isolation": "off", **fields.pop("grpo_kwargs", {})}
    return PPOConfig(**{**values, **fields})


def classic_config(**fields: Any) -> PPOConfig:
    """Return the settings of a short CPU run of the classic era; ``fields`` win."""
    values: dict[str, Any] = {"batch_size": 8, "mini_batch_size": 8, "learning_rate": 1e-3, "use_cpu": True}
    return PPOConfig(**{**values, **fields})


class GivenResponses:
    """Make a trainer "sample" responses that depend only on the row's number, some of them without EOS."""

    def __init__(self, length: int = 6) -> None:
        self.length, self.count = length, 0

    def __call__(self, prompt_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return one response per prompt."""
        draw = torch.Generator().manual_seed(self.count)
        self.count += 1
        rows = torch.randint(3, 300, (len(prompt_ids), self.length), generator=draw).tolist()
        return [row if i % 3 == 0 else [*row[: 2 + i % 3], EOS] for i, row in enumerate(rows)]

    def install(self, trainer: Any) -> None:
        """Replace sampling in ``trainer``."""
        trainer._generate_single_turn = lambda prompt_ids, *_, **__: (self(prompt_ids), None)


class Recorder(TrainerCallback):
    """Keep every log."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Append."""
        self.logs.append(dict(logs))


def v2_trainer(directory: Any, *, given: bool = True, trainer: Callable[..., Any] = PPOTrainer, **changes: Any) -> Any:
    """Return a v2 trainer on tiny models; ``changes`` are constructor arguments or, otherwise, settings."""
    call: dict[str, Any] = {
        "model": tiny_model(),
        "ref_model": None,
        "reward_model": reward_model(),
        "train_dataset": id_rows(),
        "processing_class": tiny_tokenizer(),
    }
    settings = {}
    for name, value in changes.items():
        is_argument = name in call or name in (
            "eval_dataset",
            "peft_config",
            "callbacks",
            "reward_funcs",
            "value_model",
        )
        (call if is_argument else settings)[name] = value
    if call.get("reward_funcs") is not None:
        call["reward_model"] = None
    built = trainer(args=v2_config(directory, **settings), **call)
    if given:
        GivenResponses(built.args.response_length).install(built)
    return built
