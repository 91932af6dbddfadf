"""The arithmetic from a PPO batch to groups, mini-batches and optimiser steps."""

from __future__ import annotations

import pytest

from trl_grpo_ext.compat.batch import group_size, plan_classic, plan_v2, updates_for
from trl_grpo_ext.errors import ConfigurationError

# (pd, ga, M, E) -> rows per pass, accumulation, passes per generation, G, completions, optimiser steps per update.
# Worked out by hand from the documented meaning: B = pd * ga completions, E epochs of M equal optimiser steps.
PLANS = {
    (8, 1, 1, 1): (8, 1, 1, 8, 8, 1),
    (8, 1, 2, 2): (4, 1, 2, 8, 8, 4),
    (4, 4, 2, 1): (4, 2, 4, 8, 16, 2),
    (4, 4, 4, 2): (4, 1, 4, 8, 16, 8),
    (2, 4, 4, 1): (2, 1, 4, 8, 8, 4),
    (4, 2, 4, 1): (2, 1, 4, 8, 8, 4),
    (1, 16, 1, 4): (1, 16, 16, 8, 16, 4),
    (3, 3, 3, 2): (3, 1, 3, 3, 9, 6),
    (11, 1, 1, 1): (11, 1, 1, 11, 11, 1),
}


@pytest.mark.parametrize("given", list(PLANS))
def test_v2_batches_keep_completions_and_optimiser_steps(given: tuple[int, int, int, int]) -> None:
    rows, accumulation, passes, group, completions, steps = PLANS[given]
    plan = plan_v2(*given)
    assert plan == (rows, accumulation, passes, given[3], group, completions, steps)
    assert plan.per_device_train_batch_size * plan.steps_per_generation == completions
    assert plan.prompts * plan.num_generations == completions


def test_one_sample_per_update_is_refused_with_its_factors() -> None:
    with pytest.raises(ConfigurationError) as error:
        plan_v2(1, 1, 1, 1)
    assert str(error.value) == (
        "Group-relative advantages need at least two responses per prompt, but the update holds B=1 sample "
        "(1 x 1 x 1). Raise per_device_train_batch_size or gradient_accumulation_steps."
    )


def test_mini_batches_that_do_not_fit_name_what_to_change() -> None:
    with pytest.raises(ConfigurationError, match=r"num_mini_batches=2 does not cut .*4 x 3 = 12.*divisor of") as error:
        plan_v2(4, 3, 2, 1)
    assert "gradient_accumulation_steps=2" in str(error.value)


def test_processes_multiply_the_batch_but_not_a_device_share() -> None:
    plan = plan_v2(1, 1, 1, 1, world_size=4)
    assert (plan.completions, plan.num_generations, plan.per_device_train_batch_size) == (4, 4, 1)


@pytest.mark.parametrize(("completions", "group"), [(2, 2), (6, 6), (9, 3), (11, 11), (22, 2), (64, 8), (35, 7)])
def test_the_group_is_the_largest_divisor_up_to_eight_or_the_smallest_above(completions: int, group: int) -> None:
    assert group_size(completions) == group


def test_a_group_size_that_does_not_divide_names_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"num_generations=5 .* 12 completions .*\(4 x 3 x 1\).*4 and 6"):
        group_size(12, 5, factors=(4, 3, 1))
    assert group_size(12, 4) == 4


def test_a_classic_batch_keeps_its_passes() -> None:
    """128 responses, 16 rows a pass, 2 passes a step, 4 epochs: 4 * 128 / 32 = 16 optimiser steps."""
    plan = plan_classic(128, 16, 2, 4)
    assert plan == (16, 2, 8, 4, 8, 128, 16)


def test_a_classic_batch_keeps_the_divisibility_error() -> None:
    with pytest.raises(ConfigurationError, match=r"batch_size=10 must be a multiple of .* 4 \* 1 = 4"):
        plan_classic(10, 4, 1, 4)
    with pytest.raises(
        ConfigurationError, match=r"batch_size=1 holds one.*repeat the query, or iterate trainer.dataloader"
    ):
        plan_classic(1, 1, 1, 4)


def test_updates_round_up_as_ppo_did() -> None:
    assert (updates_for(64, 64), updates_for(65, 64), updates_for(1, 64)) == (1, 2, 1)
