"""``length``: the shapes, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.rewards.verifiers.length import length


@pytest.mark.parametrize(
    ("options", "count", "score"),
    [
        ({"shape": "target", "target": 100, "width": 50}, 100, 1.0),
        ({"shape": "target", "target": 100, "width": 50}, 75, 0.5),
        ({"shape": "target", "target": 100, "width": 50}, 125, 0.5),
        ({"shape": "target", "target": 100, "width": 50}, 151, 0.0),
        ({"shape": "range", "min_length": 10, "max_length": 20}, 10, 1.0),
        ({"shape": "range", "min_length": 10, "max_length": 20}, 20, 1.0),
        ({"shape": "range", "min_length": 10, "max_length": 20}, 21, 0.0),
        ({"shape": "range", "min_length": 10, "max_length": 20}, 9, 0.0),
        ({"shape": "range", "min_length": 10, "max_length": 20, "slack": 4}, 23, 0.25),
        ({"shape": "range", "min_length": 10, "max_length": 20, "slack": 4}, 9, 0.75),
        ({"shape": "overlong", "max_length": 100, "cache": 20}, 80, 0.0),
        ({"shape": "overlong", "max_length": 100, "cache": 20}, 85, -0.25),
        ({"shape": "overlong", "max_length": 100, "cache": 20}, 100, -1.0),
        ({"shape": "overlong", "max_length": 100, "cache": 20}, 101, -1.0),
        ({"shape": "overlong", "max_length": 100, "cache": 20}, 0, 0.0),
        ({"shape": "cosine", "max_length": 100}, 0, 1.0),
        ({"shape": "cosine", "max_length": 100}, 50, 0.5),
        ({"shape": "cosine", "max_length": 100, "start": 2.0, "end": 1.0}, 25, 1.0 + 0.5 * (1 + 2**-0.5)),
        ({"shape": "cosine", "max_length": 100, "end": -1.0}, 100, -1.0),
        ({"shape": "cosine", "max_length": 100, "end": -1.0}, 250, -1.0),
    ],
)
def test_shapes(options, count, score):
    assert length(**options).judge("x", completion_ids=[1] * count).score == pytest.approx(score, abs=1e-12)


def test_units():
    assert length(unit="words", max_length=3).judge("one two  three").score == 1.0
    assert length(unit="words", max_length=2).judge("one two  three").score == 0.0
    assert length(unit="chars", max_length=3).judge("abc").score == 1.0
    assert length(unit="chars", max_length=2).judge("abc").score == 0.0
    assert length(max_length=3).judge("x").reason == "no_token_ids"
    assert length(max_length=3)(completions=["a", "b"], completion_ids=[[1] * 3, [1] * 4]) == [1.0, 0.0]


@pytest.mark.parametrize(
    "options",
    [
        {"shape": "target", "target": 5},
        {"shape": "range"},
        {"shape": "range", "min_length": 5, "max_length": 4},
        {"shape": "overlong", "max_length": 100},
        {"shape": "overlong", "max_length": 100, "cache": 101},
        {"shape": "cosine"},
        {"shape": "cosine", "max_length": 0},
        {"shape": "square", "max_length": 5},
        {"max_length": -1},
    ],
)
def test_bad_options(options):
    with pytest.raises(ConfigurationError):
        length(**options)
