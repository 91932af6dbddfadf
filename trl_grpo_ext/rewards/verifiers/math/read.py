r"""Read the tokens of one answer as a mathematical object (see ``answers``).

The outermost structure is found first: a list, an equation, a union, a pair of brackets, a matrix; what is left inside
is an expression with an optional unit, or words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from trl_grpo_ext.rewards.verifiers.math.answers import (
    Answer,
    Collection,
    Matrix,
    Named,
    Quantity,
    Relation,
    Text,
    Union,
    Unread,
)
from trl_grpo_ext.rewards.verifiers.math.evaluate import symbols
from trl_grpo_ext.rewards.verifiers.math.identity import Tolerances, same_expression
from trl_grpo_ext.rewards.verifiers.math.read_quantity import looks_like_product, read_quantity
from trl_grpo_ext.rewards.verifiers.math.tokens import MAX_DEPTH, Token, TooLarge, tokenise

_RELATIONS = frozenset(["=", "<", ">", "<=", ">=", "!=", "~=", "in"])
_AND_OR = {"and": "and", "or": "or", "AND": "and", "OR": "or", "And": "and", "Or": "or", "和": "and", "或": "or"}
_HEDGES = frozenset(["approximately", "about", "roughly", "exactly", "only", "approx", "precisely", "around"])
_EMPTY_SET = frozenset({"no solution", "no solutions", "no real solution", "no real solutions", "none", "empty set"})
_ALL_REALS = frozenset({"all real numbers", "all reals", "all real"})
_OPEN = {"(": "(", "[": "[", "\\{": "{", "{": "{", "<(": "("}
_CLOSE = {")": ")", "]": "]", "\\}": "}", "}": "}", ")>": ")"}
_ACCENTS = frozenset(
    ["angle", "measuredangle", "overline", "triangle", "vec", "hat", "widehat", "overrightarrow", "dot"]
)
_MATRICES = frozenset(["matrix", "pmatrix", "bmatrix", "Bmatrix", "vmatrix", "Vmatrix", "smallmatrix", "array"])


# A date, a time or a dotted code is no arithmetic: 2024-01-05 is neither 2018 nor 2024-05-01.
_LITERAL = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}(?:[ T]\d{1,2}:\d{2}(?::\d{2})?)?|\d{1,2}:\d{2}:\d{2}")
_RANGE = re.compile(r"\d{1,9}-\d{1,9}")


def read_answer(text: str, *, decimal_comma: bool = False, is_gold: bool = False) -> Answer:
    """Return the answer that ``text`` spells; anything unreadable is :class:`Unread` or :class:`Text`, never an error.

    Args:
        text: one answer, folded (see ``fold_unicode``).
        decimal_comma: read ``3,14`` as 3.14.
        is_gold: read ``10-15`` as a range that only its own spelling equals; in an answer it is a difference.

    Raises:
        TooLarge: if it is refused before reading.
    """
    tokens = _trim(tokenise(text, decimal_comma=decimal_comma))
    key = tuple(_spelling(token) for token in tokens)
    bare = text.strip(" $.")
    if _LITERAL.fullmatch(bare) or (is_gold and _RANGE.fullmatch(bare)):
        return Answer(key, Text(bare))
    try:
        return Answer(key, _read(tokens, 0))
    except RecursionError:
        raise TooLarge("nested too deep") from None


def _spelling(token: Token) -> str:
    if token.kind == "num" and token.value is not None:
        return str(token.value) if token.decimals < 0 else f"{token.value}d"
    return token.text.lower() if token.kind == "word" else token.text


def _trim(tokens: Sequence[Token]) -> list[Token]:
    """Drop punctuation around an answer, and words such as *approximately* before it."""
    items = list(tokens)
    while items and (items[-1].text in (".", ",", ";", ":", "\\\\", "&") or items[-1].text == "..."):
        items.pop()
    while items and (items[0].text in (",", ";", ":", "~=", "\\\\", "&") or items[0].text.lower() in _HEDGES):
        items.pop(0)
    return [token for token in items if token.text != '"']


def _split(tokens: Sequence[Token], wanted: Callable[[Token], bool]) -> tuple[list[list[Token]], list[Token]]:
    """Split at the tokens outside every bracket that ``wanted`` accepts; return the parts and the separators."""
    parts: list[list[Token]] = [[]]
    separators: list[Token] = []
    depth = 0
    for token in tokens:
        if token.kind == "open" or (token.kind == "env" and token.text.startswith("begin")):
            depth += 1
        elif token.kind == "close" or (token.kind == "env" and token.text.startswith("end")):
            depth -= 1
        if depth == 0 and token.kind not in ("open", "close", "env") and wanted(token):
            parts.append([])
            separators.append(token)
        else:
            parts[-1].append(token)
    return parts, separators


def _is_separator(token: Token) -> bool:
    if token.kind == "op":
        return token.text in (",", ";", "and", "or")
    return token.kind in ("word", "letters") and token.text in _AND_OR


def _read(tokens: list[Token], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise TooLarge(f"nested deeper than {MAX_DEPTH}")
    tokens = _trim(tokens)
    if not tokens:
        return Unread("empty")
    if all(token.kind in ("word", "letters") or token.text in ("-", "'", ".") for token in tokens):
        words = _words(tokens)
        return words if words is not None else _read_single(tokens, depth)
    parts, separators = _split(tokens, _is_separator)
    if separators:
        filled = [part for part in parts if _trim(part)]
        if len(filled) > 1:
            joins = {_AND_OR.get(token.text, ",") for token in separators}
            items = tuple(_read(part, depth + 1) for part in filled)
            return _spread_units(
                Collection(items, joined_by="or" if "or" in joins else "and" if "and" in joins else ",")
            )
        tokens = _trim(filled[0]) if filled else []
        if not tokens:
            return Unread("empty")
    return _read_single(tokens, depth)


def _spread_units(collection: Collection) -> Collection:
    """Give the unit of the last item to the others, as in ``3 and 5 cm``."""
    last = collection.items[-1]
    if not (isinstance(last, Quantity) and last.unit) or not all(
        isinstance(item, Quantity) for item in collection.items
    ):
        return collection
    items = tuple(Quantity(item.node, item.percent, item.unit or last.unit, item.product) for item in collection.items)
    return Collection(items, collection.opening, collection.closing, collection.joined_by)


def _words(tokens: Sequence[Token]) -> Any:
    """Return a text, ∅ for "no solution" and ℝ for "all real numbers"; None for letters that may be a product."""
    words = " ".join(token.text.lower() for token in tokens if token.text not in ("-", "'", ".")).strip()
    if words in _EMPTY_SET:
        return Collection((), "{", "}")
    if words in _ALL_REALS:
        return Text("\\mathbb R")
    if len(tokens) == 1 and tokens[0].kind == "letters" and looks_like_product(tokens[0].text):
        return None
    return Text(words[4:] if words.startswith("the ") else words)


def _read_single(tokens: list[Token], depth: int) -> Any:
    sides, relations = _split(tokens, lambda token: token.kind == "op" and token.text in _RELATIONS)
    if relations:
        return _relation(sides, [token.text for token in relations], depth)
    parts, unions = _split(tokens, lambda token: token.kind == "op" and token.text == "cup")
    if unions:
        return Union(tuple(_read(part, depth + 1) for part in parts))
    special = _special(tokens) or _ratio(tokens, depth)
    if special is not None:
        return special
    enclosed = _enclosed(tokens, depth)
    if enclosed is not None:
        return enclosed
    if tokens[0].kind == "env" and tokens[-1].kind == "env":
        return _environment(tokens, depth)
    return read_quantity(tokens)


def _special(tokens: list[Token]) -> Any:
    texts = [token.text for token in tokens if token.text not in ("{", "}")]
    if texts == ["emptyset"] or texts == ["\\{", "\\}"] or texts == ["phi", "\\"]:
        return Collection((), "{", "}")
    if texts[:1] == ["mathbb"] and len(texts) == 2:
        return Text(f"\\mathbb {texts[1]}")
    return None


def _ratio(tokens: list[Token], depth: int) -> Any:
    """Read ``3:2`` as 3/2 and ``1:2:3`` as proportions; ``10:30`` may be a time of day and stays as it is written."""
    parts, colons = _split(tokens, lambda token: token.kind == "op" and token.text == ":")
    if not colons or any(not part for part in parts):
        return None
    if len(parts) == 2 and len(parts[1]) == 1 and len(parts[1][0].text) == 2:
        return None
    items = [_read(part, depth + 1) for part in parts]
    if not all(isinstance(item, Quantity) and not item.unit and not item.percent for item in items):
        return None
    shares = tuple(Quantity(("mul", [(items[0].node, False), (item.node, True)])) for item in items[1:])
    return shares[0] if len(shares) == 1 else Collection(shares, ":", ":")


def _relation(sides: list[list[Token]], ops: list[str], depth: int) -> Any:
    if any(not _trim(side) for side in sides):
        return Unread("a relation without a side")
    if ops[0] in ("=", "in", "~=") and all(op in ("=", "~=") for op in ops[1:]):
        name = _name(sides[0])
        if name is not None:
            values = [_read(side, depth + 1) for side in sides[1:]]
            return Named(name, values[-1]) if _may_agree(values) else Unread("a chain of different values")
    read = tuple(_read(side, depth + 1) for side in sides)
    return Relation(read, tuple(ops), tuple(tuple(_spelling(token) for token in side) for side in sides))


def _may_agree(values: list[Any]) -> bool:
    """Return False for a chain such as ``x = 5 = 7``, which would name two answers at once."""
    constants = [value for value in values if isinstance(value, Quantity) and not symbols(value.node)]
    exact = Tolerances(inexact=Fraction(1, 100))  # x = 22/7 = 3.14 rounds on the way
    return all(same_expression(constants[-1].node, value.node, exact) is not False for value in constants[:-1])


def _name(tokens: list[Token]) -> str | None:
    r"""Return the name an equation defines: ``x``, ``x_1``, ``f(x)``, ``f^{-1}(x)``, ``AB``, ``\angle C`` or words."""
    texts = [token.text for token in tokens]
    kinds = [token.kind for token in tokens]
    if not tokens or any(kind in ("num", "env") and index == 0 for index, kind in enumerate(kinds)):
        return None
    if all(kind == "word" for kind in kinds):
        return " ".join(texts).lower()
    if len(tokens) == 1:
        single = kinds[0] == "sym" or (kinds[0] == "letters" and (texts[0].isupper() or len(texts[0]) > 3))
        return texts[0] if single else None
    if kinds[0] == "letters" and all(kind in ("letters", "word") for kind in kinds):
        return " ".join(texts).lower()
    if texts[0] in _ACCENTS:
        return "".join(texts)
    if kinds[0] in ("sym", "word") or (kinds[0] == "letters" and texts[0].isupper()) or texts[0] == "(":
        rest = texts[1:]
        if rest[:1] == ["_"] and (len(rest) == 2 or (rest[1:2] == ["{"] and "}" in rest)):
            after = 2 if rest[1] != "{" else rest.index("}") + 1
            rest = rest[after:]
        if not rest:
            return "".join(texts)
        if rest[0] == "(" and rest[-1] == ")" and not {"(", "+", "-", "*", "/", "^"}.intersection(rest[1:]):
            return "".join(texts)  # f(x), P(A); x(x+1) = 5 is an equation for x
        if rest[0] == "^" and "(" in rest and rest[-1] == ")" and "-" in rest[: rest.index("(")]:
            return "".join(texts)  # f^{-1}(x)
        if set(rest) <= {"'"} or (rest[0] == "'" and rest[-1] == ")"):
            return "".join(texts)
        if texts[0] == "(" and texts[-1] == ")" and all(kind in ("sym", "op", "open", "close") for kind in kinds):
            inside = [text for text in texts[1:-1] if text != ","]
            return (
                "".join(texts) if "," in texts and all(len(text) == 1 and text.isalpha() for text in inside) else None
            )
    return None


def _enclosed(tokens: list[Token], depth: int) -> Any:
    """Read a part that one pair of brackets encloses: tuple, set, interval, vector, or just a group."""
    first, last = tokens[0], tokens[-1]
    backwards = first.text == "]" and last.text in ("[", "]")
    if not backwards:
        if first.kind in ("sym", "letters") and len(tokens) > 3 and tokens[1].text == "(" and first.text.isupper():
            point = _enclosed(tokens[1:], depth)  # A(1,2): a point with its name
            if isinstance(point, Collection) and len(point.items) > 1:
                return point
        if first.kind != "open" or first.text not in _OPEN or last.text not in (*_CLOSE, "["):
            return None
        if not _one_pair(tokens):
            return None
    inner = tokens[1:-1]
    if any(token.kind == "cmd" and token.text in ("over", "choose") for token in inner):
        return None
    opening = "]" if backwards else _OPEN[first.text]
    closing = "[" if last.text == "[" else _CLOSE[last.text]
    parts, separators = _split(inner, lambda token: token.kind == "op" and token.text in (",", ";"))
    if not inner:
        return Collection((), "{", "}") if opening == "{" else None
    if any(token.kind == "op" and token.text in ("|", ":") for token in inner) and opening == "{":
        return _set_by_condition(inner, depth)
    if separators:
        return Collection(tuple(_read(part, depth + 1) for part in parts), opening, closing)
    content = _read(inner, depth + 1)
    if opening == "{":
        return Collection((content,), "{", "}") if first.text == "\\{" else content
    return content


def _set_by_condition(inner: list[Token], depth: int) -> Any:
    r"""Read ``\{x \mid x > 3\}`` as its condition, if the set ranges over the reals."""
    (head, *conditions), _ = _split(inner, lambda token: token.kind == "op" and token.text in ("|", ":"))
    texts = [token.text for token in head if token.text not in ("{", "}")]
    over_reals = texts[1:] in ([], ["in", "mathbb", "R"], ["in", "R"])
    if len(conditions) != 1 or not texts or head[0].kind != "sym" or not over_reals:
        return Unread("a set described by a condition")
    condition = _read(conditions[0], depth + 1)
    return condition if isinstance(condition, (Relation, Collection)) else Unread("a set described by a condition")


def _one_pair(tokens: Sequence[Token]) -> bool:
    """Return whether the first bracket closes at the last token only; ``[0,1)`` counts as a pair."""
    depth = 0
    for index, token in enumerate(tokens):
        if token.kind == "open":
            depth += 1
        elif token.kind == "close":
            depth -= 1
            if depth == 0 and index < len(tokens) - 1:
                return False
    return depth == 0 or (depth == 2 and tokens[-1].text == "[")


def _environment(tokens: list[Token], depth: int) -> Any:
    name = tokens[0].text.split()[1]
    inner = tokens[1:-1]
    if tokens[-1].text != f"end {name}" or any(token.kind == "env" for token in inner):
        return Unread("nested environments")
    rows, _ = _split(inner, lambda token: token.text == "\\\\")
    rows = [row for row in rows if row]
    if name in ("align", "aligned", "gather", "gathered", "equation", "split", "center"):
        return _read([token for token in rows[-1] if token.text != "&"], depth + 1) if rows else Unread("empty")
    if name not in _MATRICES or not rows:
        return Unread(name)
    cells = [_split(row, lambda token: token.text == "&")[0] for row in rows]
    if len({len(row) for row in cells}) != 1:
        return Unread("a matrix with rows of different length")
    matrix = Matrix(tuple(tuple(_read(cell, depth + 1) for cell in row) for row in cells))
    return Unread("a determinant") if name in ("vmatrix", "Vmatrix") else matrix
