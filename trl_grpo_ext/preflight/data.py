"""Checks that need no model: they run before one is loaded."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from trl_grpo_ext.errors import DataError
from trl_grpo_ext.rewards.columns import check_columns
from trl_grpo_ext.rewards.registry import required_columns, reward_name, unique_names


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


def check_reward_columns(dataset: Any, reward_funcs: Any, *, adds_columns: bool = False) -> None:
    """Raise if a column that a reward needs is missing from ``dataset`` or cannot arrive under its name.

    Args:
        dataset: Training data; one whose columns are unknown (a stream, or None) is not checked.
        reward_funcs: One reward or a list of them, as the trainer takes them.
        adds_columns: True if rollouts add columns of their own, so that a missing one may still come.

    Raises:
        DataError: naming reward and column.
    """
    columns = getattr(dataset, "column_names", None)
    if columns is None or reward_funcs is None:
        return
    functions = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    names = unique_names([reward_name(function) for function in functions])
    needed = {name: () if adds_columns else required_columns(f) for name, f in zip(names, functions, strict=True)}
    check_columns(columns, needed)
