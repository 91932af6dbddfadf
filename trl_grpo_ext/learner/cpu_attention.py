"""Attention over packed rows on the CPU: plain matrix products over tiles of queries that fit the caches.

PyTorch's flash kernel for CPUs works on 32 queries at a time where they are short, as completions are, on the whole
square where it is causal, and wants a prompt's keys again for each completion. Here the query heads that share a key
head are rows of one product, and a block of queries meets no key behind its last. Nothing but queries, keys and values
is kept for the backward pass, which computes the weights again, tile by tile: the saving of FlashAttention
(2205.14135, section 3.1), with tiles as long as all keys, so that a softmax over them is final and no log-sum-exp has
to be joined. The tiles come from ``cpu_tiles``.

Dimension legend: S packed tokens, K key heads, R query heads of one key head, D size of a head (of values, D_v),
C runs of L tokens in a tile, B = C x K products in one call, N keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from trl_grpo_ext.learner.cpu_tiles import Batch, Family, Tile, plan_families
from trl_grpo_ext.learner.device import takes_cpu_path
from trl_grpo_ext.learner.packing import Segment


def can_run(query: torch.Tensor, num_keys: int, sliding_window: int | None, softcap: float | None) -> bool:
    """Return whether ``attend`` computes this attention: on a CPU, with neither a cap nor a window that cuts keys.

    Args:
        query: of the attention.
        num_keys: most keys that a token has, itself included.
        sliding_window: columns that a token sees, or None.
        softcap: of the scores, or None.
    """
    return (
        takes_cpu_path(query.device)
        and softcap is None
        and (sliding_window is None or sliding_window >= num_keys)
        and hasattr(torch, "_softmax_backward_data")  # no public function has this gradient in one pass
    )


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: tuple[Segment, ...],
    scaling: float | None,
    out_dtype: torch.dtype,
    plans: dict[Any, Any],
) -> torch.Tensor:
    """Return (1, S, H, D_v), the attention of one packed row, computed in float32 (float64 if the query is).

    Equals ``shared_prefix_attention`` without window and cap. Gradients have the dtypes of the inputs; those of a
    prompt's keys are summed in float32 over its completions. There is no second derivative.

    Args:
        query: (1, H, S, D).
        key: (1, K, S, D), where K divides H.
        value: (1, K, S, D_v).
        segments: of the row; they cover it.
        scaling: of the scores; None for 1 / sqrt(D).
        out_dtype: of the result.
        plans: where the tiles of this row are kept for the next layer.
    """
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    sizes = (key.size(1), query.size(1) // key.size(1), torch.get_num_threads())
    plan = ("tiles", *sizes)
    if plan not in plans:
        plans[plan] = plan_families(segments, *sizes)
    return _TiledAttention.apply(query, key, value, plans[plan], scale, out_dtype)


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        families: list[Family],
        scale: float,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.families, ctx.scale = families, scale
        q_SKRD, k_SKD, v_SKD = _by_token(query, key, value)
        out_SKRD = torch.empty((*q_SKRD.shape[:3], v_SKD.size(-1)), dtype=out_dtype)
        work = _Workspace(q_SKRD)
        for family in families:
            keys_BND, values_BND = (work.key_buffer(name, x, family) for name, x in (("k", k_SKD), ("v", v_SKD)))
            for batch in family.batches:
                _load_keys(keys_BND, k_SKD, batch)
                _load_keys(values_BND, v_SKD, batch)
                for tile in batch.tiles:
                    queries = work.load_queries("q", q_SKRD, tile)
                    weights = work.weights(tile, queries, keys_BND, scale)
                    out = work.buffer("out", *queries.shape[:2], v_SKD.size(-1))
                    _multiply(out, weights, _cut(values_BND, weights))
                    _store_queries(out_SKRD, out, tile)
        return out_SKRD.flatten(1, 2).unsqueeze(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scale = ctx.scale
        q_SKRD, k_SKD, v_SKD = _by_token(*ctx.saved_tensors)
        d_out_SKRD = gradient[0].unflatten(1, q_SKRD.shape[1:3])
        dq_SKRD, dk_SKD, dv_SKD = (torch.empty(x.shape, dtype=x.dtype) for x in (q_SKRD, k_SKD, v_SKD))
        work = _Workspace(q_SKRD)
        for family in ctx.families:
            keys_BND, values_BND, d_keys_BND, d_values_BND = (
                work.key_buffer(name, x, family)
                for name, x in (("k", k_SKD), ("v", v_SKD), ("dk", k_SKD), ("dv", v_SKD))
            )
            for batch in family.batches:
                _load_keys(keys_BND, k_SKD, batch)
                _load_keys(values_BND, v_SKD, batch)
                # The gradients of the prompt go on growing, those of completions start anew.
                d_keys_BND[:, batch.first_own_key :].zero_()
                d_values_BND[:, batch.first_own_key :].zero_()
                for tile in batch.tiles:
                    queries = work.load_queries("q", q_SKRD, tile)
                    d_out = work.load_queries("d_out", d_out_SKRD, tile)
                    weights = work.weights(tile, queries, keys_BND, scale)
                    _multiply(_cut(d_values_BND, weights), weights.transpose(1, 2), d_out, adds=True)
                    d_scores = work.buffer("d_scores", *weights.shape)
                    _multiply(d_scores, d_out, _cut(values_BND, weights).transpose(1, 2))
                    # dP becomes P (dP - sum_n P dP), in place.
                    torch._softmax_backward_data(d_scores, weights, -1, weights.dtype, grad_input=d_scores)
                    _multiply(_cut(d_keys_BND, weights), d_scores.transpose(1, 2), queries, scale, adds=True)
                    _multiply(queries, d_scores, _cut(keys_BND, weights), scale)
                    _store_queries(dq_SKRD, queries, tile)
                if batch.first_own_key:
                    _store_keys(dk_SKD, d_keys_BND, batch)
                    _store_keys(dv_SKD, d_values_BND, batch)
            _store_keys(dk_SKD, d_keys_BND, family.batches[0])
            _store_keys(dv_SKD, d_values_BND, family.batches[0])
        dq, dk, dv = (x.transpose(0, 1).unsqueeze(0) for x in (dq_SKRD.flatten(1, 2), dk_SKD, dv_SKD))
        return dq, dk, dv, None, None, None


class _Workspace:
    """The buffers that all tiles of one call use, as fresh ones would cost page faults.

    Args:
        q_SKRD: the queries.
    """

    def __init__(self, q_SKRD: torch.Tensor) -> None:
        self._dtype = torch.float64 if q_SKRD.dtype == torch.float64 else torch.float32
        self._buffers: dict[str, torch.Tensor] = {}
        self._futures: dict[Any, torch.Tensor] = {}

    def buffer(self, name: str, *shape: int) -> torch.Tensor:
        """Return the buffer of that name; its content is finite, and what was got under that name before is lost."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.zeros(size, dtype=self._dtype)
        return self._buffers[name][:size].view(shape)

    def key_buffer(self, name: str, x_SKD: torch.Tensor, family: Family) -> torch.Tensor:
        """Return (B, N, D) for the prompt and the longest completion, with a copy for each run."""
        return self.buffer(name, family.num_copies * x_SKD.size(1), family.num_keys, x_SKD.size(-1))

    def load_queries(self, name: str, x_SKRD: torch.Tensor, tile: Tile) -> torch.Tensor:
        """Return the (B, L x R, D) queries of a tile; what runs are short of is 0, and so gives no gradient."""
        _, num_key_heads, num_repeats, size = x_SKRD.shape
        runs_CKLRD = self.buffer(name, len(tile.runs), num_key_heads, tile.length, num_repeats, size)
        whole = tile.whole()
        if whole is not None:
            runs_CKLRD.copy_(x_SKRD[whole].unflatten(0, (-1, tile.length)).transpose(1, 2))
        else:
            for run_KLRD, run in zip(runs_CKLRD, tile.runs, strict=True):
                run_KLRD[:, : run.stop - run.start] = x_SKRD[run].transpose(0, 1)
                run_KLRD[:, run.stop - run.start :] = 0
        return runs_CKLRD.view(-1, tile.length * num_repeats, size)

    def weights(self, tile: Tile, queries: torch.Tensor, keys_BND: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the (B, L x R, N) attention weights of a tile."""
        weights = self.buffer("weights", *queries.shape[:2], tile.num_keys)
        _multiply(weights, queries, _cut(keys_BND, weights).transpose(1, 2), scale)
        num_runs, num_own_keys = len(tile.runs), tile.num_keys - tile.first_own_key
        shape = (num_runs, tile.length, num_own_keys, tile.stagger)
        if shape not in self._futures:
            row = torch.arange(tile.length) + tile.stagger * torch.arange(num_runs)[:, None]
            future_CLN = torch.arange(num_own_keys) > row[..., None]
            self._futures[shape] = torch.zeros(shape[:3], dtype=self._dtype).masked_fill_(future_CLN, float("-inf"))
        runs_CKLRN = weights.view(num_runs, -1, tile.length, queries.size(1) // tile.length, tile.num_keys)
        runs_CKLRN[..., tile.first_own_key :] += self._futures[shape][:, None, :, None]
        return torch.softmax(weights, -1, out=weights)


def _multiply(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float = 1.0, *, adds: bool = False) -> None:
    """Write scale a b to ``out``, or add it."""
    torch.baddbmm(out, a, b, beta=int(adds), alpha=scale, out=out)


def _cut(keys_BND: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the keys that weights belong to."""
    return keys_BND[: weights.size(0), : weights.size(2)]


def _by_token(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return views (S, K, R, D), (S, K, D), (S, K, D_v)."""
    q_SHD, k_SKD, v_SKD = (x[0].transpose(0, 1) for x in (query, key, value))
    return q_SHD.unflatten(1, (k_SKD.size(1), -1)), k_SKD, v_SKD


def _store_queries(out_SKRD: torch.Tensor, tile_BLD: torch.Tensor, tile: Tile) -> None:
    """Write what ``load_queries`` reads."""
    _, num_key_heads, num_repeats, size = out_SKRD.shape
    runs_CKLRD = tile_BLD.view(-1, num_key_heads, tile.length, num_repeats, size)
    whole = tile.whole()
    if whole is not None:
        out_SKRD[whole].unflatten(0, (-1, tile.length)).copy_(runs_CKLRD.transpose(1, 2))
        return
    for run_KLRD, run in zip(runs_CKLRD, tile.runs, strict=True):
        out_SKRD[run] = run_KLRD[:, : run.stop - run.start].transpose(0, 1)


def _own_keys(buffer_BND: torch.Tensor, batch: Batch, num_key_heads: int) -> torch.Tensor:
    """Return (C, K, L, D), the keys behind the prefix."""
    own_BLD = buffer_BND[:, batch.first_own_key : batch.first_own_key + batch.length]
    return own_BLD.unflatten(0, (-1, num_key_heads))


def _load_keys(buffer_BND: torch.Tensor, x_SKD: torch.Tensor, batch: Batch) -> None:
    """Write each run's keys behind its prefix; those of a single segment are all runs'."""
    own_CKLD = _own_keys(buffer_BND, batch, x_SKD.size(1))
    whole = batch.whole()
    if len(batch.segments) > 1:
        own_CKLD = own_CKLD[: len(batch.segments)]
    if whole is not None:
        own_CKLD.copy_(x_SKD[whole].unflatten(0, (-1, batch.length)).transpose(1, 2))
        return
    # What stays behind a shorter segment's keys is finite, and hidden by causality.
    for own_KLD, segment in zip(own_CKLD, batch.segments, strict=True):
        own_KLD[:, : segment.length] = x_SKD[segment.start : segment.start + segment.length].transpose(0, 1)


def _store_keys(out_SKD: torch.Tensor, buffer_BND: torch.Tensor, batch: Batch) -> None:
    """Write the gradients of the keys that ``_load_keys`` reads: of a single segment, the sum over all runs."""
    own_CKLD = _own_keys(buffer_BND, batch, out_SKD.size(1))
    own_CKLD = own_CKLD[: len(batch.segments)] if len(batch.segments) > 1 else own_CKLD.sum(0, keepdim=True)
    whole = batch.whole()
    if whole is not None:
        out_SKD[whole].unflatten(0, (-1, batch.length)).copy_(own_CKLD.transpose(1, 2))
        return
    for own_KLD, segment in zip(own_CKLD, batch.segments, strict=True):
        out_SKD[segment.start : segment.start + segment.length] = own_KLD[:, : segment.length].transpose(0, 1)
