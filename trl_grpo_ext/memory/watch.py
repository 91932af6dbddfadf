"""The real peak memory of each phase of a step, next to what was planned for it.

On CUDA the peak is exact: what torch's allocator held at most during the phase. Reading it resets torch's own peak
counter, so ``torch.cuda.max_memory_allocated`` then speaks of the last phase only. On a CPU it is the process's
resident memory, and a lower bound: the kernel keeps one high-water mark per process, which only a phase that raises it
reveals.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping

import torch

GIB = 2**30


class MemoryWatch:
    """Record peaks by phase; phases may nest, and then the inner one's memory counts for both.

    Args:
        meter: reads memory; that of the device in use by default.
        planned_gib: planned peak per phase, in GiB, of a ``MemoryPlan``.
    """

    def __init__(self, meter: Meter | None = None, planned_gib: Mapping[str, float] | None = None) -> None:
        self._meter = meter or default_meter()
        self.planned_gib = dict(planned_gib or {})
        self._peaks: dict[str, int] = {}
        self._open: list[str] = []
        self._highest = 0

    @property
    def highest_bytes(self) -> int:
        """The most memory held at any time so far, in a phase or between two; resetting the meter does not lose it."""
        return max(self._highest, self._meter.peak())

    @property
    def phase(self) -> str | None:
        """The innermost phase that is running."""
        return self._open[-1] if self._open else None

    @contextlib.contextmanager
    def watching(self, phase: str) -> Iterator[None]:
        """Record the peak while the block runs.

        When the block fails the phase stays the current one until another begins, so that an error can be told where.
        """
        self.begin(phase)
        yield
        self.end()

    def begin(self, phase: str) -> None:
        """Start a phase; a phase around it goes on afterwards."""
        self._note()
        self._restart_meter()
        self._open.append(phase)

    def end(self) -> None:
        """Finish the innermost phase."""
        self._note()
        if self._open:
            self._open.pop()
        self._restart_meter()

    def abandon(self) -> None:
        """Forget phases that an error left open."""
        self._open.clear()

    def take_metrics(self) -> dict[str, float]:
        """Return ``memory/PHASE_peak_gib``, and ``…_planned_gib`` where planned, since the last call."""
        metrics = {}
        for phase, peak in self._peaks.items():
            metrics[f"memory/{phase}_peak_gib"] = peak / GIB
            if phase in self.planned_gib:
                metrics[f"memory/{phase}_planned_gib"] = self.planned_gib[phase]
        self._peaks = {}
        return metrics

    def _restart_meter(self) -> None:
        self._highest = self.highest_bytes
        self._meter.reset()

    def _note(self) -> None:
        if self._open:
            peak = self._meter.peak()
            for phase in self._open:
                self._peaks[phase] = max(self._peaks.get(phase, 0), peak)


class Meter:
    """Reads memory in bytes: the highest since ``reset``."""

    def __init__(self, read_peak: Callable[[], int], reset: Callable[[], None] = lambda: None) -> None:
        self.peak, self.reset = read_peak, reset


def default_meter() -> Meter:
    """Return the meter of the device that torch computes on."""
    if torch.cuda.is_available():
        return Meter(torch.cuda.max_memory_allocated, torch.cuda.reset_peak_memory_stats)
    return _ResidentMeter()


class _ResidentMeter(Meter):
    """Resident memory of the process, without resetting the kernel's mark, which other tools read."""

    def __init__(self) -> None:
        super().__init__(self._read, self._restart)
        self._mark = self._highest_now = 0
        self._restart()

    def _restart(self) -> None:
        self._mark, self._highest_now = resident_bytes()

    def _read(self) -> int:
        mark, now = resident_bytes()
        self._highest_now = max(self._highest_now, now)
        return mark if mark > self._mark else self._highest_now


def resident_bytes() -> tuple[int, int]:
    """Return the process's highest resident memory so far and the present one, in bytes."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file if line.startswith(("VmHWM", "VmRSS")))
        return tuple(int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "VmRSS"))  # type: ignore[return-value]
    except (OSError, KeyError, ValueError):
        return _peak_of_other_systems()


def _peak_of_other_systems() -> tuple[int, int]:
    """Return the highest resident memory twice: macOS tells no other, and Windows none of them."""
    try:
        import resource
    except ImportError:
        return 0, 0
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return peak, peak
