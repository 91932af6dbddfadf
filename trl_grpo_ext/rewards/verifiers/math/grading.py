"""Grade one answer text against one gold text, in stages: exact, numeric, symbolic."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

from trl_grpo_ext.rewards.verifiers.math import guard
from trl_grpo_ext.rewards.verifiers.math.answers import Answer, Text, Unread
from trl_grpo_ext.rewards.verifiers.math.compare import same_answer
from trl_grpo_ext.rewards.verifiers.math.extract import extract
from trl_grpo_ext.rewards.verifiers.math.identity import same_rationals
from trl_grpo_ext.rewards.verifiers.math.numbers import Number, read_number
from trl_grpo_ext.rewards.verifiers.math.quantities import Policy
from trl_grpo_ext.rewards.verifiers.math.read import read_answer
from trl_grpo_ext.rewards.verifiers.math.symbolic import same_symbolically
from trl_grpo_ext.rewards.verifiers.math.text import fold_unicode
from trl_grpo_ext.rewards.verifiers.math.tokens import TooLarge

MAX_GOLD_WORDS = 15  # a gold of more words is a worked solution in the wrong column, not an answer

_WRAPPERS = re.compile(
    r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox|textit)\s*(?=\{)|[{}$*`]|\\[()\[\] ,;]|\\left|\\right|~"
)
_CHOICE = re.compile(
    r"^(?:(?:option|choice|answer)\s*:?\s*)?(?:\(([A-Za-z])\)|\[([A-Za-z])\]|([A-Za-z])(?=$|[).:\]]|\s+[-–]\s))[).:\]]*\s*(.*)$",
    re.IGNORECASE | re.DOTALL,
)
_OTHER_CHOICE = re.compile(r"(?:^|[\s,;(])\(?[A-J][).:](?:\s|$)|\band\s+[A-J]\b|\bor\s+[A-J]\b")


class Grade(NamedTuple):
    """The verdict on an answer.

    Attributes:
        right: True, False, or None if the gold cannot be used or the symbolic stage could not run.
        reason: "equal", "different", "unreadable", "too_large", "timeout", "gold_unusable", "symbolic_unavailable".
        stage: "exact", "numeric" or "symbolic": the stage that decided.
    """

    right: bool | None
    reason: str
    stage: str = "exact"


class Gold(NamedTuple):
    """A reference, read once for all completions that are compared with it."""

    text: str
    number: Number | None
    choice: str | None
    answer: Answer | None
    usable: bool
    option: str = ""  # of a multiple-choice gold, the text behind its letter


def choice_letter(text: str) -> str | None:
    """Return the letter that a multiple-choice answer names: ``B``, ``(B)``, ``B.``, ``B) text``, ``Option B``.

    None if it names none or several, or the letter is part of a sentence (``a train``).
    """
    named = _letter_and_text(text)
    return None if named is None else named[0]


def _letter_and_text(text: str) -> tuple[str, str] | None:
    """Return the letter of a multiple-choice answer and the text behind it."""
    match = _CHOICE.match(_WRAPPERS.sub("", text).strip().rstrip(".").strip())
    if match is None or _OTHER_CHOICE.search(match.group(4)):
        return None
    return next(group for group in match.groups()[:3] if group).upper(), match.group(4).strip()


@functools.lru_cache(maxsize=4096)
def read_gold(text: str, decimal_comma: bool, policy: Policy) -> Gold:
    r"""Return the reference, read; not usable if it is empty, broken, a long prose text, or has no value (``0/0``).

    A reference may be a whole worked solution that marks its answer with a box, an answer tag or ``####``.
    """
    folded = fold_unicode(text).strip()
    marked = extract(folded, order=("boxed", "tag", "hashes"))
    if marked.text is not None:
        folded = marked.text
    elif marked.source != "no_answer":
        return Gold(folded, None, None, None, False)
    stripped = _WRAPPERS.sub("", folded).strip().rstrip(".")
    letter, option = _letter_and_text(folded) or (None, "")
    choice = letter if letter is not None and letter == stripped.lstrip("([").strip()[:1] else None
    try:
        answer = read_answer(folded, decimal_comma=decimal_comma, is_gold=True)
    except TooLarge:
        return Gold(folded, None, None, None, bool(folded))
    usable = bool(answer.key) and guard.is_balanced(folded) and not _is_prose(answer)
    if usable and choice is None:
        try:
            usable = same_answer(answer, answer, policy) is not False
        except TooLarge:
            usable = True  # equal spelling still decides
    return Gold(folded, read_number(_number_text(folded)), choice, answer, usable, option if choice else "")


def _is_prose(answer: Answer) -> bool:
    return isinstance(answer.body, (Text, Unread)) and sum(key.isalpha() for key in answer.key) > MAX_GOLD_WORDS


def _number_text(text: str) -> str:
    return text.replace("$", "") if text.startswith("$") and text.endswith("$") else text


def grade(gold: Gold, text: str, *, policy: Policy, decimal_comma: bool, symbolic: bool, timeout_s: float) -> Grade:
    """Return the verdict on one extracted answer.

    Args:
        gold: the reference, read.
        text: the answer, folded.
        policy: what may differ.
        decimal_comma: read ``3,14`` as 3.14.
        symbolic: whether the symbolic stage may be asked.
        timeout_s: its deadline.
    """
    if not gold.usable:
        return Grade(None, "gold_unusable")
    named = _letter_and_text(text)
    if gold.choice is not None:
        if named is not None:
            return _grade(named[0] == gold.choice)
        if gold.option:  # the text of the right option without its letter
            gold = read_gold(gold.option, decimal_comma, policy)
    elif named is not None and named[0] in "ABCDEFGHIJ" and named[1] and gold.number is not None:
        text = named[1]  # (B) 7 where the gold is 7
    number = read_number(_number_text(text)) if gold.number is not None and not decimal_comma else None
    if number is not None and gold.number is not None:
        return _grade(_same_numbers(gold.number, number, policy))
    if gold.answer is None:
        same = "".join(text.split()) == "".join(gold.text.split())
        return _grade(True) if same else Grade(False, "too_large")
    if not guard.is_balanced(text):
        return Grade(False, "unreadable")
    try:
        answer = read_answer(text, decimal_comma=decimal_comma)
        if not answer.key:
            return Grade(False, "unreadable")
        verdict = same_answer(gold.answer, answer, policy)
    except TooLarge:
        return Grade(False, "too_large")
    if verdict is not None:
        return _grade(verdict, "numeric")
    return _symbolic(gold, answer, text, timeout_s) if symbolic else Grade(False, "unreadable", "numeric")


def _grade(right: bool, stage: str = "exact") -> Grade:
    return Grade(right, "equal" if right else "different", stage)


def _same_numbers(gold: Number, answer: Number, policy: Policy) -> bool:
    if gold.value == answer.value:
        return True
    nodes = [("num", number.value, number.num_decimals if number.is_decimal else -1) for number in (gold, answer)]
    return same_rationals(gold.value, answer.value, nodes[0], nodes[1], policy.tolerances)


def _symbolic(gold: Gold, answer: Answer, text: str, timeout_s: float) -> Grade:
    assert gold.answer is not None
    undecided = not any(isinstance(side.body, Unread) for side in (gold.answer, answer))
    if isinstance(gold.answer.body, Text) or not (
        undecided or guard.needs_algebra(text) or guard.needs_algebra(gold.text)
    ):
        return Grade(False, "unreadable", "numeric")
    if guard.refusal(text) is not None or guard.refusal(gold.text) is not None:
        return Grade(False, "too_large", "numeric")
    outcome = same_symbolically(_latex(gold.text), _latex(text), timeout_s)
    if outcome.status == "ok":
        return Grade(outcome.value == "equal", outcome.value, "symbolic")
    return Grade(False, "timeout" if outcome.status == "timeout" else "unreadable", "symbolic")


def _latex(text: str) -> str:
    return text.replace("$", "").replace("\\usqrt", "\\sqrt").strip()


def agrees(policy: Policy, decimal_comma: bool) -> Callable[[str, str], bool]:
    """Return a function that tells whether two answer texts of one completion may mean the same."""

    def same(one: str, other: str) -> bool:
        gold = read_gold(one, decimal_comma, policy)
        verdict = grade(gold, other, policy=policy, decimal_comma=decimal_comma, symbolic=False, timeout_s=0.0)
        return verdict.right is not False or verdict.reason == "unreadable"

    return same


def reference_texts(reference: Any) -> list[str]:
    """Return the reference as text; of a list or tuple, one text per element."""
    if isinstance(reference, (list, tuple)):
        return [text for item in reference for text in reference_texts(item)]
    if isinstance(reference, Fraction):
        return [f"{reference.numerator}/{reference.denominator}"]
    return ["" if reference is None else str(reference)]
