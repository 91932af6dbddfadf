"""Closed forms against bitsandbytes' own objects on the CPU, and against numbers counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trl_grpo_ext.memory.closed_forms import (
    GIB,
    adamw_8bit_bytes,
    int8_bytes,
    kv_cache_bytes,
    nf4_bytes,
    sampling_bytes,
)
from trl_grpo_ext.memory.stand_ins import EightBitAdamW, Int8Linear, NF4Linear

SHAPES = [(512, 384), (100, 60), (896, 4864)]


def storage(tensors: Any) -> int:
    """Return the bytes of distinct storages."""
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}.values()
    )


@pytest.mark.parametrize("double_quantised", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_nf4(shape: tuple[int, int], double_quantised: bool) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    weight = bnb.nn.Params4bit(
        torch.randn(shape).bfloat16(), requires_grad=False, compress_statistics=double_quantised, quant_type="nf4"
    )
    weight = weight.to("cpu")
    if weight.quant_state is None:
        weight = weight._quantize("cpu")
    state = weight.quant_state
    real = [weight.data, state.absmax, state.code]
    if double_quantised:
        real += [state.state2.absmax, state.state2.code, state.offset]
    assert storage(real) == nf4_bytes(shape[0] * shape[1], double_quantised=double_quantised)
    stand_in = NF4Linear(nn.Linear(shape[1], shape[0], bias=False), torch.bfloat16, double_quantised=double_quantised)
    assert storage([*stand_in.parameters(), *stand_in.buffers()]) == storage(real)


@pytest.mark.parametrize("shape", SHAPES)
def test_int8(shape: tuple[int, int]) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear8bitLt(shape[1], shape[0], bias=False, has_fp16_weights=False)
    layer.weight = bnb.nn.Int8Params(torch.randn(shape).half(), has_fp16_weights=False, requires_grad=False)
    layer = layer.to("cpu")
    layer(torch.randn(2, shape[1]).bfloat16())
    assert storage([layer.state.CB, layer.weight.data, layer.state.SCB]) == int8_bytes(*shape)
    stand_in = Int8Linear(nn.Linear(shape[1], shape[0], bias=False), torch.bfloat16)
    assert storage([*stand_in.parameters(), *stand_in.buffers()]) == int8_bytes(*shape)


@pytest.mark.parametrize("size", [4095, 4096, 5000, 5120])
def test_adamw_8bit(size: int) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    parameter = nn.Parameter(torch.randn(size))
    parameter.grad = torch.randn(size)
    real = bnb.optim.AdamW8bit([parameter])
    real.step()
    ours = EightBitAdamW([parameter])
    ours.step()
    for optimizer in (real, ours):
        state = {n: s for n, s in optimizer.state[parameter].items() if isinstance(s, torch.Tensor) and "qmap" not in n}
        assert storage(state.values()) == adamw_8bit_bytes([size])


def test_quantised_bytes_per_parameter() -> None:
    """QLoRA's paper: 4 bits, and 0.127 bits of scales with double quantisation, 0.5 without."""
    many = 4096 * 14336
    assert nf4_bytes(many) / many == pytest.approx((4 + 0.127) / 8, abs=1e-4)
    assert nf4_bytes(many, double_quantised=False) / many == pytest.approx(4.5 / 8, abs=1e-4)
    assert int8_bytes(14336, 4096) == many + 4 * 14336
    assert adamw_8bit_bytes([many]) / many == 2 + 8 / 256


def test_cache() -> None:
    """Llama-3.1-8B: 128 KiB a token; a window caps what its layers keep."""
    assert kv_cache_bytes(1, 1, [None] * 32, 8, 128, 2) == 128 * 1024
    assert kv_cache_bytes(8192, 4, [None] * 32, 8, 128, 2) == 4 * GIB
    half = kv_cache_bytes(8192, 1, [None, 4096] * 16, 8, 128, 2)
    assert half == 0.75 * GIB
    assert kv_cache_bytes(1024, 1, [None, 4096] * 16, 8, 128, 2) == kv_cache_bytes(1024, 1, [None] * 32, 8, 128, 2)


def test_sampling() -> None:
    assert sampling_bytes(32, 151_936) == 32 * 151_936 * 22
