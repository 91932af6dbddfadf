"""Attention of a rollout: causal per prompt in the prefill, shared prompt plus own completion in a decode step.

Dimensions: M rows alive, C cells, U prompts of a block, R rows per prompt, H query heads, K key/value heads, G = H / K,
P prompt slots, T completion slots, D head size.

Both enter a model through transformers' ``AttentionInterface`` under the name ``ATTENTION_NAME``; the cache travels as
the forward keyword ``rollout_cache``. No mask function is registered under that name, so the model builds no mask.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from trl_grpo_ext.rollout.kv_cache import GridBlock, LayerFacts, RolloutCache

ATTENTION_NAME = "trl_grpo_ext_rollout"

_HARMLESS = frozenset(
    {"position_ids", "is_causal", "use_cache", "output_attentions", "output_router_logits", "logits_to_keep"}
)


class UnsupportedModelError(RuntimeError):
    """A model asked its attention for something the rollout engine does not compute."""


def rollout_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    rollout_cache: RolloutCache | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention output (batch, sequence, H, D) as transformers' attention functions do.

    During a prefill the batch is one packed row of prompts; in a decode step it is M rows of one token.

    Raises:
        UnsupportedModelError: when the model wants dropout, a mask, sinks, a position bias or anything unknown.
    """
    unknown = sorted(name for name, arg in kwargs.items() if arg is not None and name not in _HARMLESS)
    if rollout_cache is None or attention_mask is not None or dropout or unknown:
        what = unknown or ["an attention mask" if attention_mask is not None else "dropout" if dropout else "no cache"]
        raise UnsupportedModelError(f"attention of {type(module).__name__} was called with {', '.join(map(str, what))}")
    cache, layer = rollout_cache, int(module.layer_idx)  # type: ignore[arg-type]
    if cache.segments:
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        cache.layers[layer] = LayerFacts(scale, softcap, sliding_window)
        return _prefill(cache, layer, query, key, value), None
    with torch.autocast(query.device.type, enabled=False):
        output = decode_attention(cache, layer, query.squeeze(2), key.squeeze(2), value.squeeze(2))
    return output.unsqueeze(1), None


def _prefill(
    cache: RolloutCache, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Return causal attention inside each segment of one packed row and store its keys and values.

    Under autocast a model may hand over float32 queries and bfloat16 values; they are brought to autocast's dtype, as
    autocast does around ``scaled_dot_product_attention``.
    """
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        cache.autocast_dtype = torch.get_autocast_dtype(device_type)
        query, key, value = (tensor.to(cache.autocast_dtype) for tensor in (query, key, value))
    cache.output_dtype = value.dtype
    cache.store_prompt(layer, key, value)
    outputs = []
    for segment in cache.segments:
        span = slice(segment.start, segment.start + segment.length)
        outputs.append(_causal(cache.layers[layer], query[:, :, span], key[:, :, span], value[:, :, span]))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _causal(facts: LayerFacts, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return causal attention (1, H, S, D) of one prompt, within the sliding window if the layer has one."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    length = query.shape[2]
    mask = None
    if facts.sliding_window is not None and length > facts.sliding_window:
        index = torch.arange(length, device=query.device)
        distance = index[:, None] - index
        mask = (distance >= 0) & (distance < facts.sliding_window)
    if facts.softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=facts.scaling
        )
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril_()
    scores = torch.matmul(query, key.transpose(2, 3)) * facts.scaling
    scores = torch.tanh(scores / facts.softcap) * facts.softcap
    weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1, dtype=torch.float32)
    return torch.matmul(weights.to(value.dtype), value)


def decode_attention(
    cache: RolloutCache, layer: int, query_MHD: torch.Tensor, key_MKD: torch.Tensor, value_MKD: torch.Tensor
) -> torch.Tensor:
    """Return attention of one new token per row over [its prompt; its completion so far], itself included.

    Scores against the prompt are one matrix product per prompt and key head with the queries of all rows of the group
    as the left factor; scores against the own completion are one small product per row. They are joined before one
    softmax, so this equals attention over the concatenated sequence. A plain product is far cheaper here than
    ``scaled_dot_product_attention``, whose CPU kernel reads the prompt once per row.

    Args:
        cache: after ``begin_step``; the new keys and values are written to it.
        layer: index of the layer.
        query_MHD: (M, H, D), rotated.
        key_MKD: (M, K, D), rotated.
        value_MKD: (M, K, D).

    Returns:
        (M, H, D) in the dtype the model's own attention returns.
    """
    cache.append(layer, key_MKD, value_MKD)
    facts = cache.layers[layer]
    keys_CKTD, values_CKTD = cache.own(layer)
    query = query_MHD.to(keys_CKTD.dtype) * facts.scaling
    if not cache._is_dense:
        query = query.new_zeros(cache.num_cells, *query.shape[1:]).index_copy_(0, cache.cells_M, query)  # type: ignore[arg-type]
    outputs = [_attend_block(block, layer, facts, query, keys_CKTD, values_CKTD) for block in cache.blocks]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if not cache._is_dense:
        output = output.index_select(0, cache.cells_M)  # type: ignore[arg-type]
    return output.to(cache.output_dtype)


def _attend_block(
    block: GridBlock,
    layer: int,
    facts: LayerFacts,
    query_CHD: torch.Tensor,
    keys_CKTD: torch.Tensor,
    values_CKTD: torch.Tensor,
) -> torch.Tensor:
    """Return the attention output (U * R, H, D) of one block's cells."""
    U, R = block.num_prompts, block.num_rows
    _, H, D = query_CHD.shape
    K, T = keys_CKTD.shape[1:3]
    G = H // K
    slots = slice(block.first_slot, block.first_slot + U)
    cells = slice(block.first_cell, block.first_cell + U * R)
    prompt_keys, prompt_values = block.stack.keys[layer][slots], block.stack.values[layer][slots]
    P = prompt_keys.shape[2]

    query = query_CHD[cells].view(U, R, K, G, D)
    prompt_scores = torch.bmm(
        query.transpose(1, 2).reshape(U * K, R * G, D), prompt_keys.view(U * K, P, D).transpose(1, 2)
    ).view(U, K, R, G, P)
    own_scores = torch.bmm(query.reshape(U * R * K, G, D), keys_CKTD[cells].flatten(0, 1).transpose(1, 2)).view(
        U, R, K, G, T
    )
    scores = torch.cat((prompt_scores, own_scores.transpose(1, 2)), -1)
    if facts.softcap is not None:
        scores = scores.div_(facts.softcap).tanh_().mul_(facts.softcap)
    bias = block.bias
    if facts.sliding_window is not None:
        bias = block.sliding_bias.get(facts.sliding_window, bias)
    weights = torch.softmax(scores if bias is None else scores.add_(bias), -1)

    from_prompt = torch.bmm(weights.view(U * K, R * G, P + T)[:, :, :P], prompt_values.view(U * K, P, -1))
    return torch.baddbmm(
        from_prompt.view(U, K, R, G, -1).transpose(1, 2).reshape(U * R * K, G, -1),
        weights[..., P:].transpose(1, 2).reshape(U * R * K, G, T),
        values_CKTD[cells].flatten(0, 1),
    ).view(U * R, H, -1)


def register() -> None:
    """Make ``ATTENTION_NAME`` known to transformers; harmless when repeated."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, rollout_attention)
