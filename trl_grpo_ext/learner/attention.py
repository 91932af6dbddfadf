"""Attention over packed rows, registered with transformers' ``AttentionInterface``.

Every token of a packed row belongs to one segment. A segment attends to itself causally; a completion attends to its
prompt as well. So a group costs one causal call for the prompt and one call for its completions, and no mask ever
spans the group. Everything else in the model sees each prompt token once.

The layout travels as a forward keyword, so it is there again when gradient checkpointing runs a layer a second time.
Hooks on the attention modules switch the implementation only while that keyword is present: generation, evaluation
and TRL's own path keep the implementation that the user chose.

Dimension legend: S packed tokens, L slots per row of a bucket (segments padded to the bucket's longest), H heads, D
head size.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_grpo_ext.learner import cpu_attention
from trl_grpo_ext.learner.device import takes_cpu_path
from trl_grpo_ext.learner.packing import Segment

IMPLEMENTATION = "trl_grpo_ext_shared_prefix"
LAYOUT_KEYWORD = "packed_layout"
# Attention functions take any keyword; these change the result and are not reproduced here.
_UNKNOWN_BIASES = ("s_aux", "position_bias", "sinks", "head_mask")
# Segments share a bucket while the shorter is at least this share of the longest, so padding costs at most a quarter.
_MIN_FILL = 0.8


class Bucket(NamedTuple):
    """Segments that are run in one attention call."""

    num_rows: int
    length: int
    prefix: tuple[int, int, int] | None
    """Bucket, row in it, and length of the prompt that all rows attend to."""


class AttentionLayout:
    """Where each packed token sits in the attention calls. Not a dataclass: FSDP copies those field by field.

    Args:
        segments: of one packed row, contiguous, in order.
    """

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        self.segments = segments
        self.num_calls = 0
        """Attention calls that used this layout; a model whose attention never asks for it is caught by this."""
        self.buckets: list[Bucket] = []
        home: dict[int, tuple[int, int]] = {}
        slot_sources, is_padding = [], []
        for prefix, members in _sort_into_buckets(segments):
            length = segments[members[0]].length
            shared = None if prefix < 0 else (*home[prefix], segments[prefix].length)
            for row, member in enumerate(members):
                home[member] = (len(self.buckets), row)
                segment = segments[member]
                offsets = np.arange(length)
                # Padding repeats a real token: finite values that causality hides and that get no gradient.
                slot_sources.append(segment.start + np.minimum(offsets, segment.length - 1))
                is_padding.append(offsets >= segment.length)
            self.buckets.append(Bucket(len(members), length, shared))
        self.max_keys = max(bucket.length + (bucket.prefix[2] if bucket.prefix else 0) for bucket in self.buckets)
        """Most keys that a token has, itself included."""
        self._slot_sources = np.concatenate(slot_sources)
        padding = np.concatenate(is_padding)
        self._padding_slots = np.flatnonzero(padding)
        self._slot_of_token = np.empty(int(self._slot_sources.max()) + 1, dtype=np.int64)
        self._slot_of_token[self._slot_sources[~padding]] = np.flatnonzero(~padding)
        self._tensors: dict[Any, Any] = {}

    def slot_sizes(self) -> list[int]:
        """Return the slots of each bucket."""
        return [bucket.num_rows * bucket.length for bucket in self.buckets]

    def indices(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the token of each slot, the slot of each token, and the padding slots, on ``device``."""
        if device not in self._tensors:
            arrays = (self._slot_sources, self._slot_of_token, self._padding_slots)
            self._tensors[device] = tuple(torch.from_numpy(array).to(device) for array in arrays)
        return self._tensors[device]

    def mask(self, bucket: Bucket, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Return the (L, keys) mask of a bucket, True where attended; None where a causal flag says the same."""
        prefix_length = bucket.prefix[2] if bucket.prefix is not None else 0
        num_keys = prefix_length + bucket.length
        if window is not None and window >= num_keys:
            window = None
        if prefix_length == 0 and window is None:
            return None
        key = (device, bucket.length, prefix_length, window)
        if key not in self._tensors:
            mask = torch.ones(bucket.length, num_keys, dtype=torch.bool, device=device).tril(prefix_length)
            if window is not None:
                mask = mask.triu(prefix_length - window + 1)
            self._tensors[key] = mask
        return self._tensors[key]

    def varlen(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
        """Return (key of each attended slot, query borders, key borders, longest query, longest key) for flash."""
        key = ("varlen", device)
        if key not in self._tensors:
            keys, num_keys = [], []
            for segment in self.segments:
                prefix = self.segments[segment.prefix] if segment.prefix >= 0 else Segment(0, 0)
                keys.append(np.arange(prefix.start, prefix.start + prefix.length))
                keys.append(np.arange(segment.start, segment.start + segment.length))
                num_keys.append(prefix.length + segment.length)
            num_queries = [segment.length for segment in self.segments]
            self._tensors[key] = (
                torch.from_numpy(np.concatenate(keys)).to(device),
                torch.from_numpy(np.cumsum([0, *num_queries]).astype(np.int32)).to(device),
                torch.from_numpy(np.cumsum([0, *num_keys]).astype(np.int32)).to(device),
                max(num_queries),
                max(num_keys),
            )
        return self._tensors[key]


def _sort_into_buckets(segments: tuple[Segment, ...]) -> list[tuple[int, list[int]]]:
    """Return (prefix, members) of each attention call: first the segments without a prefix, members longest first."""
    buckets: list[tuple[int, list[int]]] = []
    order = sorted(range(len(segments)), key=lambda i: (segments[i].prefix, -segments[i].length))
    for member in order:
        prefix, length = segments[member].prefix, segments[member].length
        if buckets and buckets[-1][0] == prefix and length >= _MIN_FILL * segments[buckets[-1][1][0]].length:
            buckets[-1][1].append(member)
        else:
            buckets.append((prefix, [member]))
    return buckets


class _ToSlots(torch.autograd.Function):
    """(S, H, D) tokens to padded slots; the gradient is a gather as well, as every token has exactly one slot."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: AttentionLayout, dtype: torch.dtype) -> torch.Tensor:
        sources, _, _ = layout.indices(x.device)
        ctx.layout, ctx.dtype = layout, x.dtype
        return x.index_select(0, sources).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        _, slot_of_token, _ = ctx.layout.indices(gradient.device)
        return gradient.index_select(0, slot_of_token).to(ctx.dtype), None, None


class _FromSlots(torch.autograd.Function):
    """Padded slots back to (S, H, D) tokens; padding gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layout: AttentionLayout, dtype: torch.dtype) -> torch.Tensor:
        _, slot_of_token, _ = layout.indices(x.device)
        ctx.layout, ctx.dtype = layout, x.dtype
        return x.index_select(0, slot_of_token).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        sources, _, padding = ctx.layout.indices(gradient.device)
        return gradient.to(ctx.dtype).index_select(0, sources).index_fill_(0, padding, 0), None, None


class _GatherKeys(torch.autograd.Function):
    """Repeat a prompt's keys for each completion; the gradient is summed in float32 however many completions share."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.num_tokens = x.size(0)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        total = gradient.new_zeros((ctx.num_tokens, *gradient.shape[1:]), dtype=torch.float32)
        return total.index_add_(0, index, gradient.float()).to(gradient.dtype), None


def shared_prefix_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_layout: AttentionLayout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention of one packed row, in the signature of transformers' ``AttentionInterface``.

    Equals masked attention over the row in which token i sees token j if j precedes i in i's own segment, or j lies in
    the prompt of that segment (and, with ``sliding_window`` w, if their columns differ by less than w).

    Args:
        module: the attention module; ``config`` and the implementation that ``watch_attention`` noted are read.
        query: (1, H, S, D), rotated.
        key: (1, H_kv, S, D), rotated.
        value: (1, H_kv, S, D_v).
        attention_mask: ignored, the layout says it all.
        packed_layout: of this row.
        scaling: of the scores; None for 1 / sqrt(D).
        dropout: must be 0, since one mask on the shared prompt is not G independent ones.
        sliding_window: columns that a token sees, itself included.
        softcap: c of c tanh(score / c), as in Gemma 2.
        **kwargs: what else the model passes on.

    Returns:
        (1, S, H, D_v) of the query's dtype (autocast's, under autocast), and None for the weights.

    Raises:
        NotImplementedError: on dropout, or on a bias that this function does not know.
    """
    packed_layout.num_calls += 1
    unknown = [name for name in _UNKNOWN_BIASES if kwargs.get(name) is not None]
    if dropout or unknown:
        raise NotImplementedError(f"packed rows with attention dropout {dropout} and biases {unknown} are not exact")
    original = getattr(module, "_unpacked_attn_implementation", "sdpa")
    if "flash" in original:
        return _run_flash(module, original, query, key, value, packed_layout, scaling, sliding_window, softcap, kwargs)

    device_type = query.device.type
    is_autocast = torch.is_autocast_enabled(device_type)
    out_dtype = torch.get_autocast_dtype(device_type) if is_autocast and query.dtype != torch.float64 else query.dtype
    if cpu_attention.can_run(query, packed_layout.max_keys, sliding_window, softcap):
        with torch.autocast(device_type, enabled=False) if is_autocast else nullcontext():
            return cpu_attention.attend(
                query, key, value, packed_layout.segments, scaling, out_dtype, packed_layout._tensors
            ), None
    # On the CPU, attention in half precision is slower than in float32 (its backward, 1.5 times) and noisier. With a
    # soft-cap, it stays what transformers' own eager attention computes, rounding included.
    is_half_on_cpu = takes_cpu_path(query.device) and out_dtype in (torch.bfloat16, torch.float16) and softcap is None
    dtype = torch.float32 if is_half_on_cpu else out_dtype
    sizes = packed_layout.slot_sizes()
    queries, keys, values = (
        [
            part.view(bucket.num_rows, bucket.length, *part.shape[1:])
            for part, bucket in zip(
                _ToSlots.apply(x[0].transpose(0, 1), packed_layout, dtype).split(sizes),
                packed_layout.buckets,
                strict=True,
            )
        ]
        for x in (query, key, value)
    )
    outputs = []
    with torch.autocast(device_type, enabled=False) if is_autocast else nullcontext():
        for i, bucket in enumerate(packed_layout.buckets):
            mask = packed_layout.mask(bucket, sliding_window, query.device)
            k, v = (_with_prefix(parts, i, bucket).transpose(1, 2) for parts in (keys, values))
            out = _attend(queries[i].transpose(1, 2), k, v, mask, scaling, softcap)
            outputs.append(out.transpose(1, 2).reshape(-1, *out.shape[1::2]))
    slots = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return _FromSlots.apply(slots, packed_layout, out_dtype).unsqueeze(0), None


def _with_prefix(parts: list[torch.Tensor], i: int, bucket: Bucket) -> torch.Tensor:
    """Return the keys or values of a bucket, (rows, L or P + L, H, D)."""
    if bucket.prefix is None:
        return parts[i]
    home, row, length = bucket.prefix
    prefix = parts[home][row, :length].expand(bucket.num_rows, -1, -1, -1)
    return torch.cat([prefix, parts[i]], dim=1)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Return (rows, H, L, D_v); causal where ``mask`` is None."""
    num_repeats = query.size(1) // key.size(1)
    # With a mask, CUDA has a fast kernel only for equal numbers of heads.
    groups_natively = takes_cpu_path(query.device) or (mask is None and key.size(-1) == value.size(-1) <= 256)
    if num_repeats > 1 and (softcap is not None or not groups_natively):
        key, value = (x.repeat_interleave(num_repeats, 1) for x in (key, value))
    if softcap is None:
        return nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None and query.size(2) > 1,
            scale=scaling,
            enable_gqa=num_repeats > 1 and groups_natively,
        )
    if mask is None:
        mask = torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device).tril()
    scores = (query @ key.transpose(2, 3)) * (query.size(-1) ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    return nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype) @ value


