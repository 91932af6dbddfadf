"""The mathematical objects that an answer can be: a value, a tuple, a set, an interval, an equation, words.

An object keeps what the writer committed to (order, brackets, unit, percent sign, name before ``=``), and the
comparison decides what of that must agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from trl_grpo_ext.rewards.verifiers.math.cursor import Node
from trl_grpo_ext.rewards.verifiers.math.units import Unit


@dataclass(frozen=True)
class Quantity:
    """A number or expression, with what stands around it."""

    node: Node
    percent: bool = False
    unit: Unit | None = None
    product: Node | None = None  # the other reading of a spaced letter: 10 m as ten times m


@dataclass(frozen=True)
class Text:
    """Words, folded: lower case, single blanks, no punctuation."""

    words: str


@dataclass(frozen=True)
class Collection:
    """Several things: a tuple, set, interval or bare list.

    Attributes:
        opening: "(", "[", "]", "{", or "" for a bare list.
        closing: the matching bracket.
        joined_by: "and", "or" or ",".
    """

    items: tuple[Any, ...]
    opening: str = ""
    closing: str = ""
    joined_by: str = ","


@dataclass(frozen=True)
class Union:
    """A union of sets or intervals, in any order."""

    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Matrix:
    """Rows of entries; the kind of bracket does not matter, except that bars make a determinant."""

    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Relation:
    """An equation, an inequality or a chain of them: sides[0] ops[0] sides[1] …"""

    sides: tuple[Any, ...]
    ops: tuple[str, ...]
    side_keys: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Named:
    """``x = 2``: a value with the name it was given."""

    name: str
    value: Any


@dataclass(frozen=True)
class Unread:
    """Something that this reader has no name for; only equal spelling or the symbolic stage can decide."""

    why: str = ""


@dataclass(frozen=True)
class Answer:
    """One answer, read.

    Attributes:
        key: the spelling, synonyms and formatting unified; equal keys mean the same answer.
        body: the object.
    """

    key: tuple[str, ...]
    body: Any


def plain_number(body: Any) -> Fraction | None:
    """Return the exact value of a body that is one literal number without unit or percent sign, else None."""
    if not isinstance(body, Quantity) or body.percent or body.unit:
        return None
    node, sign = (body.node[1], -1) if body.node[0] == "neg" else (body.node, 1)
    return sign * node[1] if node[0] == "num" else None
