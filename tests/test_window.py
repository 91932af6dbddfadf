"""The window: one optimiser step cut by a token budget has the gradient of TRL's micro-batches.

Weights, prompts, completions and rewards are the same for both trainers (see `harness`); the gradient is compared at
every optimiser step, in float32 to 1e-5 of its largest entry and in float64 to 1e-10.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from datasets import Dataset
from harness import (
    ALL_EXTRAS,
    LOSS_TYPES,
    LogpTable,
    Record,
    ScriptedRollouts,
    build,
    gradient_gap,
    plain_forward,
    prompt_rows,
    scripted_reward,
)
from tiny import save_tiny
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

FP32 = 1e-5
GROUP = 4  # completions per prompt, as in `harness.settings`


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def moe_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return save_tiny(tmp_path_factory.mktemp("moe"), kind="qwen3_moe", **experts)


def train(ours: bool, model: Any, directory: Any, **fields: Any) -> Record:
    """Run a few optimiser steps on scripted completions; return the record."""
    rollouts = ScriptedRollouts(**fields.pop("rollouts", {}))
    rows = fields.pop("rows", prompt_rows(12, dead=(2, 5)))
    trainer, record = build(ours, directory, model=model, rows=rows, rollouts=rollouts, **fields)
    trainer.train()
    return record


@pytest.fixture(scope="module")
def trl_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that runs TRL once per set of arguments."""

    @functools.cache
    def cached(model: str, fields: tuple[tuple[str, Any], ...]) -> Record:
        return train(False, model, tmp_path_factory.mktemp("trl"), **dict(fields))

    return cached


def assert_same_gradients(ours: Record, theirs: Record, tolerance: float = FP32) -> None:
    """Compare every optimiser step's gradient and loss."""
    assert len(ours.gradients) == len(theirs.gradients) > 0
    assert any(value.abs().max() > 1e-3 for value in theirs.gradients[0].values()), "the case has no gradient"
    gaps = [gradient_gap(mine, other) for mine, other in zip(ours.gradients, theirs.gradients, strict=True)]
    assert max(gaps) <= tolerance, f"gradient gaps {gaps}"
    for mine, other in zip(ours.logs[:-1], theirs.logs[:-1], strict=True):  # the last entry is the run's summary
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=2e-6)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4, abs=1e-7)


# (completions per device, accumulation, budget in tokens). A group of four takes about 4 x (10 + 8) tokens.
SPLITS = [
    (4, 2, None),  # one pass holds everything
    (4, 2, 100),  # one group a pass
    (8, 1, 150),  # two groups a pass
    (2, 4, 30),  # a group is larger than the budget
    (2, 6, 1),  # a row is larger than the budget
    (1, 8, 100),  # TRL forwards single rows
]


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "x".join(map(str, split)))
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gradient_is_trl_s(
    loss_type: str, split: tuple[int, int, int | None], checkpoint: str, trl_run: Any, tmp_path: Any
) -> None:
    size, accumulation, budget = split
    fields = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation, "loss_type": loss_type}
    theirs = trl_run(checkpoint, tuple(fields.items()))
    ours = train(True, checkpoint, tmp_path, max_tokens_per_micro_batch=budget, **fields)
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("split", [(4, 2, None), (8, 1, 60), (2, 4, 10)], ids=lambda split: "x".join(map(str, split)))
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gradient_is_trl_s_with_every_extra(
    loss_type: str, split: tuple[int, int, int | None], checkpoint: str, trl_run: Any, tmp_path: Any
) -> None:
    """On packed rows, where a budget counts each prompt once; dead groups are skipped."""
    size, accumulation, budget = split
    fields = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation, "loss_type": loss_type}
    theirs = trl_run(checkpoint, tuple(fields.items()))
    ours = train(True, checkpoint, tmp_path, max_tokens_per_micro_batch=budget, **ALL_EXTRAS, **fields)
    assert_same_gradients(ours, theirs)


