"""Sample responses for given prompt ids, outside TRL's training loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from trl.models import unwrap_model_for_generation


def left_padded(rows: Sequence[Sequence[int]], fill: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask, both (B, L), of ``rows`` padded on the left with ``fill``."""
    width = max(max((len(row) for row in rows), default=0), 1)
    ids = torch.tensor([[fill] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask


def right_padded(rows: Sequence[Sequence[int]], fill: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and mask, both (B, L), of ``rows`` padded on the right with ``fill``."""
    width = max(max((len(row) for row in rows), default=0), 1)
    ids = torch.tensor([list(row) + [fill] * (width - len(row)) for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    return ids, mask


def cut_after_first(ids: Sequence[int], ends: Iterable[int]) -> list[int]:
    """Return ``ids`` up to and including the first id in ``ends``; all of them where none occurs."""
    stops = set(ends)
    for index, token in enumerate(ids):
        if token in stops:
            return list(ids[: index + 1])
    return list(ids)


@torch.no_grad()
def sample_responses(
    trainer: Any,
    prompts: Sequence[Sequence[int]],
    generation_kwargs: dict[str, Any],
    *,
    rows_per_call: int,
    ends: Iterable[int] = (),
    model: Any = None,
) -> list[list[int]]:
    """Return one response, as token ids without padding, for each prompt.

    Args:
        trainer: A built trainer; its model is used unless ``model`` is given.
        prompts: B lists of token ids.
        generation_kwargs: For ``generate``; a callable value is called once per call of ``generate``.
        rows_per_call: Most rows per call.
        ends: Ids after whose first occurrence a response is cut.
        model: Another model to sample from.
    """
    device, pad = trainer.accelerator.device, trainer._tokenizer.pad_token_id
    fixed = {name: value for name, value in generation_kwargs.items() if not callable(value)}
    responses: list[list[int]] = []
    with unwrap_model_for_generation(
        trainer.model_wrapped,
        trainer.accelerator,
        gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
        generation_kwargs=fixed,
        gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
    ) as policy:
        sampler = policy if model is None else trainer.accelerator.unwrap_model(model)
        for start in range(0, len(prompts), max(rows_per_call, 1)):
            rows = prompts[start : start + max(rows_per_call, 1)]
            drawn = {name: value() for name, value in generation_kwargs.items() if callable(value)}
            ids, mask = left_padded(rows, pad, device)
            output = sampler.generate(input_ids=ids, attention_mask=mask, **{"pad_token_id": pad, **fixed, **drawn})
            responses += [cut_after_first(row, ends) for row in output[:, ids.size(1) :].tolist()]
    return responses
