"""Will there be steps at all, and will they move anything?"""

from __future__ import annotations

from trl_grpo_ext.preflight.report import Answer


def check_data(num_prompts: int | None, completions_per_step: int, num_generations: int) -> Answer:
    """Return whether the data fill one step; TRL would end after none, without an error.

    Args:
        num_prompts: of the training data; None for a stream.
        completions_per_step: generated at once over all processes.
        num_generations: completions per prompt.
    """
    needed = completions_per_step // num_generations
    if num_prompts is None:
        return Answer("data", "green", f"a stream; one step takes {needed} prompts")
    finding = f"{num_prompts} prompts; one step takes {needed}"
    if num_prompts < needed:
        return Answer(
            "data",
            "red",
            finding,
            "Add prompts, or lower trainer.per_device_train_batch_size or trainer.gradient_accumulation_steps",
        )
    return Answer("data", "green", finding)


def check_trainable(num_trainable: int, num_parameters: int, learning_rate: float) -> Answer:
    """Return whether an optimiser step would move anything.

    Args:
        num_trainable: parameters that get a gradient.
        num_parameters: all of them.
        learning_rate: of the optimiser.
    """
    share = num_trainable / max(num_parameters, 1)
    finding = f"{_short(num_trainable)} of {_short(num_parameters)} parameters ({share:.2%})"
    if num_trainable == 0:
        return Answer("trainable", "red", "no parameter is trainable", 'Set peft.target_modules, e.g. "all-linear"')
    if learning_rate == 0:
        return Answer("trainable", "yellow", f"{finding}, at learning_rate=0", "Set trainer.learning_rate")
    return Answer("trainable", "green", finding)


def _short(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