def test_gradient_is_trl_s_with_every_default(checkpoint: str, tmp_path: Any) -> None:
    """As a user has it who changes one import: rewards in worker processes too."""

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        # inside a function, so that the workers are sent its code and need not import torch through `harness`
        return [0.5 if "dead" in p else sum(ids) % 13 / 8 for p, ids in zip(prompts, completion_ids, strict=True)]

    theirs = train(False, checkpoint, tmp_path, reward=reward)
    ours = train(
        True,
        checkpoint,
        tmp_path,
        reward=reward,
        shared_prefix_forward=True,
        reward_isolation="auto",
        reward_num_workers=1,
    )
    assert_same_gradients(ours, theirs)


SETTINGS: dict[str, dict[str, Any]] = {
    "kl": {"beta": 0.04},
    "two_iterations": {"num_iterations": 2, "beta": 0.04, "max_steps": 4},
    "long_generation": {"steps_per_generation": 4, "max_steps": 4},
    "straddling_generations": {"steps_per_generation": 3, "max_steps": 3},
    "short_generation": {"steps_per_generation": 1, "gradient_accumulation_steps": 4},
    # 3 prompts make 3 steps of 4 completions an epoch: a window of two steps, then one of one step
    "incomplete_last_window": {
        "steps_per_generation": 3,
        "max_steps": -1,
        "num_train_epochs": 2,
        "rows": prompt_rows(3),
    },
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "truncated_masked": {"mask_truncated_completions": True},
    "environment_tokens": {"rollouts": {"env_mask": True}},
    "entropy_bonus": {"entropy_coef": 0.05},
    "adaptive_entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.05, "entropy_target": 8.0, "max_steps": 3},
    "entropy_quantile": {"top_entropy_quantile": 0.4},
    "off_policy_mask": {"off_policy_mask_threshold": 1e-4, "num_iterations": 2, "max_steps": 4, "learning_rate": 0.1},
    "sequence_level": {"importance_sampling_level": "sequence", "num_iterations": 2, "max_steps": 4},
    "two_sided_clip": {"delta": 1.05, "epsilon": 0.02, "num_iterations": 3, "max_steps": 6, "learning_rate": 0.5},
    "batch_scaled": {"scale_rewards": "batch"},
    "unscaled": {"scale_rewards": "none"},
    "temperature": {"temperature": 0.7},
    "padded_to_multiple": {"pad_to_multiple_of": 16},
}
FEW_LOSSES = ("grpo", "bnpo", "dapo")


# In the fast suite each setting meets a token-mean loss on packed rows and two others on padded ones.
CROSS = [(loss, packed) for loss in LOSS_TYPES for packed in (False, True)]
FAST_CROSS = (("grpo", False), ("bnpo", False), ("dapo", True))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("loss_type", "packed"),
    [pytest.param(*pair, marks=[] if pair in FAST_CROSS else pytest.mark.slow) for pair in CROSS],
)
def test_gradient_is_trl_s_with(loss_type: str, packed: bool, setting: str, checkpoint: str, tmp_path: Any) -> None:
    fields = {"loss_type": loss_type, "max_tokens_per_micro_batch": 40, **SETTINGS[setting]}
    theirs = train(False, checkpoint, tmp_path, **fields)
    ours = train(True, checkpoint, tmp_path, **fields, **(ALL_EXTRAS if packed else {}))
    assert_same_gradients(ours, theirs)


def test_incomplete_window_exists(checkpoint: str, tmp_path: Any) -> None:
    """The case above has the optimiser steps it claims: two an epoch, of which the second is short."""
    record = train(False, checkpoint, tmp_path, **SETTINGS["incomplete_last_window"])
    assert len(record.gradients) == 4


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gradient_in_float64(loss_type: str, beta: float, checkpoint: str, tmp_path: Any) -> None:
    """Without float32's rounding the two gradients are one number: what is left cannot hide a wrong weight."""

    def double_run(ours: bool) -> Record:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
        with plain_forward():
            return train(ours, model, tmp_path, loss_type=loss_type, beta=beta, max_tokens_per_micro_batch=40)

    assert_same_gradients(double_run(True), double_run(False), tolerance=1e-10)


