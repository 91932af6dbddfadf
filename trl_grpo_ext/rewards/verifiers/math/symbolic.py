"""The symbolic stage: math-verify in a worker process that is killed at the deadline.

math-verify limits its own time by SIGALRM, which works in the main thread of a process only and clashes with other
users of that signal. So its limits are switched off and the process is what ends: the verdict is the same from the
main thread, a worker thread, an event loop and a spawned process.
"""

from __future__ import annotations

import logging
from typing import Any

from trl_grpo_ext.rewards.killable import CallOutcome, KillableWorkers

_WORKERS = KillableWorkers(num_workers=1, preload=(f"{__name__}:exercise",), memory_gib=1.5)


def same_symbolically(gold: str, answer: str, timeout_s: float) -> CallOutcome:
    """Return the outcome of math-verify on two answers; its value is "equal", "different" or "unparseable".

    Args:
        gold: LaTeX of the reference.
        answer: LaTeX of the answer, past the guard.
        timeout_s: the deadline; reaching it kills the worker.

    Raises:
        SandboxError: if no worker process can be started.
    """
    return _WORKERS.call(f"{__name__}:decide", [gold, answer], timeout_s)


def warm_up() -> None:
    """Start the worker, which takes a second or two, before the first answer needs it."""
    _WORKERS.warm_up()


def exercise() -> None:
    """Compare a few pairs, so that workers are born with what SymPy and the LaTeX grammar load on first use."""
    for gold, answer in (
        ("\\frac{1}{2}", "\\int_0^1 x\\,dx"),
        ("55", "\\sum_{k=1}^{10} k"),
        ("1", "\\lim_{x\\to 0}\\frac{\\sin x}{x}"),
        ("-2", "\\det\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"),
    ):
        decide(gold, answer)


def decide(gold: str, answer: str) -> str:
    """Compare two LaTeX expressions with math-verify; runs in the worker process.

    Only its LaTeX parser is used. Its parser for plain expressions ends in ``sympy.parse_expr``, which evaluates text
    as Python, and is never asked.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    config: list[Any] = [LatexExtractionConfig()]
    read = [
        parse(f"${text}$", extraction_config=config, fallback_mode="no_fallback", parsing_timeout=None)
        for text in (gold, answer)
    ]
    if not all(read):
        return "unparseable"
    equal = verify(read[0], read[1], float_rounding=10, timeout_seconds=None, allow_set_relation_comp=True)
    return "equal" if equal else "different"
