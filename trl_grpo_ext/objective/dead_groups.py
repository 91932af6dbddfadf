"""Find the groups whose rewards are all equal: they have no policy gradient and need no forward pass.

Dimensions: ``P`` prompts, ``G`` rollouts per prompt, ``K`` reward functions.
"""

from __future__ import annotations

import torch


def find_dead_groups(rewards_per_func: torch.Tensor, weights: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Return which groups give every rollout the same reward.

    Rewards are compared for equality. TRL tests the standard deviation instead, and rounding in the mean leaves it
    with advantages other than zero: twelve rewards of 1234.567 get 0.54 in float32.

    Args:
        rewards_per_func: (P * G, K) float, rows of a group next to each other. NaN where a function abstained.
        weights: (K,) float, weight of each function in the total reward.
        num_generations: G, at least 1.

    Returns:
        (P,) bool. A rollout for which every function abstained has advantage 0 and is left out of the comparison, so a
        group with no score at all is dead.

    Raises:
        ValueError: if the number of rows is not a multiple of G.
    """
    if num_generations < 1 or rewards_per_func.size(0) % num_generations:
        raise ValueError(
            f"{rewards_per_func.size(0)} rewards do not make whole groups of num_generations={num_generations}."
        )
    num_functions = rewards_per_func.size(1)
    total = (rewards_per_func * weights.to(rewards_per_func).unsqueeze(0)).nansum(dim=1)
    unscored = rewards_per_func.isnan().all(dim=1)
    # Equal sums, or equal in every function: the second also holds where a reduction rounds two equal rows apart.
    values = torch.cat([total.unsqueeze(1), rewards_per_func.nan_to_num(nan=torch.inf)], dim=1)
    grouped = values.view(-1, num_generations, num_functions + 1)
    scored = ~unscored.view(-1, num_generations)
    first = grouped.gather(1, scored.int().argmax(dim=1).view(-1, 1, 1).expand(-1, 1, num_functions + 1))
    same = (grouped == first) | ~scored.unsqueeze(-1)
    return same[:, :, 0].all(dim=1) | same[:, :, 1:].all(dim=2).all(dim=1)
