"""The start-up report: one message that says how a PPO call was read and what has no effect."""

from __future__ import annotations

from collections.abc import Sequence

from trl_grpo_ext.compat.batch import BatchPlan
from trl_grpo_ext.compat.fields import Era


def compose_report(
    era: Era,
    plan: BatchPlan | None,
    *,
    world_size: int = 1,
    kl: str = "",
    notes: Sequence[str] = (),
    ignored: Sequence[str] = (),
) -> str:
    """Return the text of the report.

    Args:
        era: Whose call it was.
        plan: How an update is cut; None when the configuration was already GRPO's.
        world_size: Number of processes.
        kl: What happens to the KL penalty, one phrase.
        notes: Further sentences, without a full stop.
        ignored: Arguments and settings of the critic that the user passed.
    """
    lines = [] if plan is None else _describe_batch(era, plan, world_size)
    lines += [kl, *notes]
    text = "; ".join(line for line in lines if line) + "."
    if ignored:
        text += f" There is no critic; these have no effect: {', '.join(ignored)}."
    return text[0].upper() + text[1:]


def _describe_batch(era: Era, plan: BatchPlan, world_size: int) -> list[str]:
    passes = plan.num_iterations
    steps = plan.optimizer_steps // passes
    unit = "step" if era == "classic" else "update"
    where = f" on each of {world_size} processes" if era == "classic" and world_size > 1 else ""
    prompts = f"{_count(plan.prompts, 'prompt')} x {plan.num_generations}"
    cut = f"{_count(passes, 'pass', 'passes')} x {_count(steps, 'mini-batch', 'mini-batches')}"
    lines = [f"PPO settings translated: {plan.completions} responses per {unit}{where} as {prompts}; {cut}"]
    if era == "v2" and steps > 1:
        lines.append(
            f"a batch tuned on TRL <= 0.16 was {steps} times larger: multiply gradient_accumulation_steps by {steps}"
        )
    return lines


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
