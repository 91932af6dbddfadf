"""A decode step of Llama-shaped models on the CPU with weights packed for few rows.

With a handful of rows a decode step is bound by reading weights. oneDNN reads a weight matrix 1.3 to 2 times faster
when it was reordered beforehand, and half of the remaining time is Python and dispatch: query, key and value (gate and
up) share their input and become one product, and LoRA's B becomes extra columns of the base weight,
``W x + s B (A x) = [W | s B] [x; A x]``, so nothing is merged into the weight and rounded away. The packed copy lives
for one rollout only: the weights change with every optimiser step, and training needs the memory.

Dimensions: M rows, E hidden size, H query heads, K key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from trl_grpo_ext.rollout.attention import decode_attention
from trl_grpo_ext.rollout.kv_cache import RolloutCache
from trl_grpo_ext.rollout.module_decoder import base_model

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Families whose decoder layer is: norm, q/k/v, rotary, attention, output, residual, norm, feed-forward, residual."""

Projection = Callable[[torch.Tensor], torch.Tensor]


class LinearParts(NamedTuple):
    """A linear layer taken apart: weight (O, I), bias (O,) or None, and adapters as (A (r, I), B (O, r), scale)."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    adapters: list[tuple[torch.Tensor, torch.Tensor, float]]


def is_plain(module: nn.Module) -> bool:
    """Whether calling ``module`` is just its class's forward: no replaced method, and no hooks but the learner's.

    The learner leaves hooks on attention modules that act on its own packed batches only, and says so on the hooks. It
    also gives LoRA layers a forward that computes PEFT's numbers in fewer passes, and says so on that.
    """
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    is_own = "forward" not in module.__dict__ or getattr(module.forward, "equals_class_forward", False)
    return is_own and all(getattr(hook, "is_idle_without_layout", False) for hook in hooks)


def take_apart(module: nn.Module, autocast_dtype: torch.dtype | None) -> LinearParts | None:
    """Return the parts of a linear layer or of a plain LoRA layer around one, None when it is anything else.

    Without autocast an adapter computes in its own dtype: float32 beside any base is what ``PackedLinear`` knows, other
    mixtures are left whole.
    """
    if type(module) is nn.Linear:
        return LinearParts(module.weight, module.bias, []) if is_plain(module) else None
    try:
        from peft.tuners.lora.layer import Linear as LoraLinear
    except ImportError:
        return None
    if type(module) is not LoraLinear or not is_plain(module) or module.merged:
        return None
    base = take_apart(module.get_base_layer(), autocast_dtype)
    if base is None or base.adapters or module.disable_adapters:
        return base
    adapters: list[Any] = []
    for name in module.active_adapters:
        if name not in module.lora_A:
            continue
        down, up, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
        active_dropout = isinstance(dropout, nn.Dropout) and dropout.p > 0 and dropout.training
        plain = type(down) is nn.Linear and type(up) is nn.Linear and is_plain(down) and is_plain(up)
        known_dropout = isinstance(dropout, nn.Identity | nn.Dropout)
        if not plain or active_dropout or not known_dropout or name in module.lora_variant or up.bias is not None:
            return None
        if autocast_dtype is None and down.weight.dtype not in (base.weight.dtype, torch.float32):
            return None
        adapters.append((down.weight, up.weight, float(module.scaling[name])))
    return base._replace(adapters=adapters)


class PackedLinear:
    """Linear layers with a common input as one product, their adapters included.

    ``B`` is rounded to the dtype of the product, and so is ``A x``. Float32 adapters on a half-precision product keep
    ``A x`` in float32 up to there, so that what an optimiser changes in A is not lost. PEFT rounds the base's output
    and then the sum; this is as near to the truth while the update is at most half as large as the base's output
    (tests/test_rollout_packed.py).

    Args:
        parts: the layers, in the order their outputs are concatenated.
        dtype: dtype of the product.
        expected_rows: rows the packing is tuned for; any number works.
        keeps_float32: True reads A of float32 adapters in float32 (no autocast); False rounds it to ``dtype``.
    """

    def __init__(
        self, parts: Sequence[LinearParts], dtype: torch.dtype, expected_rows: int, *, keeps_float32: bool
    ) -> None:
        weights = [part.weight.detach().to(dtype) for part in parts]
        self._dtype = dtype
        self._down: torch.Tensor | None = None
        adapters = [adapter for part in parts for adapter in part.adapters]
        if adapters:
            is_float32 = keeps_float32 and any(down.dtype == torch.float32 for down, _, _ in adapters)
            down_dtype = torch.float32 if is_float32 else dtype
            self._down = torch.cat([down.detach().to(down_dtype) for down, _, _ in adapters])
        num_inputs, num_outputs = weights[0].shape[1], sum(len(weight) for weight in weights)
        weight = weights[0]
        if adapters or len(parts) > 1:
            num_ranks = 0 if self._down is None else len(self._down)
            weight = weight.new_empty(num_outputs, num_inputs + num_ranks)
            torch.cat(weights, out=weight[:, :num_inputs])
            weight[:, num_inputs:] = _side_by_side(parts, num_outputs, num_ranks)
        self._bias: torch.Tensor | None = None
        if any(part.bias is not None for part in parts):
            biases = [part.weight.new_zeros(part.weight.shape[0]) if part.bias is None else part.bias for part in parts]
            self._bias = torch.cat(biases).to(dtype)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, expected_rows)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return (M, sum of outputs) of ``x`` (M, I)."""
        x = x.to(self._dtype)
        if self._down is not None:
            ranks = F.linear(x.to(self._down.dtype), self._down)
            x = torch.cat((x, ranks.to(self._dtype)), dim=-1)
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


