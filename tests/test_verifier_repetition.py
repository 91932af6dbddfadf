"""``repetition``: the share of repeated n-grams."""

from __future__ import annotations

import time

import pytest

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.rewards.verifiers.repetition import repetition


@pytest.mark.parametrize(
    ("text", "options", "score"),
    [
        ("a b c d e f", {"ngram": 2}, 0.0),
        ("a b a b a b", {"ngram": 2}, -0.6),  # 5 bigrams, 2 distinct
        ("a b a b a b", {"ngram": 2, "max_penalty": 0.5}, -0.3),
        ("a b a b a b", {"ngram": 2, "free_share": 0.2}, -0.5),
        ("a b a b a b", {"ngram": 2, "free_share": 0.6}, 0.0),
        ("A a A a", {"ngram": 1}, -0.75),
        ("a", {"ngram": 2}, 0.0),
        ("", {}, 0.0),
        ("哈哈哈哈", {"ngram": 1, "unit": "chars"}, -0.75),
    ],
)
def test_scores(text, options, score):
    assert repetition(**options).judge(text).score == pytest.approx(score, abs=1e-12)


def test_tokens():
    assert repetition(unit="tokens", ngram=1).judge("x", completion_ids=[5, 5, 5, 6]).score == pytest.approx(-0.5)
    assert repetition(unit="tokens").judge("x").score is None


def test_it_is_linear():
    started = time.process_time()
    assert repetition(ngram=4).judge("the same " * 50_000).score < -0.99
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize("options", [{"ngram": 0}, {"max_penalty": -1.0}, {"free_share": 1.0}])
def test_bad_options(options):
    with pytest.raises(ConfigurationError):
        repetition(**options)
