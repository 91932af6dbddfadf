"""What was allocated and freed, in order: written by the tracker, read by the report and by the allocator's replay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class Event(NamedTuple):
    """One block of memory that came or went.

    Attributes:
        block: Number of the block; an allocation and its release carry the same one.
        num_bytes: Its size; negative where the block is released.
        phase: What the run was doing.
    """

    block: int
    num_bytes: int
    phase: str


@dataclass
class Trace:
    """An allocation trace.

    Attributes:
        events: In order of time.
        categories: What each block holds, as far as it is known; blocks without an entry are activations.
        origins: The operation that made each block.
    """

    events: list[Event] = field(default_factory=list)
    categories: dict[int, str] = field(default_factory=dict)
    origins: dict[int, str] = field(default_factory=dict)

    def running(self) -> Iterator[tuple[Event, int]]:
        """Yield every event with the bytes that are allocated after it."""
        total = 0
        for event in self.events:
            total += event.num_bytes
            yield event, total

    @property
    def final_bytes(self) -> int:
        """Bytes that are still allocated at the end."""
        return sum(event.num_bytes for event in self.events)

    def peak_bytes(self) -> int:
        """Return the most bytes that were allocated at once."""
        return max((total for _, total in self.running()), default=0)

    def peaks(self) -> dict[str, int]:
        """Return the most bytes allocated at once during each phase, in order of first appearance.

        What was there when a phase began counts for it.
        """
        peaks: dict[str, int] = {}
        before = 0
        for event, total in self.running():
            peaks[event.phase] = max(peaks.get(event.phase, 0), total, before)
            before = total
        return peaks

    def breakdowns(self) -> dict[str, dict[str, int]]:
        """Return, for each phase, the bytes of every category at the moment of the phase's peak."""
        targets = self.peaks()
        found: dict[str, dict[str, int]] = {}
        held: dict[str, int] = defaultdict(int)
        before = 0
        for event, total in self.running():
            # A phase may peak on what it found, before its first release.
            if event.phase not in found and before == targets[event.phase]:
                found[event.phase] = dict(held)
            held[self.categories.get(event.block, "activations")] += event.num_bytes
            if event.phase not in found and total == targets[event.phase]:
                found[event.phase] = dict(held)
            before = total
        return {phase: {name: size for name, size in found[phase].items() if size} for phase in targets}

    def largest_at_peak(self, count: int = 10) -> list[tuple[int, str, str]]:
        """Return (bytes, category, operation) of the largest blocks alive at the peak."""
        peak, total = self.peak_bytes(), 0
        alive: dict[int, int] = {}
        for event in self.events:
            total += event.num_bytes
            alive[event.block] = alive.get(event.block, 0) + event.num_bytes
            if total == peak:
                break
        sizes = sorted(((size, block) for block, size in alive.items() if size), reverse=True)[:count]
        return [(size, self.categories.get(block, "activations"), self.origins.get(block, "")) for size, block in sizes]
