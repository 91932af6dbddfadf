r"""``math``: the final answer of a completion is mathematically the reference.

Extraction is its own step with a named order (``extract``), then comparison in stages: exact arithmetic in fractions,
values to many digits (``identity``), and math-verify in a process that is killed at its deadline (``symbolic``).
Nothing of an answer ever runs as code: the first two stages are a parser of our own, the third only parses LaTeX.
"""

from __future__ import annotations

import functools
import logging
import math as _math
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

from trl_grpo_ext.errors import ConfigurationError, SandboxError
from trl_grpo_ext.rewards.verifier import Verdict, verifier
from trl_grpo_ext.rewards.verifiers.math import extract as extraction
from trl_grpo_ext.rewards.verifiers.math.grading import Grade, agrees, grade, read_gold, reference_texts
from trl_grpo_ext.rewards.verifiers.math.identity import Tolerances
from trl_grpo_ext.rewards.verifiers.math.quantities import Policy
from trl_grpo_ext.rewards.verifiers.math.text import fold_unicode

logger = logging.getLogger(__name__)

_MAX_WARNINGS = 5
_WARNED: list[str] = []
DEFAULT_EXTRACT = list(extraction.DEFAULT_ORDER)


def _validate(options: Mapping[str, Any]) -> None:
    extraction.check_order(options["extract"])
    for key, highest in (("tolerance", 1.0), ("decimal_tolerance", 1.0), ("timeout_s", 600.0)):
        value = options[key]
        if not (_math.isfinite(value) and 0 <= value <= highest):
            raise ConfigurationError(f"reward 'math': {key}={value!r} must be between 0 and {highest:g}")
    if len(options["think_tags"]) != 2 or not all(isinstance(tag, str) and tag for tag in options["think_tags"]):
        raise ConfigurationError(
            f"reward 'math': think_tags={options['think_tags']!r} must be two texts, the opening and the closing tag"
        )


def _warm_up() -> None:
    import mpmath  # noqa: F401  the first irrational number would pay for it


