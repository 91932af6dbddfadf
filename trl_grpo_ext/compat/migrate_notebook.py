"""Notebooks: the code cells are one script, so a name imported in one cell is known in the next."""

from __future__ import annotations

import ast
import json
import re
from typing import Any, NamedTuple

from trl_grpo_ext.compat.migrate import Remark, migrate_source, unified_diff
from trl_grpo_ext.errors import DataError

_MARK = "# trl-grpo cell "
_MAGIC = "pass  # trl-grpo magic "
_PINS_TRL = re.compile(r"\bpip3? install\b.*\btrl(?:\[\w+\])?\s*(?:==|<|~=)")
_MAGIC_LINE = re.compile(r"^(\s*)([%!?].*)$")


class NotebookMigration(NamedTuple):
    """The outcome for a notebook: its new text, a diff by cell, and remarks whose lines count within their cell."""

    text: str
    diff: str
    remarks: tuple[tuple[int, Remark], ...]


def migrate_notebook(text: str, name: str) -> NotebookMigration:
    """Return a notebook rewritten.

    Lines with magics and cells that are not Python are left as they are; a cell that cannot be parsed gets a remark.

    Args:
        text: JSON of the notebook.
        name: For messages and the diff.

    Raises:
        DataError: if ``text`` is no notebook.
    """
    try:
        notebook = json.loads(text)
        cells = notebook["cells"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise DataError(f"{name} is not a notebook: {error}") from error
    remarks: list[tuple[int, Remark]] = []
    pieces: list[tuple[int, str]] = []
    magics: list[str] = []
    for number, cell in enumerate(cells):
        if cell.get("cell_type") != "code" or _source(cell).lstrip().startswith("%%"):
            continue
        code, found = _hide_magics(_source(cell), len(magics))
        for line, magic in enumerate(_source(cell).split("\n"), start=1):
            if _MAGIC_LINE.match(magic) and _PINS_TRL.search(magic):
                remarks.append((number, Remark(line, f"{magic.strip()}: this package needs trl>=1.16,<2")))
        if not _is_python(code):
            remarks.append((number, Remark(1, "the cell cannot be parsed and is left as it is")))
            continue
        magics += found
        pieces.append((number, code))
    joined = "".join(f"{_MARK}{number}\n{code}\n" for number, code in pieces)
    result = migrate_source(joined, name)
    after = _split(_show_magics(result.code, magics))
    starts = {number: joined[: joined.index(f"{_MARK}{number}\n")].count("\n") + 1 for number, _ in pieces}
    for remark in result.remarks:
        number = max((n for n in starts if starts[n] <= remark.line), default=0)
        remarks.append((number, Remark(remark.line - starts[number], remark.text)))
    diff = ""
    for number, _ in pieces:
        old, new = _source(cells[number]), after.get(number, "")
        diff += unified_diff(old, new, f"{name} cell {number}")
        if new != old:
            cells[number]["source"] = (
                new.splitlines(keepends=True) if isinstance(cells[number]["source"], list) else new
            )
    written = json.dumps(notebook, indent=_indent(text), ensure_ascii=False) + ("\n" if text.endswith("\n") else "")
    return NotebookMigration(written if diff else text, diff, tuple(sorted(remarks)))


def _source(cell: Any) -> str:
    source = cell.get("source", "")
    return source if isinstance(source, str) else "".join(source)


def _hide_magics(code: str, first: int) -> tuple[str, list[str]]:
    hidden: list[str] = []
    lines = []
    for line in code.split("\n"):
        match = _MAGIC_LINE.match(line)
        if match:
            line = f"{match[1]}{_MAGIC}{first + len(hidden)}"
            hidden.append(match[2])
        lines.append(line)
    return "\n".join(lines), hidden


def _show_magics(code: str, magics: list[str]) -> str:
    return re.sub(rf"{re.escape(_MAGIC)}(\d+)", lambda match: magics[int(match[1])], code)


def _split(code: str) -> dict[int, str]:
    """Return {cell number: code}; what was put above the first mark belongs to the first cell."""
    parts = re.split(rf"^{_MARK}(\d+)\n", code, flags=re.MULTILINE)
    cells = {int(parts[i]): parts[i + 1].removesuffix("\n") for i in range(1, len(parts), 2)}
    if parts[0].strip() and cells:
        first = min(cells)
        cells[first] = parts[0] + cells[first]
    return cells


def _is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def _indent(text: str) -> int:
    match = re.match(r"\{\n( +)", text)
    return len(match[1]) if match else 1
