r"""Parse one mathematical expression from tokens into a small tree.

Nodes are tuples, the first element names the kind:

    ("num", Fraction, decimals)   ("sym", name)   ("const", "pi" | "e" | "i" | "inf")
    ("add", nodes)   ("mul", [(node, inverted)])   ("neg", a)   ("pow", a, b)   ("root", degree, a)
    ("fn", name, arguments)   ("log", base | None, a)   ("fact", a)   ("binom", n, k)   ("deg", a)   ("pct", a)

What the grammar does not know (integrals, sums, limits) raises :class:`NotParsed`; the symbolic stage may take it.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from trl_grpo_ext.rewards.verifiers.math.cursor import Cursor, Node, NotParsed, number
from trl_grpo_ext.rewards.verifiers.math.tokens import MAX_DEPTH, Token, TooLarge
from trl_grpo_ext.rewards.verifiers.math.vocabulary import FUNCTIONS

_CLOSE = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "lfloor": "rfloor", "lceil": "rceil"}
_ALIASES = {
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh", "acosh": "arccosh", "atanh": "arctanh",
    "lg": "log10", "tg": "tan", "ctg": "cot",
}  # fmt: skip
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan", "sinh": "arcsinh", "cosh": "arccosh", "tanh": "arctanh"}
_SINGLE_LETTER_CONSTANTS = {"e": "e", "i": "i"}


class _Parser(Cursor):
    def sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooLarge(f"nested deeper than {MAX_DEPTH}")
        terms: list[Node] = [self.product()]
        while True:
            if self.accept("op", "+"):
                terms.append(self.product())
            elif self.accept("op", "-"):
                terms.append(("neg", self.product()))
            elif (branch := self.plus_minus()) is not None:
                term = self.product()
                terms.append(term if branch > 0 else ("neg", term))
            else:
                break
        self.depth -= 1
        return terms[0] if len(terms) == 1 else ("add", terms)

    def plus_minus(self) -> int | None:
        if self.accept("op", "pm"):
            self.saw_plus_minus = True
            return self.sign
        if self.accept("op", "mp"):
            self.saw_plus_minus = True
            return -self.sign
        return None

    def product(self) -> Node:
        negative = 0
        while True:
            if self.accept("op", "-"):
                negative += 1
            elif (branch := self.plus_minus()) is not None:
                negative += 1 if branch < 0 else 0
            elif not self.accept("op", "+"):
                break
        factors: list[tuple[Node, bool]] = [(self.power(), False)]
        while True:
            if self.accept("op", "*"):
                factors.append((self.signed_power(), False))
            elif self.accept("op", "/"):
                factors.append((self.signed_power(), True))
            elif self.starts_factor():
                factors.append((self.juxtaposed(factors[-1][0]), False))
            else:
                break
        result: Node = factors[0][0] if len(factors) == 1 else ("mul", factors)
        return ("neg", result) if negative % 2 else result

    def signed_power(self) -> Node:
        if self.accept("op", "-"):
            return ("neg", self.signed_power())
        if self.accept("op", "+"):
            return self.signed_power()
        return self.power()

    def juxtaposed(self, before: Node) -> Node:
        """Return the next factor of an implicit product; a number never follows a number or a letter in one.

        ``x2`` may mean a subscript or a power, and ``2a2`` a hexadecimal numeral: neither is 2x or 4a.
        """
        token = self.peek()
        if token is not None and token.kind == "num" and before[0] in ("num", "sym", "const"):
            raise NotParsed("a number after a number or a letter")
        return self.power()

    def starts_factor(self) -> bool:
        token = self.peek()
        if token is None:
            return False
        if token.kind in ("num", "sym", "letters"):
            return True
        if token.kind == "word":
            return len(token.text) == 1 or token.text in FUNCTIONS
        if token.kind == "cmd":
            return token.text not in ("circ", "over", "choose")
        return token.kind == "open" and token.text in ("(", "[", "{", "lfloor", "lceil")

    def power(self) -> Node:
        base = self.postfix(self.atom())
        if self.accept("op", "^"):
            if self.degree_mark():
                return self.after_degree(("deg", base))
            return self.postfix(("pow", base, self.exponent()))
        if self.accept("cmd", "circ"):
            return self.after_degree(("deg", base))
        return base

    def after_degree(self, node: Node) -> Node:
        return ("pow", node, self.exponent()) if self.accept("op", "^") else node

    def degree_mark(self) -> bool:
        """Take a degree sign, in braces or not, if one comes next."""
        first, second = self.peek(), self.peek(1)
        if first is not None and first.text == "{" and second is not None and second.text == "circ":
            self.position += 2
            self.expect_close("}")
            return True
        return self.accept("cmd", "circ")

    def exponent(self) -> Node:
        if self.accept("op", "-"):
            return ("neg", self.exponent())
        if self.accept("op", "+"):
            return self.exponent()
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooLarge(f"nested deeper than {MAX_DEPTH}")
        node = self.postfix(self.atom())
        if self.accept("op", "^"):
            node = ("pow", node, self.exponent())
        self.depth -= 1
        return node

    def postfix(self, node: Node) -> Node:
        while True:
            if self.accept("op", "!"):
                node = ("fact", node)
            elif self.accept("op", "%"):
                node = ("pct", node)
            else:
                return node

    def atom(self) -> Node:
        token = self.take()
        if token.kind == "num":
            assert token.value is not None
            return self.after_number(token)
        if token.kind == "sym":
            return self.symbol(token.text)
        if token.kind == "word":
            if token.text in FUNCTIONS:
                return self.function(token.text)
            if len(token.text) == 1:
                return self.symbol(token.text)
            raise NotParsed("a word inside an expression")
        if token.kind == "letters":
            return self.letters(token.text)
        if token.kind == "cmd":
            return self.command(token.text)
        if token.kind == "open" and token.text in _CLOSE:
            return self.bracket(token.text)
        if token.kind == "op" and token.text == "|":
            inner = self.sum()
            if not self.accept("op", "|"):
                raise NotParsed("lacks a closing |")
            return ("fn", "abs", (inner,))
        raise NotParsed(f"unexpected {token.text!r}")

    def after_number(self, token: Token) -> Node:
        """Return a number, a mixed number (``2 1/2``, ``2\\frac12``) or a numeral in another base (``101_2``)."""
        assert token.value is not None
        node: Node = ("num", token.value, token.decimals)
        following = self.peek()
        if following is None:
            return node
        if (following.kind, following.text) == ("cmd", "overline"):
            return self.repeating(token)
        if token.decimals >= 0:
            return node
        if following.kind == "op" and following.text == "_":
            self.position += 1
            return self.based(token)
        mixed = self.mixed_part(following)
        if mixed is not None:
            return ("num", token.value + mixed, -1)
        return node

    def repeating(self, token: Token) -> Node:
        r"""Return ``0.1\overline{6}`` as the fraction it stands for."""
        self.take()
        if not self.accept("open", "{"):
            raise NotParsed("an overline without braces")
        block = self.take()
        self.expect_close("}")
        if block.kind != "num" or not block.text.isdigit() or token.value is None:
            raise NotParsed("an overline that is no repeating block")
        shift = Fraction(1, 10 ** max(token.decimals, 0))
        return number(token.value + shift * Fraction(int(block.text), 10 ** len(block.text) - 1))

    def mixed_part(self, following: Token) -> Fraction | None:
        if following.kind == "num" and following.decimals < 0:
            slash, bottom = self.peek(1), self.peek(2)
            if slash is None or slash.text != "/" or bottom is None or not bottom.value or bottom.decimals >= 0:
                return None
            if following.value is None or following.value >= bottom.value:
                return None  # 2 3/2 is no mixed number
            self.position += 3
            return following.value / bottom.value
        if following.kind == "cmd" and following.text == "frac":
            start, depth = self.position, self.depth
            self.position += 1
            try:
                top, bottom_node = self.argument(), self.argument()
            except NotParsed:
                self.position, self.depth = start, depth
                return None
            plain = all(node[0] == "num" and node[2] < 0 for node in (top, bottom_node))
            if plain and 0 < top[1] < bottom_node[1] and not self._has_power():
                return Fraction(top[1], 1) / bottom_node[1]
            self.position = start
        return None

    def _has_power(self) -> bool:
        token = self.peek()
        return token is not None and token.text == "^"

    def based(self, token: Token) -> Node:
        """Return a numeral with a base as a subscript; the base is part of the node so that it can be compared."""
        names = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
        if self.accept("open", "{"):
            inner = self.take()
            self.expect_close("}")
        else:
            inner = self.take()
        base = inner.value if inner.kind == "num" else names.get(inner.text.lower())
        digits = token.text
        if base is None or base.denominator != 1 or not 2 <= base <= 36 or not digits.isdigit():
            raise NotParsed("a subscript that is no base")
        if any(int(digit) >= base for digit in digits):
            raise NotParsed("a digit too large for its base")
        return ("num", Fraction(int(digits, int(base))), -1, int(base))

    def symbol(self, name: str) -> Node:
        if name in _SINGLE_LETTER_CONSTANTS and not self._subscript_follows():
            return ("const", _SINGLE_LETTER_CONSTANTS[name])
        if self.accept("op", "_"):
            name += "_" + self.subscript()
        while self.accept("op", "'"):
            name += "'"
        return ("sym", name)

    def _subscript_follows(self) -> bool:
        token = self.peek()
        return token is not None and token.kind == "op" and token.text == "_"

    def subscript(self) -> str:
        if not self.accept("open", "{"):
            return self.take().text
        parts = []
        while not self.accept("close", "}"):
            token = self.take()
            if token.kind == "open":
                raise NotParsed("a nested subscript")
            parts.append(token.text)
        return "".join(parts)

    def letters(self, run: str) -> Node:
        for name in sorted(FUNCTIONS, key=len, reverse=True):
            if run == name or (run.startswith(name) and len(run) == len(name) + 1 and len(name) >= 3):
                if run != name:
                    raise NotParsed("a function glued to its argument")
                return self.function(name)
        if not run.isascii() or len(run) > 6:
            raise NotParsed("a word")
        factors = [(self.symbol_only(letter), False) for letter in run[:-1]]
        return ("mul", [*factors, (self.symbol(run[-1]), False)])

    @staticmethod
    def symbol_only(name: str) -> Node:
        return ("const", _SINGLE_LETTER_CONSTANTS[name]) if name in _SINGLE_LETTER_CONSTANTS else ("sym", name)

    def bracket(self, opening: str) -> Node:
        inner = self.sum()
        if opening == "{" and self.accept("cmd", "over"):
            inner = ("mul", [(inner, False), (self.sum(), True)])
        elif opening == "{" and self.accept("cmd", "choose"):
            inner = ("binom", inner, self.sum())
        self.expect_close(_CLOSE[opening])
        if opening in ("lfloor", "lceil"):
            return ("fn", "floor" if opening == "lfloor" else "ceil", (inner,))
        if opening == "\\{":
            raise NotParsed("a set inside an expression")
        return inner

    def argument(self) -> Node:
        """Return one TeX argument: a braced group or the next single atom."""
        token = self.peek()
        if token is not None and token.kind == "open" and token.text == "{":
            self.position += 1
            return self.bracket("{")
        if token is not None and token.kind == "num":
            self.position += 1
            return ("num", token.value, token.decimals)
        return self.atom()

    def command(self, name: str) -> Node:
        if name == "frac":
            top, bottom = self.argument(), self.argument()
            if top == ("sym", "d") and bottom[0] == "mul" and bottom[1][0] == (("sym", "d"), False):
                raise NotParsed("a derivative")
            return ("mul", [(top, False), (bottom, True)])
        if name == "sqrt":
            return self.root()
        if name in ("usqrt", "ucbrt"):
            return ("root", number(2 if name == "usqrt" else 3), self.argument())
        if name == "binom":
            top = self.argument()
            return ("binom", top, self.argument())
        if name == "pi":
            return ("const", "pi")
        if name == "infty":
            return ("const", "inf")
        if name in FUNCTIONS or name in _ALIASES:
            return self.function(name)
        if name in ("imath", "jmath"):
            return ("const", "i")
        raise NotParsed(f"unknown command {name!r}")

    def root(self) -> Node:
        degree: Node = number(2)
        following = self.peek()
        if following is not None and following.kind == "open" and following.text == "[":
            self.position += 1
            degree = self.sum()
            self.expect_close("]")
        return ("root", degree, self.argument())

    def function(self, name: str) -> Node:
        name = _ALIASES.get(name, name)
        if name == "log" and self.accept("op", "_"):
            base: Node | None = self.argument()
        else:
            base = number(10) if name == "log10" else None
        exponent = self.exponent() if self.accept("op", "^") else None
        if (exponent is not None and exponent == ("neg", number(1))) or exponent == number(-1):
            name, exponent = _INVERSE.get(name, ""), None
            if not name:
                raise NotParsed("an inverse of an unknown function")
        if base is None and name == "log" and self.accept("op", "_"):
            base = self.argument()
        arguments = self.arguments()
        node = self.applied(name, base, arguments)
        return node if exponent is None else ("pow", node, exponent)

    def applied(self, name: str, base: Node | None, arguments: tuple[Node, ...]) -> Node:
        if name in ("sqrt", "cbrt") and len(arguments) == 1:
            return ("root", number(2 if name == "sqrt" else 3), arguments[0])
        if name in ("log", "log10") and len(arguments) == 1:
            return ("log", base, arguments[0])
        if name == "ln" and len(arguments) == 1:
            return ("log", ("const", "e"), arguments[0])
        if name == "exp" and len(arguments) == 1:
            return ("pow", ("const", "e"), arguments[0])
        if len(arguments) != 1 and name not in ("gcd", "lcm", "max", "min"):
            raise NotParsed(f"{name} of {len(arguments)} arguments")
        return ("fn", name, arguments)

    def arguments(self) -> tuple[Node, ...]:
        opening = self.peek()
        if opening is not None and opening.kind == "open" and opening.text in ("(", "[", "{"):
            self.position += 1
            found = [self.sum()]
            while self.accept("op", ","):
                found.append(self.sum())
            self.expect_close(_CLOSE[opening.text])
            return tuple(found)
        factors: list[tuple[Node, bool]] = [(self.signed_power(), False)]
        while self.starts_factor() and not self._function_or_bracket():
            factors.append((self.juxtaposed(factors[-1][0]), False))
        return (factors[0][0] if len(factors) == 1 else ("mul", factors),)

    def _function_or_bracket(self) -> bool:
        token = self.peek()
        assert token is not None
        return token.kind == "open" or token.text in FUNCTIONS


class Parsed:
    """An expression with the tokens that follow it."""

    __slots__ = ("branches", "rest")

    def __init__(self, branches: tuple[Node, ...], rest: Sequence[Token]) -> None:
        self.branches = branches  # two for an expression with \pm, else one
        self.rest = rest


def parse_expression(tokens: Sequence[Token]) -> Parsed:
    r"""Return the longest expression that ``tokens`` begin with, both branches of ``\pm`` if it has one.

    Raises:
        NotParsed: if the tokens begin with no expression.
        TooLarge: if it nests too deep.
    """
    upper = _Parser(tokens, +1)
    first = upper.sum()
    rest = tokens[upper.position :]
    if not upper.saw_plus_minus:
        return Parsed((first,), rest)
    return Parsed((first, _Parser(tokens, -1).sum()), rest)
