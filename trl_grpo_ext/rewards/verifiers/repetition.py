"""``repetition``: penalty for text that repeats itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.rewards.verifier import Verdict, verifier


def _validate(options: Mapping[str, Any]) -> None:
    if options["ngram"] < 1:
        raise ConfigurationError(f"reward 'repetition': ngram={options['ngram']} must be at least 1")
    if options["max_penalty"] < 0:
        raise ConfigurationError(
            f"reward 'repetition': max_penalty={options['max_penalty']} must be >= 0; the score is its negative"
        )
    if not 0 <= options["free_share"] < 1:
        raise ConfigurationError(f"reward 'repetition': free_share={options['free_share']} must be in [0, 1)")


@verifier(name="repetition", columns=(), reference=None, version="1", validate=_validate)
def repetition(
    text: str,
    reference: Any,
    *,
    completion_ids: Sequence[int] | None = None,
    ngram: int = 4,
    unit: Literal["words", "chars", "tokens"] = "words",
    max_penalty: float = 1.0,
    free_share: float = 0.0,
) -> Verdict:
    """Return between 0 (nothing repeats) and ``-max_penalty`` (the same n-gram throughout).

    score = -max_penalty * max(0, share - free_share) / (1 - free_share),  share = 1 - distinct n-grams / n-grams.
    This is the n-gram penalty of 2503.02373, section 4.2, without its per-token form.

    Args:
        text: the completion.
        reference: not used.
        completion_ids: token ids, for ``unit: tokens``.
        ngram: length of the pieces that are compared.
        unit: what the pieces are made of. Words are split at white space and compared case-folded; use "chars" for
            scripts without blanks.
        max_penalty: size of the largest penalty.
        free_share: share of repeated n-grams that costs nothing; ordinary English prose has a few per cent.
    """
    if unit == "tokens":
        if completion_ids is None:
            return Verdict(None, "no_token_ids")
        pieces: Sequence[Any] = completion_ids
    else:
        pieces = text.casefold().split() if unit == "words" else [char for char in text if not char.isspace()]
    total = len(pieces) - ngram + 1
    if total < 2:
        return Verdict(0.0, "too_short")
    distinct = len({tuple(pieces[index : index + ngram]) for index in range(total)})
    share = 1.0 - distinct / total
    penalty = max_penalty * max(0.0, share - free_share) / (1.0 - free_share)
    return Verdict(-penalty if penalty else 0.0, "repeats" if penalty else "varied", f"{share:.3f}")
