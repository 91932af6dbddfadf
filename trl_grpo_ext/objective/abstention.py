"""Keep rollouts comparable when a reward function abstains for some of a group.

Dimensions: ``B`` = P * G rows, ``P`` prompts, ``G`` rollouts per prompt, ``K`` reward functions.
"""

from __future__ import annotations

import torch


def fill_abstained(rewards_BK: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Return the rewards with what a function left out replaced by its mean over the rows of the group it did score.

    TRL adds up what is there (``nansum``), so a rollout for which a function abstained, or failed, is compared as if it
    had been given 0: under rewards of 0.9 and 1.0 a time-out looks like the worst answer of the group, under penalties
    like the best. Filling with the group's mean says "no opinion" instead. It is the same as centring per function,

        A_i = sum_k w_k c_ik,   c_ik = r_ik - (mean of r_jk over the rows j of the group that k scored), 0 if unscored

    because the group's mean of the filled totals is sum_k w_k mean_k. Without abstentions nothing changes.

    The trainer applies it to the gathered rewards, before TRL computes advantages with
    ``multi_objective_aggregation="sum_then_normalize"``, for any ``scale_rewards``. Not with "normalize_then_sum":
    there TRL centres and scales per function already, and filled values would lower the standard deviation.
    Per-function means, tables and counters should be logged from the values before filling.

    Args:
        rewards_BK: (B, K) float, rows of a group next to each other. NaN where a function has no score.
        num_generations: G, at least 1.

    Returns:
        (B, K), same dtype and device, no gradient. NaN stays in a row that no function scored (it must get advantage 0,
        not an average one), and in the column of a function that scored no row of the group (it says nothing there).
        The mean is taken in float64, so that equal scores give exactly their value and a dead group stays dead.

    Raises:
        ValueError: if the number of rows is not a multiple of G.
    """
    if num_generations < 1 or rewards_BK.size(0) % num_generations:
        raise ValueError(f"{rewards_BK.size(0)} rewards do not make whole groups of num_generations={num_generations}.")
    rewards_BK = rewards_BK.detach()
    missing_BK = rewards_BK.isnan()
    grouped_PGK = rewards_BK.double().view(-1, num_generations, rewards_BK.size(1))
    mean_BK = grouped_PGK.nanmean(dim=1).repeat_interleave(num_generations, dim=0).to(rewards_BK.dtype)
    fill_BK = missing_BK & ~missing_BK.all(dim=1, keepdim=True)
    return torch.where(fill_BK, mean_BK, rewards_BK)
