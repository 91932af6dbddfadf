"""The forward passes that a step makes, on whatever tensors the model holds: ours, TRL's, and a plain language model's.

Dimension legend: S packed tokens, N scored tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from trl_grpo_ext.learner.attention import AttentionLayout
from trl_grpo_ext.learner.packing import PackedRows, pack_batch
from trl_grpo_ext.learner.scoring import PackedRequest, enable_packed_forward, unwrap

Path = Literal["packed", "padded", "logits"]

# TRL's fused head works on tiles of so many tokens and vocabulary entries.
_TRL_TILE_TOKENS = 4096
_TRL_TILE_VOCABULARY = 32768


@dataclass(frozen=True)
class Rows:
    """The rows of one forward pass, all of the longest length that the settings allow.

    Attributes:
        per_prompt: For each distinct prompt, how many completions it has here.
        prompt_tokens: Length of every prompt.
        completion_tokens: Length of every completion.
    """

    per_prompt: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int

    @property
    def num_rows(self) -> int:
        """Completions."""
        return sum(self.per_prompt)

    @property
    def num_packed_tokens(self) -> int:
        """Tokens that enter the model where prompts are shared."""
        return len(self.per_prompt) * self.prompt_tokens + self.num_rows * (self.completion_tokens - 1)

    def pack(self) -> PackedRows:
        """Return the packed row that the learner would make of these rows."""
        width = self.prompt_tokens + self.completion_tokens
        prompts = np.repeat(np.arange(len(self.per_prompt)), self.per_prompt)
        input_ids = np.repeat(prompts[:, None], width, axis=1).astype(np.int64)
        (chunk,) = pack_batch(input_ids, np.ones_like(input_ids), self.completion_tokens)
        return chunk


def prepare(model: nn.Module, path: Path, attn_implementation: str) -> None:
    """Make the model ready for :func:`log_probs` on the given path."""
    base = unwrap(model)
    base.config._attn_implementation = attn_implementation
    if path == "packed":
        enable_packed_forward(base)


def log_probs(model: nn.Module, path: Path, rows: Rows) -> torch.Tensor:
    """Return a differentiable scalar that stands on the log-probabilities of the completions of ``rows``."""
    if path == "packed":
        return _packed(model, rows)
    if path == "padded":
        return _padded(model, rows)
    tokens = torch.zeros(rows.num_rows, rows.prompt_tokens + rows.completion_tokens, dtype=torch.long)
    outputs = model(input_ids=tokens, labels=tokens, use_cache=False)
    # Whoever calls a model for its loss holds the logits beside it until the backward is done.
    outputs.loss.logits = outputs.logits
    return outputs.loss


def prefill(model: nn.Module, rows: Rows, *, packed: bool, max_tokens: int = 4096) -> torch.Tensor:
    """Return the last hidden states of the prompts of ``rows``; without gradients, to be called so.

    Args:
        model: made ready by :func:`prepare`.
        rows: prompts of one generation batch.
        packed: True computes distinct prompts, at most ``max_tokens`` of them at a time; False every row, padded.
        max_tokens: see ``packed``.
    """
    base = unwrap(model)
    if not packed:
        tokens = torch.zeros(rows.num_rows, rows.prompt_tokens, dtype=torch.long)
        return base.base_model(input_ids=tokens, use_cache=False).last_hidden_state[:, -1]
    count = min(len(rows.per_prompt), max(1, max_tokens // rows.prompt_tokens))
    return _packed(model, Rows((1,) * count, rows.prompt_tokens, 1))


def _packed(model: nn.Module, rows: Rows) -> torch.Tensor:
    chunk = rows.pack()
    request = PackedRequest(
        AttentionLayout(chunk.segments),
        torch.from_numpy(chunk.source_N),
        torch.from_numpy(chunk.label_N),
        temperature=1.0,
        cast_lm_head_to_fp32=False,
        compute_entropy=True,
    )
    logps_N, _ = model(
        input_ids=torch.from_numpy(chunk.input_ids_S).unsqueeze(0),
        position_ids=torch.from_numpy(chunk.position_ids_S).unsqueeze(0),
        packed_request=request,
    )
    target_N = torch.from_numpy(chunk.target_N)
    scores = logps_N.new_zeros(rows.num_rows * rows.completion_tokens).index_copy(0, target_N, logps_N)
    return (scores * scores.detach().exp()).mean()


def _padded(model: nn.Module, rows: Rows) -> torch.Tensor:
    """Run TRL's path: every row with its prompt, padded, then its fused head on the completion tokens."""
    base = unwrap(model)
    length = rows.prompt_tokens + rows.completion_tokens
    tokens = torch.zeros(rows.num_rows, length, dtype=torch.long)
    # Batches with padding get a mask of their own for every row; without any, transformers makes none.
    mask = torch.ones(rows.num_rows, 1, length, length, dtype=torch.bool)
    hidden = base.base_model(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state[:, :-1]
    # On a GPU, TRL gathers the scored positions by a mask, whose result has a shape that only data tell.
    scored = torch.arange(rows.completion_tokens) + (rows.prompt_tokens - 1)
    hidden_NH = hidden.index_select(1, scored).reshape(-1, hidden.size(-1))
    head = base.get_output_embeddings()
    logps_N = _TiledHead.apply(hidden_NH, head.weight)
    scores = logps_N.view(rows.num_rows, -1)
    return (scores * scores.detach().exp()).mean()


class _TiledHead(torch.autograd.Function):
    """Allocate what TRL's fused head does where Triton is available (``trl.kernels.chunked_logprob``, 1.16).

    Seven float32 statistics per token and one tile of logits; the backward keeps float32 gradients and casts them.
    """

    @staticmethod
    def forward(ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden_NH.dtype
        num_tokens = hidden_NH.size(0)
        statistics = [hidden_NH.new_zeros(num_tokens, dtype=torch.float32) for _ in range(7)]
        tile = hidden_NH.new_empty(min(num_tokens, _TRL_TILE_TOKENS), _TRL_TILE_VOCABULARY, dtype=dtype)
        part = weight_VH[:_TRL_TILE_VOCABULARY].to(dtype)
        del tile, part
        log_norm = statistics[0] + statistics[1].log()
        logps = statistics[-1] - log_norm
        entropy = log_norm - statistics[2] / statistics[1]
        ctx.save_for_backward(hidden_NH, weight_VH, log_norm, entropy)
        ctx.dtype = dtype
        return logps

    @staticmethod
    def backward(ctx: Any, grad_logps: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        hidden_NH, weight_VH, _, _ = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad_hidden = hidden_NH.new_zeros(hidden_NH.shape, dtype=torch.float32) if needs[0] else None
        grad_weight = weight_VH.new_zeros(weight_VH.shape, dtype=torch.float32) if needs[1] else None
        tile = hidden_NH.new_empty(min(hidden_NH.size(0), _TRL_TILE_TOKENS), _TRL_TILE_VOCABULARY, dtype=ctx.dtype)
        part = weight_VH[:_TRL_TILE_VOCABULARY].to(ctx.dtype)
        del tile, part
        return (
            None if grad_hidden is None else grad_hidden.to(hidden_NH.dtype),
            None if grad_weight is None else grad_weight.to(weight_VH.dtype),
        )
