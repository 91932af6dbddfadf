"""The trainer: the order of one step, nothing else."""

from __future__ import annotations

from trl import GRPOTrainer


class GroupRelativeTrainer(GRPOTrainer):
    """Train a policy with group-relative advantages: a drop-in for ``trl.GRPOTrainer``."""
