r"""Read one plain number exactly: integers, decimals, fractions, mixed numbers, thousands, scientific notation.

This is the fast path: no parser, no dependency, exact :class:`~fractions.Fraction` arithmetic. What it does not
recognise is ``None`` and left to the full reader.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

# A written number has at most this many digits, and a power of ten at most this exponent: beyond it exact arithmetic
# costs more than any honest answer needs (Python itself refuses to convert more than 4300 digits).
MAX_DIGITS = 4000
MAX_EXPONENT = 400

_THOUSANDS = r"\d{1,3}(?:(?:,|\{,\}|\\,|\\!|\\ |~| |'|\\;|,\\!)\d{3})+(?!\d)"
_UNSIGNED = rf"(?:{_THOUSANDS}(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
_SCIENTIFIC = (
    r"(?:[eE]([+-]?\d{1,6})"
    r"|\s*(?:\\times|\\cdot|\*|x|X)\s*10\s*(?:\^|\*\*)\s*(?:\{\s*([+-]?\d{1,6})\s*\}|([+-]?\d{1,6})))"
)
_PLAIN = re.compile(rf"([+-]?)\s*({_UNSIGNED}){_SCIENTIFIC}?\s*$")
_POWER_OF_TEN = re.compile(r"([+-]?)\s*10\s*\^\s*(?:\{\s*([+-]?\d{1,6})\s*\}|(\d))\s*$")
_SLASH = re.compile(rf"([+-]?)\s*({_UNSIGNED})\s*/\s*([+-]?)\s*({_UNSIGNED})\s*$")
_MIXED = re.compile(r"([+-]?)\s*(\d+)\s+(\d+)\s*/\s*(\d+)\s*$")
_FRAC = re.compile(
    r"([+-]?)\s*(\d*)\s*\\[dtc]?frac\s*(?:\{\s*([+-]?)\s*(\d+(?:\.\d+)?)\s*\}|(\d))\s*(?:\{\s*([+-]?)\s*(\d+(?:\.\d+)?)\s*\}|(\d))\s*$"
)
_SEPARATORS = re.compile(r"[,{}\\!~ ';]")


class Number(NamedTuple):
    """One number as written."""

    value: Fraction
    is_decimal: bool  # written with a decimal point or in scientific notation, so possibly rounded
    num_decimals: int = 0  # digits after the point, after the power of ten has been applied; never negative


def _unsigned(text: str) -> Fraction | None:
    digits = _SEPARATORS.sub("", text)
    if len(digits) > MAX_DIGITS:
        return None
    if digits.startswith("."):
        digits = "0" + digits
    return Fraction(digits.rstrip(".") if digits.endswith(".") else digits)


def _decimals(text: str) -> int:
    return len(text.rsplit(".", 1)[1]) if "." in text else 0


def _fraction(sign: str, whole: str, numerator: str, denominator: str) -> Number | None:
    units, top, bottom = (_unsigned(part) if part else Fraction(0) for part in (whole, numerator, denominator))
    if units is None or top is None or not bottom:
        return None
    if whole and (top >= bottom or "." in numerator + denominator):
        return None  # 2 3/2 is no mixed number: leave it to the full reader, which sees a product
    value = units + top / bottom
    return Number(-value if sign == "-" else value, is_decimal="." in numerator + denominator)


def read_number(text: str) -> Number | None:
    r"""Return the number that ``text`` is as a whole, or None.

    Reads ``-5``, ``5.``, ``1,234.5``, ``1 234``, ``1{,}234``, ``1.5e3``, ``1.5 \times 10^{3}``, ``3/4``, ``2 1/2``,
    ``\frac{3}{4}``, ``2\frac12``, ``-\frac{-3}{4}``. A comma counts as a thousands separator only between groups of
    three digits, so ``1,2,3`` and ``3,14`` are not numbers. Text must already be folded (see ``fold_unicode``).

    Args:
        text: candidate, at most a few hundred characters; longer ones are None.
    """
    text = text.strip()
    if not text or len(text) > MAX_DIGITS + 400:
        return None
    if match := _PLAIN.match(text):
        sign, body, *exponents = match.groups()
        value = _unsigned(body)
        exponent_text = next((part for part in exponents if part), None)
        exponent = int(exponent_text) if exponent_text else 0
        if value is None or abs(exponent) > MAX_EXPONENT:
            return None
        decimals = _decimals(body)
        value *= Fraction(10) ** exponent
        is_decimal = decimals > 0 or exponent < 0
        return Number(-value if sign == "-" else value, is_decimal, max(0, decimals - exponent))
    if match := _MIXED.match(text):
        return _fraction(*match.groups())
    if match := _SLASH.match(text):
        sign, top, sign_bottom, bottom = match.groups()
        return _fraction(
            "-" if sign_bottom == "-" and sign != "-" else sign if sign_bottom != "-" else "", "", top, bottom
        )
    if match := _FRAC.match(text):
        sign, whole, sign_top, top, top_digit, sign_bottom, bottom, bottom_digit = match.groups()
        negative = [sign, sign_top, sign_bottom].count("-") % 2 == 1
        if whole and (sign_top or sign_bottom):
            return None
        return _fraction("-" if negative else "", whole, top or top_digit, bottom or bottom_digit)
    if match := _POWER_OF_TEN.match(text):
        exponent = int(match.group(2) or match.group(3))
        if abs(exponent) <= MAX_EXPONENT:
            value = Fraction(10) ** exponent
            return Number(-value if match.group(1) == "-" else value, exponent < 0, max(0, -exponent))
    return None