def _side_by_side(parts: Sequence[LinearParts], num_outputs: int, num_ranks: int) -> torch.Tensor:
    """Return the scaled B of every adapter as blocks of one (outputs, ranks) float32 matrix."""
    ups = torch.zeros(num_outputs, num_ranks)
    row = column = 0
    for part in parts:
        end = row + part.weight.shape[0]
        for _, up, scale in part.adapters:
            ups[row:end, column : column + up.shape[1]] = up.detach().to(torch.float32) * scale
            column += up.shape[1]
        row = end
    return ups


class _Layer(NamedTuple):
    number: int
    norm_in: Projection
    qkv: Projection
    q_norm: Projection | None
    k_norm: Projection | None
    out: Projection
    norm_mid: Projection
    feed_forward: Projection
    num_heads: int
    num_kv_heads: int
    head_dim: int


def why_not_packed(model: Any) -> str | None:
    """Return why a model cannot take the packed path, or None."""
    base = base_model(model)
    family = type(base).__module__
    if next(model.parameters()).device.type != "cpu":
        return "the model is not on the CPU"
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return "torch was built without oneDNN"
    if family not in {f"transformers.models.{name}.modeling_{name}" for name in _FAMILIES}:
        return f"{type(base).__name__} is not one of {', '.join(_FAMILIES)}"
    body = getattr(base, "model", None)
    if body is None or not all(hasattr(body, name) for name in ("layers", "embed_tokens", "norm", "rotary_emb")):
        return f"{type(base).__name__} is not laid out as expected"
    if "forward" in body.__dict__:
        return f"forward of {type(body).__name__} was replaced"
    for layer in body.layers:
        if type(layer).__module__ != family or not is_plain(layer) or not is_plain(layer.self_attn):
            return f"{type(layer).__name__} was replaced or has hooks"
    return None


