"""``numeric``: one number, within the tolerance and not a hair beyond."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.rewards.verifiers.math.numbers import read_number
from trl_grpo_ext.rewards.verifiers.numeric import numeric


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", Fraction(7)),
        ("-7", Fraction(-7)),
        ("+7", Fraction(7)),
        ("7.", Fraction(7)),
        (".5", Fraction(1, 2)),
        ("0.10", Fraction(1, 10)),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("1 234 567", Fraction(1234567)),
        ("1{,}234", Fraction(1234)),
        ("1\\,234", Fraction(1234)),
        ("1.5e3", Fraction(1500)),
        ("1.5E-3", Fraction(3, 2000)),
        ("1.5 \\times 10^{3}", Fraction(1500)),
        ("10^6", Fraction(10**6)),
        ("3/4", Fraction(3, 4)),
        ("-3/4", Fraction(-3, 4)),
        ("3/-4", Fraction(-3, 4)),
        ("\\frac{3}{4}", Fraction(3, 4)),
        ("\\frac34", Fraction(3, 4)),
        ("-\\frac{-3}{4}", Fraction(3, 4)),
        ("2 1/2", Fraction(5, 2)),
        ("2\\frac12", Fraction(5, 2)),
        ("-2\\frac{1}{2}", Fraction(-5, 2)),
        ("1,2,3", None),
        ("3,14", None),
        ("1,23", None),
        ("0,123", Fraction(123)),
        ("1/0", None),
        ("2 3/2", None),
        ("--5", None),
        ("5 apples", None),
        ("", None),
        ("1e999999", None),
        ("1" * 5000, None),
        ("1" * 4000, Fraction(int("1" * 4000))),
    ],
)
def test_read_number(text, value):
    number = read_number(text)
    assert (None if number is None else number.value) == value


@given(st.fractions(max_denominator=10**6))
def test_any_fraction_equals_itself(value):
    assert numeric().judge(f"{value.numerator}/{value.denominator}", value).score == 1.0
    assert numeric().judge(str(value + 1), value).score == 0.0


@pytest.mark.parametrize(
    ("answer", "gold", "options", "score"),
    [
        ("7", 7, {}, 1.0),
        ("7 ", "7.0", {}, 1.0),
        ("7 apples", 7, {}, 0.0),
        ("so 3 plus 4 is 7", 7, {}, 0.0),
        ("so 3 plus 4 is 7", 7, {"extract": "last_number"}, 1.0),
        ("so 3 plus 4 is 7", 3, {"extract": "last_number"}, 0.0),
        ("\\boxed{1{,}234}", 1234, {"extract": "boxed"}, 1.0),
        ("<think>\\boxed{5}</think>#### 7", 7, {"extract": "auto"}, 1.0),
        ("1.05", 1, {"tolerance": 0.05}, 1.0),
        ("1.0500001", 1, {"tolerance": 0.05}, 0.0),
        ("0.94", 1, {"tolerance": 0.05}, 0.0),
        ("104", 100, {"relative_tolerance": 0.05}, 1.0),
        ("106", 100, {"relative_tolerance": 0.05}, 0.0),
        ("-104", -100, {"relative_tolerance": 0.05}, 1.0),
        ("0.1", 0.1, {}, 1.0),
        ("0.1", Decimal("0.1"), {}, 1.0),
        ("１２", 12, {}, 1.0),
        ("−5", -5, {}, 1.0),
        ("$1,234.00", 1234, {}, 1.0),
        ("nan", 7, {}, 0.0),
        ("inf", 7, {}, 0.0),
        ("7", "seven", {}, None),
        ("7", "", {}, None),
        ("7", True, {}, None),
        ("7", 7, {"score_value": 0.5}, 0.5),
        ("", 7, {}, 0.0),
    ],
)
def test_cases(answer, gold, options, score):
    assert numeric(**options).judge(answer, gold).score == score


def test_the_reason_tells_equal_from_close():
    assert numeric(tolerance=1.0).judge("7", 7).reason == "equal"
    assert numeric(tolerance=1.0).judge("8", 7).reason == "within_tolerance"
    assert numeric(tolerance=1.0).judge("x", 7).reason == "not_a_number"


@pytest.mark.parametrize("options", [{"tolerance": -1.0}, {"relative_tolerance": float("inf")}, {"extract": "nowhere"}])
def test_bad_options(options):
    with pytest.raises(ConfigurationError):
        numeric(**options)
