"""Layout of a padded batch as packed rows: each distinct prompt once, every completion behind it, no padding.

Pure functions on host arrays. Dimension legend: B rows, W prompt columns, T completion columns, S packed tokens,
N scored tokens (the completion tokens that the attention mask keeps).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class IrregularRowsError(ValueError):
    """The mask of a row has holes, or a prompt is empty: such rows cannot be packed exactly."""


class Segment(NamedTuple):
    """A run of packed tokens that attends to itself causally, and to all of its prefix if it has one."""

    start: int
    length: int
    prefix: int = -1
    """Index of the segment that holds the prompt, or -1 where this segment starts its own sequence."""


class Unit(NamedTuple):
    """Rows that share one copy of their prompt."""

    rows: tuple[int, ...]
    prompt_length: int
    completion_lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that enter the model: the last token of a completion predicts nothing and stays out."""
        return self.prompt_length + sum(max(length - 1, 0) for length in self.completion_lengths)


class PackedRows(NamedTuple):
    """One packed row, and where its results belong."""

    input_ids_S: np.ndarray
    position_ids_S: np.ndarray
    """The token's column in the padded batch: the position that the padded forward gives it."""
    segments: tuple[Segment, ...]
    source_N: np.ndarray
    """Packed position that predicts each scored token; a prompt's last position serves all its completions."""
    label_N: np.ndarray
    target_N: np.ndarray
    """Index of each scored token in the flattened (B, T) result."""


def pack_batch(
    input_ids: np.ndarray,
    attention_mask: np.ndarray,
    num_completion_columns: int,
    *,
    min_token_ratio: float = 1.2,
    max_packed_tokens: int | None = None,
) -> list[PackedRows]:
    """Return the packed rows that hold everything needed to score the completions of a padded batch.

    Rows need not be adjacent to share a prompt. A group shares its prompt if its rows on their own hold at least
    ``min_token_ratio`` times as many tokens; that ratio is at most G (P + T) / (P + G T) (Prefix Grouper, 2506.05433,
    section 3). Below it, the rows are merely unpadded.

    Args:
        input_ids: (B, W + T) token ids.
        attention_mask: (B, W + T), 1 for tokens; prompts end at column W, completions start there.
        num_completion_columns: T.
        min_token_ratio: 1 shares whenever two rows have the same prompt, infinity never.
        max_packed_tokens: most tokens in one packed row; a group that exceeds it is split and its prompt repeated, and
            a single row longer than it stands alone. None means no limit.

    Returns:
        At least one packed row. Where no row has a completion, one without scored tokens, so that a model that is
        sharded over processes still runs.

    Raises:
        IrregularRowsError: if a mask has holes or a prompt is empty.
    """
    prompt_lengths, completion_lengths = _measure_rows(attention_mask, num_completion_columns)
    units = _group_rows(input_ids, prompt_lengths, completion_lengths, num_completion_columns, min_token_ratio)
    chunks = _fill_chunks(units, max_packed_tokens)
    return [_lay_out(chunk, input_ids, num_completion_columns) for chunk in chunks]


