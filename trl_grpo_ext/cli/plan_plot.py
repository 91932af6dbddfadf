"""The stacked bars of a memory plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl_grpo_ext.errors import ConfigurationError, MissingDependencyError, install_command

GIB = 2**30


def plot_plan(plan: Any, path: Path) -> None:
    """Write one bar per phase, stacked by category, with the card and its head-room as lines.

    Raises:
        MissingDependencyError: without matplotlib.
        ConfigurationError: if the file cannot be written.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingDependencyError(
            f"--plot needs matplotlib; run: {install_command('trl-grpo-ext[report]')}"
        ) from error
    from trl_grpo_ext.cli.plan import _categories

    phases = list(plan.phases)
    figure, axes = plt.subplots(figsize=(1.6 + 1.3 * len(phases), 4.5), layout="constrained")
    bottoms = [0.0] * len(phases)
    for number, name in enumerate(_categories(plan.phases)):
        sizes = [plan.phases[phase].get(name, 0) / GIB for phase in phases]
        colour = "lightgrey" if name == "reserved, unused" else f"C{number % 10}"
        axes.bar(phases, sizes, bottom=bottoms, label=name, color=colour, width=0.7)
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    card = plan.budget / GIB
    axes.axhline(card, color="black", linewidth=1)
    axes.axhline(card * (1 - plan.headroom), color="black", linewidth=1, linestyle="--")
    axes.annotate(f"{card:g} GiB", (0, card), xytext=(0, 3), textcoords="offset points", fontsize=8)
    axes.set_ylabel("GiB at the peak of the phase")
    axes.set_title(f"{plan.model}: {plan.mode.tuning}, {plan.mode.base}", fontsize=10)
    figure.legend(loc="outside right upper", fontsize=8, reverse=True)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--plot {path}: {error}") from error
    finally:
        plt.close(figure)
