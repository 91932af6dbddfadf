"""Units of measure: which spellings mean the same unit, and how units convert.

A unit is a sorted tuple of (symbol, power), so ``m/s``, ``meters per second`` and ``m s^{-1}`` are equal. Words
that are no unit (``apples``) are kept as one noun.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from trl_grpo_ext.rewards.verifiers.math.tokens import Token

Unit = tuple[tuple[str, int], ...]


class _Definition(NamedTuple):
    base: str  # the base quantity
    factor: Fraction  # in base units
    names: tuple[str, ...]


def _define(base: str, factor: str, names: str) -> _Definition:
    return _Definition(base, Fraction(factor), tuple(names.split()))


# Abbreviations first; the first name is the symbol used for comparison. Case matters only for one- and two-letter ones.
_DEFINITIONS = (
    _define("m", "1", "m meter meters metre metres"),
    _define("m", "1/100", "cm centimeter centimeters centimetre centimetres"),
    _define("m", "1/1000", "mm millimeter millimeters millimetre millimetres"),
    _define("m", "1000", "km kilometer kilometers kilometre kilometres kms"),
    _define("m", "0.0254", "in inch inches"),
    _define("m", "0.3048", "ft foot feet"),
    _define("m", "0.9144", "yd yard yards yds"),
    _define("m", "1609.344", "mi mile miles"),
    _define("g", "1", "g gram grams gm"),
    _define("g", "1000", "kg kilogram kilograms kgs kilo kilos"),
    _define("g", "1/1000", "mg milligram milligrams"),
    _define("g", "453.59237", "lb lbs pound pounds"),
    _define("g", "28.349523125", "oz ounce ounces"),
    _define("g", "1000000", "t ton tons tonne tonnes"),
    _define("s", "1", "s sec secs second seconds"),
    _define("s", "1/1000", "ms millisecond milliseconds"),
    _define("s", "60", "min mins minute minutes"),
    _define("s", "3600", "h hr hrs hour hours"),
    _define("s", "86400", "day days"),
    _define("s", "604800", "week weeks"),
    _define("month", "1", "month months"),
    _define("year", "1", "year years yr yrs"),
    _define("L", "1", "L l liter liters litre litres"),
    _define("L", "1/1000", "mL ml milliliter milliliters millilitre millilitres"),
    _define("gal", "1", "gal gallon gallons"),
    _define("N", "1", "N newton newtons"),
    _define("J", "1", "J joule joules"),
    _define("J", "1000", "kJ kilojoule kilojoules"),
    _define("W", "1", "W watt watts"),
    _define("W", "1000", "kW kilowatt kilowatts"),
    _define("V", "1", "V volt volts"),
    _define("A", "1", "amp amps ampere amperes"),
    _define("Hz", "1", "Hz hertz"),
    _define("Pa", "1", "Pa pascal pascals"),
    _define("mol", "1", "mol mole moles"),
    _define("K", "1", "K kelvin kelvins"),
    _define("degC", "1", "degC celsius centigrade"),
    _define("degF", "1", "degF fahrenheit"),
    _define("deg", "1", "deg degree degrees"),
    _define("rad", "1", "rad radian radians"),
    _define("USD", "1", "USD dollar dollars $ bucks"),
    _define("USD", "1/100", "cent cents ¢"),
    _define("EUR", "1", "EUR euro euros €"),
    _define("GBP", "1", "GBP £ sterling"),
    _define("JPY", "1", "JPY yen ¥"),
    _define("INR", "1", "INR rupee rupees ₹ Rs"),
)
_BY_NAME = {name: definition for definition in _DEFINITIONS for name in definition.names}
_COMPOUND = {"mph": (("h", -1), ("mi", 1)), "kmh": (("h", -1), ("km", 1)), "kph": (("h", -1), ("km", 1))}
_POWERS = {"square": 2, "squared": 2, "sq": 2, "cubic": 3, "cubed": 3, "cu": 3}
_FILLERS = "of the a an about in total long wide tall old away each units unit and"
_IGNORED = frozenset(_FILLERS.split())
# Words after a number that change the number or doubt it: "5 factorial" is not five of something.
_CHANGERS = (
    "plus minus times over divided by factorial squared cubed mod modulo choose root power to not less more than least"
    " most if when maybe unless negative th st nd rd"
)
_CHANGES_THE_NUMBER = frozenset(_CHANGERS.split())
# Letters that are variables in mathematics: bare and unspaced they are no units (``2m``), spaced they may be (``2 m``).
SINGLE_LETTERS = frozenset(name for name in _BY_NAME if len(name) == 1)


def is_unit_name(name: str) -> bool:
    """Return whether ``name`` is a unit: its abbreviation, or its word in any case."""
    return name in _BY_NAME or name in _COMPOUND or name in _POWERS or (len(name) > 2 and name.lower() in _BY_NAME)


def _symbol(name: str) -> Unit | None:
    if name in _COMPOUND:
        return _COMPOUND[name]
    definition = _BY_NAME.get(name) or (_BY_NAME.get(name.lower()) if len(name) > 2 else None)
    return ((definition.names[0], 1),) if definition else None


def read_unit(tokens: Sequence[Token]) -> Unit | None:
    """Return the unit that the tokens spell, with unknown words as one noun; None if they are no unit.

    Words that say nothing, as in ``5 units``, are the empty unit.

    Knows products, ``/`` and ``per``, powers (``cm^2``, ``square feet``) and ``^{\\circ}C``.
    """
    powers: dict[str, int] = {}
    nouns: list[str] = []
    sign, prefix_power, position = 1, 1, 0
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if token.text == "/" or token.text.lower() == "per":
            sign = -1
            continue
        if token.text in ("*", ".", ",", "(", ")", "-"):
            continue
        if token.kind not in ("word", "letters", "sym", "cur"):
            return None
        name = token.text
        if name.lower() in _POWERS:
            if not powers and name.lower().endswith("ed"):
                return None
            if powers and name.lower().endswith("ed"):
                powers[next(reversed(powers))] *= _POWERS[name.lower()]
            else:
                prefix_power = _POWERS[name.lower()]
            continue
        power, position = _exponent(tokens, position)
        unit = _symbol(name)
        if unit is None:
            if name.lower() in _CHANGES_THE_NUMBER:
                return None
            if name.lower() not in _IGNORED:
                nouns.append(_singular(name.lower()))
            continue
        for symbol, own_power in unit:
            powers[symbol] = powers.get(symbol, 0) + sign * own_power * power * prefix_power
        prefix_power = 1
    if nouns and not powers:
        return ((" ".join(nouns), 1),)
    return tuple(sorted((symbol, power) for symbol, power in powers.items() if power))


def _exponent(tokens: Sequence[Token], position: int) -> tuple[int, int]:
    """Return the power written after a unit symbol and the position behind it."""
    if position >= len(tokens) or tokens[position].text != "^":
        return 1, position
    position += 1
    braced = position < len(tokens) and tokens[position].text == "{"
    position += braced
    negative = position < len(tokens) and tokens[position].text == "-"
    position += negative
    if position >= len(tokens) or tokens[position].kind != "num" or not tokens[position].value:
        return 1, position
    value = tokens[position].value
    assert value is not None
    return (-int(value) if negative else int(value)), position + 1 + braced


def _singular(noun: str) -> str:
    if len(noun) > 3 and noun.endswith("ies"):
        return noun[:-3] + "y"
    return noun[:-1] if len(noun) > 3 and noun.endswith("s") and not noun.endswith("ss") else noun


def is_known(unit: Unit) -> bool:
    """Return whether the unit is made of units of measure rather than a noun."""
    return all(symbol in _BY_NAME for symbol, _ in unit)


def conversion(unit: Unit, other: Unit) -> Fraction | None:
    """Return the factor that turns a value in ``unit`` into one in ``other``, or None if they measure different things.

    Temperatures do not convert by a factor, so only equal ones have one.
    """
    if unit == other:
        return Fraction(1)
    if not (is_known(unit) and is_known(other)) or _dimension(unit) != _dimension(other):
        return None
    return _factor(unit) / _factor(other)


def _dimension(unit: Unit) -> tuple[tuple[str, int], ...]:
    totals: dict[str, int] = {}
    for symbol, power in unit:
        base = _BY_NAME[symbol].base
        totals[base] = totals.get(base, 0) + power
    return tuple(sorted(item for item in totals.items() if item[1]))


def _factor(unit: Unit) -> Fraction:
    factor = Fraction(1)
    for symbol, power in unit:
        factor *= _BY_NAME[symbol].factor ** power
    return factor
