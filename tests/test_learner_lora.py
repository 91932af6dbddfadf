"""The learner's LoRA layers give PEFT's numbers and gradients, keep less, and leave to PEFT what is not plain LoRA."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from reference.packing_reference import gradients, ragged_batch, relative_error
from tiny import tiny_model
from torch import nn

from trl_grpo_ext.learner import lora
from trl_grpo_ext.learner.lora import fuse_adapters, is_fused
from trl_grpo_ext.learner.scoring import score_completions
from trl_grpo_ext.rollout.packed_decoder import take_apart

NUM_LAYERS = 14  # two decoder layers of seven linear layers
HALVES = (torch.bfloat16, torch.float16)


def _config(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 10, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes})


def _adapted(dtype=torch.float32, family="llama", adapter_dtype=None, up_std=0.3, second=None, **changes):
    """Return a model with PEFT's own LoRA layers: scaling 2.5, B of ``up_std``, ``second`` a second active adapter."""
    torch.manual_seed(0)
    model: Any = get_peft_model(tiny_model(family, dtype=dtype), _config(**changes))
    if second is not None:
        model.add_adapter("second", _config(**second))
        model.base_model.set_adapter(["default", "second"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.to(adapter_dtype or (dtype if dtype not in HALVES else torch.float32))
            if "lora_B" in name:
                parameter.normal_(std=up_std) if up_std else parameter.zero_()
    return model.train()


def _fused(model):
    model = copy.deepcopy(model)
    assert fuse_adapters(model) == NUM_LAYERS or model.config.model_type != "llama"
    return model


def _run(model, autocast=False, **kwargs):
    """Return the logits of a few tokens and every gradient of a sum over them."""
    ids = torch.randint(3, 300, (3, 11), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(input_ids=ids, **kwargs).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    (logits.double() * weights).mean().backward()
    return logits.detach().double(), {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def _error(found, expected):
    """Return the larger relative error of logits and gradients."""
    assert found[1].keys() == expected[1].keys()
    return max(float((found[0] - expected[0]).norm() / expected[0].norm()), relative_error(found[1], expected[1]))


@pytest.fixture
def calls(monkeypatch):
    """The scalings that ``add_adapter`` was called with."""
    seen = []

    def add_adapter(*args, original=lora.add_adapter):
        seen.append(args[-1])
        return original(*args)

    monkeypatch.setattr(lora, "add_adapter", add_adapter)
    return seen


@pytest.mark.parametrize("up_std", [0.0, 0.3])
@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}, {"second": {"r": 3, "lora_alpha": 2}}])
# Families by norm: transformers takes RMS norms in float32, whatever the model's type.
@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"), [("starcoder2", torch.float64, 1e-10), ("llama", torch.float32, 2e-5)]
)
def test_equals_peft(family, dtype, tolerance, changes, up_std, calls):
    model = _adapted(dtype, family, up_std=up_std, **changes)
    expected = _run(model)
    assert calls == []
    found = _run(_fused(model))
    assert set(calls) == {5.0} if changes.get("use_rslora") else 2.5 in calls
    assert len(calls) == sum(len(m.lora_A) for m in model.modules() if hasattr(m, "lora_A"))
    assert _error(found, expected) < tolerance
    downs = [gradient.abs().max() for name, gradient in found[1].items() if "lora_A" in name]
    assert (max(downs) == 0) == (up_std == 0)
    assert all(gradient.abs().max() > 0 for name, gradient in found[1].items() if "lora_B" in name)


def test_control_a_wrong_scaling_fails(monkeypatch):
    model = _adapted()
    expected = _run(model)
    original = lora.add_adapter
    monkeypatch.setattr(lora, "add_adapter", lambda *args: original(*args[:-1], args[-1] * 1.001))
    assert _error(_run(_fused(model)), expected) > 1e-4


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_half_precision_is_no_further_from_the_truth_than_peft(dtype, autocast):
    if dtype == torch.float32 and not autocast:
        pytest.skip("float32 has a test of its own")
    model = _adapted(dtype)
    truth = _run(copy.deepcopy(model).double())
    by_peft, found = _run(model, autocast), _run(_fused(model), autocast)
    assert 0 < _error(found, truth) <= 1.25 * _error(by_peft, truth)


