r"""Evaluate expression trees: exactly in fractions as long as the value is rational, else to many digits with mpmath.

Nothing here can run long: every power, factorial and binomial is bounded before it is computed. Real arithmetic is
used unless the imaginary unit occurs, so that an even root or a logarithm of a negative number is *undefined* at that
point instead of landing on a branch of the complex plane.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from trl_grpo_ext.rewards.verifiers.math.cursor import Node
from trl_grpo_ext.rewards.verifiers.math.tokens import TooLarge

MAX_BITS = 40_000  # of an exact integer
MAX_MAGNITUDE_BITS = 10_000_000  # of the exponent range of a rounded number
MAX_FACTORIAL = 2000
MAX_COST = 2_000_000  # bits of exact powers, plus 10,000 for each transcendental function, in one evaluation
MAX_SYMBOLIC_EXPONENT = 100  # (x + 1)^500 against another expression is refused, not expanded

Value = Any  # Fraction, mpf or mpc


class Undefined(Exception):  # noqa: N818  a value of the expression, not a fault
    """The expression has no value here: division by zero, a root or logarithm of a negative number."""


_LOCAL = threading.local()


def _context(digits: int) -> Any:
    """Return this thread's mpmath context; mpmath's global one is shared by all threads and must stay untouched."""
    context = getattr(_LOCAL, "context", None)
    if context is None:
        import mpmath

        context = _LOCAL.context = mpmath.mp.clone()
    context.dps = digits
    return context


def symbols(node: Node) -> frozenset[str]:
    """Return the names of all variables in the tree."""
    return frozenset(part[1] for part in walk(node) if part[0] == "sym")


def walk(node: Node) -> Iterator[Node]:
    """Yield every node of the tree, parents first."""
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        kind = current[0]
        if kind == "add":
            stack.extend(current[1])
        elif kind == "mul":
            stack.extend(factor for factor, _ in current[1])
        elif kind == "fn":
            stack.extend(current[2])
        elif kind not in ("num", "sym", "const"):
            stack.extend(part for part in current[1:] if isinstance(part, tuple))


def is_complex(node: Node) -> bool:
    """Return whether the imaginary unit occurs."""
    return any(part == ("const", "i") for part in walk(node))


def has_decimals(node: Node) -> bool:
    """Return whether a number in the tree is written with a decimal point."""
    return any(part[0] == "num" and part[2] >= 0 for part in walk(node))


class Evaluator:
    """Values of trees at one assignment of the variables and one precision.

    Attributes:
        peak_bits: binary exponent of the largest rounded number met, which tells how much cancellation may have cost.
    """

    def __init__(
        self, values: Mapping[str, Fraction], digits: int, *, complex_plane: bool = False, log_base: int = 0
    ) -> None:
        """Set up.

        Args:
            values: value of each variable.
            digits: decimal digits of rounded arithmetic.
            complex_plane: use principal branches in the complex plane instead of "undefined".
            log_base: base of a ``\\log`` without one; 0 is the natural logarithm.
        """
        self.values = values
        self.context = _context(digits)
        self.complex_plane = complex_plane
        self.log_base = log_base
        self.peak_bits = 0
        self.budget = MAX_COST

    def spend(self, cost: int) -> None:
        self.budget -= cost
        if self.budget < 0:
            raise TooLarge("more arithmetic than any honest answer needs")

    def rounded(self, value: Value) -> Any:
        if isinstance(value, Fraction):
            return self.context.mpf(value.numerator) / value.denominator
        return value

    def note(self, value: Value) -> Value:
        if isinstance(value, Fraction):
            return value
        if not self.context.isfinite(value):
            raise Undefined
        if value:
            bits = self.context.mag(value)
            if abs(bits) > MAX_MAGNITUDE_BITS:
                raise TooLarge("a value beyond 10^3000000")
            self.peak_bits = max(self.peak_bits, int(bits))
        return value

    def value(self, node: Node) -> Value:
        """Return the value of the tree: a Fraction if it is rational and this can be seen, else rounded.

        Raises:
            Undefined: if it has none.
            TooLarge: if it is not worth computing.
        """
        return self.note(getattr(self, "_" + node[0])(*node[1:]))

    # -- leaves ------------------------------------------------------------------------------------------------------
    def _num(self, value: Fraction, _decimals: int, _base: int = 10) -> Value:
        return value

    def _sym(self, name: str) -> Value:
        return self.values[name]

    def _const(self, name: str) -> Value:
        if name == "inf":
            raise Undefined
        if name == "pi":
            return +self.context.pi
        return self.context.e + 0 if name == "e" else self.context.mpc(0, 1)

    # -- arithmetic --------------------------------------------------------------------------------------------------
    def _add(self, terms: list[Node]) -> Value:
        exact, rest = Fraction(0), None
        for term in terms:
            value = self.value(term)
            if isinstance(value, Fraction):
                exact += value
                self._bounded(exact)
            else:
                rest = value if rest is None else rest + value
        if rest is None:
            return exact
        self.note(self.rounded(exact))
        return rest + self.rounded(exact)

    def _mul(self, factors: list[tuple[Node, bool]]) -> Value:
        exact, rest = Fraction(1), None
        for node, inverted in factors:
            value = self.value(node)
            if inverted and self._is_zero(value):
                raise Undefined
            if isinstance(value, Fraction):
                exact = exact / value if inverted else exact * value
                self._bounded(exact)
            elif rest is None:
                rest = 1 / value if inverted else value
            else:
                rest = rest / value if inverted else rest * value
        return exact if rest is None else rest * self.rounded(exact)

    def _is_zero(self, value: Value) -> bool:
        if isinstance(value, Fraction):
            return value == 0
        return value == 0 or self.context.mag(value) < self.peak_bits - 3.2 * self.context.dps

    @staticmethod
    def _bounded(value: Fraction) -> None:
        if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
            raise TooLarge("an exact number of more than 40000 bits")

    def _neg(self, node: Node) -> Value:
        return -self.value(node)

    def _pct(self, node: Node) -> Value:
        return self.value(node) / 100

    def _deg(self, node: Node) -> Value:
        return self.rounded(self.value(node)) * self.context.pi / 180

    # -- powers ------------------------------------------------------------------------------------------------------
    def _pow(self, base_node: Node, exponent_node: Node) -> Value:
        base, exponent = self.value(base_node), self.value(exponent_node)
        if isinstance(exponent, Fraction) and exponent.denominator == 1:
            if abs(exponent) > MAX_SYMBOLIC_EXPONENT and symbols(base_node) and base_node[0] != "sym":
                raise TooLarge(f"a sum to a power above {MAX_SYMBOLIC_EXPONENT}")
            return self.integer_power(base, int(exponent))
        if isinstance(exponent, Fraction):
            return self.rational_power(base, exponent)
        if self._is_zero(base):
            raise Undefined
        return self.general_power(base, exponent)

    def integer_power(self, base: Value, exponent: int) -> Value:
        if self._is_zero(base):
            if exponent <= 0:
                raise Undefined
            return Fraction(0)
        if isinstance(base, Fraction):
            if abs(base) == 1:
                return base if exponent % 2 else Fraction(1)
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if bits * abs(exponent) > MAX_BITS:
                raise TooLarge("a power of more than 40000 bits")
            self.spend(bits * abs(exponent))
            return base**exponent
        if abs(self.context.mag(base) * exponent) > MAX_MAGNITUDE_BITS or abs(exponent) > MAX_MAGNITUDE_BITS:
            raise TooLarge("a power beyond 10^3000000")
        return base**exponent

    def rational_power(self, base: Value, exponent: Fraction) -> Value:
        if isinstance(base, Fraction) and base > 0 and exponent.denominator <= 64:
            root = _exact_root(base, exponent.denominator)
            if root is not None:
                return self.integer_power(root, exponent.numerator)
        if self._is_zero(base):
            if exponent < 0:
                raise Undefined
            return Fraction(0)
        if not self.complex_plane and self._is_negative(base):
            if exponent.denominator % 2 == 0:
                raise Undefined
            power = self.rational_power(-base, exponent)  # a real odd root, as in (-8)^{1/3} = -2
            return -power if exponent.numerator % 2 else power
        return self.general_power(base, exponent)

    def general_power(self, base: Value, exponent: Value) -> Value:
        if not self.complex_plane and self._is_negative(base):
            raise Undefined
        base, exponent = self.rounded(base), self.rounded(exponent)
        if self.context.mag(exponent) > 40 or (
            exponent and abs(self.context.mag(base) * exponent) > MAX_MAGNITUDE_BITS
        ):
            raise TooLarge("a power beyond 10^3000000")
        self.spend(10_000)
        return self.context.power(base, exponent)

    def _is_negative(self, value: Value) -> bool:
        if isinstance(value, Fraction):
            return value < 0
        return not self._is_imaginary(value) and self._real(value) < 0

    def _is_imaginary(self, value: Value) -> bool:
        return hasattr(value, "_mpc_") and bool(self.context.im(value))

    def _real(self, value: Value) -> Any:
        return value if isinstance(value, Fraction) else self.context.re(value)

    def _root(self, degree_node: Node, radicand: Node) -> Value:
        degree = self.value(degree_node)
        if not isinstance(degree, Fraction) or degree.denominator != 1 or degree == 0:
            return self.general_power(self.value(radicand), 1 / self.rounded(degree))
        return self.rational_power(self.value(radicand), 1 / degree)

    # -- functions ---------------------------------------------------------------------------------------------------
    def _log(self, base_node: Node | None, node: Node) -> Value:
        value = self.value(node)
        base = self.value(base_node) if base_node is not None else (Fraction(self.log_base) if self.log_base else None)
        for part in (value, base):
            if part is not None and (self._is_zero(part) or (not self.complex_plane and self._is_negative(part))):
                raise Undefined
        if isinstance(value, Fraction) and isinstance(base, Fraction):
            exact = _exact_log(value, base)
            if exact is not None:
                return exact
        if value == 1:
            return Fraction(0)
        self.spend(10_000)
        log = self.context.log(self.rounded(value))
        if base is None:
            return log
        bottom = self.context.log(self.rounded(base))
        if self._is_zero(bottom):
            raise Undefined
        return log / bottom

    def _fact(self, node: Node) -> Value:
        value = self.value(node)
        if isinstance(value, Fraction) and value.denominator == 1:
            if value < 0:
                raise Undefined
            if value > MAX_FACTORIAL:
                raise TooLarge(f"a factorial above {MAX_FACTORIAL}")
            self.spend(20 * int(value))
            return Fraction(math.factorial(int(value)))
        return self.gamma(self.rounded(value) + 1)

    def gamma(self, value: Any) -> Any:
        if self.context.mag(value) > 10:
            raise TooLarge(f"a factorial above {MAX_FACTORIAL}")
        self.spend(20_000)
        return self.context.gamma(value)

    def _binom(self, top_node: Node, bottom_node: Node) -> Value:
        top, bottom = self.value(top_node), self.value(bottom_node)
        whole = all(isinstance(part, Fraction) and part.denominator == 1 and part >= 0 for part in (top, bottom))
        if whole:
            smaller = min(bottom, abs(top - bottom))
            if smaller * max(1, int(top).bit_length()) > MAX_BITS or top.numerator.bit_length() > 64:
                raise TooLarge("a binomial of more than 40000 bits")
            self.spend(int(smaller * max(1, int(top).bit_length())))
            return Fraction(math.comb(int(top), int(bottom)))
        top, bottom = self.rounded(top), self.rounded(bottom)
        return self.gamma(top + 1) / (self.gamma(bottom + 1) * self.gamma(top - bottom + 1))

    def _fn(self, name: str, argument_nodes: tuple[Node, ...]) -> Value:
        arguments = [self.value(node) for node in argument_nodes]
        if name in ("gcd", "lcm"):
            return self.whole_numbers(name, arguments)
        if name in ("max", "min"):
            return max(arguments) if name == "max" else min(arguments)
        (argument,) = arguments
        if name == "abs":
            return abs(argument)
        if name in ("floor", "ceil"):
            return self.rounding(name, argument)
        if name == "sgn":
            return Fraction((self._real(argument) > 0) - (self._real(argument) < 0))
        return self.transcendental(name, self.rounded(argument))

    @staticmethod
    def whole_numbers(name: str, arguments: list[Value]) -> Fraction:
        if not all(isinstance(value, Fraction) and value.denominator == 1 for value in arguments):
            raise Undefined
        whole = [int(value) for value in arguments]
        return Fraction(math.gcd(*whole) if name == "gcd" else math.lcm(*whole))

    def rounding(self, name: str, value: Value) -> Fraction:
        if isinstance(value, Fraction):
            return Fraction(math.floor(value) if name == "floor" else math.ceil(value))
        if self._is_imaginary(value) or self.context.mag(value) > 100:
            raise Undefined
        return Fraction(int(self.context.floor(value) if name == "floor" else self.context.ceil(value)))

    def transcendental(self, name: str, value: Any) -> Any:
        context = self.context
        self.spend(10_000)
        if value and context.mag(value) > 200:
            raise TooLarge(f"{name} of a number beyond 10^60")
        method = _METHODS.get(name, name)
        if not hasattr(context, method):
            raise Undefined
        if name in ("tan", "sec", "cot", "csc"):
            bottom = context.cos(value) if name in ("tan", "sec") else context.sin(value)
            if abs(bottom) < context.mpf(10) ** (-context.dps + 10):
                raise Undefined
        try:
            result = getattr(context, method)(value)
        except (ValueError, ZeroDivisionError):
            raise Undefined from None
        if not self.complex_plane and self._is_imaginary(result):
            raise Undefined
        return result


_METHODS = {
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "arccot": "acot", "arcsinh": "asinh", "arccosh": "acosh",
    "arctanh": "atanh",
}  # fmt: skip


def _integer_root(value: int, degree: int) -> int | None:
    if value < 2:
        return value
    guess = 1 << -(-value.bit_length() // degree)
    while True:
        step = ((degree - 1) * guess + value // guess ** (degree - 1)) // degree
        if step >= guess:
            return guess if guess**degree == value else None
        guess = step


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > 4000:
        return None
    top, bottom = _integer_root(value.numerator, degree), _integer_root(value.denominator, degree)
    return None if top is None or bottom is None else Fraction(top, bottom)


def _exact_log(value: Fraction, base: Fraction) -> Fraction | None:
    """Return n with base**n == value for a small whole n, or None."""
    if base <= 0 or base == 1 or max(value.numerator.bit_length(), value.denominator.bit_length()) > 4000:
        return None
    estimate = (_log2(value)) / _log2(base)
    n = round(estimate)
    return Fraction(n) if abs(n) <= 4000 and abs(estimate - n) < 1e-6 and base**n == value else None


def _log2(value: Fraction) -> float:
    return math.log2(value.numerator) - math.log2(value.denominator)
