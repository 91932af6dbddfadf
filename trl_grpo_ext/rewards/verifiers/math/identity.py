r"""Decide whether two expressions are the same number or the same function.

Rational expressions are compared exactly; everything else by its value to many digits. Two functions are equal if
they agree at every sample point where both are defined: for rational functions with exact arithmetic this is the
Schwartz-Zippel test, for others agreement to more than 20 digits at several unrelated points. The points depend on
the variables' names only, so the verdict is always the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from trl_grpo_ext.rewards.verifiers.math.cursor import Node
from trl_grpo_ext.rewards.verifiers.math.evaluate import (
    Evaluator,
    Undefined,
    Value,
    has_decimals,
    is_complex,
    symbols,
    walk,
)

NOISE = Fraction(1, 10**12)  # relative error that floating-point output carries; far below anything a digit can say
_DIGITS = (40, 80, 200)
_POINTS = 7
_MIN_POINTS = 3


class Tolerances(NamedTuple):
    """How far apart two numbers may be.

    Attributes:
        inexact: relative; a decimal against an exact value without a finite decimal, such as 1/3, π or √2.
        decimal: relative; a decimal against a decimal, a whole number or any terminating fraction.
        round_to_gold: a number is right if it rounds to the gold's decimals.
    """

    inexact: Fraction = Fraction(1, 10**6)
    decimal: Fraction = NOISE
    round_to_gold: bool = False


def same_expression(gold: Node, answer: Node, tolerances: Tolerances, factor: Fraction = Fraction(1)) -> bool | None:
    """Return whether ``gold`` equals ``factor`` times ``answer``; None if no sample point could tell.

    Args:
        gold: the reference's tree.
        answer: the answer's tree.
        tolerances: for decimals.
        factor: 1/100 for an answer in percent, and so on.

    Raises:
        TooLarge: if either is not worth computing.
    """
    if gold == answer and factor == 1:
        return _is_defined(gold)
    names = sorted(symbols(gold) | symbols(answer))
    if _bare_logarithm(gold) or _bare_logarithm(answer):
        return _any(_compare(gold, answer, names, tolerances, factor, base) for base in (0, 10))
    return _compare(gold, answer, names, tolerances, factor, 0)


def _any(verdicts) -> bool | None:  # type: ignore[no-untyped-def]
    found = list(verdicts)
    return True if True in found else False if False in found else None


def _bare_logarithm(node: Node) -> bool:
    return any(part[0] == "log" and part[1] is None for part in walk(node))


def _is_defined(node: Node) -> bool | None:
    if symbols(node) or node == ("const", "inf") or node == ("neg", ("const", "inf")):
        return True
    try:
        Evaluator({}, 40, complex_plane=is_complex(node)).value(node)
    except Undefined:
        return False
    return True


def _infinity(node: Node) -> int:
    """Return 1 for ∞, -1 for -∞, 0 for anything else."""
    if node == ("const", "inf"):
        return 1
    return -1 if node == ("neg", ("const", "inf")) else 0


def _compare(
    gold: Node, answer: Node, names: Sequence[str], tolerances: Tolerances, factor: Fraction, log_base: int
) -> bool | None:
    if _infinity(gold) or _infinity(answer):
        return _infinity(gold) == _infinity(answer)
    complex_plane = is_complex(gold) or is_complex(answer)
    if not names:
        return _compare_at({}, gold, answer, tolerances, factor, complex_plane, log_base)
    agreed = 0
    for index in range(_POINTS):
        point = {name: _sample(name, index) for name in names}
        verdict = _compare_at(point, gold, answer, tolerances, factor, complex_plane, log_base)
        if verdict is False:
            return False
        agreed += verdict is True
    return True if agreed >= _MIN_POINTS else None


def _sample(name: str, index: int) -> Fraction:
    """Return a fixed rational for a variable, of size 0.3 to 4: positive at even indices, either sign at odd ones."""
    seed = zlib.crc32(f"{index}:{name}".encode())
    value = Fraction(301 + seed % 3697, 997)
    return -value if index % 2 and (seed >> 16) % 3 else value


def _compare_at(
    point: dict[str, Fraction],
    gold: Node,
    answer: Node,
    tolerances: Tolerances,
    factor: Fraction,
    complex_plane: bool,
    log_base: int,
) -> bool | None:
    """Return whether the values agree at one point; None where one is undefined or cannot be told apart."""
    for digits in _DIGITS:
        values: list[Value] = []
        peak = -(10**9)
        for node in (gold, answer):
            evaluator = Evaluator(point, digits, complex_plane=complex_plane, log_base=log_base)
            try:
                values.append(evaluator.value(node))
            except Undefined:
                # A constant without a value (0/0, 1/0) equals nothing; a function is judged at its other points.
                return None if point else False
            peak = max(peak, evaluator.peak_bits)
        verdict = _same_values(values[0], values[1] * factor, peak, evaluator, gold, answer, tolerances)
        if verdict is not None:
            return verdict
    return None


def _same_values(
    gold: Value,
    answer: Value,
    peak: int,
    evaluator: Evaluator,
    gold_node: Node,
    answer_node: Node,
    tolerances: Tolerances,
) -> bool | None:
    if isinstance(gold, Fraction) and isinstance(answer, Fraction):
        return same_rationals(gold, answer, gold_node, answer_node, tolerances)
    context = evaluator.context
    left, right = evaluator.rounded(gold), evaluator.rounded(answer)
    size, difference = max(abs(left), abs(right)), abs(left - right)
    if difference == 0:
        return True
    allowed = tolerances.inexact if has_decimals(gold_node) != has_decimals(answer_node) else Fraction(0)
    if allowed and difference <= evaluator.rounded(allowed) * size:
        return True
    if isinstance(gold, Fraction) and tolerances.round_to_gold and _rounds_to(gold, right, gold_node, evaluator):
        return True
    error_bits = max(peak, 0 if not size else int(context.mag(size))) - 3.2 * context.dps + 16
    if context.mag(difference) > error_bits + 30:
        return False  # the difference is far above what rounding can have caused
    relative_bits = context.mag(difference) - context.mag(size)
    if relative_bits < -3.2 * context.dps + 60 and context.dps >= _DIGITS[1]:
        return True
    return True if context.dps >= _DIGITS[-1] else None


def _rounds_to(gold: Fraction, value: Value, gold_node: Node, evaluator: Evaluator) -> bool:
    decimals = _decimals(gold_node)
    half = evaluator.rounded(Fraction(1, 2 * 10 ** max(decimals, 0)))
    return decimals >= 1 and abs(evaluator.rounded(gold) - value) <= half


def _decimals(node: Node) -> int:
    """Return the digits after the point of a literal, -1 if it is written without one or is no literal."""
    node = node[1] if node[0] in ("neg", "pct") else node
    return node[2] if node[0] == "num" else -1


def _terminates(value: Fraction) -> bool:
    denominator = value.denominator
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator == 1


def same_rationals(
    gold: Fraction, answer: Fraction, gold_node: Node, answer_node: Node, tolerances: Tolerances
) -> bool:
    """Return whether two rational values are the same number, given how each was written.

    Without a decimal point on either side only equality counts, whatever the size. A decimal may miss a value that has
    no finite decimal by ``tolerances.inexact``. Two decimals of different length agree if the longer rounds to the
    shorter and the shorter itself is that precise.
    """
    if gold == answer:
        return True
    gold_is_decimal, answer_is_decimal = has_decimals(gold_node), has_decimals(answer_node)
    if not (gold_is_decimal or answer_is_decimal):
        return False
    difference, size = abs(gold - answer), max(abs(gold), abs(answer))
    if difference <= tolerances.decimal * size:
        return True
    exact = [value for value, decimal in ((gold, gold_is_decimal), (answer, answer_is_decimal)) if not decimal]
    if exact and not _terminates(exact[0]) and difference <= tolerances.inexact * size:
        return True
    gold_decimals, answer_decimals = _decimals(gold_node), _decimals(answer_node)
    if tolerances.round_to_gold and gold_decimals >= 1 and difference <= Fraction(1, 2 * 10**gold_decimals):
        return True
    if gold_decimals >= 1 and answer_decimals >= 1 and gold_decimals != answer_decimals:
        half = Fraction(1, 2 * 10 ** min(gold_decimals, answer_decimals))
        return difference <= half <= tolerances.inexact * size
    return False