class PackedDecoder:
    """Feeds one token per row through packed weights.

    Args:
        model: a model for which ``why_not_packed`` returns None.
        cache: after the first prefill, which tells the autocast dtype.
        expected_rows: rows alive at the start.
    """

    name = "packed"

    def __init__(self, model: Any, cache: RolloutCache, expected_rows: int) -> None:
        base = base_model(model)
        self._cache = cache
        self._body = base.model
        self._autocast_dtype = cache.autocast_dtype
        self._expected_rows = expected_rows
        self._layers = [self._plan(layer) for layer in self._body.layers[: base.config.num_hidden_layers]]
        self._norm = self._norm_plan(self._body.norm)
        self._head = self._project([base.lm_head])

    def _plan(self, layer: nn.Module) -> _Layer:
        attn: Any = layer.self_attn
        head_dim = attn.head_dim
        return _Layer(
            number=attn.layer_idx,
            norm_in=self._norm_plan(layer.input_layernorm),
            qkv=self._project([attn.q_proj, attn.k_proj, attn.v_proj]),
            q_norm=self._norm_plan(attn.q_norm) if hasattr(attn, "q_norm") else None,
            k_norm=self._norm_plan(attn.k_norm) if hasattr(attn, "k_norm") else None,
            out=self._project([attn.o_proj]),
            norm_mid=self._norm_plan(layer.post_attention_layernorm),
            feed_forward=self._feed_forward(layer.mlp),
            num_heads=attn.config.num_attention_heads,
            num_kv_heads=attn.config.num_key_value_heads,
            head_dim=head_dim,
        )

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=self._autocast_dtype)

    def _project(self, modules: Sequence[Any]) -> Projection:
        """Return one callable for linear layers with a common input; layers that cannot be packed are called."""
        parts = [take_apart(module, self._autocast_dtype) for module in modules]
        known = [part for part in parts if part is not None]
        dtypes = {self._autocast_dtype or part.weight.dtype for part in known}
        if len(known) == len(modules) and len(dtypes) == 1:
            keeps_float32 = self._autocast_dtype is None
            return PackedLinear(known, dtypes.pop(), self._expected_rows, keeps_float32=keeps_float32)

        def call_modules(x: torch.Tensor) -> torch.Tensor:
            with self._autocast():
                return torch.cat([module(x) for module in modules], dim=-1)

        return call_modules

    def _norm_plan(self, norm: Any) -> Projection:
        if not is_plain(norm) or not hasattr(norm, "variance_epsilon"):
            return norm
        weight, eps = norm.weight, norm.variance_epsilon
        size, twice = weight.shape[0], torch.cat((weight, weight))

        def rms_norm(x: torch.Tensor) -> torch.Tensor:
            """Return the RMS norm as the layer norm of [x, -x]: its mean is 0 and its variance the mean of x².

            torch has one CPU kernel for the layer norm; written out, the RMS norm takes eight.
            """
            if x.dtype != weight.dtype:
                return norm(x)
            return F.layer_norm(torch.cat((x, -x), dim=-1), (2 * size,), twice, None, eps)[..., :size]

        return rms_norm

    def _feed_forward(self, mlp: Any) -> Projection:
        names = ("gate_proj", "up_proj", "down_proj", "act_fn")
        if not is_plain(mlp) or not type(mlp).__name__.endswith("MLP") or not all(hasattr(mlp, n) for n in names):

            def call_module(x: torch.Tensor) -> torch.Tensor:
                with self._autocast():
                    return mlp(x.unsqueeze(1)).squeeze(1)

            return call_module
        gate_up, down, activation = (
            self._project([mlp.gate_proj, mlp.up_proj]),
            self._project([mlp.down_proj]),
            mlp.act_fn,
        )

        def gated(x: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up(x).chunk(2, dim=-1)
            return down(activation(gate) * up)

        return gated

    def step(self, token_ids_M: torch.Tensor, positions_M: torch.Tensor) -> torch.Tensor:
        """Return the next-token logits (M, V) after feeding ``token_ids_M`` at ``positions_M``."""
        with torch.inference_mode():
            return self._step(token_ids_M, positions_M)

    def _step(self, token_ids_M: torch.Tensor, positions_M: torch.Tensor) -> torch.Tensor:
        hidden = self._body.embed_tokens(token_ids_M[:, None]).squeeze(1)
        cos, sin = self._body.rotary_emb(hidden[:, None], position_ids=positions_M[:, None])
        half = cos.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        for layer in self._layers:
            hidden = hidden + self._attend(layer, layer.norm_in(hidden), cos, sin)
            hidden = hidden + layer.feed_forward(layer.norm_mid(hidden))
        return self._head(self._norm(hidden))

    def _attend(self, layer: _Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the attention sub-layer's output (M, E).

        ``rotate_half(q) * sin`` is written as a roll times a sine with its first half negated: the same products in
        fewer kernels, for queries and keys at once.
        """
        num_rows = x.shape[0]
        H, K, D = layer.num_heads, layer.num_kv_heads, layer.head_dim
        qkv = layer.qkv(x).view(num_rows, H + 2 * K, D)
        turned = qkv[:, : H + K]
        if layer.q_norm is not None and layer.k_norm is not None:
            turned = torch.cat((layer.q_norm(turned[:, :H]), layer.k_norm(turned[:, H:])), dim=1)
        turned = torch.addcmul(turned * cos, turned.roll(D // 2, -1), sin)
        output = decode_attention(self._cache, layer.number, turned[:, :H], turned[:, H:], qkv[:, H + K :])
        return layer.out(output.view(num_rows, H * D))
