"""``trl-grpo eval``: accuracy of a checkpoint on a recipe's held-out prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.", show_default=False)],
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", help="An output directory or one checkpoint; without it the untrained model."),
    ] = None,
    sampled: Annotated[
        int, typer.Option("--sampled", min=0, help="Draw this many completions per prompt; 0 decodes greedily.")
    ] = 0,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key, for example eval.limit=50. Repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sampling.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Score a model on the held-out prompts of a recipe, strictly and leniently, with 95 % intervals."""
    from trl_grpo_ext.cli.prepare import check_checkpoint, prepare
    from trl_grpo_ext.errors import ConfigurationError

    folder = None if checkpoint is None else check_checkpoint(checkpoint)
    prepared = prepare(recipe, list(overrides or ()), for_training=False)
    if not prepared.splits.held_out:
        raise ConfigurationError("the recipe holds nothing out to evaluate on; set data.held_out, for example to 200")

    from trl_grpo_ext.cli.run import run_evaluation

    result = run_evaluation(
        prepared, folder, num_samples=sampled, seed=seed, quiet=as_json, as_trained=not _sets_memory(overrides or ())
    )
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
        return
    how = "greedy" if sampled == 0 else f"{sampled} samples per prompt"
    print(
        f"{len(prepared.splits.held_out[: prepared.recipe.eval.limit])} held-out prompts, {how}, {result.seconds:.0f} s"
    )
    print(f"strict   {result.strict}")
    print(f"lenient  {result.lenient}")
    if sampled > 1:
        print(f"strict in at least one of {sampled} samples: {100 * result.pass_any:.1f} %")
    print(f"tokens per completion {result.mean_tokens:.1f}, cut off {100 * result.truncated:.1f} %")


def _sets_memory(overrides: Sequence[str]) -> bool:
    """Return whether ``--set`` names a memory mode, which then wins over what the checkpoint was trained with."""
    keys = (override.partition("=")[0].strip().removeprefix("trainer.") for override in overrides)
    return any(key.split(".")[0] == "memory" for key in keys)
