"""Everything about a run that can be checked before torch is imported: recipe, model name, rewards, data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from trl_grpo_ext.data.prompts import check_reward_columns, output_columns
from trl_grpo_ext.data.sources import peek_columns
from trl_grpo_ext.data.splits import Splits, load_splits
from trl_grpo_ext.errors import ConfigurationError, DataError
from trl_grpo_ext.models import PYPI_PREFIX, check_model_name
from trl_grpo_ext.monitor.checkpoints import last_complete_checkpoint, why_incomplete
from trl_grpo_ext.recipe import Recipe, load_recipe
from trl_grpo_ext.rewards.columns import RESERVED_COLUMNS
from trl_grpo_ext.rewards.registry import RewardSet, build_rewards


class Prepared(NamedTuple):
    """A run whose inputs are known to fit together.

    Attributes:
        recipe: the checked recipe.
        rewards: what the trainer optimises.
        strict: verifier of the strict accuracy, or None where the data have no answer to compare with.
        lenient: verifier of the lenient accuracy, or None likewise.
        splits: training and held-out rows.
    """

    recipe: Recipe
    rewards: RewardSet
    strict: Any | None
    lenient: Any | None
    splits: Splits


def prepare(path: Path, overrides: Sequence[str], *, for_training: bool = True) -> Prepared:
    """Read a recipe and everything it names that needs no model, cheapest check first.

    Args:
        path: the recipe.
        overrides: ``key=value`` changes.
        for_training: False skips the check that the training rows fill one step.

    Raises:
        GroupRelativeError: one line for the first thing that cannot work.
    """
    recipe = with_local_model(load_recipe(path, overrides))
    check_model_name(recipe.model.name)
    rewards = build_rewards(recipe.rewards, base_dir=recipe.base_dir)
    verifiers = build_rewards([recipe.eval.strict, recipe.eval.lenient], base_dir=recipe.base_dir)
    if len(verifiers.functions) != 2:
        raise ConfigurationError("eval.strict and eval.lenient must each name one verifier")
    needed = _needed_prompts(recipe)
    columns = peek_columns(recipe.data)
    if columns is not None:
        _check_columns(recipe, rewards, verifiers, columns)
    if for_training and recipe.data.task is not None:
        # Known without making a single row. Duplicates are seen only afterwards, so the check comes again below.
        held_out = recipe.data.held_out if isinstance(recipe.data.held_out, int) else 0
        _check_fills_a_step(recipe, min(recipe.data.size, recipe.data.limit or recipe.data.size) - held_out, needed)
    splits = load_splits(recipe.data)
    available = set().union(*splits.train)
    if columns is None:
        _check_columns(recipe, rewards, verifiers, sorted(available))
    if for_training:
        _check_fills_a_step(recipe, len(splits.train), needed)
    judged = all(column in available for wanted in verifiers.columns.values() for column in wanted)
    strict, lenient = verifiers.functions if judged else (None, None)
    return Prepared(recipe, rewards, strict, lenient, splits)


def with_local_model(recipe: Recipe) -> Recipe:
    """Return the recipe with a model directory beside the recipe file made absolute."""
    folder = recipe.base_dir / recipe.model.name
    if recipe.model.name.startswith(PYPI_PREFIX) or not folder.is_dir():
        return recipe
    return replace(recipe, model=replace(recipe.model, name=str(folder)))


def _check_columns(recipe: Recipe, rewards: RewardSet, verifiers: RewardSet, columns: Sequence[str]) -> None:
    available = output_columns(recipe.data, columns)
    for name in available:
        if name in RESERVED_COLUMNS:
            raise DataError(
                f"data: TRL reserves the name of the column {name!r}, so no reward would ever see it; rename it "
                f"(columns: {{gold: {name}}}, or answer: {name}) or leave it out (drop: [{name}])"
            )
    check_reward_columns(rewards.columns, available, columns)
    if recipe.raw.get("eval"):
        check_reward_columns(verifiers.columns, available, columns)


def _needed_prompts(recipe: Recipe) -> int:
    total, group = recipe.completions_per_step(int(os.environ.get("WORLD_SIZE", "1")))
    return total // group


def _check_fills_a_step(recipe: Recipe, num_prompts: int, needed: int) -> None:
    """Raise if TRL would find no full batch and "succeed" after zero steps."""
    if num_prompts >= needed:
        return
    total, group = recipe.completions_per_step(int(os.environ.get("WORLD_SIZE", "1")))
    raise DataError(
        f"{recipe.data.source} leaves {max(0, num_prompts)} training prompts, but one optimisation step needs {needed} "
        f"({total} completions in groups of {group}); provide more rows, hold out fewer, or lower "
        "trainer.per_device_train_batch_size or trainer.gradient_accumulation_steps"
    )


def check_checkpoint(path: Path, *, argument: str = "--checkpoint") -> Path:
    """Return the folder with weights that a directory means: itself, or the last whole checkpoint inside.

    Args:
        path: an output directory or one checkpoint.
        argument: its name on the command line, for the error.

    Raises:
        ConfigurationError: there is no such folder, no weights in it, or they are half-written.
    """
    if not path.is_dir():
        raise ConfigurationError(f"{argument}: there is no directory {str(path)!r}")
    if any((path / name).is_file() for name in ("adapter_config.json", "config.json")):
        if path.name.startswith("checkpoint-") and (reason := why_incomplete(path)) is not None:
            raise ConfigurationError(f"{argument}: {str(path)!r} was not written to its end: {reason}")
        return path
    inside = last_complete_checkpoint(path)
    if inside is None:
        raise ConfigurationError(f"{argument}: {str(path)!r} holds no model and no whole checkpoint")
    return inside
