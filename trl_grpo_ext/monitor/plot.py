"""Draw a run: reward, accuracy and completion length over the steps."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_grpo_ext.errors import MissingDependencyError
from trl_grpo_ext.monitor.files import write_bytes

_LINE, _FAINT, _SECOND = "#1f5fa8", "#9dbce0", "#c2571a"


def plot_run(
    path: Path,
    entries: Sequence[Mapping[str, Any]],
    *,
    title: str,
    accuracy_keys: Mapping[str, str],
    before: Mapping[str, float] | None = None,
    after: Mapping[str, float] | None = None,
) -> None:
    """Write a PNG with three panels; atomically.

    Args:
        path: the file.
        entries: lines of ``metrics.jsonl``.
        title: heading.
        accuracy_keys: {label: metric key} of the accuracies measured on the training completions.
        before: {label: share} on the held-out rows before training, drawn as a mark at step 0.
        after: likewise after training, at the last step.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("the plot needs matplotlib; run: pip install matplotlib") from error

    # No pyplot: it would choose a backend and keep global state in the user's process.
    figure = Figure(figsize=(11, 3.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    reward, accuracy, length = figure.subplots(1, 3)
    _curve(reward, entries, "reward", _LINE, "mean reward", _FAINT)
    reward.set_ylabel("reward")
    colours = dict(zip(accuracy_keys, (_LINE, _SECOND), strict=False))
    # Where two curves are one, the first lies on top, dashed, so that both colours are seen.
    for index, (label, key) in reversed(list(enumerate(accuracy_keys.items()))):
        style = "--" if index == 0 and len(accuracy_keys) > 1 else "-"
        _curve(accuracy, entries, key, colours[label], f"{label} (training)", colours[label] + "55", style)
    last = max((entry["step"] for entry in entries), default=0)
    for step, shares in ((0, before), (last, after)):
        for index, (label, share) in enumerate((shares or {}).items()):
            colour = colours.get(label, "black")
            accuracy.plot(
                [step],
                [share],
                "o",
                color=colour,
                markersize=9 - 3 * (index == 0),
                zorder=6 - index,
                markeredgecolor="white",
            )
    if before or after:
        accuracy.plot([], [], "o", color="grey", label="held-out")
    accuracy.set_ylim(-0.02, 1.02)
    accuracy.set_ylabel("share right")
    if accuracy.get_legend_handles_labels()[0]:
        accuracy.legend(fontsize=8, loc="upper left")
    _curve(length, entries, "completions/mean_length", _LINE, "mean length", _FAINT)
    length.set_ylabel("tokens per completion")
    length.set_ylim(0, 1.08 * length.get_ylim()[1])
    for axes in (reward, accuracy, length):
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_bytes(path, buffer.getvalue())


def smoothed(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Return the exponential moving average, corrected for its start, so that the first value is the first point."""
    average, total, result = 0.0, 0.0, []
    for value in values:
        average = weight * average + (1 - weight) * value
        total = weight * total + (1 - weight)
        result.append(average / total)
    return result


def _curve(
    axes: Any, entries: Sequence[Mapping[str, Any]], key: str, colour: str, label: str, faint: str, style: str = "-"
) -> None:
    points = [(entry["step"], float(entry[key])) for entry in entries if isinstance(entry.get(key), (int, float))]
    if not points:
        return
    steps, values = zip(*points, strict=True)
    axes.plot(steps, values, color=faint, linewidth=0.9)
    axes.plot(steps, smoothed(values), style, color=colour, linewidth=1.8, label=label)
