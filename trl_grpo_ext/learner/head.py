"""Log-probabilities and entropies of chosen tokens from hidden states, never holding all logits.

Dimension legend: N scored tokens, H hidden size, V vocabulary.

Three things make it cheaper than recomputing the logits tile by tile as TRL's fused head does. The gradient of a
log-probability with respect to its hidden state is a scalar times a row that is known in the forward, so a frozen head
is never run again in the backward. The forward is cut along tokens and the gradient of the weight along the
vocabulary, so every matrix product is complete and rounded once, and half precision needs no float32 products to stay
unbiased. And the softmax is taken once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from trl_grpo_ext.learner.device import takes_cpu_path

# Bytes of the float32 tile that one step of the loops holds. Above 32 MiB, glibc returns every freed block to the
# system, and touching fresh pages costs the CPU more than the softmax does (measured: 2.5 times, at 48 MiB).
_TILE_BYTES_CPU = 24 * 2**20
_TILE_BYTES_ACCELERATOR = 256 * 2**20


class HeadTransform(NamedTuple):
    """What lies between the LM head and the softmax: z = softcap(logits * scale) / temperature."""

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return z in at least float32, reusing the memory of ``logits`` where it already is."""
        z = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.scale != 1.0:
            z = z.mul_(self.scale)
        if self.softcap is not None:
            z = z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z.div_(self.temperature) if self.temperature != 1.0 else z

    def backward_(self, gradient: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Turn a gradient with respect to z into one with respect to the logits, in place."""
        if self.softcap is not None:
            # d tanh(x) = 1 - tanh(x)^2
            gradient.mul_(1 - (z * (self.temperature / self.softcap)).square_())
        factor = self.scale / self.temperature
        return gradient.mul_(factor) if factor != 1.0 else gradient


def read_head_transform(config: Any, temperature: float) -> HeadTransform:
    """Return what a transformers model does to its logits, read from its configuration, as TRL's fused head reads it.

    ``logit_scale`` (Cohere), ``output_multiplier`` and ``lm_head_multiplier`` (Falcon-H1) multiply; ``logits_scaling``
    divides (Granite, MiniCPM3), except in HyperCLOVA X, where it multiplies.
    """
    text = config.get_text_config()
    scale = None
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        scale = getattr(text, name, None) if scale is None else scale
    divisor = getattr(text, "logits_scaling", None)
    if scale is None and divisor is not None:
        scale = divisor if text.model_type == "hyperclovax" else 1 / divisor
    return HeadTransform(temperature, 1.0 if scale is None else scale, getattr(text, "final_logit_softcapping", None))


class Scores(NamedTuple):
    """Results of ``score_tokens``."""

    logps_N: torch.Tensor
    entropies_N: torch.Tensor | None


def score_tokens(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    transform: HeadTransform,
    *,
    compute_entropy: bool,
    gather: Callable[..., AbstractContextManager] = lambda *parameters: nullcontext(),
) -> Scores:
    """Return log p(label) and the entropy of softmax(z) for every hidden state.

    z = softcap(scale * (hidden W^T + b)) / temperature. The product runs in autocast's dtype, or in that of
    ``hidden_NH`` without autocast, and is rounded to it as TRL's head rounds it; the softmax runs in float32 (float64
    for float64).

    Args:
        hidden_NH: (N, H), N >= 0.
        weight_VH: (V, H).
        bias_V: (V,) or None.
        labels_N: (N,) token ids.
        transform: scale, soft-cap and temperature.
        compute_entropy: whether to return entropies.
        gather: context that gathers sharded parameters while they are read.

    Returns:
        (N,) float32 or float64. Gradients flow from both to all of hidden, weight and bias.
    """
    device_type = hidden_NH.device.type
    dtype = hidden_NH.dtype
    if torch.is_autocast_enabled(device_type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device_type)
    with torch.autocast(device_type, enabled=False):
        logps_N, entropies_N = _ScoreTokens.apply(
            hidden_NH, weight_VH, bias_V, labels_N, transform, dtype, compute_entropy, torch.is_grad_enabled(), gather
        )
    return Scores(logps_N, entropies_N)


class _ScoreTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_N: torch.Tensor,
        transform: HeadTransform,
        dtype: torch.dtype,
        compute_entropy: bool,
        needs_grad: bool,
        gather: Callable[..., AbstractContextManager],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.set_materialize_grads(False)
        num_tokens = hidden_NH.size(0)
        result_dtype = torch.promote_types(dtype, torch.float32)
        logps_N = hidden_NH.new_empty(num_tokens, dtype=result_dtype)
        entropies_N = torch.empty_like(logps_N) if compute_entropy else None
        log_norm_N = torch.empty_like(logps_N)
        needs_hidden = needs_grad and ctx.needs_input_grad[0]
        direction_NH = hidden_NH.new_empty(hidden_NH.shape, dtype=dtype) if needs_hidden else None
        hidden = hidden_NH.to(dtype)
        with gather(weight_VH, bias_V):
            weight, bias = weight_VH.to(dtype), None if bias_V is None else bias_V.to(dtype)
            for rows in _tiles(num_tokens, weight.size(0), hidden.device):
                z = transform.apply(nn.functional.linear(hidden[rows], weight, bias))
                label = labels_N[rows].unsqueeze(-1)
                # Not torch.softmax: on the CPU, its exponential is off by 1e-5, which shows in entropies and gradients.
                largest = z.amax(-1, keepdim=True)
                p = torch.sub(z, largest).exp_()
                total = p.sum(-1, keepdim=True)
                log_norm = (largest + total.log()).squeeze(-1)
                log_norm_N[rows] = log_norm
                logps_N[rows] = z.gather(-1, label).squeeze(-1) - log_norm
                p.div_(total)
                if entropies_N is not None:
                    entropies_N[rows] = log_norm - torch.linalg.vecdot(p, z)
                if direction_NH is not None:
                    # d log p(label) / dz = 1[label] - p; formed before rounding, so confident tokens keep their digits
                    gradient = p.neg_().scatter_add_(-1, label, torch.ones_like(label, dtype=p.dtype))
                    torch.mm(transform.backward_(gradient, z).to(dtype), weight, out=direction_NH[rows])
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, labels_N, log_norm_N, entropies_N, direction_NH)
        ctx.transform, ctx.dtype, ctx.gather = transform, dtype, gather
        return logps_N, entropies_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logps_N: torch.Tensor | None, grad_entropies_N: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, labels_N, log_norm_N, entropies_N, direction_NH = ctx.saved_tensors
        transform, dtype = ctx.transform, ctx.dtype
        grad_hidden = grad_weight = grad_bias = None
        hidden = hidden_NH.to(dtype)
        with ctx.gather(weight_VH, bias_V):
            weight, bias = weight_VH.to(dtype), None if bias_V is None else bias_V.to(dtype)
            if ctx.needs_input_grad[0]:
                grad_hidden = torch.zeros_like(hidden_NH)
                if grad_logps_N is not None:
                    grad_hidden += (grad_logps_N.unsqueeze(-1) * direction_NH).to(grad_hidden.dtype)
                for rows in (
                    _tiles(hidden.size(0), weight.size(0), hidden.device) if grad_entropies_N is not None else ()
                ):
                    z = transform.apply(nn.functional.linear(hidden[rows], weight, bias))
                    grad_entropies = grad_entropies_N[rows]  # type: ignore[index]
                    gradient = _grad_of_z(z, log_norm_N[rows], entropies_N[rows], None, grad_entropies, None)
                    grad_hidden[rows] += (transform.backward_(gradient, z).to(dtype) @ weight).to(grad_hidden.dtype)
            if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
                grad_weight = torch.empty_like(weight_VH) if ctx.needs_input_grad[1] else None
                grad_bias = torch.empty_like(bias_V) if ctx.needs_input_grad[2] else None
                for columns in _tiles(weight.size(0), hidden.size(0), hidden.device):
                    part = None if bias is None else bias[columns]
                    z = transform.apply(nn.functional.linear(hidden, weight[columns], part))
                    label = labels_N - columns.start
                    gradient = _grad_of_z(z, log_norm_N, entropies_N, grad_logps_N, grad_entropies_N, label)
                    gradient = transform.backward_(gradient, z)
                    if grad_bias is not None:
                        grad_bias[columns] = gradient.sum(0).to(grad_bias.dtype)
                    if grad_weight is not None:
                        grad_weight[columns] = (gradient.to(dtype).t() @ hidden).to(grad_weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None


def _grad_of_z(
    z: torch.Tensor,
    log_norm: torch.Tensor,
    entropies: torch.Tensor | None,
    grad_logps: torch.Tensor | None,
    grad_entropies: torch.Tensor | None,
    label: torch.Tensor | None,
) -> torch.Tensor:
    """Return the gradient of a tile of z: g (1[label] - p) - e p (log p + entropy)."""
    log_p = z - log_norm.unsqueeze(-1)
    factor = torch.zeros_like(log_p)
    if grad_entropies is not None and entropies is not None:
        factor.add_(log_p).add_(entropies.unsqueeze(-1)).mul_(-grad_entropies.unsqueeze(-1))
    if grad_logps is not None:
        factor.sub_(grad_logps.unsqueeze(-1))
    gradient = factor.mul_(log_p.exp_())
    if grad_logps is not None and label is not None:
        inside = (label >= 0) & (label < z.size(-1))
        column = label.clamp(0, z.size(-1) - 1).unsqueeze(-1)
        gradient.scatter_add_(-1, column, (grad_logps * inside).to(gradient.dtype).unsqueeze(-1))
    return gradient


def _tiles(length: int, width: int, device: torch.device) -> Iterator[slice]:
    """Yield slices over ``length`` whose tiles of ``width`` float32 columns fit the device's tile."""
    tile_bytes = _TILE_BYTES_CPU if takes_cpu_path(device) else _TILE_BYTES_ACCELERATOR
    step = max(1, tile_bytes // (4 * max(width, 1)))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))
