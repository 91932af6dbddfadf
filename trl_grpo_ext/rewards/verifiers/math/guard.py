r"""Refuse what a computer algebra system would choke on, by looking at the text alone.

The exact stage bounds its own arithmetic (see ``evaluate``). This guard stands before the symbolic stage, whose cost
cannot be bounded from inside: power towers, factorial towers, long sums, integrals without a closed form.
"""

from __future__ import annotations

import re

MAX_CHARS = 400
MAX_NESTING = 12
MAX_COMMANDS = 60
MAX_NUMBER_DIGITS = 30
MAX_BOUND = 2000  # of sums, products, exponents, factorials, binomials

# What our own reader does not know and a computer algebra system may. Other unread text never reaches it.
_NEEDS_ALGEBRA = re.compile(
    r"\\(?:i?int|oint|sum|prod|lim|det|frac\s*\{\s*d|partial|nabla|begin|mid|setminus|cap|forall|exists|pmod|bmod|mod|notin|"
    r"Re|Im|vec|hat)(?![A-Za-z])|\\\{[^{}]*(?:\||:)"
)
_BIG_OPERATOR = re.compile(r"\\(?:i?int|oint|sum|prod|lim)(?![A-Za-z])")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_SMALL_POWER = re.compile(r"([A-Za-z])\s*\^\s*(?:\{\s*\d\s*\}|\d(?!\d))")
_BARE_TOWER = re.compile(r"\^\s*(?:\d+|[A-Za-z]|\\[A-Za-z]+)\s*\^")
_CODE = re.compile(r"__|['\"`;#@]|\bimport\b|\blambda\b|\.[A-Za-z]")


def refusal(text: str) -> str | None:
    """Return why ``text`` must not reach the symbolic stage, or None if it may.

    Args:
        text: one answer, folded.
    """
    if len(text) > MAX_CHARS:
        return f"more than {MAX_CHARS} characters"
    if text.count("\\") > MAX_COMMANDS:
        return f"more than {MAX_COMMANDS} commands"
    if _CODE.search(re.sub(r"\\[;!'`\"]", "", text)):
        return "looks like program code"
    if _nesting(text) > MAX_NESTING:
        return f"nested deeper than {MAX_NESTING}"
    numbers = _NUMBER.findall(text)
    if any(len(number) > MAX_NUMBER_DIGITS for number in numbers):
        return f"a number of more than {MAX_NUMBER_DIGITS} digits"
    costly = bool(_BIG_OPERATOR.search(text)) or any(mark in text for mark in ("^", "!", "binom"))
    if costly and any(float(number) > MAX_BOUND for number in numbers):
        return f"a bound or exponent above {MAX_BOUND}"
    if _power_depth(text) > 1:
        return "a tower of powers"
    if text.count("!") > 3 or re.search(r"!\s*[)}\]]*\s*!", text):
        return "a tower of factorials"
    if len(_BIG_OPERATOR.findall(text)) > 2:
        return "more than two sums, integrals or limits"
    return None


def needs_algebra(text: str) -> bool:
    """Return whether the text holds something only the symbolic stage can read."""
    return _NEEDS_ALGEBRA.search(text) is not None


def is_balanced(text: str) -> bool:
    r"""Return whether the plain braces of a LaTeX text pair up; ``\{`` and ``\}`` are not counted."""
    depth = 0
    for token in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth < 0:
            return False
    return depth == 0


def _nesting(text: str) -> int:
    depth = deepest = 0
    for char in text:
        if char in "{([":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "})]":
            depth -= 1
    return deepest


def _power_depth(text: str) -> int:
    """Return how many exponents stand inside one another; the square of a variable does not count."""
    text = _SMALL_POWER.sub(r"\1", text)
    if _BARE_TOWER.search(text):
        return 2
    depth = deepest = 0
    stack: list[bool] = []
    previous = ""
    for char in text:
        if char == "{":
            stack.append(previous == "^")
            depth += stack[-1]
            deepest = max(deepest, depth)
        elif char == "}" and stack:
            depth -= stack.pop()
        elif char == "^":
            deepest = max(deepest, depth + 1)
        if not char.isspace():
            previous = char
    return deepest