def test_every_completion_truncated_and_masked(checkpoint: str, tmp_path: Any) -> None:
    fields = {"mask_truncated_completions": True, "rollouts": {"truncate_all": True}}
    theirs = train(False, checkpoint, tmp_path, **fields)
    ours = train(True, checkpoint, tmp_path, max_tokens_per_micro_batch=40, **fields)
    for mine, other in zip(ours.gradients, theirs.gradients, strict=True):
        assert all(not value.any() for value in [*mine.values(), *other.values()])


@pytest.mark.parametrize("loss_type", FEW_LOSSES)
@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_gradient_of_a_mixture_of_experts(
    loss_type: str, coefficient: float, moe_checkpoint: str, tmp_path: Any
) -> None:
    """With its balancing loss, which depends on the rows that share a forward pass, and without."""
    fields = {"loss_type": loss_type, "router_aux_loss_coef": coefficient}
    theirs = train(False, moe_checkpoint, tmp_path, **fields)
    ours = train(True, moe_checkpoint, tmp_path, max_tokens_per_micro_batch=40, **fields)
    assert_same_gradients(ours, theirs)
    assert ("aux_loss" in theirs.logs[0]) == ("aux_loss" in ours.logs[0]) == (coefficient > 0)


@pytest.mark.parametrize("loss_type", FEW_LOSSES)
def test_gradient_of_an_adapter(loss_type: str, checkpoint: str, tmp_path: Any) -> None:
    from peft import LoraConfig

    def adapter_run(ours: bool) -> Record:
        torch.manual_seed(5)  # of the adapter's weights
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return train(ours, checkpoint, tmp_path, loss_type=loss_type, beta=0.04, peft_config=lora)

    assert_same_gradients(adapter_run(True), adapter_run(False))


def test_weights_after_several_steps(checkpoint: str, tmp_path: Any) -> None:
    theirs = train(False, checkpoint, tmp_path, max_steps=6, learning_rate=0.1)
    ours = train(True, checkpoint, tmp_path, max_steps=6, learning_rate=0.1, max_tokens_per_micro_batch=30)
    start = train(False, checkpoint, tmp_path, max_steps=1, learning_rate=0.0).weights
    moved = max(float((theirs.weights[name] - start[name]).abs().max()) for name in start)
    gap = max(float((theirs.weights[name] - ours.weights[name]).abs().max()) for name in start)
    assert moved > 1e-3
    assert gap <= 1e-4 * moved


