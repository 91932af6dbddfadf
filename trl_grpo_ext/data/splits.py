"""Cut rows into training and held-out rows that share no question."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from trl_grpo_ext.data.prompts import make_row, question_text
from trl_grpo_ext.data.sources import read_held_out_rows, read_rows
from trl_grpo_ext.data.spec import DataSpec
from trl_grpo_ext.errors import DataError

Row = dict[str, Any]


class SplitCounts(NamedTuple):
    """What happened to the rows, for the report.

    Attributes:
        read: rows of the training source.
        duplicates: rows left out because their question came before.
        conflicting: those of the duplicates whose answer differs from the one kept.
        train: training rows.
        held_out: held-out rows.
        removed_from_train: training rows left out because the separate held-out source asks the same.
    """

    read: int
    duplicates: int
    conflicting: int
    train: int
    held_out: int
    removed_from_train: int


class Splits(NamedTuple):
    """Disjoint rows.

    Attributes:
        train: rows with ``prompt`` and the columns rewards read.
        held_out: likewise.
        counts: what happened to the rows.
    """

    train: list[Row]
    held_out: list[Row]
    counts: SplitCounts


def load_splits(spec: DataSpec) -> Splits:
    """Read a source and return its disjoint splits.

    Raises:
        DataError: unreadable data, or nothing left to train on.
    """
    source = read_rows(spec)
    rows = [make_row(row, spec, f"row {number}") for number, row in enumerate(source, start=1)]
    separate = read_held_out_rows(spec)
    if separate is None:
        return split_rows(rows, spec.held_out, seed=spec.held_out_seed, deduplicate=spec.deduplicate)
    held_out = [make_row(row, spec, f"held-out row {number}") for number, row in enumerate(separate, start=1)]
    held_out, _, _ = drop_duplicates(held_out)
    return remove_held_out(rows, held_out, deduplicate=spec.deduplicate)


def split_rows(rows: Sequence[Row], held_out: int | float, *, seed: int = 0, deduplicate: bool = True) -> Splits:
    """Return training and held-out rows that share no question, whatever duplicates the data have.

    The held-out questions are those with the smallest sha256(seed, question), so the choice depends neither on the
    order of the rows nor on how many there are in front.

    Args:
        rows: rows with ``prompt``.
        held_out: number of held-out questions (int) or share of the questions (float in [0, 1)).
        seed: salt of the hash.
        deduplicate: True keeps the first row of each question in training; held-out rows are always distinct.

    Raises:
        DataError: if the held-out part would leave nothing to train on.
    """
    distinct, duplicates, conflicting = drop_duplicates(rows)
    wanted = round(held_out * len(distinct)) if isinstance(held_out, float) else held_out
    if wanted >= len(distinct):
        raise DataError(
            f"data.held_out asks for {wanted} held-out questions, but there are only {len(distinct)} different ones "
            f"({len(rows)} rows); lower it, or provide more rows"
        )
    keys = [question_text(row["prompt"]) for row in distinct]
    order = sorted(range(len(keys)), key=lambda index: _hash(keys[index], seed))
    chosen = {keys[index] for index in order[:wanted]}
    test = [row for row, key in zip(distinct, keys, strict=True) if key in chosen]
    pool = distinct if deduplicate else rows
    train = [row for row in pool if question_text(row["prompt"]) not in chosen]
    dropped = (duplicates, conflicting) if deduplicate else (0, 0)
    return _checked(Splits(train, test, SplitCounts(len(rows), *dropped, len(train), len(test), 0)))


def remove_held_out(rows: Sequence[Row], held_out: Sequence[Row], *, deduplicate: bool = True) -> Splits:
    """Return the rows without the questions of a separate held-out set, and that set.

    Raises:
        DataError: if nothing is left to train on.
    """
    pool, duplicates, conflicting = drop_duplicates(rows) if deduplicate else (list(rows), 0, 0)
    taken = {question_text(row["prompt"]) for row in held_out}
    train = [row for row in pool if question_text(row["prompt"]) not in taken]
    if not train:
        raise DataError("data: every training question is also in the held-out set, so nothing is left to train on")
    counts = SplitCounts(len(rows), duplicates, conflicting, len(train), len(held_out), len(pool) - len(train))
    return _checked(Splits(train, list(held_out), counts))


def drop_duplicates(rows: Sequence[Row]) -> tuple[list[Row], int, int]:
    """Return (first row of each question, rows dropped, dropped rows whose answer differs from the one kept)."""
    kept: dict[str, Row] = {}
    conflicting = 0
    for row in rows:
        first = kept.setdefault(question_text(row["prompt"]), row)
        conflicting += first.get("answer") != row.get("answer")
    return list(kept.values()), len(rows) - len(kept), conflicting


def _hash(text: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}\0{text}".encode()).digest()


def _checked(splits: Splits) -> Splits:
    """Return the splits after proving that no question is in both."""
    train = {question_text(row["prompt"]) for row in splits.train}
    shared = [row for row in splits.held_out if question_text(row["prompt"]) in train]
    assert not shared, f"{len(shared)} questions are in both splits"
    return splits


def to_dataset(rows: Sequence[Row]) -> Any:
    """Return a ``datasets.Dataset``; columns with dictionaries are stored as JSON, so that each row keeps its own keys.

    Arrow would give every dictionary of a column the union of all keys, filled with None.

    Raises:
        DataError: if a column mixes types that cannot be stored together.
    """
    import datasets
    import pyarrow

    names = list(dict.fromkeys(name for row in rows for name in row))
    table = {name: [row.get(name) for row in rows] for name in names}
    nested = [
        name for name in names if name != "prompt" and any(isinstance(_first(value), dict) for value in table[name])
    ]
    try:
        plain = datasets.Dataset.from_dict({name: table[name] for name in names if name not in nested})
        if not nested:
            return plain
        features = datasets.Features({**plain.features, **{name: datasets.Json() for name in nested}})
        return datasets.Dataset.from_dict({name: table[name] for name in features}, features=features)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, TypeError) as error:
        raise DataError(
            f"data: a column mixes types: {str(error).splitlines()[0]}; make each column one type"
        ) from error


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value
