"""Read the data sets of PPO scripts: ids only, Python lists, torch data sets, padded tensors.

PPO fed ``input_ids`` and looked at nothing else, so ids that are there are fed unchanged: decoding and tokenising again
would double BOS and undo a chat template that the script applied. Text is for reward functions and tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset

from trl_grpo_ext.errors import DataError

TEXT_COLUMNS = ("prompt", "query")
_MODEL_COLUMNS = frozenset({"attention_mask", "token_type_ids", "special_tokens_mask"})


def strip_padding(
    ids: Any, mask: Any = None, *, pad_token_id: int | None = None, eos_token_id: int | None = None
) -> list[int]:
    """Return the token ids of one prompt without its padding.

    Args:
        ids: List, array or tensor of shape (L,) or (1, L).
        mask: Attention mask of the same shape; where given it alone decides.
        pad_token_id: Leading and trailing ids equal to it are padding; only leading ones when it is also EOS, which a
            prompt may end with.
        eos_token_id: The end token.

    Raises:
        DataError: if ``ids`` holds more than one row.
    """
    row = _as_row(ids)
    if mask is not None:
        return [token for token, keep in zip(row, _as_row(mask), strict=True) if keep]
    if pad_token_id is None:
        return row
    start, end = 0, len(row)
    while start < end and row[start] == pad_token_id:
        start += 1
    while pad_token_id != eos_token_id and end > start and row[end - 1] == pad_token_id:
        end -= 1
    return row[start:end]


def prepare_prompts(dataset: Any, tokenizer: Any) -> Any:
    """Return ``dataset`` as the trainer takes it: a ``prompt`` column and, where there were ids, ``input_ids``.

    Args:
        dataset: HF data set (map-style or streamed), any object with ``len`` and indexing, or None. A row is a mapping
            with ``prompt``, ``query`` or ``input_ids``, or a plain text.
        tokenizer: Decodes ids for display; its pad and EOS ids say what padding is.

    Raises:
        DataError: if no usable column is there, or a row is not a mapping.
    """
    if dataset is None:
        return None
    if isinstance(dataset, DatasetDict | dict):
        return {name: prepare_prompts(split, tokenizer) for name, split in dataset.items()}
    if isinstance(dataset, Dataset | IterableDataset):
        dataset = dataset.with_format(None)
        columns = dataset.column_names or list(next(iter(dataset), {}))
        _check_columns(columns)
        if columns and "input_ids" not in columns and "prompt" in columns:
            return dataset
        dropped = [name for name in columns if name in _MODEL_COLUMNS]
        return dataset.map(lambda row: prepare_row(row, tokenizer), remove_columns=dropped)
    rows = [dataset[index] for index in range(len(dataset))]
    return Dataset.from_list([prepare_row(row, tokenizer) for row in rows])


def prepare_row(row: Any, tokenizer: Any) -> dict[str, Any]:
    """Return one row with ``prompt`` (for display, or to be tokenised) and, where it had ids, clean ``input_ids``."""
    if isinstance(row, str):
        return {"prompt": row}
    if not isinstance(row, Mapping):
        raise DataError(f"A row of the data set is a {type(row).__name__}; it must be a mapping or a text.")
    _check_columns(list(row))
    clean = {name: _plain(value) for name, value in row.items() if name not in _MODEL_COLUMNS}
    if "input_ids" in row:
        clean["input_ids"] = strip_padding(
            row["input_ids"],
            row.get("attention_mask"),
            pad_token_id=getattr(tokenizer, "pad_token_id", None),
            eos_token_id=getattr(tokenizer, "eos_token_id", None),
        )
    if "prompt" not in clean:
        text = clean.get("query")
        clean["prompt"] = text if isinstance(text, str) else tokenizer.decode(clean["input_ids"])
    if isinstance(clean["prompt"], list) and "input_ids" in clean:
        # Messages whose template was applied already: TRL would apply it again, and the ids are what is fed.
        clean["prompt"] = tokenizer.decode(clean["input_ids"])
    return clean


def _check_columns(columns: Sequence[str]) -> None:
    if columns and not {"prompt", "query", "input_ids"} & set(columns):
        raise DataError(f"The data set needs a column prompt, query or input_ids; found {sorted(columns)}.")


def _as_row(values: Any) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    if values and isinstance(values[0], list | tuple):
        if len(values) != 1:
            raise DataError(f"input_ids of one row hold {len(values)} sequences; use one row per prompt.")
        values = list(values[0])
    return [int(value) for value in values]


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
