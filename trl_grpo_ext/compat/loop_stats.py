"""The statistics that the classic ``step`` returned, under its names. Pure: numbers in, a dictionary out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

# Figures of the critic. NaN, never 0: scripts print them, and a number would be a lie.
_CRITIC = (
    "ppo/loss/value",
    "ppo/returns/mean",
    "ppo/returns/var",
    "ppo/val/vpred",
    "ppo/val/error",
    "ppo/val/clipfrac",
    "ppo/val/mean",
    "ppo/val/var",
    "ppo/val/var_explained",
)


class MiniBatchStats(NamedTuple):
    """What one backward pass saw: its loss, and how far the policy stood from where it sampled."""

    loss: float
    ratio: float
    approx_kl: float
    policy_kl: float
    clip_fraction: float
    entropy: float


class StepFigures(NamedTuple):
    """What one step measured. Tensors of (N,) rows over all processes, except the log-probs of this one, (B, T)."""

    kl: torch.Tensor
    kl_coef: float
    entropy: torch.Tensor
    non_score_reward: torch.Tensor
    num_tokens: torch.Tensor
    scores: torch.Tensor
    advantages: torch.Tensor
    logps: torch.Tensor
    ref_logps: torch.Tensor
    query_lengths: Sequence[int]
    response_lengths: Sequence[int]
    learning_rate: float
    forward_seconds: float
    total_seconds: float


def classic_stats(figures: StepFigures, mini_batches: Sequence[MiniBatchStats]) -> dict[str, Any]:
    """Return the dictionary of the classic trainer; arrays are NumPy, scalars are floats, the critic's are NaN."""
    mean = {name: float(np.mean([getattr(piece, name) for piece in mini_batches])) for name in MiniBatchStats._fields}
    stats: dict[str, Any] = {
        "objective/kl": figures.kl.mean().item(),
        "objective/kl_dist": _array(figures.kl),
        "objective/kl_coef": figures.kl_coef,
        "objective/entropy": figures.entropy.mean().item(),
        "objective/logprobs": _array(figures.logps),
        "objective/ref_logprobs": _array(figures.ref_logps),
        "ppo/mean_scores": figures.scores.mean().item(),
        "ppo/std_scores": figures.scores.std().item(),
        # Per token, unlike the KL beside it: so did TRL 0.11.
        "ppo/mean_non_score_reward": (figures.non_score_reward.sum() / figures.num_tokens.sum()).item(),
        "ppo/learning_rate": figures.learning_rate,
        "ppo/loss/policy": mean["loss"],
        "ppo/loss/total": mean["loss"],
        "ppo/policy/entropy": mean["entropy"],
        "ppo/policy/approxkl": mean["approx_kl"],
        "ppo/policy/policykl": mean["policy_kl"],
        "ppo/policy/clipfrac": mean["clip_fraction"],
        "ppo/policy/advantages": _array(figures.advantages),
        "ppo/policy/advantages_mean": figures.advantages.mean().item(),
        "ppo/policy/ratio": np.array([piece.ratio for piece in mini_batches]),
    }
    stats |= dict.fromkeys(_CRITIC, math.nan)
    for name, lengths in (("queries", figures.query_lengths), ("responses", figures.response_lengths)):
        values = np.array(lengths, dtype=float)
        stats[f"tokens/{name}_len_mean"] = float(values.mean())
        stats[f"tokens/{name}_len_std"] = float(values.std(ddof=1)) if values.size > 1 else 0.0
        stats[f"tokens/{name}_dist"] = values
    stats["time/ppo/forward_pass"] = figures.forward_seconds
    stats["time/ppo/optimize_step"] = figures.total_seconds - figures.forward_seconds
    stats["time/ppo/total"] = figures.total_seconds
    return stats


def scalars(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries that a tracker can plot: finite numbers."""
    return {
        name: float(value) for name, value in stats.items() if isinstance(value, int | float) and math.isfinite(value)
    }


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()
