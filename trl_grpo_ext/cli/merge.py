"""``trl-grpo merge``: a trained adapter and its base become one ordinary model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def merge(
    checkpoint: Annotated[Path, typer.Argument(help="An output directory or one checkpoint.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the merged model goes; a new directory.")],
    base: Annotated[
        str | None, typer.Option("--base", help="The base model; the one that the adapter names by default.")
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Of the merged weights: bfloat16, float16 or float32.")
    ] = "bfloat16",
    original_base: Annotated[
        bool,
        typer.Option("--original-base", help="Merge into the base as published, even if it was quantised in training."),
    ] = False,
) -> None:
    """Merge an adapter into its base and write a model that needs no PEFT, with its model card."""
    from trl_grpo_ext.cli import command_line
    from trl_grpo_ext.cli.prepare import check_checkpoint
    from trl_grpo_ext.models import PYPI_PREFIX, published_as, resolve_model
    from trl_grpo_ext.monitor.files import write_text
    from trl_grpo_ext.monitor.report import merged_card

    folder = check_checkpoint(checkpoint, argument="CHECKPOINT")
    if base is not None and base.startswith(PYPI_PREFIX):
        base = resolve_model(base, announce=print)

    from trl_grpo_ext.memory.merge import merge_adapter

    output = output.expanduser()
    merged = merge_adapter(folder, output, base=base, dtype=dtype, original_base=original_base)
    published = published_as(merged.base)
    card = merged_card(
        name=output.absolute().name,
        base=merged.base,
        published=published.name,
        licence=published.licence,
        adapter=str(folder),
        dtype=dtype,
        as_quantised=merged.as_quantised,
        command=command_line(),
    )
    write_text(output / "README.md", card)
    print(f"merged {folder} into {output}")
