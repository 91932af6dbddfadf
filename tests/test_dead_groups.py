"""Groups with equal rewards: advantage exactly 0, no forward pass where that is exact, and the same gradient as TRL."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import LOSS_TYPES, Record, ScriptedRollouts, build, gradient_gap, prompt_rows, scripted_reward
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import save_tiny
from trl import GRPOTrainer

from trl_grpo_ext.objective.dead_groups import find_dead_groups

DEAD_SHARE = 0.25  # of the groups below
ROWS = prompt_rows(8, dead=(1, 6))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def moe_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return save_tiny(tmp_path_factory.mktemp("moe"), kind="qwen3_moe", **experts)


def train(ours: bool, model: str, directory: Any, **fields: Any) -> tuple[Record, int, Any]:
    """Train on all eight groups a step; return the record, the rows forwarded with gradient, and the trainer."""
    num_rows = 0
    forward = GRPOTrainer._get_per_token_logps_and_entropies

    def counting(self: Any, policy: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_rows
        num_rows += len(input_ids) if torch.is_grad_enabled() else 0
        return forward(self, policy, input_ids, *args, **kwargs)

    config = {"gradient_accumulation_steps": 8, "max_steps": 1, **fields}
    rows, reward = config.pop("rows", ROWS), config.pop("reward", scripted_reward)
    trainer, record = build(
        ours, directory, model=model, rows=rows, reward=reward, rollouts=ScriptedRollouts(), **config
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", counting)
        trainer.train()
    return record, num_rows, trainer


def worst_gap(ours: Record, theirs: Record) -> float:
    return max(gradient_gap(a, b) for a, b in zip(ours.gradients, theirs.gradients, strict=True))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_skipping_leaves_the_gradient(loss_type: str, checkpoint: str, tmp_path: Any) -> None:
    """They stay in every normaliser: the gradient is neither that of TRL without them nor any other."""
    theirs, _, _ = train(False, checkpoint, tmp_path, loss_type=loss_type, max_steps=2)
    on, rows_on, _ = train(True, checkpoint, tmp_path, loss_type=loss_type, max_steps=2)
    off, rows_off, _ = train(True, checkpoint, tmp_path, loss_type=loss_type, max_steps=2, skip_dead_groups=False)
    assert (rows_on, rows_off) == (48, 64)  # two of eight groups of four, two steps
    assert worst_gap(on, off) <= 1e-5
    assert worst_gap(on, theirs) <= 1e-5
    for mine, other in zip(on.logs[:2], theirs.logs[:2], strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=2e-6)


@pytest.mark.parametrize(
    "fields",
    [
        {"beta": 0.04, "num_iterations": 2, "max_steps": 2},
        {"entropy_coef": 0.05},
        {"use_adaptive_entropy": True, "entropy_target": 9.0, "max_steps": 2},
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"skip_dead_groups": False},
        {"max_tokens_per_micro_batch": 0},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_conditions_that_forbid_skipping(fields: dict[str, Any], checkpoint: str, tmp_path: Any) -> None:
    """Each gives a dead group a gradient of its own, or is the switch; every row is forwarded."""
    theirs, _, _ = train(False, checkpoint, tmp_path, **fields)
    ours, num_rows, _ = train(True, checkpoint, tmp_path, **fields)
    assert num_rows == 32 * fields.get("max_steps", 1)
    assert worst_gap(ours, theirs) <= 1e-5
    assert ours.logs[0].get("dead_groups/skipped_share", 0.0) == 0.0


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_router_loss_forbids_skipping(coefficient: float, moe_checkpoint: str, tmp_path: Any) -> None:
    theirs, _, _ = train(False, moe_checkpoint, tmp_path, router_aux_loss_coef=coefficient)
    ours, num_rows, _ = train(True, moe_checkpoint, tmp_path, router_aux_loss_coef=coefficient)
    assert num_rows == (32 if coefficient else 24)
    assert worst_gap(ours, theirs) <= 1e-5


@pytest.mark.parametrize("fields", [{"beta": 0.5}, {"entropy_coef": 0.5}], ids=lambda fields: next(iter(fields)))
def test_forbidden_skipping_would_have_shown(fields: dict[str, Any], checkpoint: str, tmp_path: Any) -> None:
    """Negative control: with the condition ignored, the gradient is another one."""
    from trl_grpo_ext import GroupRelativeTrainer

    fields = {**fields, "num_iterations": 2, "max_steps": 2, "learning_rate": 1.0}
    theirs, _, _ = train(False, checkpoint, tmp_path, **fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GroupRelativeTrainer, "_can_skip_dead_groups", property(lambda _: True))
        ours, num_rows, _ = train(True, checkpoint, tmp_path, **fields)
    assert num_rows == 48
    assert worst_gap(ours, theirs) > 1e-3


@pytest.mark.parametrize("budget", [None, 30])
def test_all_groups_dead(budget: int | None, checkpoint: str, tmp_path: Any) -> None:
    """The gradient is zero and exists, and the optimiser steps as in TRL: momentum and weight decay go on."""
    fields = {"optim": "adamw_torch", "weight_decay": 0.1, "learning_rate": 1e-3, "max_steps": 2}
    # the first four groups have a gradient, the next four do not
    rows = prompt_rows(8, dead=(4, 5, 6, 7))
    fields |= {"rows": rows, "shuffle_dataset": False, "gradient_accumulation_steps": 4}
    theirs, _, _ = train(False, checkpoint, tmp_path, **fields)
    ours, num_rows, _ = train(True, checkpoint, tmp_path, max_tokens_per_micro_batch=budget, **fields)
    assert 16 <= num_rows <= 17  # at most one row is forwarded in the dead step, so that gradients exist
    assert not any(value.any() for value in theirs.gradients[1].values())
    assert not any(value.any() for value in ours.gradients[1].values())
    start, _, _ = train(False, checkpoint, tmp_path, **{**fields, "max_steps": 1})
    for name, value in theirs.weights.items():
        moved = (value - start.weights[name]).abs().max()  # in the second step
        assert moved > 1e-5, name
        # Adam divides each gradient by its size, so that rounding in a small one is a visible part of a step
        assert (ours.weights[name] - value).abs().max() <= 0.05 * moved, name
    assert ours.logs[1]["dead_groups/share"] == ours.logs[1]["dead_groups/skipped_share"] == 1.0


def test_figures_of_a_step_without_rows_are_missing_not_zero(checkpoint: str, tmp_path: Any) -> None:
    """Nothing was forwarded, so that no entropy or clip fraction was measured."""
    ours, _, _ = train(True, checkpoint, tmp_path, rows=prompt_rows(8, dead=tuple(range(8))))
    entry = ours.logs[0]
    assert entry["loss"] == 0.0
    assert entry["grad_norm"] == 0.0
    assert entry.get("entropy") is None
    assert entry.get("clip_ratio/region_mean") is None
    assert entry["window/scored_token_share"] == 0.0


def test_metrics(checkpoint: str, tmp_path: Any) -> None:
    """How many groups are dead, and on what share of the tokens entropy and clip figures stand."""
    ours, _, _ = train(True, checkpoint, tmp_path)
    entry = ours.logs[0]
    assert entry["dead_groups/share"] == DEAD_SHARE
    assert entry["dead_groups/skipped_share"] == DEAD_SHARE
    assert entry["frac_reward_zero_std"] == DEAD_SHARE  # TRL's own test, by deviation; rewards are exact here
    off, _, _ = train(True, checkpoint, tmp_path, skip_dead_groups=False)
    assert off.logs[0]["window/scored_token_share"] == 1.0
    assert 0.6 < entry["window/scored_token_share"] < 0.9
    kept, _, _ = train(True, checkpoint, tmp_path, beta=0.04)
    assert kept.logs[0]["dead_groups/share"] == DEAD_SHARE
    assert kept.logs[0]["dead_groups/skipped_share"] == 0.0


def _advantages(ours: bool, checkpoint: str, directory: Any, reward: Any, **fields: Any) -> torch.Tensor:
    found: list[torch.Tensor] = []
    trainer, _ = build(
        ours, directory, model=checkpoint, rows=ROWS, reward=reward, rollouts=ScriptedRollouts(), max_steps=1, **fields
    )
    score = trainer._generate_and_score_completions

    def recording(inputs: Any) -> Any:
        output = score(inputs)
        found.append(output["advantages"].clone())
        return output

    trainer._generate_and_score_completions = recording
    trainer.train()
    return found[0]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("value", [1234.567, 0.1, 1e-3, -7.3])
def test_rounding_leaves_no_advantage(value: float, scale: str, checkpoint: str, tmp_path: Any) -> None:
    """Twelve equal rewards that float32 cannot hold have advantage exactly 0."""

    def constant(prompts: list[Any], **_: Any) -> list[float]:
        return [value] * len(prompts)

    size = {"num_generations": 12, "per_device_train_batch_size": 12, "gradient_accumulation_steps": 2}
    advantages = _advantages(True, checkpoint, tmp_path, constant, scale_rewards=scale, **size)
    assert advantages.shape == (24,)
    assert not advantages.any()


def test_trl_leaves_an_advantage(checkpoint: str, tmp_path: Any) -> None:
    """Why the rule above exists: TRL's mean is rounded, and the deviation it divides by is as small as the error."""
    size = {"num_generations": 12, "per_device_train_batch_size": 12, "gradient_accumulation_steps": 2}
    advantages = _advantages(False, checkpoint, tmp_path, lambda prompts, **_: [1234.567] * len(prompts), **size)
    assert advantages.abs().max() > 0.1


