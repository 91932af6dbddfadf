"""A sandbox for model-written Python on the user's own machine: see docs/sandbox.md."""

from __future__ import annotations

from trl_grpo_ext.rewards.sandbox.backends import SandboxReport
from trl_grpo_ext.rewards.sandbox.limits import SandboxLimits
from trl_grpo_ext.rewards.sandbox.pool import SandboxPool, shared_pool
from trl_grpo_ext.rewards.sandbox.results import ProgramResult, TestOutcome

__all__ = ["ProgramResult", "SandboxLimits", "SandboxPool", "SandboxReport", "TestOutcome", "shared_pool"]
