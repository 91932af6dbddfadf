"""Will the run fit the card? Asked of the planner, which needs neither weights nor a GPU."""

from __future__ import annotations

from typing import Any

from trl_grpo_ext.preflight.report import Answer, Colour

_COLOURS: dict[str, Colour] = {"yes": "green", "no": "red", "uncertain": "yellow"}


# Out of memory, the trainer halves these by itself.
_GIVES_WAY = {"max_tokens_per_micro_batch", "max_tokens_per_generation_batch"}


def answer_of_plan(plan: Any, budget_gib: float, recipe: str = "RECIPE.yaml") -> Answer:
    """Return the row for a ``MemoryPlan``; ``recipe`` is what to call the recipe in a command."""
    lines = [line for line in str(plan.explain()).splitlines() if line.strip()]
    finding = f"{plan.fits} for {budget_gib:g} GiB. {lines[0] if lines else ''}".rstrip()
    if plan.fits == "yes":
        return Answer("will it fit", "green", finding)
    changes = list(getattr(plan, "alternatives", ()))
    settings = changes[0].settings if changes else {}
    fix = f"Write {changes[0].change}. " if settings else ""
    fix += f"`trl-grpo plan {recipe} --gpu {budget_gib:g}` shows where the memory goes"
    colour: Colour = "yellow" if settings and set(settings) <= _GIVES_WAY else _COLOURS.get(plan.fits, "yellow")
    return Answer("will it fit", colour, finding, f"{fix}; --no-preflight tries all the same")


def answer_without_plan(budget_gib: float, error: Exception) -> Answer:
    """Return the row for a plan that could not be made."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return Answer("will it fit", "yellow", f"could not be planned for {budget_gib:g} GiB: {reason}")
