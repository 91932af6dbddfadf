"""LoRA layers that keep less for the backward and pass over their output once.

PEFT computes ``result + scaling * B (A x)`` kernel by kernel. With float32 adapters on a half-precision base each one
keeps a float32 copy of its input, so query, key and value keep three, and the product, its scaling, the sum and the
rounding each walk over all outputs. Here the input is kept as it came, which its neighbours share, beside the small
``h = A x``; the scaling goes into a small operand, and one product adds to the base layer's result and rounds once.

Dimension legend: S tokens, I inputs, O outputs, r rank.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

# By name: whoever has such a layer has imported it, and nobody else should load PEFT or bitsandbytes for this.
_PEFT_LAYERS = frozenset(
    {"peft.tuners.lora.layer.Linear", "peft.tuners.lora.bnb.Linear4bit", "peft.tuners.lora.bnb.Linear8bitLt"}
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def add_adapter(
    result: torch.Tensor, x: torch.Tensor, down_rI: torch.Tensor, up_Or: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Return ``result + scaling * (x A^T) B^T``.

    Computed in the adapter's dtype, or in autocast's where that is on, and rounded once to the dtype of ``result``.

    Args:
        result: (..., O), what the base layer made of ``x``.
        x: (..., I), floating; with gradients it is kept as it is, not in the adapter's dtype.
        down_rI: A.
        up_Or: B, of A's dtype.
        scaling: of the adapter.

    Returns:
        Shape and dtype of ``result``; first-order gradients flow to the first four arguments.
    """
    device_type = x.device.type
    is_autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if is_autocast else down_rI.dtype
    return _AddAdapter.apply(result, x, down_rI, up_Or, scaling, dtype)


class _AddAdapter(torch.autograd.Function):
    """``add_adapter`` in the given dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        result: torch.Tensor,
        x: torch.Tensor,
        down_rI: torch.Tensor,
        up_Or: torch.Tensor,
        scaling: float,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        h_Sr = x.reshape(-1, x.size(-1)).to(dtype) @ down_rI.to(dtype).t()
        _, x_needs, down_needs, up_needs, _, _ = ctx.needs_input_grad
        ctx.scaling, ctx.dtype, ctx.x_dtype, ctx.x_shape = scaling, dtype, x.dtype, x.shape
        ctx.down_dtype, ctx.up_dtype = down_rI.dtype, up_Or.dtype
        ctx.save_for_backward(
            x if down_needs else None,
            down_rI if x_needs else None,
            up_Or if x_needs or down_needs else None,
            h_Sr if up_needs else None,
        )
        rows_SO = result.reshape(-1, result.size(-1))
        return _add_product(rows_SO, h_Sr, up_Or.to(dtype).t(), scaling).view(result.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        x, down_rI, up_Or, h_Sr = ctx.saved_tensors
        dtype = ctx.dtype
        grad_x = grad_down = grad_up = None
        with torch.autocast(gradient.device.type, enabled=False):
            grad_SO = gradient.reshape(-1, gradient.size(-1)).to(dtype)
            if h_Sr is not None:
                grad_up = (grad_SO.t() @ h_Sr).mul_(ctx.scaling).to(ctx.up_dtype)
            if up_Or is not None:
                grad_h_Sr = (grad_SO @ up_Or.to(dtype)).mul_(ctx.scaling)
            del grad_SO  # before its like in the other size is made
            if x is not None:
                grad_down = (grad_h_Sr.t() @ x.reshape(-1, x.size(-1)).to(dtype)).to(ctx.down_dtype)
            if down_rI is not None:
                grad_x = _product(grad_h_Sr, down_rI.to(dtype), ctx.x_dtype).view(ctx.x_shape)
        return gradient, grad_x, grad_down, grad_up, None, None


def _add_product(result: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return ``result + scaling * left @ right`` in the dtype of ``result``, rounded once."""
    if result.dtype == left.dtype:
        return torch.addmm(result, left, right, alpha=scaling)
    if result.dtype == torch.bfloat16 and left.dtype == torch.float32:
        return torch.addmm(result, *_in_halves(left * scaling, right))
    return torch.add(result, left @ right, alpha=scaling).to(result.dtype)


