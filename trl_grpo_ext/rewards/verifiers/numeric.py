"""``numeric``: the answer is one plain number within a tolerance of the reference."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.rewards.verifier import Verdict, verifier
from trl_grpo_ext.rewards.verifiers.math import extract as extraction
from trl_grpo_ext.rewards.verifiers.math.numbers import read_number
from trl_grpo_ext.rewards.verifiers.math.text import fold_unicode

_WRAPPERS = re.compile(r"\\text\s*\{([^{}]*)\}|\$|\\left|\\right|\\[()\[\],;!]|\*\*|`")
_CURRENCY = re.compile(r"^([+-]?)\s*(?:\\?\$|€|£|¥|₹)\s*|\s*(?:\\?\$|€|£|¥|₹)$")


def _validate(options: Mapping[str, Any]) -> None:
    extraction.check_order(_order(options["extract"]))
    for key in ("tolerance", "relative_tolerance"):
        if not (options[key] >= 0 and math.isfinite(options[key])):
            raise ConfigurationError(f"reward 'numeric': {key}={options[key]!r} must be a finite number >= 0")


def _order(sources: Any) -> Any:
    return extraction.DEFAULT_ORDER if sources == "auto" else sources


@verifier(name="numeric", columns=("answer",), deterministic=True, version="1", reference="answer", validate=_validate)
def numeric(
    text: str,
    reference: Any,
    *,
    extract: Any = "whole",
    tolerance: float = 0.0,
    relative_tolerance: float = 0.0,
    score_value: float = 1.0,
) -> Verdict:
    r"""Return ``score_value`` if the answer is a number close enough to the reference, else 0.

    Right means abs(answer - gold) <= max(tolerance, relative_tolerance * abs(gold)), in exact arithmetic.

    Args:
        text: the completion.
        reference: the gold number: int, float, Fraction, Decimal or text such as ``1,234``, ``3/4``, ``1.5e3``.
            Anything else gives no score ("gold_unusable").
        extract: where the number is: "whole" (the whole trimmed completion), "last_number", "boxed", "tag", "hashes",
            "sentence", …, a list of these tried in turn, or "auto" (the order of the ``math`` verifier).
        tolerance: allowed absolute difference.
        relative_tolerance: allowed difference relative to the gold.
        score_value: score of a match.
    """
    gold = _as_fraction(reference)
    if gold is None:
        return Verdict(None, "gold_unusable")
    found = extraction.extract(fold_unicode(text), order=extraction.check_order(_order(extract)))
    if found.text is None:
        return Verdict(0.0, found.source)
    answer = _as_fraction(found.text)
    if answer is None:
        return Verdict(0.0, "not_a_number", found.text)
    allowed = max(Fraction(tolerance), Fraction(relative_tolerance) * abs(gold))
    if abs(answer - gold) <= allowed:
        return Verdict(score_value, "equal" if answer == gold else "within_tolerance", found.text)
    return Verdict(0.0, "different", found.text)


def _as_fraction(value: Any) -> Fraction | None:
    """Return the value exactly, or None. Floats mean the shortest decimal that reads back as them: 0.1 is 1/10."""
    if isinstance(value, bool):
        return None
    if isinstance(value, Fraction):
        return value
    text = _CURRENCY.sub(r"\1", _WRAPPERS.sub(r"\1", fold_unicode(str(value))).strip())
    number = read_number(text)
    return None if number is None else number.value
