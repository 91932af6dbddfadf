"""Read a quantity: an expression with an optional currency before it and a unit behind it, or else a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trl_grpo_ext.rewards.verifiers.math.answers import Collection, Quantity, Text, Unread
from trl_grpo_ext.rewards.verifiers.math.cursor import Node, NotParsed, number
from trl_grpo_ext.rewards.verifiers.math.expression import parse_expression
from trl_grpo_ext.rewards.verifiers.math.tokens import Token, TooLarge
from trl_grpo_ext.rewards.verifiers.math.units import SINGLE_LETTERS, Unit, is_unit_name, read_unit

_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_TEMPERATURES = {"c": "degC", "f": "degF"}


def looks_like_product(run: str) -> bool:
    """Return whether a bare run of letters is a product of variables rather than a word."""
    return len(run) <= 4 and (set(run) <= set("xyz") or set(run) <= set("abc") or set(run) <= set("pqrmnk"))


def read_quantity(tokens: list[Token]) -> Any:
    """Read an expression with an optional currency before and a unit behind it; words only are text."""
    unit: Unit | None = None
    if tokens[0].kind == "cur" or (tokens[0].text == "-" and len(tokens) > 1 and tokens[1].kind == "cur"):
        index = 0 if tokens[0].kind == "cur" else 1
        unit = read_unit([tokens[index]])
        tokens = tokens[:index] + tokens[index + 1 :]
        if not tokens:
            return Unread("a currency without an amount")
    split = _unit_start(tokens)
    expression, rest = tokens[:split], tokens[split:]
    if not expression:
        return _sentence(tokens)
    try:
        parsed = parse_expression(expression)
    except NotParsed as error:
        return _sentence(tokens) if any(token.kind == "word" for token in tokens) else Unread(str(error))
    if parsed.rest:
        return (
            _sentence(tokens)
            if any(token.kind in ("word", "letters") for token in rest)
            else Unread("trailing symbols")
        )
    if rest and rest[0].text.lower() in _SCALES:  # 1.5 million dollars
        scale = number(_SCALES[rest[0].text.lower()])
        parsed.branches = tuple(("mul", [(node, False), (scale, False)]) for node in parsed.branches)
        rest = rest[1:]
    if rest:
        found = read_unit(rest)
        if found is None:
            return Unread("trailing symbols")
        unit = found or unit
    product = _as_product(tokens) if rest and all(token.kind in ("sym", "letters") for token in rest) else None
    quantities = tuple(_with_percent(node, unit, product) for node in parsed.branches)
    return quantities[0] if len(quantities) == 1 else Collection(quantities, joined_by="or")


def _as_product(tokens: list[Token]) -> Node | None:
    try:
        parsed = parse_expression(tokens)
    except (NotParsed, TooLarge):
        return None
    return None if parsed.rest or len(parsed.branches) > 1 else parsed.branches[0]


def _with_percent(node: Node, unit: Unit | None, product: Node | None) -> Quantity:
    percent = unit is not None and unit[0][0] in ("percent", "percentage", "pct")
    if percent:
        unit = None
    if node[0] == "pct":
        node, percent = node[1], True
    elif node[0] == "neg" and node[1][0] == "pct":
        node, percent = ("neg", node[1][1]), True
    if node[0] == "deg":
        scale = _TEMPERATURES.get(unit[0][0]) if unit and len(unit) == 1 else None
        node, unit = node[1], ((scale, 1),) if scale else unit or (("deg", 1),)
    elif node[0] == "mul" and node[1][0][0][0] == "deg" and len(node[1]) == 2 and node[1][1][0][0] == "sym":
        scale = _TEMPERATURES.get(node[1][1][0][1].lower())
        if scale is not None:
            node, unit = node[1][0][0][1], ((scale, 1),)
    return Quantity(node, percent, unit, product)


def _unit_start(tokens: list[Token]) -> int:
    """Return where the unit begins: at the trailing run of words and unit names after a number."""
    first_word = next((index for index, token in enumerate(tokens) if _begins_unit(tokens, index)), len(tokens))
    tail = tokens[first_word:]
    allowed = all(
        token.kind in ("word", "letters", "sym", "num", "cur")
        or token.text in ("/", "^", "{", "}", "*", "-", ".", "(", ")")
        for token in tail
    )
    return first_word if tail and allowed else len(tokens)


def _begins_unit(tokens: list[Token], index: int) -> bool:
    token = tokens[index]
    if index == 0:
        return False
    before = tokens[index - 1]
    if token.kind == "word":
        return before.kind == "num" or before.text in ("}", ")", "!", "%", "pi", "circ") or before.kind == "sym"
    if token.kind == "cur":
        return before.kind == "num"
    if token.kind not in ("letters", "sym") or (before.kind != "num" and before.text not in ("}", ")")):
        return False
    if token.kind == "letters":
        return is_unit_name(token.text) or (len(token.text) > 2 and token.spaced and not looks_like_product(token.text))
    return token.text in SINGLE_LETTERS and token.spaced and before.kind == "num"


def _sentence(tokens: Sequence[Token]) -> Text | Unread:
    words = [token for token in tokens if token.text not in ("-", "'", ".", ",", "(", ")", "{", "}", "!", "?")]
    if not any(token.kind in ("word", "letters") for token in words):
        return Unread("no expression")
    return Text(" ".join(token.text.lower() for token in words))
