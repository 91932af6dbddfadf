"""Checks that need no model: they run before one is loaded."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from trl_grpo_ext.errors import DataError


def check_one_step_of_data(dataset: Any, generation_batch_size: int, num_generations: int) -> None:
    """Raise if a data set of known length cannot fill one generation batch.

    TRL drops an incomplete batch, so such a run would end at once, without a step and without an error.

    Args:
        dataset: Training data; one without a length (a stream, or None) is not checked.
        generation_batch_size: Completions per generation over all processes.
        num_generations: Completions per prompt.

    Raises:
        DataError: naming the prompts needed, the prompts found and the settings to change.
    """
    if not isinstance(dataset, Sized):
        return
    needed = generation_batch_size // num_generations
    if len(dataset) < needed:
        raise DataError(
            f"The data set has {len(dataset)} prompts, but one step needs {needed} different ones "
            f"({generation_batch_size} completions in groups of {num_generations}). Add prompts, lower "
            "per_device_train_batch_size or gradient_accumulation_steps, or raise num_generations."
        )
