"""Choosing the next token: score edits in the order transformers applies them, and drawing by inverse CDF.

Dimensions: M rows alive, V vocabulary, N candidates of a top-p cut. Pure functions; nothing here draws random numbers
on its own, the uniforms are an argument.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from trl_grpo_ext.rollout.engine import SamplingParams

_TOP_P_CANDIDATES = 1024
"""A top-p set larger than this is found by a full sort; a smaller one by a partial sort, which is far cheaper."""


class Drawn(NamedTuple):
    """Tokens (M,) int64 and, when asked for, their log-probabilities (M,) float32 at the sampling temperature."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor | None


def seeded_uniforms(seeds_M: torch.Tensor, steps_M: torch.Tensor) -> torch.Tensor:
    """Return one uniform in [0, 1) per row as a pure function of (seed, step).

    The row's seed is scrambled once and then starts a SplitMix64 sequence (Steele, Lea & Flood 2014) of which ``step``
    picks one member; the top 53 bits become the fraction. Stateless, so neither the batch, nor the device, nor a
    resumed run changes it. Scrambling first keeps rows with neighbouring seeds from sharing a shifted sequence.

    Args:
        seeds_M: (M,) int64, the row seeds (any 64-bit pattern).
        steps_M: (M,) int64, index of the token to draw, from 0.

    Returns:
        (M,) float64.
    """
    state = _splitmix64_mix(seeds_M) + (steps_M + 1) * _GOLDEN_GAMMA
    return ((_splitmix64_mix(state) >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN_GAMMA = _signed(0x9E3779B97F4A7C15)


def _splitmix64_mix(x: torch.Tensor) -> torch.Tensor:
    """Return the SplitMix64 finaliser of int64 ``x``; torch shifts arithmetically, so the sign bits are masked off."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def draw(weights_MV: torch.Tensor, uniforms_M: torch.Tensor) -> torch.Tensor:
    """Return per row the token whose slice of the cumulative weights contains ``uniform * total``.

    Two levels, so that the vocabulary is summed and not scanned: block sums, their cumulative sum in float64, then the
    cumulative sum of the one block hit. One uniform replaces the V exponentials of ``torch.multinomial``.
    A token of weight 0 is never drawn: a target is kept below the total, and the first entry above it has weight.
    A row whose weights are not finite, or all zero, gets -1, so that the caller can raise after its one
    synchronisation.

    Args:
        weights_MV: (M, V) float, non-negative, at least one positive per row; need not sum to one.
        uniforms_M: (M,) float64 in [0, 1).

    Returns:
        (M,) int64, -1 for a row without a distribution.
    """
    num_rows, vocab_size = weights_MV.shape
    block = _block_size(vocab_size)
    if vocab_size % block:
        weights_MV = torch.nn.functional.pad(weights_MV, (0, block - vocab_size % block))
    blocks = weights_MV.view(num_rows, -1, block)
    block_cdf = blocks.sum(-1).to(torch.float64).cumsum(-1)
    total = block_cdf[:, -1]
    target = _below(uniforms_M * total, total)[:, None]
    hit = torch.searchsorted(block_cdf, target, right=True).clamp_max_(blocks.shape[1] - 1)
    before = torch.where(hit > 0, block_cdf.gather(1, (hit - 1).clamp_min(0)), 0.0)
    inner_cdf = blocks.gather(1, hit[:, :, None].expand(num_rows, 1, block)).squeeze(1).to(torch.float64).cumsum(-1)
    inner_target = _below((target - before).squeeze(1), inner_cdf[:, -1])[:, None]
    inner = torch.searchsorted(inner_cdf, inner_target, right=True)
    return torch.where(torch.isfinite(total) & (total > 0), (hit * block + inner).squeeze(1), -1)


def _below(value: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Return ``value`` kept strictly below ``bound`` (rounding can reach it) and at least 0."""
    return torch.minimum(value, torch.nextafter(bound, torch.zeros_like(bound))).clamp_min(0.0)


def _block_size(vocab_size: int) -> int:
    """Return a power of two near the square root of the vocabulary that divides it, else one that needs padding."""
    for block in (256, 128, 512, 64):
        if vocab_size % block == 0:
            return block
    return 256 if vocab_size > 4096 else 32


def choose(
    logits_MV: torch.Tensor,
    params: SamplingParams,
    uniforms_M: torch.Tensor | None,
    *,
    steps_M: torch.Tensor | None = None,
    seen_MV: torch.Tensor | None = None,
    return_logprobs: bool = False,
) -> Drawn:
    """Return the next token of every row.

    Args:
        logits_MV: (M, V) float, raw logits; not changed.
        params: how to choose.
        uniforms_M: (M,) float64 in [0, 1); None when ``params.do_sample`` is False.
        steps_M: (M,) int64, tokens already drawn per row; needed when ``params.min_new_tokens`` is set.
        seen_MV: (M, V) bool, tokens in the prompt or completion; needed for a repetition penalty.
        return_logprobs: also return the log-probability of each token, ``log_softmax(logits / temperature)``.

    Returns:
        Tokens and log-probabilities.
    """
    scores = logits_MV.to(torch.float32)
    if not params.do_sample:
        edited = edit_scores(scores, params, steps_M, seen_MV) if params.changes_scores else scores
        token_ids = edited.argmax(-1)
        return Drawn(token_ids, _logprobs(scores, token_ids, params.temperature) if return_logprobs else None)
    assert uniforms_M is not None
    if params.needs_filter:
        token_ids = draw(
            torch.softmax(filter_scores(edit_scores(scores, params, steps_M, seen_MV), params), -1), uniforms_M
        )
        return Drawn(token_ids, _logprobs(scores, token_ids, params.temperature) if return_logprobs else None)
    weights = torch.softmax(scores / params.temperature if params.temperature != 1.0 else scores, -1)
    token_ids = draw(weights, uniforms_M)
    if not return_logprobs:
        return Drawn(token_ids, None)
    return Drawn(token_ids, weights.gather(1, token_ids.clamp_min(0)[:, None]).squeeze(1).log())


def _logprobs(scores_MV: torch.Tensor, token_ids_M: torch.Tensor, temperature: float) -> torch.Tensor:
    scaled = scores_MV / temperature if temperature != 1.0 else scores_MV
    return scaled.gather(1, token_ids_M.clamp_min(0)[:, None]).squeeze(1) - scaled.logsumexp(-1)


def edit_scores(
    scores_MV: torch.Tensor, params: SamplingParams, steps_M: torch.Tensor | None, seen_MV: torch.Tensor | None
) -> torch.Tensor:
    """Return the scores after transformers' logits processors: repetition penalty, minimum length, suppressed tokens.

    In that order (``GenerationMixin._get_logits_processor``). These apply to greedy decoding too.
    """
    if params.repetition_penalty != 1.0:
        assert seen_MV is not None
        penalty = params.repetition_penalty
        penalised = torch.where(scores_MV < 0, scores_MV * penalty, scores_MV / penalty)
        scores_MV = torch.where(seen_MV, penalised, scores_MV)
    if params.min_new_tokens > 0 and params.eos_token_ids:
        assert steps_M is not None
        eos = torch.zeros(scores_MV.shape[-1], dtype=torch.bool, device=scores_MV.device)
        eos[list(params.eos_token_ids)] = True
        scores_MV = scores_MV.masked_fill((steps_M < params.min_new_tokens)[:, None] & eos, -math.inf)
    if params.suppress_token_ids:
        scores_MV = scores_MV.clone()
        scores_MV[:, list(params.suppress_token_ids)] = -math.inf
    return scores_MV


def filter_scores(scores_MV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the scores after transformers' warpers: temperature, top-k, top-p, min-p, in that order.

    Dropped tokens become -inf. Top-k keeps ties at the k-th score, as transformers does.
    """
    if params.temperature != 1.0:
        scores_MV = scores_MV / params.temperature
    if params.top_k > 0:
        k = min(params.top_k, scores_MV.shape[-1])
        scores_MV = scores_MV.masked_fill(scores_MV < torch.topk(scores_MV, k).values[:, -1:], -math.inf)
    if params.top_p < 1.0:
        scores_MV = _keep_top_p(scores_MV, params.top_p)
    if params.min_p:
        floor = scores_MV.amax(-1, keepdim=True) + math.log(params.min_p)
        scores_MV = scores_MV.masked_fill(scores_MV < floor, -math.inf)
    return scores_MV


def _keep_top_p(scores_MV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the scores with everything outside the nucleus at -inf.

    transformers sorts upwards and drops a token while the mass up to and including it is at most 1 - top_p; that is:
    keep a token while the mass of the better ones is below top_p. The mass is summed in float64 here and in float32
    there, so a token closer to the border than float32 resolves may fall on either side; of equal scores at the border
    an arbitrary one is kept, as there.
    """
    vocab_size = scores_MV.shape[-1]
    top = scores_MV.amax(-1, keepdim=True)
    total = (scores_MV - top).exp_().sum(-1, keepdim=True, dtype=torch.float64)
    for num_candidates in (min(_TOP_P_CANDIDATES, vocab_size), vocab_size):
        values, indices = torch.topk(scores_MV, num_candidates)
        mass = (values.to(torch.float64) - top).exp_() / total
        mass_up_to = mass.cumsum(-1)
        if num_candidates == vocab_size or bool((mass_up_to[:, -1] >= top_p).all()):
            break
    keep = mass_up_to - mass < top_p
    keep[:, 0] = True
    kept = values.masked_fill(~keep, -math.inf)
    return torch.full_like(scores_MV, -math.inf).scatter_(1, indices, kept)
