"""The LM head against plain logits, in every tile size."""

from __future__ import annotations

import pytest
import torch
import transformers
from reference.packing_reference import tiny_model

from trl_grpo_ext.learner import head
from trl_grpo_ext.learner.head import HeadTransform, read_head_transform, score_tokens

TRANSFORMS = [
    HeadTransform(),
    HeadTransform(temperature=0.7),
    HeadTransform(temperature=1.3, scale=0.4),
    HeadTransform(temperature=0.9, scale=1.7, softcap=2.5),
]


def _inputs(dtype=torch.float64, num_tokens=11):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((num_tokens, 6), (17, 6), (17,))
    )
    labels = torch.randint(17, (num_tokens,), generator=generator)
    return hidden, weight, bias, labels


def _plain(hidden, weight, bias, labels, transform):
    z = torch.nn.functional.linear(hidden, weight, bias) * transform.scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    log_p = torch.log_softmax(z / transform.temperature, -1)
    return log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def _gradients(logps, entropies, inputs, use=(1.0, 0.3)):
    weights = torch.randn(2, len(logps), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    total = sum(
        share * (x.double() * w).sum()
        for share, x, w in zip(use, (logps, entropies), weights, strict=True)
        if share and x is not None
    )
    return torch.autograd.grad(total, inputs)


@pytest.mark.parametrize("tile_bytes", [4, 4 * 17 * 3, 2**20])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_equals_plain_logits(monkeypatch, tile_bytes, has_bias, transform):
    monkeypatch.setattr(head, "_TILE_BYTES_CPU", tile_bytes)
    hidden, weight, bias, labels = _inputs()
    bias = bias if has_bias else None
    leaves = [x for x in (hidden, weight, bias) if x is not None]
    for use in ((1.0, 0.3), (1.0, 0.0), (0.0, 1.0)):
        expected = _plain(hidden, weight, bias, labels, transform)
        found = score_tokens(hidden, weight, bias, labels, transform, compute_entropy=True)
        for a, b in zip(found, expected, strict=True):
            assert (a - b).abs().max() < 1e-12
        for a, b in zip(_gradients(*found, leaves, use), _gradients(*expected, leaves, use), strict=True):
            assert (a - b).abs().max() < 1e-12


def test_without_entropy_only_the_log_probabilities_come():
    hidden, weight, bias, labels = _inputs()
    found = score_tokens(hidden, weight, bias, labels, HeadTransform(), compute_entropy=False)
    assert found.entropies_N is None
    expected = _plain(hidden, weight, bias, labels, HeadTransform())[0]
    assert (found.logps_N - expected).abs().max() < 1e-12
    leaves = [hidden, weight, bias]
    for a, b in zip(
        _gradients(found.logps_N, None, leaves), _gradients(expected, None, leaves, (1.0, 0.0)), strict=True
    ):
        assert (a - b).abs().max() < 1e-12


def test_a_frozen_head_gives_the_same_gradient_of_the_hidden_states(monkeypatch):
    monkeypatch.setattr(head, "_TILE_BYTES_CPU", 4 * 17 * 3)
    hidden, weight, _, labels = _inputs()
    found = score_tokens(hidden, weight.detach(), None, labels, HeadTransform(0.7), compute_entropy=True)
    expected = _plain(hidden, weight, None, labels, HeadTransform(0.7))
    assert (_gradients(*found, [hidden])[0] - _gradients(*expected, [hidden])[0]).abs().max() < 1e-12


def test_no_tokens():
    hidden, weight, bias, labels = _inputs(num_tokens=0)
    logps, entropies = score_tokens(hidden, weight, bias, labels, HeadTransform(), compute_entropy=True)
    assert logps.shape == entropies.shape == (0,)
    (logps.sum() + entropies.sum()).backward()
    assert not weight.grad.any()
    assert not bias.grad.any()


def test_a_confident_token_keeps_its_small_gradient_in_half_precision():
    # p = 1 - 2.5e-3: formed after rounding, 1 - p would be 0 or 4e-3 in bfloat16.
    hidden = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[6.0, 0.0], [0.0, 1.0]], dtype=torch.bfloat16)
    score_tokens(
        hidden, weight, None, torch.tensor([0]), HeadTransform(), compute_entropy=False
    ).logps_N.sum().backward()
    one_minus_p = 1 - torch.sigmoid(torch.tensor(6.0, dtype=torch.float64))
    expected = one_minus_p * torch.tensor([6.0, -1.0], dtype=torch.float64)
    assert (hidden.grad.double() - expected).abs().max() < 0.005 * expected.abs().max()


def test_float32_is_good_to_seven_digits_over_a_large_vocabulary():
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(64, 32, generator=generator).requires_grad_()
    weight = torch.randn(30_000, 32, generator=generator)
    labels = torch.randint(30_000, (64,), generator=generator)
    found = score_tokens(hidden, weight, None, labels, HeadTransform(), compute_entropy=True)
    (gradient,) = torch.autograd.grad(found.logps_N.sum(), hidden)
    exact = hidden.detach().double().requires_grad_()
    expected = _plain(exact, weight.double(), None, labels, HeadTransform())
    (expected_gradient,) = torch.autograd.grad(expected[0].sum(), exact)
    # torch.softmax alone would cost a digit here: its exponential is off by 1e-5 on the CPU.
    assert (found.logps_N - expected[0]).abs().max() < 1e-5
    assert (found.entropies_N - expected[1]).abs().max() < 1e-5
    assert (gradient - expected_gradient).norm() < 1e-6 * expected_gradient.norm()


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", HeadTransform(0.5)),
        ("gemma2", HeadTransform(0.5, softcap=5.0)),
        ("granite", HeadTransform(0.5, scale=1 / 3.0)),
        ("cohere", HeadTransform(0.5, scale=0.3)),
    ],
)
def test_what_a_model_does_to_its_logits(family, expected):
    assert read_head_transform(tiny_model(family).config, 0.5) == expected


def test_a_scale_that_hyperclovax_multiplies_by():
    config = transformers.PretrainedConfig()
    config.model_type, config.logits_scaling = "hyperclovax", 4.0
    assert read_head_transform(config, 1.0).scale == 4.0
