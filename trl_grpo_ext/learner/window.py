"""The rollouts of one optimiser step, and what is already known about each row.

Dimensions: ``B`` rows, ``P`` prompt tokens, ``T`` completion tokens.

TRL computes its loss on micro-batches of ``per_device_train_batch_size`` rows, and several loss types normalise within
one. To forward *other* micro-batches and still get TRL's gradient, the window keeps TRL's micro-batches as they are:
a loss is always evaluated on a whole TRL micro-batch, in which only the rows that were just forwarded carry a gradient.
Summed over the forwarded micro-batches this is the gradient of TRL's loss, whatever the loss type or normaliser.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad as pad_last

from trl_grpo_ext.learner.micro_batches import Row

Batch = dict[str, Any]

# Keys of a micro-batch with a completion-token dimension, and what fills the positions beyond a row's own width.
_PER_TOKEN_FILL = {
    "completion_ids": 0,
    "completion_mask": 0,
    "tool_mask": 1,
    "old_per_token_logps": 0.0,
    "ref_per_token_logps": 0.0,
    "sampling_per_token_logps": 0.0,
    "importance_sampling_ratio": 1.0,
    "advantages": 0.0,
}


class Scores(NamedTuple):
    """Log-probabilities and entropies of completion tokens, both (B, T); gradient flows if the forward kept it."""

    logps: torch.Tensor
    entropies: torch.Tensor


class RolloutWindow:
    """Hold TRL's micro-batches of one optimiser step until the last of them arrives.

    Attributes:
        batches: TRL's micro-batches, each a dict of tensors with the row as first dimension.
        accumulation_steps: For each micro-batch, the number TRL divides its loss by.
    """

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.accumulation_steps: list[int] = []
        self._known: list[Scores] = []

    def add(self, batch: Batch, accumulation_steps: int) -> None:
        """Append a micro-batch; until its rows are forwarded they stand on the log-probs they were sampled with."""
        self.batches.append(batch)
        self.accumulation_steps.append(accumulation_steps)
        self._known.append(_stand_in(batch))

    def forget_scores(self) -> None:
        """Forget what forward passes gave, as if none had been made."""
        self._known = [_stand_in(batch) for batch in self.batches]

    def clear(self) -> None:
        """Forget everything; called once the gradients are in place."""
        self.batches.clear()
        self.accumulation_steps.clear()
        self._known.clear()

    def rows(self) -> tuple[list[Row], list[Row]]:
        """Return the rows to forward, and the rows of dead groups, which have no gradient."""
        alive: list[Row] = []
        dead: list[Row] = []
        for number, batch in enumerate(self.batches):
            prompt_tokens = batch["prompt_mask"].sum(1).tolist()
            completion_tokens = batch["completion_mask"].sum(1).tolist()
            count = len(prompt_tokens)
            groups = batch["group_index"].tolist() if "group_index" in batch else [-1] * count
            is_dead = batch["is_dead"].tolist() if "is_dead" in batch else [False] * count
            for i in range(count):
                # A row without a group, as a subclass may make it, is a group of its own.
                group = groups[i] if groups[i] >= 0 else -1 - (number * count + i)
                row = Row(number, i, group, int(prompt_tokens[i]), int(completion_tokens[i]))
                (dead if is_dead[i] else alive).append(row)
        return alive, dead

    def select(self, rows: Sequence[Row]) -> Batch:
        """Return ``prompt_ids``, ``prompt_mask`` (R, P) and ``completion_ids``, ``completion_mask`` (R, T) of ``rows``.

        P and T are the longest prompt and completion among them: prompts are cut on the left, completions on the right.
        """
        prompt_width = max(max(row.prompt_tokens for row in rows), 1)
        completion_width = max(max(row.completion_tokens for row in rows), 1)
        parts: dict[str, list[torch.Tensor]] = {}
        for row in rows:
            batch = self.batches[row.batch]
            for name in ("prompt_ids", "prompt_mask"):
                parts.setdefault(name, []).append(_fit(batch[name][row.position], prompt_width, left=True))
            for name in ("completion_ids", "completion_mask"):
                parts.setdefault(name, []).append(_fit(batch[name][row.position], completion_width))
        return {name: torch.stack(tensors) for name, tensors in parts.items()}

    def keep(self, rows: Sequence[Row], scores: Scores) -> None:
        """Remember the values, without gradient, that a forward pass over ``rows`` gave."""
        for i, row in enumerate(rows):
            for known, new in zip(self._known[row.batch], scores, strict=True):
                width = min(known.size(1), new.size(1))
                known[row.position, :width] = new[i, :width].detach().to(known.dtype)

    def scores_with(self, number: int, rows: Sequence[Row], scores: Scores) -> Scores:
        """Return the scores (B, T) of TRL's micro-batch ``number``, with gradient for those of its rows in ``rows``."""
        here = [(i, row) for i, row in enumerate(rows) if row.batch == number]
        source = torch.tensor([i for i, _ in here], device=scores.logps.device)
        target = torch.tensor([row.position for _, row in here], device=scores.logps.device)
        known = self._known[number]
        return Scores(*(_replace_rows(old, target, new[source]) for old, new in zip(known, scores, strict=True)))

    def known(self, number: int) -> Scores:
        """Return the values (B, T), without gradient, known of TRL's micro-batch ``number``."""
        return self._known[number]

    def union(self, skipped: Sequence[Row]) -> tuple[Batch, Scores]:
        """Return all rows as one batch, the ``skipped`` ones masked out, for metrics over the whole window."""
        width = max(batch["completion_ids"].size(1) for batch in self.batches)
        prompt_width = max(batch["prompt_ids"].size(1) for batch in self.batches)
        joined: Batch = {}
        for name, value in self.batches[0].items():
            if not isinstance(value, torch.Tensor) or value.ndim == 0:
                joined[name] = value
                continue
            tensors = [batch[name] for batch in self.batches]
            if name in ("prompt_ids", "prompt_mask"):
                tensors = [_fit(t, prompt_width, left=True) for t in tensors]
            elif name in _PER_TOKEN_FILL and value.ndim == 2 and value.size(1) > 1:
                tensors = [_fit(t, width, fill=_PER_TOKEN_FILL[name]) for t in tensors]
            joined[name] = torch.cat(tensors)
        if skipped:
            size = self.batches[0]["completion_ids"].size(0)
            joined["completion_mask"] = joined["completion_mask"].clone()
            joined["completion_mask"][[row.batch * size + row.position for row in skipped]] = 0
        scores = Scores(*(torch.cat([_fit(t, width) for t in kind]) for kind in zip(*self._known, strict=True)))
        return joined, scores


def _stand_in(batch: Batch) -> Scores:
    """Return scores (B, T) for rows that no forward pass of the window has reached yet."""
    filler = batch.get("old_per_token_logps", batch.get("ref_per_token_logps"))
    completion_ids = batch["completion_ids"]
    logps = filler.clone() if filler is not None else torch.zeros(completion_ids.shape, device=completion_ids.device)
    return Scores(logps, torch.zeros_like(logps))


def _fit(tensor: torch.Tensor, width: int, *, left: bool = False, fill: float = 0) -> torch.Tensor:
    """Return ``tensor`` cut or padded in its last dimension to ``width``, on the left or on the right."""
    missing = width - tensor.size(-1)
    if missing > 0:
        return pad_last(tensor, (missing, 0) if left else (0, missing), value=fill)
    return tensor[..., -missing:] if left else tensor[..., :width]


def _replace_rows(old: torch.Tensor, index: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return ``old`` (B, T) with rows ``index`` replaced by ``new`` (R, t), brought to width T; gradient to ``new``."""
    dtype = torch.promote_types(old.dtype, new.dtype)
    return old.to(dtype).index_copy(0, index, _fit(new, old.size(1)).to(dtype))
