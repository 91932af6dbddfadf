"""Scores that need not be computed twice."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

import pytest

from trl_grpo_ext.rewards.cache import RewardCache, content_key
from trl_grpo_ext.rewards.outcome import Score


def test_equal_content_has_one_key_and_any_difference_another() -> None:
    key = content_key(b"math v1", ["prompt", [{"role": "user", "content": "a" * 3}], {"answer": 1}])
    assert key == content_key(b"math v1", ["".join("prompt"), [{"role": "user", "content": "aaa"}], {"answer": 1}])
    others = [
        content_key(b"math v2", ["prompt", [{"role": "user", "content": "aaa"}], {"answer": 1}]),
        content_key(b"math v1", ["prompt", [{"role": "user", "content": "aab"}], {"answer": 1}]),
        content_key(b"math v1", ["prompt", [{"role": "user", "content": "aaa"}], {"answer": 1.0}]),
        content_key(b"math v1", ["prompt", [{"role": "user", "content": "aaa"}], {"answer": True}]),
    ]
    assert len({key, *others}) == 5


def test_content_that_is_no_plain_data_has_no_key() -> None:
    assert content_key(b"f", [object()]) is None


def test_the_least_recently_used_score_goes_first() -> None:
    cache = RewardCache(2)
    cache.put(b"a", Score(1.0))
    cache.put(b"b", Score(2.0))
    assert cache.get(b"a") == Score(1.0)
    cache.put(b"c", Score(3.0))
    assert cache.get(b"b") is None
    assert (cache.get(b"a"), cache.get(b"c"), len(cache)) == (Score(1.0), Score(3.0), 2)


def test_no_entries_means_no_cache() -> None:
    cache = RewardCache(0)
    cache.put(b"a", Score(1.0))
    assert cache.get(b"a") is None


def test_the_file_outlives_the_run_and_is_shared(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "scores.db"
    first, second = RewardCache(10, path), RewardCache(10, path)
    first.put(b"a", Score(0.25, "close", "3"))
    first.put(b"n", Score(None, "gold_unusable"))
    first.flush()
    assert second.get(b"a") == Score(0.25, "close", "3")
    first.close()
    again = RewardCache(10, path)
    assert again.get(b"n") == Score(None, "gold_unusable")


def test_the_file_is_bounded(tmp_path: Path) -> None:
    cache = RewardCache(50, tmp_path / "scores.db")
    for number in range(2500):
        cache.put(number.to_bytes(4, "big"), Score(1.0))
        if number % 100 == 0:
            cache.flush()
    cache.close()
    count = sqlite3.connect(tmp_path / "scores.db").execute("SELECT count(*) FROM scores").fetchone()[0]
    assert count <= 50 + 1000


def test_a_damaged_or_poisoned_file_costs_the_cache_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken.db"
    broken.write_bytes(b"this is no database" * 1000)
    with caplog.at_level(logging.WARNING):
        cache = RewardCache(10, broken)
        cache.put(b"a", Score(1.0))
        cache.flush()
    assert cache.get(b"a") == Score(1.0)
    assert "kept in memory only" in caplog.text

    poisoned = tmp_path / "poisoned.db"
    RewardCache(10, poisoned).close()
    connection = sqlite3.connect(poisoned)
    connection.executemany(
        "INSERT INTO scores VALUES (?, ?)",
        [(b"i", "[Infinity, null, null]"), (b"x", "[1"), (b"s", '["1", null, null]')],
    )
    connection.commit()
    cache = RewardCache(10, poisoned)
    assert [cache.get(key) for key in (b"i", b"x", b"s")] == [None, None, None]