@verifier(
    name="math", columns=("answer",), deterministic=True, version="1", reference="answer", validate=_validate,
    warm_up=_warm_up,
)  # fmt: skip
def math(
    text: str,
    reference: Any,
    *,
    extract: Any = DEFAULT_EXTRACT,
    tolerance: float = 1e-6,
    decimal_tolerance: float = 1e-12,
    round_to_gold: bool = False,
    percent: Literal["either", "strict", "ignore"] = "either",
    units: Literal["optional", "required", "convert", "ignore"] = "optional",
    decimal_comma: bool = False,
    number_words: bool = True,
    intervals_as_inequalities: bool = True,
    rearranged_equations: bool = True,
    vectors_as_tuples: bool = False,
    set_braces: Literal["optional", "required"] = "optional",
    several_golds: Literal["all", "any"] = "all",
    unclosed: Literal["reject", "previous"] = "reject",
    contradiction: Literal["reject", "first"] = "reject",
    think_tags: Any = ("<think>", "</think>"),
    opened_by_template: bool = False,
    symbolic: bool = True,
    timeout_s: float = 2.0,
    score_value: float = 1.0,
) -> Verdict:
    r"""Return ``score_value`` if the final answer equals the reference mathematically, 0 if not, None for a bad gold.

    Args:
        text: the completion.
        reference: the gold answer: text in LaTeX or plain notation, a number, or a list (see ``several_golds``). A
            worked solution that boxes its answer or ends in ``#### 42`` is read as that answer.
        extract: sources of the answer, tried in turn: "boxed", "tag" (``<answer>``), "hashes" (``####``), "sentence"
            ("the answer is …"), "bold", "conclusion" (a last sentence "So … = 7."), "whole" (the completion is nothing
            but the answer); opt-in: "last_line", "last_number".
        tolerance: relative; a decimal against a value without a finite decimal (1/3, π).
        decimal_tolerance: relative; any other decimal. Whole numbers and fractions are always compared exactly.
        round_to_gold: also accept what rounds to the gold's decimals (0.333 for a gold of 0.33).
        percent: "either" (50% is 50 or 0.5), "strict" (50% is 0.5 only), "ignore" (50% is 50 only).
        units: "optional" (may be missing on one side; two different ones are wrong), "required" (if the gold has one),
            "convert" (1 m is 100 cm), "ignore".
        decimal_comma: read ``3,14`` as 3.14.
        number_words: read ``seven`` as 7.
        intervals_as_inequalities: ``0 \le x \le 1`` is ``[0,1]``.
        rearranged_equations: ``2x - y + 1 = 0`` is ``y = 2x + 1``.
        vectors_as_tuples: a column or row matrix is the tuple of its entries.
        set_braces: "optional" (``1, 2`` is ``\{1,2\}``) or "required".
        several_golds: for a list: "all" must be in the answer, or "any" one is enough.
        unclosed: an unclosed last box or tag: "reject" the completion, or take the "previous" one.
        contradiction: a later box, tag or ``####`` with another value: "reject", or keep the "first" source's.
        think_tags: opening and closing tag of the reasoning, which never holds the answer.
        opened_by_template: the chat template already wrote the opening tag, so reasoning without its closing tag is
            unfinished.
        symbolic: ask math-verify where the first two stages cannot tell.
        timeout_s: its deadline; reaching it scores 0 with the reason "timeout".
        score_value: score of a right answer.
    """
    policy = _policy(
        tolerance, decimal_tolerance, round_to_gold, percent, units, number_words, intervals_as_inequalities,
        rearranged_equations, vectors_as_tuples, set_braces,
    )  # fmt: skip
    golds = [read_gold(gold, decimal_comma, policy) for gold in _gold_texts(reference, several_golds)]
    if not golds or not all(gold.usable for gold in golds):
        _warn_of_gold(str(reference)[:200])
        return Verdict(None, "gold_unusable")
    found = extraction.extract(
        fold_unicode(text),
        order=extraction.check_order(extract),
        think_tags=think_tags,
        opened_by_template=opened_by_template,
        on_unclosed=unclosed,
        same=agrees(policy, decimal_comma) if contradiction == "reject" else None,
    )
    if found.text is None:
        return Verdict(0.0, found.source)
    result = Grade(False, "different")
    try:
        for gold in golds:
            result = grade(
                gold, found.text, policy=policy, decimal_comma=decimal_comma, symbolic=symbolic, timeout_s=timeout_s
            )
            if result.right:
                return Verdict(score_value, "equal", found.text)
    except SandboxError:
        return Verdict(None, "symbolic_unavailable", found.text)
    return Verdict(0.0, result.reason, found.text)


@functools.lru_cache(maxsize=_MAX_WARNINGS + 1)
def _warn_of_gold(reference: str) -> None:
    """Name an unusable reference in the log, the first few of them, each once."""
    if len(_WARNED) < _MAX_WARNINGS:
        _WARNED.append(reference)
        logger.warning(
            "math: the reference %r is empty, broken or no answer, so its row gets no score (reason gold_unusable)",
            reference,
        )


def _gold_texts(reference: Any, several_golds: str) -> list[str]:
    if isinstance(reference, (list, tuple)):
        texts = reference_texts(reference)
        return texts if several_golds == "any" or len(texts) == 1 else [" , ".join(texts)]
    return reference_texts(reference)


def _policy(
    tolerance: float, decimal_tolerance: float, round_to_gold: bool, percent: str, units: str, *rest: Any
) -> Policy:
    # Through text, so that 1e-6 is one millionth and not the nearest binary fraction below it.
    tolerances = Tolerances(Fraction(Decimal(str(tolerance))), Fraction(Decimal(str(decimal_tolerance))), round_to_gold)
    number_words, intervals, equations, vectors, braces = rest
    return Policy(tolerances, percent, units, intervals, equations, vectors, number_words, braces)
