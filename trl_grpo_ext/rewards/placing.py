"""Where a reward runs: in a worker process, or in the training process and why."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import cloudpickle

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.rewards.outside_state import outside_changes
from trl_grpo_ext.rewards.signature import (
    Accepted,
    accepted_keywords,
    is_async,
    is_deterministic,
    is_per_sample,
    needs_whole_batch,
)
from trl_grpo_ext.rewards.verifier import VerifierReward

logger = logging.getLogger(__name__)

Isolation = Literal["auto", "always", "never"]
_MAX_PICKLE_BYTES = 64 * 2**20


@dataclass
class Plan:
    """How one reward is run.

    Attributes:
        pickled: the function as a worker gets it; None if it runs in the training process.
        why_here: why it runs in the training process; None if it does not.
        changes: what it changes outside itself; all its batch calls then go to the same worker.
        identity: what the function is, for the cache; None if its scores are not cached.
        usual_s: longest of its last whole calls, in seconds.
    """

    function: Callable[..., Any]
    name: str
    accepted: Accepted
    is_verifier: bool
    is_async: bool
    per_sample: bool
    may_split: bool
    pickled: bytes | None = None
    why_here: str | None = None
    changes: tuple[str, ...] = ()
    identity: bytes | None = None
    pool_index: int = -1
    recent_s: list[float] = field(default_factory=list)

    @property
    def usual_s(self) -> float:
        return max(self.recent_s, default=0.0)

    def note_duration(self, seconds: float) -> None:
        """Remember how long a healthy whole call took."""
        self.recent_s = [*self.recent_s[-9:], seconds]

    def move_here(self, why: str) -> None:
        """Run it in the training process from now on, and say so once, visibly."""
        self.pickled, self.why_here = None, why
        logger.warning(
            "Reward %r runs inside the training process: %s. There it is not isolated: a crash of it ends the run, "
            "and a hang in C code stops it.",
            self.name,
            why,
        )


def plan_reward(function: Callable[..., Any], name: str, isolate: Isolation) -> Plan:
    """Return how a reward is run.

    "auto" puts everything that can be pickled into a worker process. An attribute ``isolated = False`` on the function
    keeps it out, and so does a method ``judge_batch`` of a verifier, which brings its own isolation and judges a batch
    at once. "always" refuses what cannot be isolated. "never" runs everything in the training process.

    Raises:
        ConfigurationError: for something that is no callable, a module of torch, or, under "always", a reward that
            cannot be isolated.
    """
    torch = sys.modules.get("torch")
    if not callable(function) or (torch is not None and isinstance(function, torch.nn.Module)):
        raise ConfigurationError(
            f"reward {name!r} is a {type(function).__name__}; the runner takes callables, reward models stay with TRL"
        )
    plan = Plan(
        function=function,
        name=name,
        accepted=accepted_keywords(function),
        is_verifier=isinstance(function, VerifierReward),
        is_async=is_async(function),
        per_sample=is_per_sample(function),
        may_split=not needs_whole_batch(function),
    )
    why: str | None = None
    if isolate == "never":
        plan.why_here = "isolation is switched off"
    elif plan.is_verifier and hasattr(function, "judge_batch"):
        plan.why_here = "it judges batches in processes of its own"
    elif any(hasattr(part, "judge_batch") for part in getattr(function, "functions", ())):
        plan.why_here = "a part of it judges batches in processes of its own"
        plan.per_sample = False  # or that part would get its batches one sample at a time
    elif getattr(function, "isolated", True) is False:
        plan.why_here = "it declares isolated = False"
    else:
        plan.pickled, why = _pickle_or_reason(plan)
        if why is not None and isolate == "always":
            raise ConfigurationError(f"reward {name!r} cannot run in a worker process: {why}")
        if why is not None:
            plan.move_here(why)
        elif changes := outside_changes(function):
            plan.changes = tuple(changes)
            logger.warning(
                "Reward %r changes %s. It runs in a worker process, where the rest of your program does not see that, "
                "and loses it when the worker is replaced. If that matters, set its attribute isolated = False.",
                name,
                ", ".join(changes),
            )
    if is_deterministic(function):
        plan.identity = _identity(plan)
    return plan


def _pickle_or_reason(plan: Plan) -> tuple[bytes | None, str | None]:
    """Return the pickled function, or why it cannot run elsewhere."""
    if os.name != "posix":
        return None, f"worker processes need fork, which {sys.platform} does not have"
    if not sys.executable:
        return None, "this Python is embedded in another program, so no worker can be started"
    if "environments" in plan.accepted.names:
        return None, "it takes the live environments"
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(plan.function)
    except Exception as error:
        return None, f"it cannot be pickled ({type(error).__name__}: {str(error)[:200]})"
    data = buffer.getvalue()
    if len(data) > _MAX_PICKLE_BYTES:
        return None, f"it is {len(data) / 2**20:.0f} MiB large, which every worker would hold once more"
    return data, None


class _Pickler(cloudpickle.Pickler):
    """cloudpickle, but models and what lies on an accelerator are refused: a copy per worker is never meant."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None:
            if isinstance(obj, torch.nn.Module):
                raise TypeError(f"it holds a model ({type(obj).__name__})")
            if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
                raise TypeError(f"it holds a tensor on {obj.device}")
        return super().reducer_override(obj)


def _identity(plan: Plan) -> bytes:
    """Return bytes that differ where the function, its version or its options do."""
    function = plan.function
    if isinstance(function, VerifierReward):
        kind = type(function)
        parts = (
            kind.__module__,
            kind.__qualname__,
            kind.version,
            sorted(function.options.items()),
            function.column_names,
        )
        return repr(parts).encode()
    version = str(getattr(function, "version", "1"))
    return version.encode() + b"\0" + (plan.pickled or cloudpickle.dumps(function))
