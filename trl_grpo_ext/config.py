"""The settings of a run: TRL's own plus ours."""

from __future__ import annotations

from dataclasses import dataclass

from trl import GRPOConfig


@dataclass
class GroupRelativeConfig(GRPOConfig):
    """Extend ``trl.GRPOConfig``; every field of TRL keeps its name, meaning and default."""
