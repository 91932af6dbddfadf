"""``regex``: patterns that never stop are stopped, and everything else is Python's ``re``."""

from __future__ import annotations

import time

import pytest

from trl_grpo_ext.errors import ConfigurationError, MissingDependencyError
from trl_grpo_ext.rewards.verifiers.regex import regex

SLOW = {"timeout_s": 60.0}


@pytest.mark.parametrize(
    ("text", "options", "score"),
    [
        ("abc", {"pattern": "[a-c]+"}, 1.0),
        (" abc\n", {"pattern": "[a-c]+"}, 1.0),
        (" abc\n", {"pattern": "[a-c]+", "strip": False}, 0.0),
        ("abcd", {"pattern": "[a-c]+"}, 0.0),
        ("abcd", {"pattern": "[a-c]+", "where": "start"}, 1.0),
        ("xabcd", {"pattern": "[a-c]+", "where": "start"}, 0.0),
        ("xabcd", {"pattern": "[a-c]+", "where": "anywhere"}, 1.0),
        ("ABC", {"pattern": "[a-c]+"}, 0.0),
        ("ABC", {"pattern": "[a-c]+", "ignore_case": True}, 1.0),
        ("a\nb", {"pattern": "a.b"}, 0.0),
        ("a\nb", {"pattern": "a.b", "dot_all": True}, 1.0),
        ("x\nb", {"pattern": "^b$", "where": "anywhere"}, 0.0),
        ("x\nb", {"pattern": "^b$", "where": "anywhere", "multiline": True}, 1.0),
        ("sorry", {"pattern": "sorry", "must": "not_match", "where": "anywhere"}, 0.0),
        ("fine", {"pattern": "sorry", "must": "not_match", "where": "anywhere"}, 1.0),
        ("<think>abc</think>7", {"pattern": "\\d", "skip_reasoning": True}, 1.0),
        ("<think>7", {"pattern": "\\d", "skip_reasoning": True, "where": "anywhere"}, 0.0),
        ("", {"pattern": "x*"}, 1.0),
        ("x", {"pattern": "(?<=y)x", "where": "anywhere"}, 0.0),
        ("abc", {"pattern": "[a-c]+", "score_value": 0.3}, 0.3),
    ],
)
def test_cases(text, options, score):
    assert regex(**SLOW, **options).judge(text).score == score


def test_a_pattern_per_row():
    assert regex(**SLOW).judge("7", regex="\\d").score == 1.0
    assert regex(**SLOW).judge("x", regex="\\d").score == 0.0
    assert regex(**SLOW).judge("x", regex="(").reason == "bad_pattern"
    assert regex(**SLOW).judge("x").reason == "no_pattern"
    assert regex(**SLOW)(completions=["7", "x"], regex=["\\d", "\\d"]) == [1.0, 0.0]


@pytest.mark.parametrize("must", ["match", "not_match"])
def test_a_catastrophic_pattern_is_killed_at_the_deadline_and_pays_nothing(must):
    reward = regex(pattern="(a+)+$", where="start", timeout_s=0.2, must=must)
    regex(pattern="a", **SLOW).judge("a")  # the worker's start is not part of the deadline
    started = time.monotonic()
    verdict = reward.judge("a" * 60 + "b")
    assert time.monotonic() - started < 10.0
    assert (verdict.score, verdict.reason) == (0.0, "timeout")
    assert regex(pattern="a", **SLOW).judge("a").score == 1.0


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"pattern": "("}, "no regular expression"),
        ({"pattern": "a", "timeout_s": 0.0}, "timeout_s"),
        ({"pattern": "a", "where": "here"}, "where"),
    ],
)
def test_bad_options(options, part):
    with pytest.raises(ConfigurationError, match=part):
        regex(**options)


def test_the_linear_engine_or_a_message_how_to_get_it():
    try:
        import re2  # noqa: F401
    except ImportError:
        with pytest.raises(MissingDependencyError, match="google-re2"):
            regex(pattern="a", engine="linear")
        return
    reward = regex(pattern="(a+)+$", where="start", engine="linear")
    assert reward.judge("a" * 60 + "b").score == 0.0
    assert reward.judge("a" * 60).score == 1.0
    assert regex(pattern="[a-c]+", engine="linear", ignore_case=True).judge("ABC").score == 1.0
    with pytest.raises(ConfigurationError, match="look-around"):
        regex(pattern="(?<=y)x", engine="linear")
