"""``trl-grpo train``: a recipe becomes a trained model with its results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from trl_grpo_ext.cli.prepare import Prepared


def train(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change one key, for example trainer.max_steps=10. Repeatable."
        ),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", help="Where everything goes; runs/RECIPE by default.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on from the last whole checkpoint, or start anew; a finished run is left as it is."
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the results of an earlier run in the output directory.")
    ] = False,
    shuffle_rewards: Annotated[
        bool,
        typer.Option(
            "--shuffle-rewards", help="Control run: rewards are permuted within each step, so nothing can be learnt."
        ),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="First prove on 16 rows that the rewards pay right answers best.")
    ] = True,
    preflight: Annotated[
        bool, typer.Option("--preflight/--no-preflight", help="First look at template, lengths, memory and the like.")
    ] = True,
    gpu: Annotated[
        float | None, typer.Option(help="Memory of a card in GiB to plan for; the one that is there by default.")
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="In the pre-flight, also sample: are completions cut off?")
    ] = False,
    seed: Annotated[int | None, typer.Option("--seed", help="Replaces trainer.seed; the data split stays.")] = None,
) -> None:
    """Train the model of a recipe, evaluating it on held-out prompts before and after."""
    from trl_grpo_ext.cli.prepare import prepare
    from trl_grpo_ext.cli.rundir import RunDirectory, is_main_process
    from trl_grpo_ext.errors import ConfigurationError

    if resume and overwrite:
        raise ConfigurationError("--resume and --overwrite contradict each other; give one of them")
    changes = list(overrides or ())
    if seed is not None:
        changes.append(f"trainer.seed={seed}")
    prepared = prepare(recipe, changes)
    if check and is_main_process():
        _check_rewards(prepared)
    recipe_dir = prepared.recipe.trainer.get("output_dir") or Path("runs") / prepared.recipe.name
    directory = RunDirectory(output_dir or Path(recipe_dir))
    directory.open(prepared.recipe, resume=resume, overwrite=overwrite, control=shuffle_rewards)

    try:
        if directory.is_finished:
            if is_main_process():
                print(f"already finished: {directory.summary}; a larger trainer.max_steps goes on")
            return
        plan = None
        if preflight and is_main_process() and directory.checkpoint is None:
            plan = _preflight(prepared, gpu, probe)
        from trl_grpo_ext.cli.run import run_training

        run_training(prepared, directory, control=shuffle_rewards, resume=resume, plan=plan)
    finally:
        directory.close()


def _check_rewards(prepared: Prepared) -> None:
    """Leave with 1 if the rewards would teach the wrong thing; the fast version of ``trl-grpo check``."""
    from rich.console import Console

    from trl_grpo_ext.cli.check import print_report, quick_check

    report = quick_check(prepared.splits.train, prepared.rewards, source=prepared.recipe.data.source)
    if report.failed():
        print_report(report, Console(stderr=True))
        print(
            "trl-grpo: the rewards failed the check, so nothing was trained; --no-check trains all the same",
            file=sys.stderr,
        )
        raise typer.Exit(1)


def _preflight(prepared: Prepared, gpu_gib: float | None, probe: bool) -> Any:
    """Print what is worth knowing before training; return the memory plan, if one was made.

    Raises:
        ConfigurationError: for the first answer that means the run would fail or teach nothing.
    """
    from rich.console import Console

    from trl_grpo_ext.cli.preflight import run_preflight
    from trl_grpo_ext.errors import ConfigurationError
    from trl_grpo_ext.preflight.report import print_answers

    answers, plan = run_preflight(prepared, gpu_gib=gpu_gib, probe=probe)
    red = [answer for answer in answers if answer.colour == "red"]
    if red:
        raise ConfigurationError(f"pre-flight: {red[0].line} (--no-preflight trains all the same)")
    print_answers(answers, Console(), only_problems=True)
    return plan
