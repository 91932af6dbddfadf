"""``memory="auto"``: the planner's choice where there is a card to plan for, the plainest mode elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.memory.mode import NAMED_MODES, MemoryMode


class Choice(NamedTuple):
    """A mode and why it was taken, as a clause."""

    mode: MemoryMode
    reason: str


def choose_mode(*, has_adapter: bool, plan: Callable[[], Any] | None) -> Choice:
    """Return the mode that ``memory="auto"`` stands for.

    Args:
        has_adapter: Whether the user gives an adapter, new or trained before. Tuning is never changed on its own.
        plan: Makes a ``MemoryPlan`` for this run and this card; None: there is no card, or no planner.

    Raises:
        ConfigurationError: if the plan says that the run does not fit.
    """
    if plan is None:
        name = "lora" if has_adapter else "full"
        given = "an adapter is" if has_adapter else "no adapter is"
        return Choice(NAMED_MODES[name], f"{name!r}, because {given} given and there is no card to plan for")
    result = plan()
    if result.fits == "no":
        raise ConfigurationError(
            f'memory="auto": the run does not fit this card. {result.explain()} Allow more (memory="lora" or "qlora"), '
            "or lower max_completion_length or num_generations."
        )
    if result.fits == "uncertain":
        return Choice(result.mode, "planned for this card, without certainty that it fits")
    return Choice(result.mode, "planned for this card")
