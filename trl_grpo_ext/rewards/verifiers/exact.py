"""``exact``: the whole completion, trimmed, is the reference."""

from __future__ import annotations

import unicodedata
from typing import Any

from trl_grpo_ext.rewards.verifier import Verdict, verifier


@verifier(name="exact", columns=("answer",), deterministic=True, version="1", reference="answer")
def exact(
    text: str,
    reference: Any,
    *,
    ignore_case: bool = False,
    collapse_whitespace: bool = False,
    score_value: float = 1.0,
) -> Verdict:
    """Return ``score_value`` if the trimmed completion equals the trimmed reference, else 0.

    Both are put into Unicode's composed form (NFC) first, because the same letter can be stored in two ways.

    Args:
        text: the completion.
        reference: the gold answer; ``str()`` of it is compared. Blank: the verdict has no score ("gold_unusable").
        ignore_case: compare case-folded.
        collapse_whitespace: treat any run of white space, line breaks included, as one blank.
        score_value: score of a match.
    """
    answer, gold = (_prepare(value, ignore_case, collapse_whitespace) for value in (text, str(reference)))
    if not gold:
        return Verdict(None, "gold_unusable")
    if not answer:
        return Verdict(0.0, "no_answer")
    return Verdict(score_value, "equal", answer) if answer == gold else Verdict(0.0, "different", answer)


def _prepare(value: str, ignore_case: bool, collapse_whitespace: bool) -> str:
    value = unicodedata.normalize("NFC", value).strip()
    if collapse_whitespace:
        value = " ".join(value.split())
    return value.casefold() if ignore_case else value