class _OneLayer(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(48, 80, dtype=dtype)

    def forward(self, x):
        return self.linear(x)


def _run_layer(layer, x, gradient):
    x = x.detach().requires_grad_()
    out = layer(x)
    layer.zero_grad()
    out.backward(gradient.to(out.dtype))
    weights = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert all(weight.grad.dtype == weight.dtype for weight in weights)
    return out.detach(), x.grad, *(weight.grad for weight in weights)


@pytest.mark.parametrize("shape", [(37, 48), (3, 37, 48), (0, 48)])
@pytest.mark.parametrize(
    ("dtype", "adapter_dtype"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
)
def test_one_layer_in_every_mixture_of_types(dtype, adapter_dtype, shape, calls):
    layer: Any = get_peft_model(_OneLayer(dtype), _config(target_modules=["linear"], task_type=None)).base_model.model
    layer = layer.linear
    for part in (layer.lora_A, layer.lora_B):
        nn.init.normal_(part["default"].weight, std=0.3)
        part.to(adapter_dtype)
    x, gradient = torch.randn(shape, dtype=dtype), torch.randn(*shape[:-1], 80, dtype=dtype)
    truth = _run_layer(copy.deepcopy(layer).double(), x.double(), gradient.double())
    by_peft = _run_layer(layer, x, gradient)
    assert fuse_adapters(layer) == 1
    found = _run_layer(layer, x, gradient)
    assert calls == [2.5]
    for mine, theirs, exact in zip(found, by_peft, truth, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        error, allowed = ((part.double() - exact).norm() for part in (mine, theirs))
        assert error <= 1.25 * allowed + (1e-13 if dtype == torch.float64 else 1e-6) * exact.norm()
    if (dtype, adapter_dtype) == (torch.bfloat16, torch.float32):
        # Rounded once: each output is the bfloat16 nearest to base result + product; halves lose 2^-14 of its terms.
        down, up = (part["default"].weight.double() for part in (layer.lora_A, layer.lora_B))
        h = x.double() @ down.T
        sums = layer.base_layer(x).double() + 2.5 * h @ up.T
        allowed = 2**-8 * sums.abs() + 2**-14 * 2.5 * h.abs() @ up.abs().T
        assert ((found[0].double() - sums).abs() <= allowed).all()
        for mine, exact in zip(found[2:], truth[2:], strict=True):
            assert (mine.double() - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize("kind", ["Linear4bit", "Linear8bitLt"])
def test_quantised_layers(kind, calls):
    bnb = pytest.importorskip("bitsandbytes")
    model: Any = _OneLayer(torch.bfloat16)
    plain = model.linear
    if kind == "Linear4bit":
        model.linear, model.is_loaded_in_4bit = bnb.nn.Linear4bit(64, 64, compute_dtype=torch.bfloat16), True
    else:
        model.linear, model.is_loaded_in_8bit = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False), True
    model.linear.load_state_dict({"weight": torch.randn(64, 64) / 8, "bias": plain.bias[:64].float()}, strict=False)
    model = get_peft_model(model.to("cpu"), _config(target_modules=["linear"], task_type=None))
    layer = model.base_model.model.linear
    assert type(layer).__name__ == kind
    nn.init.normal_(layer.lora_B["default"].weight, std=0.3)
    x, gradient = torch.randn(3, 9, 64).bfloat16(), torch.randn(3, 9, 64).bfloat16()
    expected = _run_layer(layer, x, gradient)
    assert fuse_adapters(model) == 1
    found = _run_layer(layer, x, gradient)
    assert calls == [2.5]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - theirs).norm() < 2**-8 * theirs.norm()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant, calls):
    model = _fused(_adapted())
    expected = _run(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    assert _error(_run(model), expected) < 1e-6
    assert len(calls) == 3 * NUM_LAYERS


def test_gradients_or_none_the_numbers_are_the_same(calls):
    """So the ratio of a policy to itself is 1, wherever its old log-probabilities were computed."""
    model = _fused(_adapted(torch.bfloat16))
    expected, _ = _run(model)
    ids = torch.randint(3, 300, (3, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits.double(), expected)
    assert len(calls) == 2 * NUM_LAYERS


def test_copies_run_themselves(calls):
    model = _fused(_adapted())
    expected, _ = _run(model)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    for other in copies:
        fuse_adapters(other)
        assert torch.equal(_run(other)[0], expected)
    assert not torch.equal(_run(model)[0], expected)
    assert len(calls) == 4 * NUM_LAYERS


def _nothing(model):
    pass


def _with_trained_head(model, change):
    """Apply ``change`` and leave the head's weight something to learn, as no adapter is left to."""
    change()
    model.get_output_embeddings().weight.requires_grad_()


def _hooked(model):
    model.base_model.model.model.layers[0].mlp.up_proj.lora_B["default"].register_forward_hook(lambda *_: None)


FALLBACKS = {
    "dropout": ({"lora_dropout": 0.5}, _nothing, NUM_LAYERS),
    "dora": ({"use_dora": True}, _nothing, NUM_LAYERS),
    "merged": ({}, lambda model: _with_trained_head(model, model.merge_adapter), NUM_LAYERS),
    "disabled": ({}, lambda model: _with_trained_head(model, model.disable_adapter_layers), NUM_LAYERS),
    "bias": ({"lora_bias": True, "target_modules": ["q_proj"]}, _nothing, 2),
    "hook": ({}, _hooked, 1),
}


@pytest.mark.parametrize("reason", FALLBACKS)
def test_what_is_not_plain_lora_is_left_to_peft(reason, calls):
    changes, prepare, num_left = FALLBACKS[reason]
    model = _adapted(family="qwen2" if reason == "bias" else "llama", **changes)
    fused = copy.deepcopy(model)
    num_layers = fuse_adapters(fused)
    results = []
    for each in (model, fused):
        prepare(each)
        torch.manual_seed(5)
        results.append(_run(each))
    assert len(calls) == num_layers - num_left
    assert _error(results[1], results[0]) <= (5e-6 if reason == "hook" else 0)


def test_a_mixed_batch_is_left_to_peft(calls):
    model = _adapted(second={"r": 3}).eval()
    model.set_adapter("default")
    names = ["default", "second", "__base__"]
    expected = _run(model, adapter_names=names)
    assert torch.equal(_run(_fused(model), adapter_names=names)[0], expected[0])
    assert calls == []


def test_switching_merging_and_saving_go_on(calls):
    model = _adapted(second={"r": 3, "lora_alpha": 9})
    fused = _fused(model)
    assert fuse_adapters(fused) == NUM_LAYERS  # twice
    for name, scaling in (("default", 2.5), ("second", 3.0)):
        for each in (model, fused):
            each.set_adapter(name)
        assert _error(_run(fused), _run(model)) < 5e-6
        assert set(calls) == {scaling}
        calls.clear()
    for each in (model, fused):
        with each.disable_adapter():
            off = each(torch.arange(9)[None]).logits
        each.merge_adapter()
        merged = each(torch.arange(9)[None]).logits
        each.unmerge_adapter()
    assert calls == []
    assert not torch.allclose(off, merged)
    assert torch.allclose(merged, fused(torch.arange(9)[None]).logits, atol=1e-5)
    assert len(calls) == NUM_LAYERS
    states = [get_peft_model_state_dict(each, adapter_name="second") for each in (model, fused)]
    assert states[0].keys() == states[1].keys()
    assert not any(is_fused(module) for module in fused.merge_and_unload().modules())


def test_a_forward_that_somebody_replaced_is_left_alone():
    model = _adapted()
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    original = layer.forward
    layer.forward = lambda x: original(x)
    assert fuse_adapters(model) == NUM_LAYERS - 1
    assert not is_fused(layer)


def _saved(model):
    """Return storage, type and size of what the first query, key and value projections keep for their backward."""
    attention = model.base_model.model.model.layers[0].self_attn
    x = torch.randn(3, 11, 32).bfloat16().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection(x)
    return x, [t for t in kept if t.shape[-1] == 32 and t.numel() == x.numel()]


def test_the_input_is_kept_once_and_as_it_came():
    model = _adapted(torch.bfloat16)
    _, by_peft = _saved(model)
    assert sum(t.dtype == torch.float32 for t in by_peft) == 3  # control: what there is to save
    x, kept = _saved(_fused(model))
    assert kept
    assert {(t.dtype, t.data_ptr()) for t in kept} == {(x.dtype, x.data_ptr())}


def test_the_packed_learner_uses_it_and_the_decoder_still_takes_layers_apart(calls):
    batch = ragged_batch()
    model = _adapted()
    before = [take_apart(m, None) for m in model.modules() if hasattr(m, "lora_A")]
    scores = score_completions(model, *batch, min_token_ratio=1.0)
    assert len(calls) == NUM_LAYERS
    after = [take_apart(m, None) for m in model.modules() if hasattr(m, "lora_A")]
    assert all(part is not None and len(part.adapters) == 1 for part in after)
    assert len(before) == len(after)
    found = gradients(model, scores.logps_BT, torch.zeros_like(scores.logps_BT))
    assert all(gradient.abs().max() > 0 for gradient in found.values())
