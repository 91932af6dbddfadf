"""What a reward changes outside itself is seen, and nothing else is."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from trl_grpo_ext.rewards.outside_state import outside_changes

COUNTER = 0
HISTORY: list[Any] = []
TABLE = {"a": 1.0}


def counts(completions: Any, **kwargs: Any) -> list[float]:
    global COUNTER
    COUNTER += 1
    return [float(COUNTER)]


def remembers(completions: Any, **kwargs: Any) -> list[float]:
    HISTORY.append(completions)
    return [1.0]


def remembers_inside(completions: Any, **kwargs: Any) -> list[float]:
    return [float(len(HISTORY.append(text) or text)) for text in completions]


def make_closure() -> Any:
    step, seen = 0, set()

    def closure(completions: Any, **kwargs: Any) -> list[float]:
        nonlocal step
        step += 1
        seen.add(step)
        return [float(step)]

    return closure


class Stateful:
    def __init__(self) -> None:
        self.step = 0

    def __call__(self, completions: Any, **kwargs: Any) -> list[float]:
        self.step += 1
        return [float(self.step)]

    def method(self, completions: Any) -> list[float]:
        self.last = completions
        return [1.0]


@pytest.mark.parametrize(
    ("function", "changes"),
    [
        (counts, ["global COUNTER"]),
        (functools.partial(counts, bonus=1), ["global COUNTER"]),
        (remembers, ["HISTORY.append()"]),
        (remembers_inside, ["HISTORY.append()"]),
        (make_closure(), ["nonlocal step", "seen.add()"]),
        (Stateful(), ["self.step"]),
        (Stateful().method, ["self.last"]),
    ],
)
def test_changes_are_seen(function: Any, changes: list[str]) -> None:
    assert outside_changes(function) == changes


def innocent(completions: Any, bonus: float = 0.0, **kwargs: Any) -> list[float]:
    total, mine = 0.0, []
    other = dict(TABLE)
    other.update(b=2.0)

    def helper(text: str) -> float:
        nonlocal total
        total += len(text)
        return total

    for text in completions:
        mine.append(helper(text) + TABLE.get(text, bonus))
    return mine


class Stateless:
    def __init__(self) -> None:
        self.weight = 2.0

    def __call__(self, completions: Any, **kwargs: Any) -> list[float]:
        class Box:
            pass

        box = Box()
        box.value = self.weight  # type: ignore[attr-defined]
        return [box.value] * len(completions)  # type: ignore[attr-defined]


@pytest.mark.parametrize("function", [innocent, Stateless(), len, functools.partial(innocent, bonus=1.0)])
def test_what_stays_inside_is_not(function: Any) -> None:
    assert outside_changes(function) == []
