"""Public names exist, are documented, and their docstrings name the parameters that they have."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest

import trl_grpo_ext

PACKAGE = Path(trl_grpo_ext.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py"))
ENTRY = re.compile(r"^(\*{0,2}\w+(?:, ?\*{0,2}\w+)*)(?: \([^)]*\))?:(?: |$)")


class Documented(NamedTuple):
    """A public function, method or class, as its source has it."""

    where: str
    docstring: str | None
    section: str  # that lists names: "Args" or "Attributes"
    required: list[str]  # names that the section must list if it is there
    known: set[str]  # names that it may list
    is_inner: bool  # a method


def _record_fields(node: ast.ClassDef) -> list[str]:
    """Return the annotated public fields in the body of a class: those of a dataclass or a NamedTuple."""
    statements = [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
    return [item.id for item in statements if isinstance(item, ast.Name) and not item.id.startswith("_")]


def _attributes(node: ast.ClassDef) -> set[str]:
    """Return every name that an instance can have: fields, properties, methods, and what methods assign to self."""
    names = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
    for item in ast.walk(node):
        if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store) and ast.unparse(item.value) == "self":
            names.add(item.attr)
        if isinstance(item, ast.Assign):
            names |= {target.id for target in item.targets if isinstance(target, ast.Name)}
    return names | set(_record_fields(node))


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef, is_method: bool) -> list[str]:
    args = node.args
    plain = [arg.arg for arg in [*args.posonlyargs, *args.args]]
    static = any(isinstance(item, ast.Name) and item.id == "staticmethod" for item in node.decorator_list)
    plain = plain[1:] if is_method and not static else plain
    return [*plain, *(arg.arg for arg in args.kwonlyargs), *(arg.arg for arg in (args.vararg, args.kwarg) if arg)]


def _of_class(node: ast.ClassDef, where: str, is_record: bool) -> Iterator[Documented]:
    docstring = ast.get_docstring(node)
    fields = _record_fields(node)
    has_parents = any(ast.unparse(base) not in ("NamedTuple", "Protocol", "ABC") for base in node.bases)
    # a subclass may speak of what it inherits, which its source does not show
    inherited = set(entries(docstring or "", "Attributes") or ()) if has_parents else set()
    # no attribute must be listed: many explain themselves
    yield Documented(where, docstring, "Attributes", [], _attributes(node) | inherited, False)
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    init = [_parameters(item, True) for item in methods if item.name == "__init__"]
    if init:  # the Args of a class are its constructor's
        yield Documented(where, docstring, "Args", init[0], set(init[0]), False)
    elif is_record and not has_parents:
        yield Documented(where, docstring, "Args", fields, set(fields), False)
    for item in methods:
        if not item.name.startswith("_"):
            names = _parameters(item, True)
            yield Documented(f"{where}.{item.name}", ast.get_docstring(item), "Args", names, set(names), True)


def documented(tree: ast.Module, module: str) -> Iterator[Documented]:
    """Yield what a module shows to others: names without an underscore, and the public methods of its classes."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        where = f"{module}.{node.name}"
        if isinstance(node, ast.ClassDef):
            marks = " ".join(ast.unparse(item) for item in [*node.bases, *node.decorator_list])
            yield from _of_class(node, where, "NamedTuple" in marks or "dataclass" in marks)
        else:
            names = _parameters(node, False)
            yield Documented(where, ast.get_docstring(node), "Args", names, set(names), False)


def entries(docstring: str, section: str) -> list[str] | None:
    """Return the names that a section lists, or None when the docstring has no such section."""
    lines = docstring.splitlines()
    if f"{section}:" not in lines:
        return None
    names: list[str] = []
    for line in lines[lines.index(f"{section}:") + 1 :]:
        if line and not line.startswith(" "):
            break  # the next section, or text at the margin
        match = ENTRY.match(line[4:]) if line.startswith("    ") and not line.startswith("     ") else None
        if match:
            names += [name.strip(" *") for name in match[1].split(",")]
    return names


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


ALL = [item for path in FILES for item in documented(ast.parse(path.read_text()), _module_name(path))]


def mismatches(item: Documented) -> list[str]:
    """Return how a docstring and a signature differ, one line each; a docstring without the section is no lie."""
    listed = entries(item.docstring or "", item.section)
    if listed is None:
        return []
    unknown, silent = set(listed) - item.known, set(item.required) - set(listed) - {"args", "kwargs", "_"}
    lines = [f"{item.where}: {name} is documented and does not exist" for name in sorted(unknown)]
    return lines + [f"{item.where}: {name} is not documented" for name in sorted(silent)]


def test_public_names_are_importable() -> None:
    assert set(trl_grpo_ext.__all__) == set(dir(trl_grpo_ext))
    for name in trl_grpo_ext.__all__:
        assert getattr(trl_grpo_ext, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'GroupRelativeTrainr'"):
        _ = trl_grpo_ext.GroupRelativeTrainr


def test_version_has_one_place() -> None:
    assert trl_grpo_ext.__version__ == version("trl-grpo-ext")
    assert (PACKAGE / "py.typed").exists()


def test_public_names_have_docstrings() -> None:
    """Modules, functions and classes; a method may be plain from its class."""
    modules = [_module_name(path) for path in FILES if not ast.get_docstring(ast.parse(path.read_text()))]
    assert modules == [], "modules without a docstring"
    names = sorted({item.where for item in ALL if not item.docstring and not item.is_inner})
    assert names == [], "public names without a docstring"


def test_docstrings_end_their_first_sentence() -> None:
    """The first paragraph is a sentence: tools show it alone."""
    odd = [
        item.where
        for item in ALL
        if item.docstring and not item.docstring.split("\n\n")[0].rstrip().endswith((".", ":", "?", "!", "…", "``"))
    ]
    assert odd == []


def test_docstrings_name_the_parameters_that_exist() -> None:
    assert [line for item in ALL for line in mismatches(item)] == []


def test_every_setting_is_documented_and_has_help() -> None:
    """A field that we add to TRL's config is in the docstring's Args, and `--help` says what it does."""
    from trl import GRPOConfig

    from trl_grpo_ext import GroupRelativeConfig

    theirs = {field.name for field in dataclasses.fields(GRPOConfig)}
    ours = {field.name: field for field in dataclasses.fields(GroupRelativeConfig) if field.name not in theirs}
    assert ours
    assert set(entries(inspect.getdoc(GroupRelativeConfig) or "", "Args") or ()) == set(ours)
    assert [name for name, field in ours.items() if not field.metadata.get("help")] == []


def test_comparison_notices() -> None:
    """Negative control: each kind of lie is found."""
    source = '''
@dataclass
class Thing:
    """A thing.

    Attributes:
        left, right: Sides
            of it: here.
        gone (int): No such field.
    """

    left: int
    right: int
    new: int

    def turn(self, by, *args, how=1):
        """Turn.

        Args:
            by: angle.
            who: nobody.

        Returns:
            by: not a parameter entry.
        """

def quiet(a):
    """Say nothing of a."""
'''
    found = [line for item in documented(ast.parse(source), "m") for line in mismatches(item)]
    assert found == [
        "m.Thing: gone is documented and does not exist",
        "m.Thing.turn: who is documented and does not exist",
        "m.Thing.turn: how is not documented",
    ]
