"""``length``: reward or penalty for how long a completion is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.rewards.verifier import Verdict, verifier

_NEEDED = {
    "target": ("target", "width"),
    "range": ("min_length", "max_length"),
    "overlong": ("max_length", "cache"),
    "cosine": ("max_length",),
}


def _validate(options: Mapping[str, Any]) -> None:
    shape = options["shape"]
    for key in _NEEDED[shape]:
        if options[key] is None:
            raise ConfigurationError(f"reward 'length': shape={shape!r} needs {' and '.join(_NEEDED[shape])}")
    for key in ("target", "width", "min_length", "max_length", "cache", "slack"):
        value = options[key]
        if value is not None and (value < 0 or (key in ("width", "max_length") and value == 0)):
            raise ConfigurationError(f"reward 'length': {key}={value!r} must be positive")
    if shape == "range" and options["min_length"] > options["max_length"]:
        raise ConfigurationError(
            f"reward 'length': min_length={options['min_length']} is above max_length={options['max_length']}"
        )
    if shape == "overlong" and not 0 < options["cache"] <= options["max_length"]:
        raise ConfigurationError(
            f"reward 'length': cache={options['cache']} must be above 0 and at most max_length={options['max_length']}"
        )


@verifier(name="length", columns=(), reference=None, version="1", validate=_validate)
def length(
    text: str,
    reference: Any,
    *,
    completion_ids: Sequence[int] | None = None,
    shape: Literal["target", "range", "overlong", "cosine"] = "range",
    unit: Literal["tokens", "words", "chars"] = "tokens",
    target: int | None = None,
    width: int | None = None,
    min_length: int | None = 0,
    max_length: int | None = None,
    slack: int = 0,
    cache: int | None = None,
    start: float = 1.0,
    end: float = 0.0,
) -> Verdict:
    r"""Return a score for the length L of a completion.

    target:    max(0, 1 - abs(L - target) / width)
    range:     1 inside [min_length, max_length], falling linearly to 0 over ``slack`` outside it
    overlong:  0 up to max_length - cache; (max_length - cache - L) / cache beyond; -1 above max_length.
               DAPO 2503.14476, equation 13 (soft overlong punishment).
    cosine:    end + (start - end) (1 + cos(\pi min(L, max_length) / max_length)) / 2. The schedule of 2503.02373,
               appendix C.1; to couple it to correctness as there, use ``combine`` with ``how: cosine``.

    Args:
        text: the completion.
        reference: not used.
        completion_ids: token ids, for ``unit: tokens``; they are what TRL counts, an end token included.
        shape: see above.
        unit: what is counted.
        target: length with full score.
        width: distance from it at which the score is 0.
        min_length: lower end of the range.
        max_length: upper end; for "overlong", usually ``max_completion_length``.
        slack: width of the slopes outside the range; 0 makes them steps.
        cache: length of the slope of "overlong".
        start: "cosine" at length 0.
        end: "cosine" from ``max_length`` on.
    """
    if unit == "tokens":
        if completion_ids is None:
            return Verdict(None, "no_token_ids")
        count = len(completion_ids)
    else:
        count = len(text.split()) if unit == "words" else len(text)
    # What a shape needs is checked on construction; 0 stands in for the type checker only.
    target, width, cache = target or 0, width or 1, cache or 1
    min_length, max_length = min_length or 0, max_length or 1
    if shape == "target":
        score = max(0.0, 1.0 - abs(count - target) / width)
    elif shape == "range":
        outside = max(min_length - count, count - max_length, 0)
        score = 1.0 if not outside else max(0.0, 1.0 - outside / slack) if slack else 0.0
    elif shape == "overlong":
        score = -1.0 if count > max_length else min(0.0, (max_length - cache - count) / cache)
    else:
        score = end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * min(count, max_length) / max_length))
    return Verdict(score, f"length_{shape}", str(count))