def _product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``left @ right`` in ``dtype``, rounded once."""
    if dtype == torch.bfloat16 and left.dtype == torch.float32:
        left, right = _in_halves(left, right)
    return (left @ right).to(dtype)


def _in_halves(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bfloat16 matrices whose product is that of two float32 ones, to about 2^-16 of each term.

    A float32 number is a bfloat16 one plus a remainder, itself rounded to bfloat16: (l + l')(r + r') without l' r'.
    Products add up in float32, so a result in bfloat16 is as good as one computed in float32 and rounded, without the
    float32 matrix of that size. float16 would not do: its remainders underflow.
    """
    left_high, right_high = left.bfloat16(), right.bfloat16()
    left_low, right_low = (left - left_high).bfloat16(), (right - right_high).bfloat16()
    return (
        torch.cat((left_high, left_low, left_high), dim=1),
        torch.cat((right_high, right_high, right_low), dim=0),
    )


def fuse_adapters(model: nn.Module) -> int:
    """Make the LoRA layers of ``model`` use ``add_adapter`` wherever that is what PEFT would compute.

    Each call of a layer decides anew, so merging, disabling and switching adapters go on as in PEFT, and so does what
    ``add_adapter`` does not cover: dropout in effect, DoRA and other variants, adapters with a bias or hooks, sharded
    ones. Calling it twice does no harm; a layer whose forward somebody replaced is left alone.

    Returns:
        The number of layers that use it.
    """
    count = 0
    for module in model.modules():
        if f"{type(module).__module__}.{type(module).__qualname__}" not in _PEFT_LAYERS:
            continue
        found = module.__dict__.get("forward")
        if found is None or getattr(found, "__func__", None) is type(module).forward:  # what unpickling leaves
            # Bound to the module, so that a deep copy of it runs itself.
            module.__dict__["forward"] = types.MethodType(forward, module)
        count += is_fused(module)
    return count


def is_fused(module: nn.Module) -> bool:
    """Return whether ``fuse_adapters`` has replaced the forward of ``module``."""
    return getattr(module.__dict__.get("forward"), "__func__", None) is forward


def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Stand in for the forward of a LoRA layer of PEFT. Of its name too, as pickle looks a method up by that."""
    names = [] if args or kwargs or self.disable_adapters or self.merged else self.active_adapters
    names = [name for name in names if name in self.lora_A]
    if not names or not all(_is_covered(self, name, x) for name in names):
        return type(self).forward(self, x, *args, **kwargs)
    result = self.base_layer(x)
    for name in names:
        down, up = self.lora_A[name].weight, self.lora_B[name].weight
        result = add_adapter(result, x, down, up, self.scaling[name])
    return result


# For whoever asks whether calling a module is more than its class's forward: the numbers are those, up to rounding.
forward.equals_class_forward = True  # type: ignore[attr-defined]


def _is_covered(layer: Any, name: str, x: torch.Tensor) -> bool:
    """Return whether PEFT would add ``scaling * B (A x)`` of this adapter and nothing else."""
    down, up, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
    if name in layer.lora_variant or not _is_bare(down) or not _is_bare(up):
        return False
    if type(dropout) is not nn.Identity and (type(dropout) is not nn.Dropout or (dropout.p > 0 and dropout.training)):
        return False
    dtype = down.weight.dtype
    is_cast = getattr(layer, "cast_input_dtype_enabled", True) or x.dtype == dtype
    # Autocast leaves float64 as it is.
    is_known_to_autocast = torch.float64 not in (x.dtype, dtype) or not torch.is_autocast_enabled(x.device.type)
    return (
        up.weight.dtype == dtype
        and x.is_floating_point()
        and x.device == down.weight.device == up.weight.device
        and is_cast
        and is_known_to_autocast
    )


def _is_bare(linear: Any) -> bool:
    """Return whether a module is a product with a whole matrix and nothing else."""
    if type(linear) is not nn.Linear or linear.bias is not None or "forward" in linear.__dict__:
        return False
    if any(getattr(linear, hooks) for hooks in _HOOKS):
        return False
    weight = linear.weight
    is_whole = type(weight) in (nn.Parameter, torch.Tensor) and weight.dim() == 2 and weight.numel() > 0
    return is_whole and not hasattr(weight, "ds_id")
