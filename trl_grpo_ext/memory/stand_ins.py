"""Layers and an optimiser that hold and allocate what those of bitsandbytes do on a GPU, and compute nothing of use.

bitsandbytes' own cannot run without data: quantising fails on fake tensors, and on the CPU some of its layers take
other paths than on CUDA. These run anywhere, on real tensors as on fake ones, so that the two can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from trl_grpo_ext.memory.closed_forms import (
    EIGHT_BIT_BLOCK,
    EIGHT_BIT_MIN_ELEMENTS,
    NESTED_BLOCK,
    NF4_BLOCK,
    ceil_div,
)


class StandInLinear(nn.Linear):
    """A frozen linear layer whose weight is stored quantised; ``nn.Linear`` so that PEFT finds it."""

    def __init__(self, plain: nn.Linear, compute_dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.compute_dtype = compute_dtype
        self.bias = plain.bias


class NF4Linear(StandInLinear):
    """4-bit weight, scales in 8 bits with double quantisation; one dequantised copy lives during each product."""

    def __init__(self, plain: nn.Linear, compute_dtype: torch.dtype, *, double_quantised: bool = True) -> None:
        super().__init__(plain, compute_dtype)
        device = plain.weight.device
        num_elements = plain.weight.numel()
        blocks = ceil_div(num_elements, NF4_BLOCK)
        packed = torch.empty(ceil_div(num_elements, 2), 1, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        scales = torch.uint8 if double_quantised else torch.float32
        self.register_buffer("absmax", torch.empty(blocks, dtype=scales, device=device))
        self.register_buffer("code", torch.empty(16, device=device))
        if double_quantised:
            self.register_buffer("absmax_absmax", torch.empty(ceil_div(blocks, NESTED_BLOCK), device=device))
            self.register_buffer("absmax_code", torch.empty(256, device=device))
            self.register_buffer("absmax_offset", torch.empty((), device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        y = _DequantisedProduct.apply(x.to(self.compute_dtype), self.weight, self.out_features, self.bias)
        return y.to(dtype)


class _DequantisedProduct(torch.autograd.Function):
    """x W^T with W made anew in the forward and in the backward; the input is not kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, out_features: int, bias: Any) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.shape = (out_features, x.size(-1))
        weight = x.new_empty(ctx.shape)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return gradient @ gradient.new_empty(ctx.shape), None, None, None


class Int8Linear(StandInLinear):
    """8-bit weight with a scale per row; the product runs on an 8-bit copy of the input into 32-bit integers."""

    def __init__(self, plain: nn.Linear, compute_dtype: torch.dtype) -> None:
        super().__init__(plain, compute_dtype)
        device = plain.weight.device
        weight = torch.empty(plain.weight.shape, dtype=torch.int8, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scale", torch.empty(plain.out_features, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Int8Product.apply(x, self.weight, self.scale, self.bias)


class _Int8Product(torch.autograd.Function):
    """x W^T as in LLM.int8(): the input is kept, the backward multiplies with a dequantised weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: Any) -> torch.Tensor:
        ctx.save_for_backward(x, weight, scale)
        rows = x.reshape(-1, x.size(-1))
        half = rows.to(torch.float16)
        quantised = rows.new_empty(rows.shape, dtype=torch.int8)
        row_scale = rows.new_empty(rows.size(0), dtype=torch.float32)
        del half
        sums = rows.new_empty((rows.size(0), weight.size(0)), dtype=torch.int32)
        y = rows.new_empty(sums.shape)
        del quantised, row_scale, sums
        if bias is not None:
            y = y.add_(bias)
        return y.view(*x.shape[:-1], weight.size(0))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        x, weight, _ = ctx.saved_tensors
        return gradient.to(x.dtype) @ weight.to(x.dtype), None, None, None


def quantise_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Linear], skip: Iterable[nn.Module]) -> int:
    """Replace every linear layer but those in ``skip``; return how many.

    Args:
        model: changed in place.
        make: returns the stand-in of a layer.
        skip: layers that keep their precision, usually the LM head.
    """
    kept = {id(module) for module in skip}
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and id(child) not in kept:
                setattr(parent, name, make(child))
                count += 1
    return count


class EightBitAdamW(torch.optim.Optimizer):
    """Hold the states of bitsandbytes' 8-bit AdamW; the update is in place and needs nothing more.

    Args:
        params: what is trained.
        paged: True leaves the states out, as for those that the host may hold; see ``host_bytes``.
    """

    def __init__(self, params: Iterable[nn.Parameter], *, paged: bool = False) -> None:
        super().__init__(list(params), {})
        self.paged = paged
        self.host_bytes = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in self.state:
                    self.state[parameter] = self._new_state(parameter)
                parameter.mul_(1.0)

    def _new_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        size = parameter.numel()
        if size < EIGHT_BIT_MIN_ELEMENTS:
            return {name: parameter.new_zeros(parameter.shape, dtype=torch.float32) for name in ("state1", "state2")}
        blocks = ceil_div(size, EIGHT_BIT_BLOCK)
        state: dict[str, Any] = {
            name: parameter.new_zeros(blocks, dtype=torch.float32) for name in ("absmax1", "absmax2")
        }
        # bitsandbytes pages tensors of 100 000 elements and more.
        if self.paged and size >= 100_000:
            self.host_bytes += 2 * size
            return state
        for name in ("state1", "state2"):
            state[name] = parameter.new_zeros(parameter.shape, dtype=torch.uint8)
        return state


class ForeachAdamW(torch.optim.Optimizer):
    """Hold the states of ``torch.optim.AdamW(foreach=True)``, and the square roots it makes of all at once."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(list(params), {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter in parameters:
            if parameter not in self.state:
                self.state[parameter] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        roots = [self.state[parameter]["exp_avg_sq"].sqrt() for parameter in parameters]
        for parameter, root in zip(parameters, roots, strict=True):
            parameter.addcdiv_(self.state[parameter]["exp_avg"], root.add_(1.0), value=0.0)
