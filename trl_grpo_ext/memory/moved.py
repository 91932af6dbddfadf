"""Count how many of the trained numbers an optimiser step changes.

An update smaller than half the distance between two neighbouring numbers of a dtype is rounded away. Loss, reward and
gradient norm look as ever; only the weights stand still. So the weights are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

# 4 MiB in float32, held for one step; tensors up to the second size are taken whole.
MAX_SAMPLED_ENTRIES = 2**20
_WHOLE = 256


class Movement(NamedTuple):
    """What one optimiser step did to the sample.

    Attributes:
        entries: numbers looked at.
        moved: of these, changed.
        with_gradient: of these, with a gradient other than 0.
    """

    entries: int
    moved: int
    with_gradient: int

    @property
    def moved_share(self) -> float:
        """Share of the entries that changed."""
        return self.moved / max(self.entries, 1)


class SampledEntries:
    """A fixed, evenly spread sample of trained tensors: every n-th entry of each.

    Exact where there are at most ``max_entries`` entries in all. Of a sharded tensor, this process's shard is seen.

    Args:
        parameters: What is trained.
        max_entries: About how many entries to look at.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], max_entries: int = MAX_SAMPLED_ENTRIES) -> None:
        self._parameters = list(parameters)
        total = sum(parameter.numel() for parameter in self._parameters)
        # An odd stride has no factor in common with most widths, so that it visits every column.
        self._stride = -(-total // max_entries) | 1 if total > max_entries else 1
        self.is_exact = self._stride == 1
        self._before: list[torch.Tensor] = []

    def take(self) -> None:
        """Remember the present values."""
        self._before = [self._sample(parameter).clone() for parameter in self._parameters]

    @torch.no_grad()
    def compare(self) -> Movement:
        """Return what changed since ``take``; gradients must not have been cleared."""
        entries, moved, with_gradient = 0, [], []
        for parameter, before in zip(self._parameters, self._before, strict=True):
            now = self._sample(parameter)
            if now.shape != before.shape or now.numel() == 0:
                continue
            entries += now.numel()
            moved.append((now != before).sum())
            if parameter.grad is not None:
                with_gradient.append((self._sample(parameter.grad) != 0).sum())
        return Movement(entries, _total(moved), _total(with_gradient))

    def _sample(self, tensor: torch.Tensor) -> torch.Tensor:
        local = getattr(tensor, "_local_tensor", tensor).detach()
        flat = local.reshape(-1)
        return flat if flat.numel() <= _WHOLE else flat[:: self._stride]


def _total(counts: list[torch.Tensor]) -> int:
    """Return the sum of the counts; the devices are waited for once, not once a tensor."""
    if not counts:
        return 0
    device = counts[0].device
    return int(torch.stack([count.to(device) for count in counts]).sum())
