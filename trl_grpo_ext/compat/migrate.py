"""Rewrite a PPO script of either era, or a GRPO script, for this package, and list what a person must decide.

The script is parsed with libcst, never executed; formatting and comments stay.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, NamedTuple

from trl_grpo_ext.errors import DataError, MissingDependencyError, install_command

try:
    import libcst
except ImportError as error:
    raise MissingDependencyError(
        f"`trl-grpo migrate` needs libcst; run: {install_command('trl-grpo-ext[migrate]')}"
    ) from error

from trl_grpo_ext.compat.migrate_collect import collect
from trl_grpo_ext.compat.migrate_rewrite import Rewriter


class Remark(NamedTuple):
    """Something a person must decide: the line in the old script (1-based) and one sentence."""

    line: int
    text: str


class Migration(NamedTuple):
    """The outcome for one script: its new text, and remarks in the order of their lines."""

    code: str
    remarks: tuple[Remark, ...]


def migrate_source(code: str, name: str = "script") -> Migration:
    """Return ``code`` rewritten.

    Args:
        code: Python source.
        name: For messages.

    Raises:
        DataError: if ``code`` is not Python.
    """
    try:
        wrapper = libcst.MetadataWrapper(libcst.parse_module(code))
    except libcst.ParserSyntaxError as error:
        raise DataError(f"{name}, line {error.raw_line}: not Python that can be parsed: {error.message}") from error
    facts = collect(wrapper)
    rewriter = Rewriter(facts)
    changed: Any = wrapper.visit(rewriter)
    changed = rewriter.with_needed_imports(changed)
    remarks = sorted({Remark(line, text) for line, text in rewriter.remarks})
    return Migration(changed.code, tuple(remarks))


def unified_diff(old: str, new: str, name: str) -> str:
    """Return a unified diff, empty when nothing changed."""
    lines: Sequence[str] = list(
        difflib.unified_diff(
            old.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{name}", f"b/{name}", n=2
        )
    )
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)
