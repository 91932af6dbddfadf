"""Packed linear layers of the decoder: how exact they are beside PEFT's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trl_grpo_ext.rollout.packed_decoder import PackedLinear, take_apart

pytest.importorskip("peft")


def adapted_layers(size_of_update: float, base_dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """Return q, k and v with float32 adapters , their updates this large beside the base's output."""
    from peft import LoraConfig, get_peft_model

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(64, 96), nn.Linear(64, 32), nn.Linear(64, 32)

    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=12, target_modules=["q", "k", "v"])
    model = get_peft_model(Layer().to(base_dtype), config).get_base_model()
    for layer in (model.q, model.k, model.v):
        assert layer.lora_A["default"].weight.dtype == torch.float32
        nn.init.normal_(layer.base_layer.weight, std=1.0)
        nn.init.normal_(layer.lora_A["default"].weight, std=1.0)
        # variance of the update over that of the base's output: rank * (scale * std)^2
        nn.init.normal_(layer.lora_B["default"].weight, std=size_of_update / (1.5 * 8**0.5))
    return [model.q, model.k, model.v]


def exact(layers: list[Any], x: torch.Tensor) -> torch.Tensor:
    """Return the outputs side by side, in float64."""
    outputs = []
    for layer in layers:
        base, down, up = layer.base_layer, layer.lora_A["default"], layer.lora_B["default"]
        update = x.double() @ down.weight.double().T @ up.weight.double().T * layer.scaling["default"]
        outputs.append(x.double() @ base.weight.double().T + base.bias.double() + update)
    return torch.cat(outputs, dim=-1)


def packed_output(layers: list[Any], x: torch.Tensor, *, keeps_float32: bool = True) -> torch.Tensor:
    parts = [take_apart(layer, None) for layer in layers]
    return PackedLinear([part for part in parts if part], x.dtype, len(x), keeps_float32=keeps_float32)(x)


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("size_of_update", [0.01, 0.1, 0.5])
@torch.no_grad()
def test_float32_adapters_on_a_bfloat16_base_are_as_near_to_the_truth_as_pefts(size_of_update: float) -> None:
    """PEFT rounds the base's output and then the sum; the packed product rounds A x and B and then the sum."""
    layers = adapted_layers(size_of_update)
    x = torch.randn(256, 64).bfloat16()
    truth = exact(layers, x)
    of_peft = rms(torch.cat([layer(x) for layer in layers], dim=-1) - truth)
    got = packed_output(layers, x)
    assert got.dtype == torch.bfloat16
    assert rms(got - truth) < 1.1 * of_peft
    without_bias = rms(got - truth + torch.cat([layer.base_layer.bias for layer in layers]).double())
    assert without_bias > 2 * of_peft, "the comparison would not see a missing bias"


@torch.no_grad()
def test_a_change_of_a_float32_adapter_below_bfloat16_reaches_the_sampler() -> None:
    """The control rounds A to bfloat16, as autocast would: there, steps of a small learning rate are lost."""
    layers = adapted_layers(1.0)
    for layer in layers:  # values that bfloat16 holds exactly, so that a small change is rounded away
        layer.lora_A["default"].weight.copy_(layer.lora_A["default"].weight.bfloat16())
    x = torch.randn(256, 64).bfloat16()
    before = {kept: packed_output(layers, x, keeps_float32=kept) for kept in (True, False)}
    for layer in layers:
        layer.lora_A["default"].weight.mul_(1 + 2**-10)
    after = {kept: packed_output(layers, x, keeps_float32=kept) for kept in (True, False)}
    assert float((after[True] != before[True]).float().mean()) > 0.05
    assert torch.equal(after[False], before[False])


@torch.no_grad()
def test_float32_adapters_on_a_float32_base_are_exact() -> None:
    layers = adapted_layers(1.0, torch.float32)
    x = torch.randn(64, 64)
    truth = exact(layers, x)
    assert rms(packed_output(layers, x) - truth) < 1e-6 * rms(truth)
