"""Scores that need not be computed twice, found by what they were computed from.

A key covers the function (where it lives, its version and options), the prompt if it is used, the completion and the
columns in use. Only scores and abstentions are kept, never failures: a time-out may go better next time.
"""

from __future__ import annotations

import collections
import hashlib
import json
import logging
import marshal
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_grpo_ext.rewards.coerce import BadValue, coerce_reward
from trl_grpo_ext.rewards.outcome import Score

logger = logging.getLogger(__name__)

# Version 2 of marshal has no back references, so equal values give equal bytes whichever objects they share.
_MARSHAL_VERSION = 2
_PRUNE_EVERY = 1000


def content_key(identity: bytes, parts: Sequence[Any]) -> bytes | None:
    """Return the key of one sample, or None if a part is no plain data (text, numbers, bytes, lists, dicts)."""
    try:
        content = marshal.dumps(list(parts), _MARSHAL_VERSION)
    except ValueError:
        return None
    return hashlib.blake2b(content, digest_size=20, key=hashlib.blake2b(identity).digest()).digest()


class RewardCache:
    """Keeps the scores used last; on disk as well if a path is given.

    Attributes:
        max_entries: bound of the memory part, and of the file. 0 keeps nothing.
    """

    def __init__(self, max_entries: int, path: str | os.PathLike[str] | None = None) -> None:
        """Open the cache.

        Args:
            max_entries: most scores kept, >= 0.
            path: SQLite file that outlives the run; several processes may share it. None: memory only.
        """
        self.max_entries = max_entries
        self._memory: collections.OrderedDict[bytes, Score] = collections.OrderedDict()
        self._file = _CacheFile(Path(path), max_entries) if path is not None and max_entries > 0 else None

    def __len__(self) -> int:
        return len(self._memory)

    def get(self, key: bytes) -> Score | None:
        """Return the score under the key, or None; it then counts as the most recently used."""
        score = self._memory.get(key)
        if score is not None:
            self._memory.move_to_end(key)
            return score
        if self._file is not None and (score := self._file.get(key)) is not None:
            self._remember(key, score)
        return score

    def put(self, key: bytes, score: Score) -> None:
        """Keep a score; the least recently used one goes if the cache is full."""
        self._remember(key, score)
        if self._file is not None:
            self._file.put(key, score)

    def flush(self) -> None:
        """Write what is pending to the file, if there is one."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Write and close the file."""
        if self._file is not None:
            self._file.close()

    def _remember(self, key: bytes, score: Score) -> None:
        if self.max_entries <= 0:
            return
        self._memory[key] = score
        self._memory.move_to_end(key)
        while len(self._memory) > self.max_entries:
            self._memory.popitem(last=False)


class _CacheFile:
    """The part on disk. An error of the file costs the cache, never the run."""

    def __init__(self, path: Path, max_entries: int) -> None:
        self.path = path
        self.max_entries = max_entries
        self.pending: list[tuple[bytes, str]] = []
        self.num_written = 0
        self.connection: sqlite3.Connection | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.connection = sqlite3.connect(path, timeout=5, check_same_thread=False)
            self.connection.execute("PRAGMA journal_mode=WAL")
            self.connection.execute("PRAGMA synchronous=OFF")  # a lost entry is computed again
            self.connection.execute("CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, score TEXT NOT NULL)")
            self.connection.commit()
        except (OSError, sqlite3.Error) as error:
            self._give_up(error)

    def get(self, key: bytes) -> Score | None:
        if self.connection is None:
            return None
        try:
            row = self.connection.execute("SELECT score FROM scores WHERE key = ?", (key,)).fetchone()
            return None if row is None else _read_score(row[0])
        except sqlite3.Error as error:
            self._give_up(error)
            return None

    def put(self, key: bytes, score: Score) -> None:
        if self.connection is not None:
            self.pending.append((key, json.dumps(list(score), allow_nan=False)))

    def flush(self) -> None:
        if self.connection is None or not self.pending:
            return
        try:
            self.connection.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?)", self.pending)
            self.num_written += len(self.pending)
            if self.num_written >= _PRUNE_EVERY:
                self.num_written = 0
                self.connection.execute(
                    "DELETE FROM scores WHERE rowid <= (SELECT max(rowid) FROM scores) - ?", (self.max_entries,)
                )
            self.connection.commit()
            self.pending.clear()
        except sqlite3.Error as error:
            self._give_up(error)

    def close(self) -> None:
        self.flush()
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _give_up(self, error: Exception) -> None:
        logger.warning("The reward cache %s cannot be used (%s); scores are kept in memory only", self.path, error)
        self.connection = None
        self.pending.clear()


def _read_score(text: str) -> Score | None:
    """Return a stored score, or None if the entry is damaged."""
    try:
        value, reason, extracted = json.loads(text)
    except (ValueError, TypeError):
        return None
    score = coerce_reward(value)
    return None if isinstance(score, BadValue) else Score(score, reason, extracted)
