"""Show comparisons: a table for the terminal, Markdown for a page, a picture."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from trl_grpo_ext.bench.clock import PHASES
from trl_grpo_ext.bench.compare import SIDES, Comparison
from trl_grpo_ext.errors import MissingDependencyError
from trl_grpo_ext.monitor.files import write_bytes

_NAMES = {"forward_backward": "forward + backward", "optimizer": "optimiser", "step": "whole step"}
_COLOURS = {"rollout": "#1f5fa8", "scoring": "#9dbce0", "forward_backward": "#c2571a", "optimizer": "#777777"}
_GIB = 2**30


def table(comparison: Comparison) -> Table:
    """Return seconds and ratios by phase, with the rest of the figures in the caption."""
    c = comparison
    result = Table(
        title=f"{c.job}: {c.about} ({c.dtype}, {c.num_threads} thread{'s' * (c.num_threads > 1)})", title_justify="left"
    )
    for heading in ("phase", "TRL, s", "ours, s", "ratio", "from", "to"):
        result.add_column(heading, justify="left" if heading == "phase" else "right")
    for phase in PHASES:
        ratio = c.ratio(phase)
        seconds = [f"{c.seconds(side, phase):.3g}" for side in SIDES]
        spread = [f"{value:.2f}" for value in ratio] if c.seconds("trl", phase) >= 0.01 else ["", "", ""]
        result.add_row(_NAMES.get(phase, phase), *seconds, *spread, style="bold" if phase == "step" else None)
    peaks = [c.peak_bytes[side] / _GIB for side in SIDES]
    result.caption = (
        f"medians of {len(c.steps['ours'])} timed step(s); peak memory {peaks[0]:.2f} and {peaks[1]:.2f} GiB, ours/TRL "
        f"{c.memory_ratio:.2f}; {c.tokens_per_second('trl'):.0f} and {c.tokens_per_second('ours'):.0f} tokens/s; "
        f"gradient error on the same rollouts {_error(c)}; {100 * c.scored_share:.0f} % of the tokens were in groups "
        f"whose rewards differ, the others cost us no pass; ours is {c.above_floor:.1f} times its floor of "
        f"{sum(c.floor):.2f} s"
    )
    result.caption_justify = "left"
    return result


def markdown(comparisons: Sequence[Comparison]) -> str:
    """Return one table row per comparison, for a page."""
    lines = [
        "| job | weights | threads | TRL, s | ours, s | step ratio | rollout | fwd + bwd "
        "| peak TRL, GiB | peak ours | ours/TRL | gradient error | above floor |",
        "|" + "---|" * 13,
    ]
    for c in comparisons:
        step = c.ratio("step")
        cells = [
            c.job,
            c.dtype,
            str(c.num_threads),
            *(f"{c.seconds(side, 'step'):.1f}" for side in SIDES),
            f"**{step.median:.2f}** [{step.low:.2f}, {step.high:.2f}]",
            *(f"{c.ratio(phase).median:.2f}" for phase in ("rollout", "forward_backward")),
            *(f"{c.peak_bytes[side] / _GIB:.2f}" for side in SIDES),
            f"**{c.memory_ratio:.2f}**",
            _error(c),
            f"{c.above_floor:.1f}×",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _error(c: Comparison) -> str:
    return "none: all rewards equal" if math.isnan(c.gradient_error) else f"{c.gradient_error:.0e}"


def plot(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Write a PNG: seconds by phase, peak memory and milliseconds per completion token of each job, TRL beside ours.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("the plot needs matplotlib; run: pip install matplotlib") from error

    figure = Figure(figsize=(max(11, 2.2 * len(comparisons) + 4), 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    time_axes, memory_axes, token_axes = figure.subplots(1, 3)
    for index, c in enumerate(comparisons):
        for side, x in zip(SIDES, (index - 0.2, index + 0.2), strict=True):
            bottom = 0.0
            for phase, colour in _COLOURS.items():
                seconds = c.seconds(side, phase)
                label = _NAMES.get(phase, phase) if index == 0 and side == "trl" else None
                time_axes.bar(x, seconds, 0.36, bottom=bottom, color=colour, label=label, edgecolor="white")
                bottom += seconds
            colour = "#bbbbbb" if side == "trl" else "#1f5fa8"
            label = {"trl": "TRL", "ours": "ours"}[side] if index == 0 else None
            memory_axes.bar(x, c.peak_bytes[side] / _GIB, 0.36, color=colour, label=label)
            token_axes.bar(x, 1000 / c.tokens_per_second(side), 0.36, color=colour, label=label)
        highest = max(c.seconds(side, "step") for side in SIDES)
        time_axes.text(index, 1.02 * highest, f"{c.ratio('step').median:.1f}×", ha="center", fontweight="bold")
        highest = max(c.peak_bytes.values()) / _GIB
        memory_axes.text(index, 1.02 * highest, f"{c.memory_ratio:.2f}", ha="center", fontweight="bold")
    for axes, title in (
        (time_axes, "seconds per step (left TRL, right ours)"),
        (memory_axes, "peak memory, GiB"),
        (token_axes, "milliseconds per completion token"),
    ):
        axes.set_title(title, fontsize=10)
        axes.set_xticks(range(len(comparisons)), [f"{c.job}\n{c.dtype}" for c in comparisons])
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.margins(y=0.12)
        axes.legend(fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_bytes(path, buffer.getvalue())