def test_missing_rewards(checkpoint: str, tmp_path: Any) -> None:
    """A group without any reward, one with a single reward, one whose rewards are equal where they exist: all dead."""

    def reward(prompts: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        values: list[float | None] = list(scripted_reward(prompts, completion_ids))
        for index, prompt in enumerate(prompts):
            if "1 + 1" in prompt:
                values[index] = None  # no reward at all
            elif "0 + 0" in prompt and index % 4:
                values[index] = None  # a single one
            elif "dead 6" in prompt and index % 2:
                values[index] = None  # equal where they exist
            elif "3 + 3" in prompt and index % 4 == 1:
                values[index] = None  # alive, one is missing
        return values

    fields = {"shuffle_dataset": False, "reward": reward}
    theirs, _, _ = train(False, checkpoint, tmp_path, **fields)
    ours, num_rows, _ = train(True, checkpoint, tmp_path, **fields)
    assert num_rows == 32 - 3 * 4
    assert worst_gap(ours, theirs) <= 1e-5
    assert ours.logs[0]["dead_groups/share"] == 3 / 8


def _by_hand(group: list[list[float]], weights: list[float]) -> bool:
    """Return whether the scored rows of a group have one total, or agree in every function."""
    scored = [row for row in group if not all(math.isnan(value) for value in row)]
    totals = {sum(v * w for v, w in zip(row, weights, strict=True) if not math.isnan(v)) for row in scored}
    rows = {tuple("none" if math.isnan(value) else value for value in row) for row in scored}
    return len(totals) <= 1 or len(rows) <= 1


# multiples of 1/2, so that totals are exact in any order
_REWARDS = st.one_of(st.integers(-2, 2).map(lambda n: n / 2), st.just(math.nan))


@settings(deadline=None, max_examples=200)
@given(
    st.integers(1, 3).flatmap(
        lambda num_functions: st.lists(
            st.lists(st.lists(_REWARDS, min_size=num_functions, max_size=num_functions), min_size=3, max_size=3),
            min_size=1,
            max_size=4,
        )
    )
)
def test_find_dead_groups(groups: list[list[list[float]]]) -> None:
    weights = [1.0, 2.0, 0.5][: len(groups[0][0])]
    rewards = torch.tensor([row for group in groups for row in group])
    found = find_dead_groups(rewards, torch.tensor(weights), 3)
    assert found.tolist() == [_by_hand(group, weights) for group in groups]


def test_find_dead_groups_by_hand() -> None:
    nan = math.nan
    rewards = [[1.0, 0.0], [0.0, 1.0], [1.0, nan], [1.0, 0.0], [nan, nan], [0.0, 1.0], [0.1, 0.2], [0.1, 0.3]]
    found = find_dead_groups(torch.tensor(rewards), torch.tensor([1.0, 1.0]), 2)
    assert found.tolist() == [True, True, True, False]
    assert find_dead_groups(torch.tensor(rewards), torch.tensor([1.0, 2.0]), 2).tolist() == [False, True, True, False]


@pytest.mark.parametrize("num_generations", [0, 3])
def test_find_dead_groups_refuses_partial_groups(num_generations: int) -> None:
    with pytest.raises(ValueError, match=f"num_generations={num_generations}"):
        find_dead_groups(torch.zeros(4, 1), torch.ones(1), num_generations)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_find_dead_groups_compares_and_does_not_measure(scale: float) -> None:
    """The smallest difference keeps a group alive, at any size of the rewards."""
    one = torch.tensor(scale)
    nearly = torch.nextafter(one, torch.tensor(math.inf))
    rewards = torch.stack([one, nearly, one, one]).view(4, 1)
    assert find_dead_groups(rewards, torch.ones(1), 2).tolist() == [False, True]
