"""What counts as a reward: one place that turns what a reward function returned into floats, Nones and complaints.

Accepted, as a whole: list, tuple, generator or other iterable, numpy array, tensor (also one that needs grad), each of
length n; arrays and tensors also of shape (n, 1). Accepted, as one reward: None, int, float, bool, Fraction, Decimal,
one-element array or tensor, Verdict. Refused: strings, dicts, sets, nested lists, tuples such as (score, explanation),
a single number for the whole batch, None for the whole batch, a wrong length.

Needs neither numpy nor torch, so that a worker process starts without them.
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Iterable, Mapping, Set
from decimal import Decimal
from typing import Any, NamedTuple

from trl_grpo_ext.errors import RewardError
from trl_grpo_ext.rewards.verifier import Verdict

# Rewards become float32 in the trainer: anything above this turns into infinity there.
LARGEST_REWARD = 3.4028234663852886e38


class ShapeError(RewardError):
    """What a reward function returned is not one value per completion, so no sample of the call has a score."""


class BadValue(NamedTuple):
    """One value that is no reward.

    Attributes:
        reason: "bad_value" for something that is no number, "non_finite" for NaN, infinity or a float32 overflow.
        detail: the value and its type, in words.
    """

    reason: str
    detail: str


def coerce_rewards(output: Any, num_samples: int) -> list[float | BadValue | None]:
    """Return one float, None or BadValue per sample for what a reward function returned.

    Args:
        output: the return value.
        num_samples: number of completions that were scored.

    Raises:
        ShapeError: if the value as a whole is not one reward per completion. Its message reads on after "reward 'x' ".
    """
    return [coerce_reward(value) for value in _values(output, num_samples)]


def coerce_reward(value: Any) -> float | BadValue | None:
    """Return one reward as a finite float, None for None, or a BadValue that says what is wrong."""
    if value is None:
        return None
    if isinstance(value, Verdict):
        value = value.score
        if value is None:
            return None
    if not isinstance(value, (float, int)):
        if isinstance(value, (numbers.Rational, Decimal)):
            pass
        elif hasattr(value, "item") and _num_elements(value) == 1:
            value = value.item()
            if not isinstance(value, (float, int)):
                return BadValue("bad_value", _describe(value))
        else:
            return BadValue("bad_value", _describe(value))
    try:
        score = float(value)
    except (OverflowError, ValueError):
        return BadValue("non_finite", f"{_short(value)} does not fit into a float")
    if not -LARGEST_REWARD <= score <= LARGEST_REWARD:  # False for NaN as well
        overflow = score == score and abs(score) != float("inf")
        return BadValue("non_finite", f"{score!r} overflows float32" if overflow else f"{score!r}")
    return score


def _values(output: Any, num_samples: int) -> list[Any]:
    """Return the values of a container that has the right shape."""
    expected = f"{num_samples} were expected (one per completion)"
    if output is None:
        raise ShapeError(f"returned None, but {expected}; is a return statement missing?")
    if isinstance(output, (str, bytes, Mapping, Set)):
        raise ShapeError(f"returned a {type(output).__name__}, but a list of {num_samples} numbers was expected")
    shape = getattr(output, "shape", None)
    if isinstance(shape, tuple) and hasattr(output, "tolist"):
        if len(shape) == 2 and shape[1] == 1:
            values = [row[0] for row in output.tolist()]
        elif len(shape) == 1:
            values = output.tolist()
        else:
            raise ShapeError(f"returned an array of shape {tuple(shape)}, but {expected}: shape ({num_samples},)")
    elif isinstance(output, Iterable):
        # One more than wanted is enough to see that a generator, perhaps an endless one, is too long.
        values = list(itertools.islice(output, num_samples + 1))
        if len(values) > num_samples and isinstance(output, (list, tuple)):
            raise ShapeError(f"returned {len(output)} rewards, but {expected}")
    else:
        raise ShapeError(f"returned a single {type(output).__name__} ({_short(output)}), but {expected}")
    if len(values) != num_samples:
        count = f"more than {num_samples}" if len(values) == num_samples + 1 else str(len(values))
        count = str(len(values)) if shape is not None else count
        raise ShapeError(f"returned {count} rewards, but {expected}")
    return values


def _num_elements(value: Any) -> int | None:
    numel = getattr(value, "numel", None)
    if callable(numel):
        return int(numel())
    size = getattr(value, "size", None)
    return size if isinstance(size, int) else None


def _describe(value: Any) -> str:
    hint = ""
    if isinstance(value, (tuple, list)):
        hint = "; return the score alone and pass explanations to log_extra"
    elif isinstance(value, str):
        hint = "; convert it to a number in the reward function"
    return f"{_short(value)} ({type(value).__name__}) is not a number or None{hint}"


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__} whose repr fails>"
    return text if len(text) <= 80 else text[:77] + "..."
