"""Will the run fit the card? Asked of the planner, which needs neither weights nor a GPU."""

from __future__ import annotations

from typing import Any

from trl_grpo_ext.preflight.report import Answer, Colour

_COLOURS: dict[str, Colour] = {"yes": "green", "no": "red", "uncertain": "yellow"}


def answer_of_plan(plan: Any, budget_gib: float) -> Answer:
    """Return the row for a ``MemoryPlan``."""
    lines = [line for line in str(plan.explain()).splitlines() if line.strip()]
    finding = f"{plan.fits} for {budget_gib:g} GiB. {lines[0] if lines else ''}".rstrip()
    fix = "" if plan.fits == "yes" else "trl-grpo plan tells what would; --no-preflight tries all the same"
    return Answer("will it fit", _COLOURS.get(plan.fits, "yellow"), finding, fix)


def answer_without_plan(budget_gib: float, error: Exception) -> Answer:
    """Return the row for a plan that could not be made."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return Answer("will it fit", "yellow", f"could not be planned for {budget_gib:g} GiB: {reason}")
