"""Read rows from local files and from the hub, as plain dictionaries.

CSV cells stay text: a type guess would turn the gold answers ``007`` and ``1.50`` into other answers.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trl_grpo_ext.data import gym
from trl_grpo_ext.data.spec import DataSpec
from trl_grpo_ext.errors import DataError, MissingDependencyError, nearest

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")


def read_rows(spec: DataSpec) -> list[Row]:
    """Return the rows of the source, at most ``spec.limit`` of them.

    Raises:
        DataError: a missing, empty or malformed file, or a hub data set that cannot be loaded.
        MissingDependencyError: reasoning-gym is not installed.
    """
    if spec.task is not None:
        return gym.make_rows(spec.task, spec.params, spec.size if spec.limit is None else spec.limit, spec.seed)
    if spec.hub is not None:
        return _read_hub(spec, spec.split, spec.limit)
    return _read_files(spec.files, spec.limit)


def read_held_out_rows(spec: DataSpec) -> list[Row] | None:
    """Return the rows of the separate held-out source, or None if the held-out rows come from the training source."""
    if spec.held_out_files:
        return _read_files(spec.held_out_files, None)
    if spec.held_out_split is not None:
        return _read_hub(spec, spec.held_out_split, None)
    return None


def peek_columns(spec: DataSpec) -> list[str] | None:
    """Return the columns of the first row without reading the rest; None where that needs the network."""
    if spec.task is not None:
        return list(gym.COLUMNS)
    if spec.hub is not None:
        return None
    if spec.files[0].suffix.lower() == ".parquet":
        return list(_parquet_schema_names(spec.files[0]))
    return list(_read_files(spec.files[:1], 1)[0])


def _read_files(files: tuple[Path, ...], limit: int | None) -> list[Row]:
    rows = list(itertools.islice(itertools.chain.from_iterable(_iterate(path) for path in files), limit))
    if not rows:
        raise DataError(f"data: {', '.join(map(str, files))} holds no rows")
    return rows


def _iterate(path: Path) -> Iterator[Row]:
    readers = {
        ".jsonl": _iterate_jsonl,
        ".ndjson": _iterate_jsonl,
        ".json": _iterate_json,
        ".csv": _iterate_csv,
        ".tsv": _iterate_csv,
        ".parquet": _iterate_parquet,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"data: {path} ends in {path.suffix!r}; known endings are {', '.join(SUFFIXES)}")
    try:
        yield from reader(path)
    except FileNotFoundError as error:
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(f"data: there is no file {str(path)!r}.{nearest(path.name, siblings)}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"data: {path} is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise DataError(f"data: cannot read {str(path)!r}: {error.strerror or error}") from error


def _iterate_jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _object(_decode(line, f"{path}, line {number}"), f"{path}, line {number}")


def _iterate_json(path: Path) -> Iterator[Row]:
    """Yield the objects of one JSON array; a file of one object per line is read as JSONL whatever its ending."""
    with path.open(encoding="utf-8-sig") as file:
        head = file.read(1024).lstrip()
    if not head.startswith("["):
        yield from _iterate_jsonl(path)
        return
    for number, value in enumerate(_decode(path.read_text(encoding="utf-8-sig"), str(path)), start=1):
        yield _object(value, f"{path}, item {number}")


def _decode(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"data: {where}: not valid JSON: {error.msg} (column {error.colno})") from error


def _object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"data: {where}: a {type(value).__name__}; every row must be an object of columns")
    return value


def _iterate_csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # the default of 128 KiB refuses long documents
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise DataError(
                        f"data: {path}, line {reader.line_num}: the number of cells differs from the header's "
                        f"{len(reader.fieldnames or [])}"
                    )
                yield row
        except csv.Error as error:
            raise DataError(f"data: {path}, line {reader.line_num}: not valid CSV: {error}") from error


def _iterate_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"data: {path} is not a Parquet file: {str(error).splitlines()[0]}") from error


def _parquet_schema_names(path: Path) -> list[str]:
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        return parquet.read_schema(path).names
    except FileNotFoundError as error:
        raise DataError(f"data: there is no file {str(path)!r}") from error
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"data: {path} is not a Parquet file: {str(error).splitlines()[0]}") from error


def _read_hub(spec: DataSpec, split: str, limit: int | None) -> list[Row]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingDependencyError("data: a hub data set needs datasets; run: pip install datasets") from error
    try:
        dataset = load_dataset(spec.hub, spec.config, split=split, revision=spec.revision)
    except Exception as error:  # the hub client raises many kinds; each is one cause for the reader: it did not load
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"data: cannot load {spec.hub!r} (config {spec.config!r}, split {split!r}): {reason}"
        ) from error
    if limit is not None:
        dataset = dataset.select(range(min(limit, len(dataset))))
    rows: list[Row] = dataset.to_list()
    if not rows:
        raise DataError(f"data: split {split!r} of {spec.hub!r} holds no rows")
    return rows