def _run_flash(
    module: Any,
    implementation: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: AttentionLayout,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Run transformers' flash attention over all segments at once; its causal mask is aligned to the last key."""
    index, cu_q, cu_k, max_q, max_k = layout.varlen(query.device)
    key, value = (_GatherKeys.apply(x[0].transpose(0, 1), index).transpose(0, 1).unsqueeze(0) for x in (key, value))
    own = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids", "is_causal"}
    # The flash function reads the name of its kernel from the config.
    module.config._attn_implementation = implementation
    try:
        return ALL_ATTENTION_FUNCTIONS[implementation](
            module,
            query,
            key,
            value,
            None,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            is_causal=True,
            cu_seq_lens_q=cu_q,
            cu_seq_lens_k=cu_k,
            max_length_q=max_q,
            max_length_k=max_k,
            **{name: x for name, x in kwargs.items() if name not in own},
        )
    finally:
        module.config._attn_implementation = IMPLEMENTATION


def find_attention_modules(model: nn.Module) -> list[Any]:
    """Return the modules that call the attention interface: those with a config, a layer index and a causality."""
    return [m for m in model.modules() if all(hasattr(m, name) for name in ("config", "layer_idx", "is_causal"))]


def watch_attention(model: nn.Module) -> int:
    """Make the attention of ``model`` use ``shared_prefix_attention`` whenever a layout is passed; return its layers.

    Without the keyword nothing changes. Calling it twice does no harm.
    """
    AttentionInterface.register(IMPLEMENTATION, shared_prefix_attention)
    modules = find_attention_modules(model)
    for module in modules:
        if _switch_on not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_switch_on, with_kwargs=True)
            module.register_forward_hook(_switch_off, with_kwargs=True, always_call=True)
    return len(modules)


def _switch_on(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get(LAYOUT_KEYWORD) is not None:
        module._unpacked_attn_implementation = module.config._attn_implementation
        module.config._attn_implementation = IMPLEMENTATION


def _switch_off(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    if kwargs.get(LAYOUT_KEYWORD) is not None:
        module.config._attn_implementation = module._unpacked_attn_implementation


# For whoever asks whether calling a module is more than its class's forward: without a layout these do nothing.
_switch_on.is_idle_without_layout = True  # type: ignore[attr-defined]
_switch_off.is_idle_without_layout = True  # type: ignore[attr-defined]
