"""Attention over packed rows against one dense mask over the row."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

from trl_grpo_ext.learner import attention, cpu_attention
from trl_grpo_ext.learner.attention import AttentionLayout, shared_prefix_attention
from trl_grpo_ext.learner.packing import Segment

# A prompt with ragged completions, a row alone, a prompt with completions of one length, and one longer row.
SEGMENTS = (
    Segment(0, 5),
    Segment(5, 4, 0),
    Segment(9, 1, 0),
    Segment(10, 3, 0),
    Segment(13, 6),
    Segment(19, 3),
    Segment(22, 2, 5),
    Segment(24, 2, 5),
    Segment(26, 7),
)
NUM_TOKENS = 33


@pytest.fixture
def without_tiles(monkeypatch):
    """Take the path of accelerators on the CPU as well."""
    monkeypatch.setattr(cpu_attention, "can_run", lambda *_: False)


def _dense_mask(window=None):
    column = torch.empty(NUM_TOKENS, dtype=torch.long)
    mask = torch.zeros(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool)
    for segment in SEGMENTS:
        own = slice(segment.start, segment.start + segment.length)
        first = SEGMENTS[segment.prefix].length if segment.prefix >= 0 else 0
        column[own] = first + torch.arange(segment.length)
        mask[own, own] = torch.ones(segment.length, segment.length).tril().bool()
        if segment.prefix >= 0:
            prefix = SEGMENTS[segment.prefix]
            mask[own, prefix.start : prefix.start + prefix.length] = True
    if window is not None:
        mask &= column[:, None] - column[None, :] < window
    return mask


def _dense(query, key, value, scaling, window=None, softcap=None):
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~_dense_mask(window), float("-inf")).softmax(-1)
    return (weights @ value).transpose(1, 2)


def _inputs(dtype=torch.float64, num_kv_heads=2):
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(1, heads, NUM_TOKENS, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for heads in (4, num_kv_heads, num_kv_heads)
    )


def _run(layout=None, inputs=None, module=None, **options):
    inputs = _inputs() if inputs is None else inputs
    layout = AttentionLayout(SEGMENTS) if layout is None else layout
    out, _ = shared_prefix_attention(module or nn.Module(), *inputs, None, packed_layout=layout, **options)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return out, torch.autograd.grad((out.double() * weights).sum(), inputs)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 4}, {"sliding_window": 1}, {"sliding_window": 99}, {"softcap": 2.0}]
)
def test_equals_a_dense_mask(num_kv_heads, options, without_tiles):
    inputs = _inputs(num_kv_heads=num_kv_heads)
    found, gradients = _run(inputs=inputs, scaling=0.3, **options)
    expected = _dense(*inputs, 0.3, options.get("sliding_window"), options.get("softcap"))
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tolerance = 1e-6 if "softcap" in options else 1e-13  # eager attention takes its softmax in float32
    assert (found - expected).abs().max() < tolerance
    for a, b in zip(gradients, torch.autograd.grad((expected * weights).sum(), inputs), strict=True):
        assert (a - b).abs().max() < 10 * tolerance


def test_half_precision_on_the_cpu_is_rounded_once_at_the_end(without_tiles):
    inputs = _inputs(torch.bfloat16)
    found, gradients = _run(inputs=inputs)
    exact = tuple(x.detach().double().requires_grad_() for x in inputs)
    expected = _dense(*exact, 8**-0.5)
    assert found.dtype == gradients[0].dtype == torch.bfloat16
    assert torch.equal(found, expected.to(torch.bfloat16)) or (found - expected).abs().max() <= 2**-8


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_autocast_decides_the_type_of_the_result(enabled, tiled, request):
    if not tiled:
        request.getfixturevalue("without_tiles")
    inputs = _inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        found, gradients = _run(inputs=inputs)
    assert found.dtype == (torch.bfloat16 if enabled else torch.float32)
    assert gradients[0].dtype == torch.float32
    assert (found - _dense(*inputs, 8**-0.5)).abs().max() < (1e-2 if enabled else 1e-6)


def test_no_mask_spans_a_group(without_tiles):
    layout = AttentionLayout(SEGMENTS)
    _run(layout)
    masks = [x for x in layout._tensors.values() if isinstance(x, torch.Tensor) and x.dtype == torch.bool]
    assert sorted(tuple(mask.shape) for mask in masks) == [(1, 6), (2, 5), (3, 8), (4, 9)]


def test_segments_of_similar_length_share_a_call(monkeypatch, without_tiles):
    sizes = []
    original = attention._attend

    def spy(query, *rest):
        sizes.append(tuple(query.shape[::2]))
        return original(query, *rest)

    monkeypatch.setattr(attention, "_attend", spy)
    _run()
    # (rows, length): 7 and 6 together, 5, 3; the completions of the first prompt: 4, 3 does not fill 0.8 of it, 1.
    assert sizes == [(2, 7), (1, 5), (1, 3), (1, 4), (1, 3), (1, 1), (2, 2)]


def test_what_it_does_not_know_is_refused():
    for options in ({"dropout": 0.1}, {"s_aux": torch.zeros(4)}):
        with pytest.raises(NotImplementedError, match="not exact"):
            _run(**options)


def _variable_length_attention(module, query, key, value, mask, **kwargs):
    """What flash attention computes: per sequence, causal, aligned to the last key. Its name comes from the config."""
    assert module.config._attn_implementation == "flash_attention_2"
    assert mask is None
    assert kwargs["is_causal"]
    outputs = []
    q_borders, k_borders = kwargs["cu_seq_lens_q"].tolist(), kwargs["cu_seq_lens_k"].tolist()
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
    for i in range(len(q_borders) - 1):
        q = query[:, :, q_borders[i] : q_borders[i + 1]]
        k, v = (x[:, :, k_borders[i] : k_borders[i + 1]] for x in (key, value))
        assert q.size(2) <= kwargs["max_length_q"]
        assert k.size(2) <= kwargs["max_length_k"]
        mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril(k.size(2) - q.size(2))
        if kwargs["sliding_window"] is not None:
            mask = mask.triu(k.size(2) - q.size(2) - kwargs["sliding_window"] + 1)
        scores = (q @ k.transpose(2, 3) * kwargs["scaling"]).masked_fill(~mask, float("-inf"))
        outputs.append((scores.softmax(-1) @ v).transpose(1, 2))
    return torch.cat(outputs, 1), None


@pytest.mark.parametrize("window", [None, 4])
def test_flash_attention_gets_every_segment_with_its_prompt(monkeypatch, window):
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", _variable_length_attention)
    module = nn.Module()
    module._unpacked_attn_implementation = "flash_attention_2"
    module.config = SimpleNamespace(_attn_implementation=attention.IMPLEMENTATION)
    inputs = _inputs()
    options = {"scaling": 0.3, "sliding_window": window, "position_ids": torch.zeros(1, NUM_TOKENS)}
    found, gradients = _run(inputs=inputs, module=module, **options)
    expected = _dense(*inputs, 0.3, window)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert (found - expected).abs().max() < 1e-13
    for a, b in zip(gradients, torch.autograd.grad((expected * weights).sum(), inputs), strict=True):
        assert (a - b).abs().max() < 1e-5  # the gradient of a shared prompt is summed in float32
    assert module.config._attn_implementation == attention.IMPLEMENTATION
