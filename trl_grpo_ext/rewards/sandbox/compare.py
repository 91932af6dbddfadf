"""Comparison of a program's output with the expected one, outside the program's process.

The whole output is compared, line counts included: pairing up lines and ignoring what is left over gives full reward
for printing the first line alone.
"""

from __future__ import annotations

import re
from typing import Literal

from trl_grpo_ext.errors import ConfigurationError, nearest

OutputMode = Literal["exact", "lines", "tokens"]
OUTPUT_MODES: tuple[str, ...] = ("exact", "lines", "tokens")

_NUMBER = re.compile(r"[+-]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][+-]?\d{1,4})?")
_INTEGER = re.compile(r"[+-]?\d+")


def check_mode(mode: str) -> None:
    """Check the name of a comparison.

    Raises:
        ConfigurationError: if there is no such comparison.
    """
    if mode not in OUTPUT_MODES:
        raise ConfigurationError(
            f"output={mode!r} is no comparison; it must be one of {', '.join(OUTPUT_MODES)}."
            + nearest(mode, OUTPUT_MODES)
        )


def normal_lines(text: str) -> list[str]:
    """Return the lines with Windows line ends, trailing blanks and empty lines at the end removed."""
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def same_output(expected: str, got: str, mode: str = "lines", *, rel_tol: float = 0.0, abs_tol: float = 0.0) -> bool:
    """Return whether an output is the expected one.

    Args:
        expected: from the data set.
        got: what the program printed.
        mode: "exact" compares every character; "lines" forgives Windows line ends, blanks at line ends and empty lines
            at the end; "tokens" compares what stands between any white space.
        rel_tol: relative tolerance for numbers with a decimal point or exponent, in "lines" and "tokens".
        abs_tol: absolute tolerance, likewise. Integers are always compared exactly.
    """
    if mode == "exact":
        return expected == got
    if mode == "tokens":
        rows_expected, rows_got = [expected.split()], [got.split()]
    else:
        lines_expected, lines_got = normal_lines(expected), normal_lines(got)
        if lines_expected == lines_got:
            return True
        if not (rel_tol or abs_tol):
            return False
        rows_expected, rows_got = [line.split() for line in lines_expected], [line.split() for line in lines_got]
    return len(rows_expected) == len(rows_got) and all(
        len(one) == len(other)
        and all(_same_token(token, their, rel_tol, abs_tol) for token, their in zip(one, other, strict=True))
        for one, other in zip(rows_expected, rows_got, strict=True)
    )


def _same_token(expected: str, got: str, rel_tol: float, abs_tol: float) -> bool:
    if expected == got:
        return True
    if not (rel_tol or abs_tol) or not _NUMBER.fullmatch(expected) or not _NUMBER.fullmatch(got):
        return False
    if _INTEGER.fullmatch(expected) and _INTEGER.fullmatch(got):
        return int(expected) == int(got)
    one, other = float(expected), float(got)
    return abs(one - other) <= max(abs_tol, rel_tol * max(abs(one), abs(other)))
