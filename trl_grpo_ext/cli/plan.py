"""``trl-grpo plan``: will it fit, in which memory mode, and where do the bytes go."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple

import typer

from trl_grpo_ext.choices import check_choice
from trl_grpo_ext.errors import ConfigurationError

_TUNINGS = ("full", "lora", "qlora", "qlora-8bit", "auto")
_ENGINES = ("auto", "vllm", "transformers")
GIB = 2**30
_ASSUMED_PROMPT = 512


class _Request(NamedTuple):
    """What is to be planned: model, settings, adapter, what may be changed, and the recipe that says so, if any."""

    model: str
    config: Any
    peft: dict[str, Any] | None
    allow: tuple[str, ...]
    recipe: Any = None
    overrides: Sequence[str] = ()


def plan(
    model: Annotated[str, typer.Argument(help="A recipe, a directory, a config.json, a known name, or `table`.")],
    gpu: Annotated[str, typer.Option(help="Memory of the card in GiB; for `table`, several with commas.")],
    prompt: Annotated[
        int | None,
        typer.Option(help="Longest prompt, in tokens. [default: a recipe's local data are measured, else 512]"),
    ] = None,
    completion: Annotated[int | None, typer.Option(help="Longest completion, in tokens. [default: 1024]")] = None,
    group: Annotated[int | None, typer.Option(help="Completions of a prompt. [default: 8]")] = None,
    batch: Annotated[int | None, typer.Option(help="Completions of an optimiser step. [default: 32]")] = None,
    tuning: Annotated[
        str | None,
        typer.Option(help="full, lora, qlora, qlora-8bit, or auto: full, else lora, else qlora. [default: auto]"),
    ] = None,
    rank: Annotated[int | None, typer.Option(help="Rank of the adapter. [default: 16]")] = None,
    engine: Annotated[str, typer.Option(help="What samples: auto, vllm or transformers.")] = "auto",
    overrides: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, as for train.")] = None,
    headroom: Annotated[float, typer.Option(help="Share of the card that must stay free.")] = 0.10,
    quick: Annotated[bool, typer.Option("--quick", help="Do not verify the chosen mode in full.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a stacked bar of every phase to this file.")] = None,
) -> int:
    """Plan the memory of a run before any weight is loaded. Exit code 0: it fits; 1: it does not, or may not."""
    check_choice("--engine", engine, _ENGINES)
    if tuning is not None:
        check_choice("--tuning", tuning, _TUNINGS)
    cards = _cards(gpu)
    if model == "table":
        from trl_grpo_ext.cli.plan_table import Sizes, print_table

        sizes = Sizes(prompt or _ASSUMED_PROMPT, completion or 1024, group or 8, batch or 32, rank or 16)
        with _quiet():
            print_table(cards, sizes, headroom, as_json)
        return 0
    if len(cards) != 1:
        raise ConfigurationError(f"--gpu {gpu}: one card, please; several go with `trl-grpo plan table`")
    request = _read_request(model, overrides or [], completion, group, batch, tuning, rank)

    from trl_grpo_ext.memory.plan import plan_memory
    from trl_grpo_ext.models import resolve_model

    with _quiet():
        made = plan_memory(
            resolve_model(request.model) if request.recipe is not None else request.model,
            request.config,
            request.peft,
            budget_gib=cards[0],
            headroom=headroom,
            allow=request.allow,
            prompt_len=prompt or _measured_prompt(request) or _ASSUMED_PROMPT,
            engine=engine,  # type: ignore[arg-type]
            tier="T1" if quick else "T2",
        )
    if request.recipe is not None:
        made = replace(made, model=request.model)
    if as_json:
        print(json.dumps(made.to_json(None if request.recipe is None else request.recipe.raw), indent=1))
    else:
        _print_plan(made, request.recipe)
    if plot is not None:
        from trl_grpo_ext.cli.plan_plot import plot_plan

        plot_plan(made, plot)
    return 0 if made.fits == "yes" else 1


def _cards(text: str) -> list[float]:
    """Return the sizes in ``--gpu``."""
    try:
        sizes = [float(part.strip().lower().removesuffix("gib").removesuffix("gb")) for part in text.split(",")]
    except ValueError as error:
        raise ConfigurationError(f"--gpu {text!r} is no size in GiB; for example 24, or 24,40,80") from error
    if any(size <= 0 for size in sizes):
        raise ConfigurationError(f"--gpu {text!r}: a card has more than 0 GiB")
    return sizes


def _read_request(
    model: str,
    overrides: Sequence[str],
    completion: int | None,
    group: int | None,
    batch: int | None,
    tuning: str | None,
    rank: int | None,
) -> _Request:
    """Return what is to be planned; options on the command line win over a recipe."""
    recipe = None
    trainer: dict[str, Any] = {}
    peft: dict[str, Any] | None = None
    is_recipe = model.endswith((".yaml", ".yml"))
    if is_recipe:
        from trl_grpo_ext.cli.prepare import with_local_model
        from trl_grpo_ext.recipe import load_recipe

        recipe = with_local_model(load_recipe(model, overrides))
        trainer, peft, model = dict(recipe.trainer), recipe.peft, recipe.model.name
        trainer["model_init_kwargs"] = {"dtype": recipe.model.dtype, **(trainer.get("model_init_kwargs") or {})}
    elif overrides:
        raise ConfigurationError(f"--set {overrides[0]} changes a recipe, and {model!r} is none (it ends in .yaml)")
    else:
        trainer = {"max_completion_length": 1024, "num_generations": 8}
        batch = 32 if batch is None else batch
    if completion is not None:
        trainer["max_completion_length"] = completion
    if group is not None:
        trainer["num_generations"] = group
    if batch is not None:
        size = trainer.get("num_generations") or 8
        if batch % size:
            raise ConfigurationError(f"--batch {batch} must be a multiple of the group of {size} completions")
        trainer.update(per_device_train_batch_size=size, gradient_accumulation_steps=batch // size)
    allow: tuple[str, ...] = ("as-configured",)
    if tuning is None and not is_recipe:
        tuning = "auto"
    if tuning == "auto":
        # Full tuning first, the adapter only where that does not fit: the user asked for either.
        trainer["memory"], allow = "full", ("lora", "qlora")
    elif tuning is not None:
        trainer["memory"] = tuning
    if rank is not None:
        peft = {**(peft or {}), "r": rank}
    if trainer.get("memory") == "full" and tuning != "auto":
        peft = None
    return _Request(model, SimpleNamespace(**trainer), peft, allow, recipe, overrides)


def _measured_prompt(request: _Request) -> int | None:
    """Return the longest prompt of a recipe whose data and model are on this machine; None for any other."""
    recipe = request.recipe
    if recipe is None or recipe.data.hub is not None:
        return None
    from trl_grpo_ext.models import resolve_model

    if not Path(resolve_model(recipe.model.name)).is_dir():
        return None
    from trl_grpo_ext.cli.preflight import longest_prompt
    from trl_grpo_ext.cli.prepare import prepare

    try:
        return longest_prompt(prepare(recipe.path, request.overrides, for_training=False))
    except OSError:  # a directory with nothing but its config.json can be planned; it has no tokenizer
        return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings of libraries that were only imported off the screen."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _print_plan(made: Any, recipe: Any) -> None:
    """Print the verdict, the table of bytes, what was assumed and the settings to run."""
    from rich.console import Console
    from rich.table import Table

    from trl_grpo_ext.memory.report import describe_mode

    console = Console()
    colour = {"yes": "green", "no": "red", "uncertain": "yellow"}[made.fits]
    words = {"yes": "fits", "no": "does not fit", "uncertain": "uncertain"}[made.fits]
    console.print(
        f"[{colour}]{words}[/]: {made.model} on {made.budget / GIB:g} GiB ({made.tier}, {made.seconds:.1f} s)"
    )
    console.print(f"mode: {describe_mode(made)}", highlight=False)
    table = Table(title="GiB at the peak of each phase")
    table.add_column("")
    for phase in made.phases:
        table.add_column(phase, justify="right")
    for name in _categories(made.phases):
        sizes = [made.phases[phase].get(name, 0) / GIB for phase in made.phases]
        if max(sizes) >= 0.005:
            table.add_row(name, *(f"{size:.2f}" if size >= 0.005 else "" for size in sizes))
    table.add_section()
    table.add_row("all", *(f"{sum(parts.values()) / GIB:.2f}" for parts in made.phases.values()))
    console.print(table)
    console.print(
        f"tensors {made.peak / GIB:.2f}, reserved {made.reserved / GIB:.2f}, process {made.process / GIB:.2f} GiB; "
        f"margin {made.margin / GIB:+.2f} GiB beyond the {made.headroom:.0%} that stay free; host memory "
        f"{made.host_ram / GIB:.2f} GiB",
        highlight=False,
        soft_wrap=True,
    )
    for title, lines in (("assumed", made.assumptions), ("turned down", made.notes)):
        for line in lines:
            console.print(f"{title}: {line}", highlight=False, soft_wrap=True)
    for change in made.alternatives:
        taken = f"the run takes {change.process_gib:.1f} GiB"
        console.print(f"would fit: {change.change} ({taken})", highlight=False, soft_wrap=True, markup=False)
    settings = made.yaml(None if recipe is None else recipe.raw)
    if recipe is not None:
        settings = f"# These keys replace those of {recipe.path}; its others stay.\n{settings}"
    console.print("\n" + settings, highlight=False, soft_wrap=True, markup=False)


def _categories(phases: dict[str, dict[str, int]]) -> list[str]:
    """Return the categories of all phases, tensors that stay first."""
    order = ["weights", "reference", "adapter", "optimizer", "gradients", "activations", "staging", "kv cache"]
    order += ["sampling", "workspaces", "vLLM", "reserved, unused", "CUDA context"]
    found = {name for parts in phases.values() for name in parts}
    return [name for name in order if name in found] + sorted(found - set(order))