def test_comparison_notices_a_dropped_row(checkpoint: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a window that loses one row of a step fails the comparison."""
    from trl_grpo_ext.learner.window import RolloutWindow

    whole = RolloutWindow.rows

    def without_one(self: RolloutWindow) -> Any:
        alive, dead = whole(self)
        return alive[:-1], dead

    theirs = train(False, checkpoint, tmp_path)
    monkeypatch.setattr(RolloutWindow, "rows", without_one)
    ours = train(True, checkpoint, tmp_path)
    with pytest.raises(AssertionError, match="gradient gaps"):
        assert_same_gradients(ours, theirs)


def passes_of(checkpoint: str, directory: Any, budget: int | None, **fields: Any) -> list[torch.Tensor]:
    """Return the (rows, width) attention masks of the passes with gradient, and check that prompts are told apart."""
    masks: list[torch.Tensor] = []
    forward = GRPOTrainer._get_per_token_logps_and_entropies

    def recording(
        self: Any, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if torch.is_grad_enabled():
            masks.append(torch.where(attention_mask.bool(), input_ids, -1))
        return forward(self, model, input_ids, attention_mask, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", recording)
        train(
            True, checkpoint, directory, max_tokens_per_micro_batch=budget, max_steps=1, rows=prompt_rows(12), **fields
        )
    return masks


@pytest.mark.parametrize("budget", [30, 100, 200])
def test_no_pass_exceeds_the_budget(budget: int, checkpoint: str, tmp_path: Any) -> None:
    passes = passes_of(checkpoint, tmp_path, budget, gradient_accumulation_steps=8)
    assert sum(len(rows) for rows in passes) == 32
    assert all(rows.numel() <= budget or len(rows) == 1 for rows in passes)


def test_memory_does_not_grow_with_the_step(checkpoint: str, tmp_path: Any) -> None:
    """Neither with the completions per device nor with accumulation."""
    for size, accumulation in ((4, 2), (32, 1), (1, 32)):
        passes = passes_of(
            checkpoint,
            tmp_path,
            100,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
        )
        assert max(rows.numel() for rows in passes) <= 100


def test_groups_stay_whole_where_they_fit(checkpoint: str, tmp_path: Any) -> None:
    """TRL shuffles rows over its micro-batches; the window brings a group's rows together again."""
    rollouts = ScriptedRollouts()
    completion_of = {tuple(rollouts.completion(row)): row for row in range(32)}
    assert len(completion_of) == 32
    for budget, whole in ((120, True), (30, False)):
        passes = passes_of(checkpoint, tmp_path, budget, gradient_accumulation_steps=8)
        homes: dict[int, set[int]] = {}
        for number, rows in enumerate(passes):
            for row in rows.tolist():
                tokens = tuple(token for token in row if token >= 0)
                found = next(r for ids, r in completion_of.items() if tokens[-len(ids) :] == ids)
                homes.setdefault(found // GROUP, set()).add(number)
        assert all(len(home) == 1 for home in homes.values()) == whole


def test_generate_calls_stay_within_their_budget(checkpoint: str, tmp_path: Any) -> None:
    """Rows per call do not grow with accumulation; greedy completions do not depend on the calls."""

    def generate(budget: int, accumulation: int) -> tuple[list[int], list[list[int]]]:
        sizes: list[int] = []
        completions: list[list[int]] = []

        def reward(prompts: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
            completions.extend(completion_ids)
            return scripted_reward(prompts, completion_ids)

        trainer, _ = build(
            True,
            tmp_path,
            model=checkpoint,
            rows=prompt_rows(16),
            reward=reward,
            gradient_accumulation_steps=accumulation,
            generation_kwargs={"do_sample": False},
            max_tokens_per_generation_batch=budget,
            max_steps=1,
        )
        model_generate = trainer.model.generate
        trainer.model.generate = lambda **kwargs: sizes.append(kwargs["input_ids"].numel()) or model_generate(**kwargs)
        trainer.train()
        return sizes, completions

    whole, expected = generate(0, 8)
    assert len(whole) == 1
    cut, found = generate(120, 8)
    assert len(cut) >= 4
    assert max(cut) + 8 * GROUP <= 120  # the prompts and the room for 8 new tokens a row
    assert found == expected
    assert max(generate(120, 2)[0]) + 8 * GROUP <= 120


def test_evaluation_is_trl_s(checkpoint: str, tmp_path: Any) -> None:
    def evaluate(ours: bool) -> dict[str, float]:
        trainer, _ = build(
            ours,
            tmp_path,
            model=checkpoint,
            rows=prompt_rows(8),
            rollouts=ScriptedRollouts(),
            per_device_eval_batch_size=8,
        )
        return trainer.evaluate(Dataset.from_list(prompt_rows(4, dead=(1,))))

    ours, theirs = evaluate(True), evaluate(False)
    for key, value in theirs.items():
        if not any(word in key for word in ("time", "per_second")):
            assert ours[key] == pytest.approx(value, rel=1e-6, abs=1e-7), key


def test_sequences_of_the_table_are_long_enough() -> None:
    """The rows that `LogpTable` tells apart by their first token are different for all rows of a run."""
    rollouts = ScriptedRollouts(row_ids=True)
    ids = torch.tensor([rollouts.completion(row)[:2] for row in range(64)])
    assert LogpTable.rows(ids).tolist() == list(range(64))
