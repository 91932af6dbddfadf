"""Check what a script hands to ``step`` and lay it out as TRL's loss takes it.

Dimensions: ``B`` rows of this process, ``P`` prompt tokens, ``T`` response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from trl_grpo_ext.compat.sampling import left_padded, right_padded
from trl_grpo_ext.errors import ConfigurationError


class StepInputs(NamedTuple):
    """Clean arguments of one ``step``: ids as lists, scores as floats, masks as lists of 0 and 1 or None."""

    queries: list[list[int]]
    responses: list[list[int]]
    scores: list[float]
    masks: list[list[int]] | None


def check_step_inputs(batch_size: int, queries: Any, responses: Any, scores: Any, masks: Any = None) -> StepInputs:
    """Return the arguments of ``step`` as plain lists.

    Args:
        batch_size: Rows expected.
        queries: B token id tensors or lists.
        responses: B token id tensors or lists.
        scores: B numbers: floats, tensors of one element, or one (B,) tensor.
        masks: B masks over the responses, 1 for tokens to learn from, or None.

    Raises:
        ConfigurationError: naming the list and what was expected.
    """
    named = {"queries": queries, "responses": responses, "scores": scores}
    if masks is not None:
        named["response_masks"] = masks
    for name, values in named.items():
        if (isinstance(values, torch.Tensor) and values.ndim == 0) or not hasattr(values, "__len__"):
            raise ConfigurationError(f"{name} must be a list of {batch_size}, got {type(values).__name__}.")
        if len(values) == batch_size:
            continue
        if len(values) == 1:
            raise ConfigurationError(
                "Group-relative advantages need at least two responses per prompt, but step got one sample; the batch "
                f"size is {batch_size}. Repeat the query, or iterate trainer.dataloader."
            )
        raise ConfigurationError(
            f"Batch size ({batch_size}) does not match number of examples - but got {len(values)} for: {name}. Pass "
            f"{batch_size} per process."
        )
    rows = StepInputs(
        [_ids(value, "queries") for value in queries],
        [_ids(value, "responses") for value in responses],
        [_score(value) for value in scores],
        None if masks is None else [[int(bool(x)) for x in _ids(value, "response_masks")] for value in masks],
    )
    for index, response in enumerate(rows.responses):
        if not response:
            raise ConfigurationError(f"responses[{index}] is empty; a response needs at least one token.")
        if rows.masks is not None and len(rows.masks[index]) != len(response):
            raise ConfigurationError(
                f"response_masks[{index}] has {len(rows.masks[index])} entries, responses[{index}] has {len(response)}."
            )
    return rows


def build_batch(rows: StepInputs, pad_token_id: int, device: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that TRL's loss takes: prompts (B, P) padded left, responses (B, T) padded right."""
    prompt_ids, prompt_mask = left_padded(rows.queries, pad_token_id, device)
    completion_ids, completion_mask = right_padded(rows.responses, pad_token_id, device)
    batch = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
    }
    if rows.masks is not None:
        batch["tool_mask"], _ = right_padded(rows.masks, 0, device)
    return batch


def select_rows(batch: dict[str, torch.Tensor], rows: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return rows of ``batch``, cut to the longest response among them."""
    index = torch.as_tensor(rows, device=batch["completion_ids"].device)
    chosen = {name: value[index] if value.ndim else value for name, value in batch.items()}
    width = max(int(chosen["completion_mask"].sum(dim=1).max()), 1)
    prompt = max(int(chosen["prompt_mask"].sum(dim=1).max()), 1)
    for name in ("completion_ids", "completion_mask", "tool_mask", "old_per_token_logps"):
        if name in chosen:
            chosen[name] = chosen[name][:, :width]
    for name in ("prompt_ids", "prompt_mask"):
        chosen[name] = chosen[name][:, -prompt:]
    return chosen


def _ids(value: Any, name: str) -> list[int]:
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple):
        raise ConfigurationError(
            f"Elements of {name} must be tensors or lists of token ids, got {type(value).__name__}."
        )
    if value and isinstance(value[0], list | tuple):
        if len(value) != 1:
            raise ConfigurationError(f"An element of {name} holds {len(value)} rows; pass one tensor per sample.")
        value = value[0]
    return [int(x) for x in value]


def _score(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ConfigurationError(
                f"Scores must be one number per sample, got a tensor of shape {tuple(value.shape)}."
            )
        return float(value.item())
    return float(value)
