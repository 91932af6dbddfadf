"""Rollouts stay comparable when a reward abstains for some of a group."""

from __future__ import annotations

import pytest
import torch

from trl_grpo_ext.objective.abstention import fill_abstained
from trl_grpo_ext.objective.dead_groups import find_dead_groups

NAN = float("nan")


def advantages(rewards: torch.Tensor, weights: torch.Tensor, num_generations: int) -> torch.Tensor:
    """TRL's "sum_then_normalize" without scaling."""
    total = (rewards * weights).nansum(dim=1)
    total[rewards.isnan().all(dim=1)] = NAN
    mean = total.view(-1, num_generations).nanmean(dim=1).repeat_interleave(num_generations)
    return (total - mean).nan_to_num(nan=0.0)


def test_by_hand() -> None:
    # Function 0 scores all four rows, function 1 only rows 0, 1 and 3: mean (4 + 1 + 1) / 3 = 2.
    rewards = torch.tensor([[1.0, 4.0], [0.0, 1.0], [1.0, NAN], [0.0, 1.0]])
    filled = fill_abstained(rewards, 4)
    assert torch.equal(filled, torch.tensor([[1.0, 4.0], [0.0, 1.0], [1.0, 2.0], [0.0, 1.0]]))
    # Weights 1 and 0.5. Centred: function 0 by 0.5, function 1 by 2.
    # Row 0: 0.5 + 0.5 * 2 = 1.5; rows 1, 3: -0.5 - 0.5 * 1 = -1; row 2: 0.5 + nothing = 0.5.
    weights = torch.tensor([1.0, 0.5])
    assert torch.equal(advantages(filled, weights, 4), torch.tensor([1.5, -1.0, 0.5, -1.0]))
    # TRL's sum takes the abstention for a 0: totals 3, 0.5, 1, 0.5, mean 1.25; the right answer of row 2 is punished.
    assert torch.equal(advantages(rewards, weights, 4), torch.tensor([1.75, -0.75, -0.25, -0.75]))


def test_it_is_centring_per_function() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    rewards[torch.rand(40, 3, generator=generator) < 0.3] = NAN
    rewards[5] = NAN
    rewards[8:16, 1] = NAN
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    grouped = rewards.view(5, 8, 3)
    centred = (grouped - grouped.nanmean(dim=1, keepdim=True)).nan_to_num(nan=0.0).view(40, 3)
    torch.testing.assert_close(
        advantages(fill_abstained(rewards, 8), weights, 8), centred @ weights, rtol=0, atol=1e-12
    )


def test_nothing_changes_without_abstentions() -> None:
    rewards = torch.randn(8, 2)
    assert torch.equal(fill_abstained(rewards, 4), rewards)


def test_rows_and_columns_without_any_score_stay_empty() -> None:
    rewards = torch.tensor([[1.0, NAN], [NAN, NAN], [0.0, NAN], [5.0, 1.0]])
    filled = fill_abstained(rewards[:3], 3)
    assert torch.equal(filled.isnan(), torch.tensor([[False, True], [True, True], [False, True]]))
    assert advantages(filled, torch.ones(2), 3).tolist() == [0.5, 0.0, -0.5]


def test_other_groups_do_not_matter() -> None:
    rewards = torch.tensor([[1.0], [NAN], [3.0], [9.0]])
    assert fill_abstained(torch.cat([rewards, torch.zeros(4, 1)], dim=1), 2)[1, 0] == 1.0


@pytest.mark.parametrize("value", [0.1, 0.7, 3.3, 77.7, 1234.567])
@pytest.mark.parametrize("size", range(3, 16))
def test_equal_scores_and_an_abstention_make_a_dead_group(value: float, size: int) -> None:
    equal = torch.full((size, 2), value)
    rewards = equal.clone()
    rewards[1, 1] = NAN
    filled = fill_abstained(rewards, size)
    assert torch.equal(filled, equal)  # a mean in float32 is another number for some of these
    assert not find_dead_groups(rewards, torch.ones(2), size)
    assert find_dead_groups(filled, torch.ones(2), size)


def test_incomplete_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="5 rewards do not make whole groups"):
        fill_abstained(torch.zeros(5, 1), 4)
