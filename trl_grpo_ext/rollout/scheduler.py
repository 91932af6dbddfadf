"""Which rows may run: a token budget for keys and values, groups queued, rows refilled as others finish.

Pure Python, no tensors. A row is charged for the most it can ever hold, so that a running row is never evicted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

ROUND_TO = 16
"""Completion buffers are rounded up to this many tokens: few distinct shapes, and no sum is split differently."""


def round_up(num_tokens: int, unit: int = ROUND_TO) -> int:
    """Return ``num_tokens`` rounded up to a multiple of ``unit``."""
    return -(-num_tokens // unit) * unit


def prompt_width(num_tokens: int) -> int:
    """Return the padded width of a prompt: four widths per octave, at least 16 apart.

    Prompts of one width share a stack, so there are few stacks, and padding costs 25 % at most (12 % on average). The
    width depends on the prompt alone: how a row is summed does not depend on the other prompts.
    """
    return round_up(num_tokens, max(ROUND_TO, 1 << max(0, num_tokens.bit_length() - 3)))


def slots_needed(prompt_ids: Sequence[Sequence[int]], max_new_tokens: int) -> tuple[int, int]:
    """Return the token slots that all rows at once can reach, and those of the longest row alone."""
    groups = Counter(tuple(ids) for ids in prompt_ids)
    row_cost = round_up(max_new_tokens)
    together = sum(prompt_width(len(ids)) + num_rows * row_cost for ids, num_rows in groups.items())
    return together, max((prompt_width(len(ids)) + row_cost for ids in groups), default=0)


@dataclass
class GroupQueue:
    """A distinct prompt and the rows that share it, waiting or alive."""

    group: int
    prompt_length: int
    waiting: deque[int]
    alive: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Admission:
    """Rows that start now. ``new_groups`` need a prefill; the other groups' prompts are already cached."""

    new_groups: list[int]
    rows: list[tuple[int, int]]
    """(group, row) pairs."""


class Scheduler:
    """Hands out rows in the order given, within a budget of token slots.

    A group costs the padded width of its prompt (once) and each alive row ``max_new_tokens``, rounded up. Groups start
    in order; a group that does not fit whole starts with the rows that do and continues as slots free up. When nothing
    is alive, one row is admitted even if it exceeds the budget: refusing would hang.

    Args:
        groups: rows of each distinct prompt.
        prompt_lengths: tokens of each distinct prompt.
        max_new_tokens: most tokens a row can draw.
        max_tokens: the budget in token slots, None for no limit.
        refill_fraction: rows are only admitted next to running ones when they are at least this fraction of the rows
            alive: each admission costs a prefill and a copy of the cache.
    """

    def __init__(
        self,
        groups: list[list[int]],
        prompt_lengths: list[int],
        max_new_tokens: int,
        max_tokens: int | None = None,
        refill_fraction: float = 0.125,
    ) -> None:
        self._queues = [
            GroupQueue(group, length, deque(rows))
            for group, (rows, length) in enumerate(zip(groups, prompt_lengths, strict=True))
        ]
        self._row_cost = round_up(max_new_tokens)
        self._budget = max_tokens
        self._refill_fraction = refill_fraction
        self._next = 0
        self.over_budget = False

    @property
    def num_alive(self) -> int:
        """Rows running."""
        return sum(len(queue.alive) for queue in self._queues)

    def live_groups(self) -> dict[int, list[int]]:
        """Return the alive rows of each group whose prompt must stay cached, by group."""
        return {
            queue.group: list(queue.alive)
            for queue in self._queues
            if queue.alive or (queue.waiting and queue.group < self._next)
        }

    def started_groups_waiting(self) -> set[int]:
        """Return the groups that have started and still have rows to start."""
        return {queue.group for queue in self._queues[: self._next] if queue.waiting}

    def finish(self, group: int, row: int) -> None:
        """Take a row out."""
        self._queues[group].alive.remove(row)

    def committed_tokens(self) -> int:
        """Return the slots that alive rows and their prompts can reach."""
        used = 0
        for queue in self._queues[: self._next]:
            if queue.alive or queue.waiting:
                used += prompt_width(queue.prompt_length) + self._row_cost * len(queue.alive)
        return used

    def admit(self) -> Admission | None:
        """Start what fits and return it, or None when nothing (worth the copy) does."""
        plan = self._plan()
        num_alive = self.num_alive
        if not plan or (num_alive and len(plan) < max(1, int(self._refill_fraction * num_alive))):
            return None
        new_groups = sorted({group for group, _ in plan if group >= self._next})
        for group, row in plan:
            queue = self._queues[group]
            assert queue.waiting[0] == row
            queue.waiting.popleft()
            queue.alive.append(row)
        self._next = max([self._next, *(group + 1 for group, _ in plan)])
        return Admission(new_groups, plan)

    def _first_waiting(self) -> int:
        return next((i for i, queue in enumerate(self._queues) if queue.waiting), len(self._queues))

    def _plan(self) -> list[tuple[int, int]]:
        """Return the (group, row) pairs that fit, first come first served."""
        free = None if self._budget is None else self._budget - self.committed_tokens()
        plan: list[tuple[int, int]] = []
        for queue in self._queues[self._first_waiting() :]:
            if not queue.waiting:
                continue
            if free is None:
                plan.extend((queue.group, row) for row in queue.waiting)
                continue
            prompt_cost = 0 if queue.group < self._next else prompt_width(queue.prompt_length)
            num_rows = min(len(queue.waiting), max(0, (free - prompt_cost) // self._row_cost))
            if num_rows == 0 and not plan and self.num_alive == 0:
                num_rows, self.over_budget = 1, True
            if num_rows == 0:
                break
            plan.extend((queue.group, row) for row in list(queue.waiting)[:num_rows])
            free -= prompt_cost + num_rows * self._row_cost
            if num_rows < len(queue.waiting):
                break
        return plan
