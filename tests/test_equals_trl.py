"""With the extras off, our trainer is TRL's bit for bit: completions, losses, gradients and weights.

Both sample from the model here, so that the random numbers consumed are compared too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import EXTRAS_OFF, LOSS_TYPES, Record, build, prompt_rows, scripted_reward
from tiny import save_tiny

# Wall-clock figures differ between any two runs.
TIMINGS = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def run(ours: bool, checkpoint: str, directory: Any, lora: bool, **fields: Any) -> tuple[Any, Record, list[Any]]:
    """Train three steps with sampling; return the trainer, its record and the completions."""
    peft_config = None
    if lora:
        from peft import LoraConfig

        # `init_lora_weights=False` draws both matrices, so that the adapter's gradients are not half zero
        peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    completions: list[Any] = []

    def reward(prompts: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        completions.append(completion_ids)
        return scripted_reward(prompts, completion_ids)

    torch.manual_seed(5)  # of the adapter's first weights
    config = {"max_steps": 3, "optim": "adamw_torch", "learning_rate": 1e-3, "max_grad_norm": 1.0, **fields}
    trainer, record = build(
        ours,
        directory,
        model=checkpoint,
        rows=prompt_rows(16, dead=(2, 5)),
        reward=reward,
        peft_config=peft_config,
        **config,
        **EXTRAS_OFF,
    )
    trainer.train()
    return trainer, record, completions


def assert_bit_equal(ours: Record, theirs: Record) -> None:
    """Compare logs (losses, gradient norms, every metric), gradients and weights without any tolerance."""

    def untimed(logs: list[dict[str, float]]) -> list[dict[str, float]]:
        return [{key: value for key, value in entry.items() if key not in TIMINGS} for entry in logs]

    assert untimed(ours.logs) == untimed(theirs.logs)
    assert len(ours.gradients) == len(theirs.gradients) == 3
    for mine, other in [*zip(ours.gradients, theirs.gradients, strict=True), (ours.weights, theirs.weights)]:
        assert mine.keys() == other.keys()
        for name in other:
            assert torch.equal(mine[name], other[name]), name
    assert any(value.abs().max() > 0 for value in theirs.gradients[-1].values())


CASES = [(loss, beta, lora) for loss in LOSS_TYPES for beta in (0.0, 0.04) for lora in (False, True)]


@pytest.mark.parametrize(("loss_type", "beta", "lora"), CASES)
def test_extras_off_is_trl(loss_type: str, beta: float, lora: bool, checkpoint: str, tmp_path: Any) -> None:
    _, theirs, their_completions = run(False, checkpoint, tmp_path, lora, loss_type=loss_type, beta=beta)
    _, ours, our_completions = run(True, checkpoint, tmp_path, lora, loss_type=loss_type, beta=beta)
    assert our_completions == their_completions
    assert_bit_equal(ours, theirs)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_iterations": 2, "steps_per_generation": 3},
        {"gradient_checkpointing": True},
        {"top_entropy_quantile": 0.5, "use_adaptive_entropy": True, "entropy_target": 6.0, "entropy_coef": 0.01},
        {"multi_objective_aggregation": "normalize_then_sum", "mask_truncated_completions": True},
        {"bf16": True},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_extras_off_is_trl_with_other_settings(fields: dict[str, Any], checkpoint: str, tmp_path: Any) -> None:
    _, theirs, _ = run(False, checkpoint, tmp_path, False, **fields)
    _, ours, _ = run(True, checkpoint, tmp_path, False, **fields)
    assert_bit_equal(ours, theirs)


def test_extras_off_is_trl_with_missing_rewards(checkpoint: str, tmp_path: Any) -> None:
    """Two functions that abstain here and there, weighted; one row has no reward at all."""

    def first(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [None if sum(ids) % 3 == 0 else len(ids) / 3 for ids in completion_ids]

    def second(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [None if sum(ids) % 6 == 0 else sum(ids) % 7 / 7 for ids in completion_ids]

    def run_both(ours: bool) -> Record:
        fields = {"max_steps": 3, "reward_weights": [1.0, 0.3], "rows": prompt_rows(16), "reward": [first, second]}
        trainer, record = build(ours, tmp_path, model=checkpoint, **fields, **EXTRAS_OFF)
        trainer.train()
        return record

    assert_bit_equal(run_both(True), run_both(False))


def test_comparison_notices_a_difference(checkpoint: str, tmp_path: Any) -> None:
    """Negative control: another seed is not bit-equal."""
    _, theirs, _ = run(False, checkpoint, tmp_path, False)
    _, ours, _ = run(True, checkpoint, tmp_path, False, seed=12)
    with pytest.raises(AssertionError):
        assert_bit_equal(ours, theirs)
