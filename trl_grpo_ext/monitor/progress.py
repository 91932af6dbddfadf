"""Show a run's progress: a live bar on a terminal, one plain line per log entry elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class ProgressDisplay:
    """Print what matters of each log entry.

    On a terminal the figures stand in one line that is redrawn; in a CI log (or with ``plain=True``) each entry has its
    own line.
    """

    def __init__(self, console: Console, *, accuracy_key: str | None, plain: bool | None = None) -> None:
        """Prepare the display.

        Args:
            console: where to write.
            accuracy_key: the log key that holds the share of right answers; None shows none.
            plain: True for lines, False for the live bar; None looks at the console.
        """
        self.console = console
        self.accuracy_key = accuracy_key
        self.plain = not console.is_terminal if plain is None else plain
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._rate = _Rate()

    def start(self, step: int, total: int) -> None:
        """Begin at ``step`` of ``total``."""
        self._rate = _Rate(step=step, total=total)
        if self.plain:
            return
        self._progress = Progress(
            TextColumn("[bold]train[/bold]"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=self.console,
        )
        self._progress.start()
        self._task = self._progress.add_task("train", total=total, completed=step, figures="")

    def update(self, step: int, logs: Mapping[str, Any]) -> None:
        """Show a log entry; entries without a reward (the summary at the end) are passed over."""
        if not _is_number(logs.get("reward")):
            return
        figures = self._figures(step, logs)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, figures="  ".join(figures))
        else:
            self.console.print(f"step {step}/{self._rate.total}  " + "  ".join(figures), highlight=False, markup=False)

    def stop(self) -> None:
        """End the live display, leaving its last state on the screen."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _figures(self, step: int, logs: Mapping[str, Any]) -> list[str]:
        tokens_per_s, eta_s = self._rate.at(step, logs.get("num_tokens"))
        figures = [f"reward {float(logs['reward']):.3f}"]
        if self.accuracy_key is not None and _is_number(logs.get(self.accuracy_key)):
            figures.append(f"accuracy {100 * float(logs[self.accuracy_key]):.0f} %")
        if _is_number(logs.get("completions/mean_length")):
            figures.append(f"length {float(logs['completions/mean_length']):.1f}")
        if tokens_per_s is not None:
            figures.append(f"{tokens_per_s:.0f} tok/s")
        if eta_s is not None:
            figures.append(f"ETA {format_duration(eta_s)}")
        return figures


class _Rate:
    """Tokens per second since the last entry, and the time left at the pace so far."""

    def __init__(self, step: int = 0, total: int = 0) -> None:
        self.first_step = step
        self.total = total
        self.started = self.last_time = time.monotonic()
        self.last_tokens: float | None = None

    def at(self, step: int, num_tokens: Any) -> tuple[float | None, float | None]:
        """Return (tokens per second, seconds left), each None until it can be told.

        Args:
            step: steps done.
            num_tokens: TRL's running count of prompt and completion tokens.
        """
        now = time.monotonic()
        tokens_per_s = None
        if _is_number(num_tokens):
            # A resumed run's count starts above zero, so its first entry has nothing to be compared with.
            before = self.last_tokens if self.last_tokens is not None else (0.0 if self.first_step == 0 else None)
            if before is not None and now > self.last_time:
                tokens_per_s = (float(num_tokens) - before) / (now - self.last_time)
            self.last_tokens = float(num_tokens)
        self.last_time = now
        done = step - self.first_step
        eta_s = (now - self.started) / done * (self.total - step) if done > 0 and self.total else None
        return tokens_per_s, eta_s


def _is_number(value: Any) -> bool:
    """Return whether a log value can be shown; a metric that nothing was measured for is None."""
    try:
        return value is not None and float(value) == float(value)
    except (TypeError, ValueError):
        return False


def format_duration(seconds: float) -> str:
    """Return ``m:ss`` or ``h:mm:ss``."""
    minutes, second = divmod(round(max(0.0, seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
