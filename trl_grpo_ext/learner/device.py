"""Whether a computation takes the CPU's way, where the two ways differ in what they allocate.

The memory planner runs the learner on tensors without data that are nominally on the CPU, and needs the way that the
real ones will take on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_is_planning_for_accelerator = False


def takes_cpu_path(device: torch.device) -> bool:
    """Return whether tensors on ``device`` are computed the CPU's way."""
    return device.type == "cpu" and not _is_planning_for_accelerator


@contextlib.contextmanager
def planning_for_accelerator(wanted: bool = True) -> Iterator[None]:
    """Make CPU tensors take the accelerator's way inside; False changes nothing."""
    global _is_planning_for_accelerator
    before, _is_planning_for_accelerator = _is_planning_for_accelerator, wanted
    try:
        yield
    finally:
        _is_planning_for_accelerator = before
