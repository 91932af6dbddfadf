"""Group-relative policy optimisation for TRL: the same gradients, faster, in less memory.

Public names are imported on first use, so that ``import trl_grpo_ext`` and the command line start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trl_grpo_ext._version import __version__

if TYPE_CHECKING:
    from trl_grpo_ext.config import GroupRelativeConfig
    from trl_grpo_ext.trainer import GroupRelativeTrainer

_HOMES = {
    "GroupRelativeConfig": "trl_grpo_ext.config",
    "GroupRelativeTrainer": "trl_grpo_ext.trainer",
}

__all__ = ["GroupRelativeConfig", "GroupRelativeTrainer", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trl_grpo_ext' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
