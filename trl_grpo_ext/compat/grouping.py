"""Advantages for responses that come with scores but without a fixed group layout.

Dimensions: ``N`` responses, in any order; group sizes may differ.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from trl_grpo_ext.errors import ConfigurationError

EPS = 1e-4  # added to the deviation, TRL's value


class Advantages(NamedTuple):
    """(N,) float32 advantages, and how many responses have no other response to the same prompt."""

    values: torch.Tensor
    num_singles: int


class RunningMoments:
    """Mean and deviation over everything seen so far (Chan et al., parallel variance).

    Attributes:
        mean: Mean of all values.
        std: Unbiased standard deviation, 1 before the second value.
        count: Number of values.
    """

    def __init__(self) -> None:
        self.mean, self.std, self.count = 0.0, 1.0, 0
        self._squares = 0.0

    def update(self, values: torch.Tensor) -> None:
        """Take in ``values``, (N,)."""
        n = values.numel()
        if not n:
            return
        data = values.double()
        mean, squares = data.mean().item(), (data - data.mean()).square().sum().item()
        delta, total = mean - self.mean, self.count + n
        self._squares += squares + delta**2 * self.count * n / total
        self.mean += delta * n / total
        self.count = total
        self.std = math.sqrt(self._squares / (total - 1)) if total > 1 else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return the moments."""
        return {"mean": self.mean, "std": self.std, "count": self.count, "squares": self._squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the moments from ``state_dict``."""
        self.mean, self.std, self.count = state["mean"], state["std"], state["count"]
        self._squares = state["squares"]


def prompt_key(ids: Sequence[int]) -> int:
    """Return a 63-bit number that is the same on every process for the same token ids."""
    digest = hashlib.blake2b(",".join(map(str, ids)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def advantages_by_prompt(
    rewards_N: torch.Tensor, keys: Sequence[int], *, ungrouped: str = "batch", running: RunningMoments | None = None
) -> Advantages:
    """Return how much better each response did than the others to its prompt.

    A_i = (r_i - b_i) / (std of the batch + 1e-4), where b_i is the mean over the responses to the same prompt, and for
    a prompt that occurs once the mean over the batch ("batch") or over all rewards so far ("running"). Scaling by the
    batch is what PPO's whitening did.

    Args:
        rewards_N: (N,) float, N >= 2.
        keys: N numbers; equal ones are responses to the same prompt.
        ungrouped: "batch", "running" or "error".
        running: Moments of all rewards including these, for "running".

    Returns:
        Advantages without gradient; exactly 0 for a group whose rewards are all equal, and for all where the whole
        batch is.

    Raises:
        ConfigurationError: if a prompt occurs once and ``ungrouped`` is "error".
        ValueError: if there are fewer than two responses, or ``ungrouped`` is unknown.
    """
    if rewards_N.numel() < 2:
        raise ValueError(f"Advantages compare responses; got {rewards_N.numel()}.")
    if ungrouped not in ("batch", "running", "error"):
        raise ValueError(f"ungrouped={ungrouped!r} is not one of 'batch', 'running', 'error'.")
    rewards_N = rewards_N.detach().float()
    members: dict[int, list[int]] = {}
    for index, key in enumerate(keys):
        members.setdefault(key, []).append(index)
    singles = [indices[0] for indices in members.values() if len(indices) == 1]
    if singles and ungrouped == "error":
        raise ConfigurationError(
            f"{len(singles)} of {len(members)} prompts occur once, and ungrouped='error' forbids that. Repeat prompts, "
            "or iterate trainer.dataloader."
        )
    baseline_N = torch.empty_like(rewards_N)
    is_flat = torch.zeros_like(rewards_N, dtype=torch.bool)
    for indices in members.values():
        group = rewards_N[indices]
        if len(indices) > 1:
            baseline_N[indices] = group.mean()
            is_flat[indices] = bool((group == group[0]).all())
        else:
            use_running = ungrouped == "running" and running is not None
            baseline_N[indices] = running.mean if use_running and running is not None else rewards_N.mean()
    values_N = (rewards_N - baseline_N) / (rewards_N.std() + EPS)
    values_N[is_flat | bool((rewards_N == rewards_N[0]).all())] = 0.0
    return Advantages(values_N, len(singles))


def describe_singles(keys: Sequence[int], ungrouped: str) -> str:
    """Return the warning about prompts that occur once."""
    counts = Counter(keys)
    singles = sum(1 for count in counts.values() if count == 1)
    baseline = "the running mean" if ungrouped == "running" else "the batch mean"
    return (
        f"{singles} of {len(counts)} prompts occur once; using {baseline} as baseline. Iterate trainer.dataloader or "
        "repeat prompts for true groups (ungrouped='error' to forbid)."
    )
