"""``trl-grpo migrate``: rewrite a PPO or GRPO script or notebook for this package."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trl_grpo_ext.errors import DataError


def migrate(
    script: Annotated[Path, typer.Argument(help="A Python script or a notebook (.ipynb). It is never executed.")],
    write: Annotated[bool, typer.Option("--write", help="Write the changes to the file.")] = False,
) -> None:
    """Rewrite imports, names and arguments of a PPO script (any TRL up to 1.12) or a GRPO script.

    Prints a diff, and on stderr what needs a decision. Without --write the file stays as it is.
    """
    if not script.is_file():
        raise DataError(f"There is no file {script}.")
    try:
        old = script.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{script} is not UTF-8 text: {error}.") from error
    if script.suffix == ".ipynb":
        from trl_grpo_ext.compat.migrate_notebook import migrate_notebook

        notebook = migrate_notebook(old, script.name)
        new, diff = notebook.text, notebook.diff
        remarks = [f"cell {cell}, line {remark.line}: {remark.text}" for cell, remark in notebook.remarks]
    else:
        from trl_grpo_ext.compat.migrate import migrate_source, unified_diff

        result = migrate_source(old, script.name)
        new, diff = result.code, unified_diff(old, result.code, script.name)
        remarks = [f"line {remark.line}: {remark.text}" for remark in result.remarks]
    sys.stdout.write(diff)
    if remarks:
        print(f"{len(remarks)} to decide by hand in {script}:", file=sys.stderr)
        for remark in remarks:
            print(f"  {remark}", file=sys.stderr)
    if not diff:
        print(f"{script}: nothing to change.", file=sys.stderr)
    elif write:
        script.write_text(new, encoding="utf-8")
        print(f"{script}: written.", file=sys.stderr)
    else:
        print("Add --write to change the file.", file=sys.stderr)
