"""What CUDA allocates differently from the CPU inside one operation, where it matters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def cuda_softmax(wanted: bool = True) -> Iterator[None]:
    """Make ``nn.functional.softmax`` allocate as on CUDA inside; False changes nothing.

    CUDA turns half into float32 within the kernel, where the CPU makes a copy first, and its backward holds the product
    of gradient and result (``softmax_backward_cuda_out`` in ATen). It decides for eager attention on long rows.
    """
    if not wanted:
        yield
        return
    plain = nn.functional.softmax

    def softmax(x: torch.Tensor, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> torch.Tensor:
        return _CudaSoftmax.apply(x, x.dtype if dtype is None else dtype)

    nn.functional.softmax = softmax  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.functional.softmax = plain


class _CudaSoftmax(torch.autograd.Function):
    """Shapes and storages of a soft-max; its values are not computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        result = x.new_zeros(x.shape, dtype=dtype)
        ctx.save_for_backward(result)
        ctx.input_dtype = x.dtype
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (result,) = ctx.saved_tensors
        product = gradient * result
        grad_input = gradient.new_zeros(gradient.shape, dtype=ctx.input_dtype)
        del product
        return grad_input, None
