"""``choice``: the answer names the right option of a multiple-choice question, and only that one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.rewards.verifier import Verdict, verifier
from trl_grpo_ext.rewards.verifiers.math import extract as extraction
from trl_grpo_ext.rewards.verifiers.math.grading import choice_letter
from trl_grpo_ext.rewards.verifiers.math.text import fold_unicode

DEFAULT_EXTRACT = ["boxed", "tag", "hashes", "sentence", "bold", "last_line", "whole"]


def _validate(options: Mapping[str, Any]) -> None:
    extraction.check_order(options["extract"])
    letters = options["letters"]
    if not letters.isalpha() or not letters.isupper() or len(set(letters)) != len(letters) or len(letters) < 2:
        raise ConfigurationError(
            f"reward 'choice': letters={letters!r} must be two or more different capital letters, for example 'ABCD'"
        )


@verifier(
    name="choice", columns=("answer",), optional_columns=("choices",), reference="answer", version="1",
    validate=_validate,
)  # fmt: skip
def choice(
    text: str,
    reference: Any,
    *,
    choices: Any = None,
    letters: str = "ABCDEFGHIJ",
    first_index: int | None = None,
    extract: Any = DEFAULT_EXTRACT,
    think_tags: Any = ("<think>", "</think>"),
    opened_by_template: bool = False,
    score_value: float = 1.0,
) -> Verdict:
    """Return ``score_value`` if the final answer is the reference's letter (or its option's full text), else 0.

    ``B``, ``(B)``, ``B.``, ``B) some text``, ``Option B`` name B. Two letters name none, and the article in
    *a train* is no letter.

    Args:
        text: the completion.
        reference: the right letter, also written ``(B)`` or ``B) some text``; or its number (see ``first_index``).
        choices: column with the options' texts in order. If present, the right option's text alone is right too,
            unless two options read the same.
        letters: letters of the options in order.
        first_index: number of the first option where the gold is a number: 0 or 1. None: a number is unusable.
        extract: sources of the answer, tried in turn; as for ``math``.
        think_tags: opening and closing tag of the reasoning, which never holds the answer.
        opened_by_template: the chat template already wrote the opening tag.
        score_value: score of a right answer.
    """
    gold = _gold_letter(reference, letters, first_index)
    if gold is None:
        return Verdict(None, "gold_unusable")
    found = extraction.extract(
        fold_unicode(text),
        order=extraction.check_order(extract),
        think_tags=think_tags,
        opened_by_template=opened_by_template,
    )
    if found.text is None:
        return Verdict(0.0, found.source)
    letter = choice_letter(found.text)
    if letter is None:
        letter = _letter_of_text(found.text, choices, letters)
    if letter is None or letter not in letters:
        return Verdict(0.0, "no_choice", found.text)
    return Verdict(score_value, "equal", letter) if letter == gold else Verdict(0.0, "different", letter)


def _gold_letter(reference: Any, letters: str, first_index: int | None) -> str | None:
    if not isinstance(reference, bool) and str(reference).strip().isdigit():
        if first_index is None:
            return None
        index = int(reference) - first_index
        return letters[index] if 0 <= index < len(letters) else None
    letter = choice_letter(fold_unicode(str(reference)))
    return letter if letter is not None and letter in letters else None


def _letter_of_text(answer: str, choices: Any, letters: str) -> str | None:
    """Return the letter of the only option whose text is the answer."""
    if isinstance(choices, Mapping):
        choices = choices.get("text")  # the layout of ARC: {"text": [...], "label": [...]}
    if not isinstance(choices, Sequence) or isinstance(choices, str):
        return None
    same = [index for index, option in enumerate(choices) if _plain(str(option)) == _plain(answer)]
    return letters[same[0]] if len(same) == 1 and same[0] < len(letters) else None


def _plain(text: str) -> str:
    return " ".join(fold_unicode(text).casefold().replace("$", "").split()).strip(" .")
