r"""Cut one answer, in LaTeX or plain text, into tokens.

Formatting is dropped here (``\left``, ``\displaystyle``, spaces, ``$``), synonyms get one spelling (``\dfrac`` and
``\tfrac`` are ``frac``; ``\leq``, ``≤`` and ``<=`` are ``<=``), and numbers become exact fractions. One linear pass.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from trl_grpo_ext.rewards.verifiers.math import vocabulary
from trl_grpo_ext.rewards.verifiers.math.numbers import MAX_DIGITS, MAX_EXPONENT

MAX_TOKENS = 2000
MAX_DEPTH = 40


class TooLarge(Exception):  # noqa: N818  a verdict on the text, not a fault
    """The expression is refused before anything is computed: too long, too deep, or its value too big."""


class Token(NamedTuple):
    """One token.

    Attributes:
        kind: "num", "sym" (one letter or a Greek letter), "letters" (a run of two or more letters outside ``\\text``),
            "word" (letters inside ``\\text``), "cmd" (a command with meaning), "op", "open", "close".
        text: the spelling, synonyms unified.
        value: of a number.
        decimals: digits after the point of a number; -1 if it is written without a point.
        spaced: whether white space precedes it.
    """

    kind: str
    text: str
    value: Fraction | None = None
    decimals: int = -1
    spaced: bool = False


_LEX = re.compile(
    r"(?P<space>\s+|~)|(?P<command>\\(?:[A-Za-z]+\*?|.)|\\$)|(?P<letters>[^\W\d_]+)"
    r"|(?P<op>\*\*|\.\.\.|<=|>=|=<|!=|==|:=|<|>|.)",
    re.DOTALL,
)
_GROUPED = re.compile(r"\d{1,3}(?:(?:,|\{,\}|\\,|\\!|\\ |~| |'|,\\!)\d{3})+(?![\d])(?!\s*/)(?:\.\d+)?")
_BRACED_GROUPS = re.compile(r"\d{1,3}(?:(?:\{,\}|\\,|,\\!)\d{3})+(?!\d)(?:\.\d+)?")
_DECIMAL_COMMA = re.compile(r"\d+(?:\{,\}|,)\d+(?!\d)")
_PLAIN = re.compile(r"\d+(?:\.\d+)?|\.\d+")
_PREFIXED = re.compile(r"0(?:x[0-9a-fA-F]{1,256}|b[01]{1,1024}|o[0-7]{1,512})(?![0-9A-Za-z])")
_TRAILING_POINT = re.compile(r"\.(?!\d)(?=\s*(?:$|[})\]\\*]))")
_EXPONENT = re.compile(r"[eE]([+-]?\d{1,5})(?![\d.A-Za-z])")
_NOT_DIGITS = re.compile(r"[^\d.]")


class _Lexer:
    def __init__(self, text: str, decimal_comma: bool) -> None:
        self.text = text
        self.decimal_comma = decimal_comma
        self.tokens: list[Token] = []
        self.spaced = False
        self.brackets = 0  # inside ( [ \{ a comma separates and never groups digits
        self.braces: list[str] = []  # what each open brace is: "group", "set", "text", "style", "drop"

    def add(self, kind: str, text: str, value: Fraction | None = None, decimals: int = -1) -> None:
        if self.braces and "drop" in self.braces:
            return
        self.tokens.append(Token(kind, text, value, decimals, self.spaced))
        self.spaced = False
        if len(self.tokens) > MAX_TOKENS:
            raise TooLarge("more than 2000 symbols")

    def run(self) -> list[Token]:
        position, end = 0, len(self.text)
        while position < end:
            char = self.text[position]
            if char.isdigit() or (char == "." and self.text[position + 1 : position + 2].isdigit()):
                position = self.number(position)
                continue
            match = _LEX.match(self.text, position)
            assert match is not None  # the last alternative takes any character
            position = match.end()
            if match["space"]:
                self.spaced = True
            elif match["command"]:
                position = self.command(match["command"], position)
            elif match["letters"]:
                self.letters(match["letters"])
            else:
                self.symbol(match["op"])
        return self.tokens

    def number(self, position: int) -> int:
        text = self.text
        match = None
        if self.takes_one_digit() and text[position] != ".":
            self.add("num", text[position], Fraction(int(text[position])))
            return position + 1
        coded = _PREFIXED.match(text, position)
        if coded:
            self.add("num", coded.group(), Fraction(int(coded.group(), 0)))
            return coded.end()
        if self.decimal_comma:
            match = _DECIMAL_COMMA.match(text, position)
            if match:
                whole, part = re.split(r"\{,\}|,", match.group(), maxsplit=1)
                return self._number(f"{whole}.{part}", match.end())
        pattern = _BRACED_GROUPS if self.brackets else _GROUPED
        match = pattern.match(text, position) or _PLAIN.match(text, position)
        assert match is not None
        end = match.end()
        if self.text.startswith("{,}", end) and re.match(r"\{,\}\d+(?!\d)", text[end : end + 40]):
            part_match = re.compile(r"\{,\}(\d+)").match(text, end)  # 3{,}14: the braces make the comma a decimal mark
            if part_match and "." not in match.group():
                return self._number(f"{match.group()}.{part_match.group(1)}", part_match.end())
        point = _TRAILING_POINT.match(text, end)
        if point and "." not in match.group() and not text.startswith("...", end):
            end = point.end()
        return self._number(match.group(), end)

    def takes_one_digit(self) -> bool:
        r"""Return whether TeX would take a single digit here as an argument, as in ``\frac12``."""
        names = [token.text for token in self.tokens[-2:]]
        if names and self.tokens[-1].kind == "cmd" and names[-1] in ("frac", "binom"):
            return True
        return len(names) == 2 and names[0] in ("frac", "binom") and self.tokens[-1].kind == "num"

    def _number(self, written: str, end: int) -> int:
        digits = _NOT_DIGITS.sub("", written)
        if len(digits) > MAX_DIGITS:
            raise TooLarge(f"a number of more than {MAX_DIGITS} digits")
        decimals = len(digits.rsplit(".", 1)[1]) if "." in digits else -1
        value = Fraction("0" + digits if digits.startswith(".") else digits)
        exponent = _EXPONENT.match(self.text, end)
        if exponent:
            power = int(exponent.group(1))
            if abs(power) > MAX_EXPONENT:
                raise TooLarge(f"a power of ten beyond {MAX_EXPONENT}")
            value *= Fraction(10) ** power
            decimals = max(0, max(decimals, 0) - power)
            end = exponent.end()
        self.add("num", written, value, decimals)
        return end

    def letters(self, run: str) -> None:
        if run.lower() in ("inf", "infinity"):
            self.add("cmd", "infty")
        elif self.braces and "text" in self.braces:
            self.add("word", run)
        elif len(run) == 1:
            self.add("sym", run)
        elif run.lower() in vocabulary.FUNCTIONS and run.lower() == run:
            self.add("cmd", run)
        elif run in ("pi", "Pi", "PI"):
            self.add("cmd", "pi")
        elif run == "oo":
            self.add("cmd", "infty")
        else:
            self.add("letters", run)

    def symbol(self, op: str) -> None:
        if op == "{":
            previous = self.tokens[-1] if self.tokens else None
            argument = previous is not None and (
                previous.kind == "cmd"
                or previous.text in ("^", "_", "}", "]")
                or (previous.kind == "num" and previous.text)
            )
            self.braces.append("group" if argument else "set")
            self.brackets += 0 if argument else 1
            self.add("open", "{")
        elif op == "}":
            kind = self.braces.pop() if self.braces else "group"
            if kind in ("group", "set"):
                self.brackets -= 1 if kind == "set" else 0
                self.add("close", "}")
        elif op in "([":
            self.brackets += 1
            self.add("open", op)
        elif op in ")]":
            self.brackets = max(0, self.brackets - 1)
            self.add("close", op)
        elif op in vocabulary.CURRENCIES:
            self.add("cur", op)
        elif op == "**":
            self.add("op", "^")
        elif op in ("==", ":="):
            self.add("op", "=")
        elif op == "=<":
            self.add("op", "<=")
        elif op not in ("$", "`"):
            self.add("op", op)

    def command(self, command: str, position: int) -> int:
        name = command[1:].rstrip("*")
        if name in vocabulary.DROPPED:
            if self.text.startswith(".", position) and name in ("left", "right", "middle"):
                return position + 1
            return position
        if name in vocabulary.SPACES or name in (",", ";", ":", "!", " ", ">", "/"):
            self.spaced = True
        elif name in ("(", ")", "[", "]"):
            self.spaced = True  # \( \) \[ \] only delimit mathematics
        elif name in vocabulary.TEXT or name in vocabulary.STYLE or name in vocabulary.DROPPED_WITH_ARGUMENT:
            return self.styled(name, position)
        elif name in ("begin", "end"):
            match = re.compile(r"\s*\{([A-Za-z]+)\*?\}").match(self.text, position)
            if match is None:
                raise TooLarge("a broken environment")
            self.brackets += 1 if name == "begin" else -1
            self.add("env", f"{name} {match.group(1)}")
            position = match.end()
            if match.group(1) == "array" and name == "begin":
                columns = re.compile(r"\s*\{[^{}]*\}").match(self.text, position)
                position = columns.end() if columns else position
        else:
            self.meaningful(name)
        return position

    def styled(self, name: str, position: int) -> int:
        match = re.compile(r"\s*\{").match(self.text, position)
        if match is None:
            return position  # \mathbf 7, \text A: the style of one token changes nothing
        kind = "drop" if name in vocabulary.DROPPED_WITH_ARGUMENT else "text" if name in vocabulary.TEXT else "style"
        self.braces.append(kind)
        self.spaced = self.spaced or kind == "text"
        return match.end()

    def meaningful(self, name: str) -> None:
        if name in vocabulary.OPERATORS:
            self.add("op", vocabulary.OPERATORS[name])
        elif name in vocabulary.COMMANDS:
            self.add("cmd", vocabulary.COMMANDS[name])
        elif name in vocabulary.GREEK:
            self.add("sym", vocabulary.VARIANTS.get(name, name))
        elif name in ("{",) or name in vocabulary.OPENERS:
            self.brackets += 1
            self.add("open", vocabulary.OPENERS.get(name, "\\{"))
        elif name in ("}",) or name in vocabulary.CLOSERS:
            self.brackets = max(0, self.brackets - 1)
            self.add("close", vocabulary.CLOSERS.get(name, "\\}"))
        elif name == "%":
            self.add("op", "%")
        elif name in ("$", "pounds", "euro", "EUR"):
            self.add("cur", {"$": "$", "pounds": "£"}.get(name, "€"))
        elif name == "\\":
            self.add("op", "\\\\")
        elif name in ("&", "#", "_", "|"):
            self.add("op", "||" if name == "|" else name)
        else:
            self.add("cmd", name)


def tokenise(text: str, *, decimal_comma: bool = False) -> list[Token]:
    r"""Return the tokens of one answer.

    A comma between groups of three digits belongs to the number, unless it stands inside brackets: ``1,234`` is one
    token and ``(1,234)`` holds two numbers.

    Args:
        text: the answer, folded (see ``fold_unicode``).
        decimal_comma: read ``3,14`` as 3.14.

    Raises:
        TooLarge: above 2000 tokens, 4000 digits in a number, or a power of ten beyond 400.
    """
    if "\\\\" in text and "\\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z]{2,})", r"\\", text)  # a data set that escaped its backslashes twice
    dollars = re.findall(r"(?<!\\)\$", text)
    if len(dollars) == 1:  # a lone $ is money, a pair delimits mathematics
        text = re.sub(r"(?<!\\)\$", r"\\$", text)
    return _Lexer(text, decimal_comma).run()