def _measure_rows(attention_mask: np.ndarray, num_completion_columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the (B,) prompt lengths and the (B,) completion lengths of a padded batch."""
    mask = attention_mask.astype(bool)
    width = mask.shape[1] - num_completion_columns
    prompt, completion = mask[:, :width], mask[:, width:]
    has_hole = (prompt[:, 1:] < prompt[:, :-1]).any(1)
    if has_hole.any():
        raise IrregularRowsError(f"the prompt of row {int(np.argmax(has_hole))} is not padded on the left only")
    has_hole = (completion[:, 1:] > completion[:, :-1]).any(1)
    if has_hole.any():
        raise IrregularRowsError(f"the completion of row {int(np.argmax(has_hole))} is not padded on the right only")
    prompt_lengths = prompt.sum(1)
    if (prompt_lengths == 0).any():
        raise IrregularRowsError(f"the prompt of row {int(np.argmin(prompt_lengths))} is empty")
    return prompt_lengths, completion.sum(1)


def _group_rows(
    input_ids: np.ndarray,
    prompt_lengths: np.ndarray,
    completion_lengths: np.ndarray,
    num_completion_columns: int,
    min_token_ratio: float,
) -> list[Unit]:
    """Return the rows that have a completion as units, in the order of each unit's first row."""
    width = input_ids.shape[1] - num_completion_columns
    rows_of_prompt: dict[bytes, list[int]] = {}
    for row in np.flatnonzero(completion_lengths):
        prompt = input_ids[row, width - prompt_lengths[row] : width]
        rows_of_prompt.setdefault(prompt.tobytes(), []).append(int(row))
    if not rows_of_prompt:
        return [Unit((0,), int(prompt_lengths[0]), (0,))]  # so that every process of a sharded model runs it
    units = []
    for rows in rows_of_prompt.values():
        prompt_length = int(prompt_lengths[rows[0]])
        shared = Unit(tuple(rows), prompt_length, tuple(int(completion_lengths[row]) for row in rows))
        num_tokens_alone = shared.num_tokens + (len(rows) - 1) * prompt_length
        if num_tokens_alone >= min_token_ratio * shared.num_tokens:
            units.append(shared)
        else:
            units.extend(Unit((row,), prompt_length, (int(completion_lengths[row]),)) for row in rows)
    return sorted(units, key=lambda unit: unit.rows[0])


def _fill_chunks(units: list[Unit], max_packed_tokens: int | None) -> list[list[Unit]]:
    """Return the units in chunks of at most ``max_packed_tokens``, splitting a group only if it exceeds a chunk."""
    if max_packed_tokens is None:
        return [units]
    chunks: list[list[Unit]] = [[]]
    used = 0
    for unit in units:
        for part in _split_unit(unit, max_packed_tokens):
            if chunks[-1] and used + part.num_tokens > max_packed_tokens:
                chunks.append([])
                used = 0
            chunks[-1].append(part)
            used += part.num_tokens
    return chunks


def _split_unit(unit: Unit, max_packed_tokens: int) -> list[Unit]:
    """Return the unit in parts of at most ``max_packed_tokens``, each with the prompt; a part has one row at least."""
    parts: list[Unit] = []
    for row, length in zip(unit.rows, unit.completion_lengths, strict=True):
        if parts:
            longer = Unit((*parts[-1].rows, row), unit.prompt_length, (*parts[-1].completion_lengths, length))
            if longer.num_tokens <= max_packed_tokens:
                parts[-1] = longer
                continue
        parts.append(Unit((row,), unit.prompt_length, (length,)))
    return parts


def _lay_out(units: list[Unit], input_ids: np.ndarray, num_completion_columns: int) -> PackedRows:
    """Return the packed row of some units: prompt, its completions, next prompt, …; a row alone is one segment."""
    width = input_ids.shape[1] - num_completion_columns
    tokens, positions, sources, labels, targets = [], [], [], [], []
    segments: list[Segment] = []
    used = 0

    def add(row: int, first_column: int, end_column: int, prefix: int) -> None:
        nonlocal used
        if end_column > first_column:
            segments.append(Segment(used, end_column - first_column, prefix))
            tokens.append(input_ids[row, first_column:end_column])
            positions.append(np.arange(first_column, end_column))
            used += end_column - first_column

    for unit in units:
        prompt_segment, end_of_prompt = len(segments), used + unit.prompt_length
        is_alone = len(unit.rows) == 1
        if not is_alone:
            add(unit.rows[0], width - unit.prompt_length, width, -1)
        for row, length in zip(unit.rows, unit.completion_lengths, strict=True):
            num_fed = max(length - 1, 0)
            start = end_of_prompt if is_alone else used
            if is_alone:
                add(row, width - unit.prompt_length, width + num_fed, -1)
            else:
                add(row, width, width + num_fed, prompt_segment)
            sources.append(np.concatenate([[end_of_prompt - 1], np.arange(start, start + num_fed)])[:length])
            labels.append(input_ids[row, width : width + length])
            targets.append(row * num_completion_columns + np.arange(length))
    return PackedRows(
        np.concatenate(tokens),
        np.concatenate(positions),
        tuple(segments),
        np.concatenate(sources).astype(np.int64),
        np.concatenate(labels),
        np.concatenate(targets).astype(np.int64),
    )
