"""One JSON line per log entry, in step order, without duplicates after a resume."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trl_grpo_ext.monitor.files import append_line, finite, write_text

Entry = dict[str, Any]


class MetricsLog:
    """Append entries to ``metrics.jsonl``; each has ``step`` and ``elapsed_s``, the run's time over all its parts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset_s = 0.0
        self._started = time.monotonic()

    def start(self, resumed_step: int | None) -> None:
        """Begin a run, or go on after ``resumed_step``: later entries are dropped, they will be written again.

        The clock goes on from the last entry kept, so that the time lost by a crash is not counted twice.
        """
        kept = (
            []
            if resumed_step is None
            else [entry for entry in read_metrics(self.path) if entry["step"] <= resumed_step]
        )
        if kept or self.path.exists():
            write_text(self.path, "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in kept))
        self._offset_s = max((entry.get("elapsed_s") or 0.0 for entry in kept), default=0.0)
        self._started = time.monotonic()

    def append(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one entry."""
        entry = {"step": step, "elapsed_s": round(self.elapsed_s(), 3), **finite(dict(values))}
        append_line(self.path, json.dumps(entry, ensure_ascii=False, allow_nan=False))

    def elapsed_s(self) -> float:
        """Return the seconds this run has taken, parts before a resume included."""
        return self._offset_s + time.monotonic() - self._started


def read_metrics(path: Path) -> list[Entry]:
    """Return the entries of a metrics file, without a last line that was cut off and without repeated steps of a kind.

    Where a step was logged twice with the same keys (an older run was resumed by hand), the later entry counts.
    """
    if not path.is_file():
        return []
    entries: dict[tuple[int, tuple[str, ...]], Entry] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            entries[(entry["step"], tuple(sorted(entry)))] = entry
    return sorted(entries.values(), key=lambda entry: entry["step"])
