"""Tell running out of memory from other errors, and lower the token budget of a phase until its work fits.

No trainer and no settings in here: what a phase does again, and what it must take back first, its caller knows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate.utils.memory import clear_device_cache

from trl_grpo_ext.errors import MemoryBudgetError
from trl_grpo_ext.rng import RandomState

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Messages of plain RuntimeErrors that mean it: CUDA, HIP, XPU and MPS; the CPU's allocator on Linux and elsewhere;
# cuBLAS, cuDNN and cuSOLVER, which allocate workspaces of their own.
_SIGNS = ("out of memory", "can't allocate memory", "DefaultCPUAllocator: not enough memory", "_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` says that memory ran out and that less work could have succeeded.

    Not so for an error of a collective: the other processes are left in it, whatever its cause.
    """
    distributed_error = getattr(torch.distributed, "DistError", ())
    if distributed_error and isinstance(error, distributed_error):
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, for a log; unlike the error it keeps no tensor alive."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def free_memory() -> None:
    """Give back what a failed attempt left: objects in reference cycles, then the allocator's cache."""
    clear_device_cache(garbage_collection=True)


class Work(NamedTuple):
    """What an attempt had to hold, in tokens.

    Attributes:
        held_tokens: most tokens at once, had there been no budget.
        row_tokens: the longest row alone, which no budget can cut.
    """

    held_tokens: int
    row_tokens: int


class TokenBudget:
    """How many tokens a phase may hold at once: as configured at first, halved each time memory runs out.

    Args:
        phase: "train", "generate" or "score".
        setting: the field that sets the budget, for messages.
        max_tokens: the configured budget; None for no limit.
        max_halvings: halvings allowed in a run; 0 never lowers, so that an error passes.
        advise: returns what else would save memory, for the message when no halving is left.
    """

    def __init__(
        self,
        phase: str,
        setting: str,
        max_tokens: int | None,
        max_halvings: int,
        advise: Callable[[str], str] = lambda _phase: "",
    ) -> None:
        self.phase, self.setting = phase, setting
        self.configured, self.max_tokens = max_tokens, max_tokens
        self.max_halvings, self.num_halvings = max_halvings, 0
        self._advise = advise

    @property
    def can_recover(self) -> bool:
        """Whether work that ran out of memory may be done again with less."""
        return self.max_halvings > 0

    def smaller(self, held_tokens: int) -> int:
        """Return the budget to try after work that held so many tokens failed, at least 1.

        A budget far above the work would change nothing when halved, so the work itself counts where it is smaller.
        """
        tried = held_tokens if self.max_tokens is None else min(held_tokens, self.max_tokens)
        return max(tried // 2, 1)

    def lower(self, max_tokens: int, cause: str) -> None:
        """Put a lower budget in force for the rest of the run and say so.

        Args:
            max_tokens: from ``smaller``; 0 where one row alone did not fit.
            cause: the first line of the error.

        Raises:
            MemoryBudgetError: if one row alone did not fit, or all halvings are used up.
        """
        tried = "all rows at once" if self.max_tokens is None else f"{self.setting}={self.max_tokens}"
        if max_tokens < 1:
            raise MemoryBudgetError(
                f"{self._ran_out()} with {tried}, and a single row cannot be cut: {cause}. {self._advise(self.phase)}"
            )
        if self.num_halvings >= self.max_halvings:
            raise MemoryBudgetError(
                f"{self._ran_out()} with {tried}, after {self.num_halvings} halvings of a budget that began at "
                f"{self.configured or 'no limit'} (oom_max_halvings={self.max_halvings}): {cause}. "
                f"{self._advise(self.phase)}"
            )
        self.num_halvings += 1
        self.max_tokens = max_tokens
        logger.warning(
            "%s with %s. Doing it again with %s=%d, which stays for the rest of the run; the result is the same, and "
            "setting it saves the detour. (%s)",
            self._ran_out(),
            tried,
            self.setting,
            max_tokens,
            cause,
        )

    def take(self, max_tokens: int | None, num_halvings: int) -> None:
        """Take over the state of another process or of a checkpoint, where it is the lower one."""
        if max_tokens is not None and (self.max_tokens is None or max_tokens < self.max_tokens):
            self.max_tokens, self.num_halvings = max_tokens, max(num_halvings, self.num_halvings)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know."""
        return {"max_tokens": self.max_tokens, "num_halvings": self.num_halvings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the lowered budget of an earlier part of the run; a lower one configured since then stays."""
        if state["num_halvings"]:
            self.take(state["max_tokens"], state["num_halvings"])

    def _ran_out(self) -> str:
        doing = {"train": "the training step", "generate": "sampling", "score": "scoring completions"}
        return f"Out of memory in {doing.get(self.phase, self.phase)}"


def recover(budget: TokenBudget, attempt: Callable[[int | None], T], work: Callable[[], Work]) -> T:
    """Return ``attempt(budget)``, done again from the start with a lower budget each time memory runs out.

    The random generators are set back before each further attempt: the result is that of a run that had the last
    budget from the beginning. Use it for work that no other process takes part in and that leaves nothing behind.

    Args:
        budget: of the phase; it keeps what it was lowered to.
        attempt: does all the work within a number of tokens (None: no limit).
        work: measures the work; called only after a failure.

    Raises:
        MemoryBudgetError: if even one row at a time does not fit, or all halvings are used up.
    """
    if not budget.can_recover:
        return attempt(budget.max_tokens)
    random_state = RandomState.now()
    while True:
        try:
            return attempt(budget.max_tokens)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            cause = first_line(error)
        # Past the handler, so that the traceback and with it the tensors of the failed attempt are gone.
        free_memory()
        held_tokens, row_tokens = work()
        one_by_one = min(held_tokens, budget.max_tokens or held_tokens) <= row_tokens
        budget.lower(0 if one_by_one else budget.smaller(held_tokens), cause)
        random_state.restore()
