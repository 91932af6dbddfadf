"""A slow reference of TRL's advantages, in Python floats: rewards in, one advantage per completion out.

DeepSeekMath 2402.03300 (group), PPO Lite 2508.08221 (batch), Dr. GRPO 2503.20783 (none), GDPO 2601.05242
(normalize_then_sum). A reward that is NaN is left out of every mean and deviation; a completion without any reward has
advantage 0. Standard deviations divide by n - 1; 1e-4 is added to each, as in TRL.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

EPS = 1e-4


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _mean(values: Sequence[float]) -> float:
    finite = _finite(values)
    return math.fsum(finite) / len(finite) if finite else math.nan


def _std(values: Sequence[float]) -> float:
    finite = _finite(values)
    if len(finite) < 2:
        return math.nan
    mean = _mean(finite)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in finite) / (len(finite) - 1))


def _zero_if_nan(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def _weighted_sum(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the sum over the rewards that exist, NaN when none does."""
    if not _finite(values):
        return math.nan
    return math.fsum(value * weight for value, weight in zip(values, weights, strict=True) if not math.isnan(value))


def advantages(
    rewards: Sequence[Sequence[float]],
    group_size: int,
    *,
    weights: Sequence[float] | None = None,
    scale: str = "group",
    aggregation: str = "sum_then_normalize",
) -> list[float]:
    """Return one advantage per completion.

    Args:
        rewards: one row per completion, one column per reward function; groups are consecutive.
        group_size: completions per prompt.
        weights: of the reward functions, 1 by default.
        scale: "group", "batch" or "none"; only for "sum_then_normalize".
        aggregation: "sum_then_normalize" or "normalize_then_sum".
    """
    weights = weights or [1.0] * len(rewards[0])
    starts = range(0, len(rewards), group_size)
    if aggregation == "normalize_then_sum":
        columns: list[list[float]] = [[math.nan] * len(weights) for _ in rewards]
        for start in starts:
            for k in range(len(weights)):
                group = [rewards[i][k] for i in range(start, start + group_size)]
                mean, std = _mean(group), _std(group)
                for i, value in enumerate(group):
                    columns[start + i][k] = (value - mean) / (std + EPS)
        scores = [
            math.nan
            if not _finite(reward)
            else math.fsum(_zero_if_nan(c) * w for c, w in zip(column, weights, strict=True))
            for reward, column in zip(rewards, columns, strict=True)
        ]
        mean, std = _mean(scores), _std(scores)
        return [_zero_if_nan((score - mean) / (std + EPS)) for score in scores]
    scores = [_weighted_sum(row, weights) for row in rewards]
    batch_std = _std(scores)
    result: list[float] = []
    for start in starts:
        group = scores[start : start + group_size]
        mean, std = _mean(group), _std(group)
        divisor = {"group": std + EPS, "batch": batch_std + EPS, "none": 1.0}[scale]
        result += [_zero_if_nan((score - mean) / divisor) for score in group]
    return result
