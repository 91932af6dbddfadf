"""Attention on the CPU, tile by tile, against one dense mask over the row."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trl_grpo_ext.learner import cpu_attention, cpu_tiles
from trl_grpo_ext.learner.attention import AttentionLayout, shared_prefix_attention
from trl_grpo_ext.learner.cpu_tiles import plan_families
from trl_grpo_ext.learner.packing import Segment

# Prompt and completion lengths of each group.
CASES = {
    "ragged": [(5, [4, 1, 3, 4])],
    "several groups": [(7, [6, 6, 6]), (3, []), (2, [5, 4, 5, 5, 5])],
    "one completion": [(4, [9])],
    "one prompt token, one completion token": [(1, [1]), (1, [1, 1])],
    "long prompt": [(150, [3, 3])],
    "long completions": [(5, [140, 133])],
}


def _segments(groups):
    segments, start = [], 0
    for prompt, completions in groups:
        home = len(segments)
        for length, prefix in [(prompt, -1), *((length, home) for length in completions)]:
            segments.append(Segment(start, length, prefix))
            start += length
    return tuple(segments)


def _dense_mask(segments):
    num_tokens = segments[-1].start + segments[-1].length
    mask = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for segment in segments:
        own = slice(segment.start, segment.start + segment.length)
        mask[own, own] = torch.ones(segment.length, segment.length).tril().bool()
        if segment.prefix >= 0:
            prefix = segments[segment.prefix]
            mask[own, prefix.start : prefix.start + prefix.length] = True
    return mask


def _dense(query, key, value, mask, scaling):
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


def _inputs(segments, heads=(6, 3), dtype=torch.float64, value_size=8):
    generator = torch.Generator().manual_seed(0)
    num_tokens = segments[-1].start + segments[-1].length
    shapes = [(1, heads[0], num_tokens, 8), (1, heads[1], num_tokens, 8), (1, heads[1], num_tokens, value_size)]
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes
    )


def _difference(segments, inputs, mask, scaling=None):
    """Return how far output and gradients are from those of a dense mask in float64."""
    found, _ = shared_prefix_attention(
        nn.Module(), *inputs, None, packed_layout=AttentionLayout(segments), scaling=scaling
    )
    exact = tuple(x.detach().double().requires_grad_() for x in inputs)
    expected = _dense(*exact, mask, 8**-0.5 if scaling is None else scaling)
    assert found.dtype == inputs[0].dtype
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pairs = [(found, expected)]
    gradients = torch.autograd.grad((found.double() * weights).sum(), inputs)
    pairs += zip(gradients, torch.autograd.grad((expected * weights).sum(), exact), strict=True)
    assert all(a.shape == b.shape for a, b in pairs)
    return max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs)


@pytest.fixture(autouse=True)
def tiles_are_used(monkeypatch):
    """Count the calls, so that no test passes by the other path."""
    calls = []
    original = cpu_attention.attend
    monkeypatch.setattr(cpu_attention, "attend", lambda *args: calls.append(1) or original(*args))
    return calls


@pytest.fixture(params=[1, 2, 4])
def num_threads(request, monkeypatch):
    """Let tiles be cut for so many threads, however many compute."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    return request.param


@pytest.mark.parametrize("heads", [(6, 3), (4, 4), (8, 1)])
@pytest.mark.parametrize("case", CASES)
def test_equals_a_dense_mask(case, heads, num_threads, tiles_are_used):
    segments = _segments(CASES[case])
    mask = _dense_mask(segments)
    assert _difference(segments, _inputs(segments, heads), mask) < 1e-12
    assert _difference(segments, _inputs(segments, heads), mask, scaling=0.3) < 1e-12
    assert _difference(segments, _inputs(segments, heads, torch.float32), mask) < 5e-6
    assert len(tiles_are_used) == 3


@pytest.mark.parametrize("num_weights", [1, 200, 2000])
def test_small_tiles_change_nothing(monkeypatch, num_weights, num_threads):
    monkeypatch.setattr(cpu_tiles, "_TILE_WEIGHTS_PER_THREAD", num_weights)
    monkeypatch.setattr(cpu_tiles, "_MIN_TILE_TOKENS", 3)
    monkeypatch.setattr(cpu_tiles, "_MIN_RUN_ROWS", 2)
    for groups in CASES.values():
        segments = _segments(groups)
        assert _difference(segments, _inputs(segments), _dense_mask(segments)) < 1e-12


def test_values_may_have_a_size_of_their_own(tiles_are_used):
    segments = _segments(CASES["several groups"])
    assert _difference(segments, _inputs(segments, value_size=5), _dense_mask(segments)) < 1e-12
    assert tiles_are_used


def test_half_precision_is_rounded_once_at_the_end():
    segments = _segments(CASES["several groups"])
    assert _difference(segments, _inputs(segments, dtype=torch.bfloat16), _dense_mask(segments)) < 2**-8


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_mask_is_noticed(case):
    segments = _segments(CASES[case])
    right = _dense_mask(segments)
    first, last = segments[0].length - 1, len(right) - 1
    for row, column in ((last, first), (first, first + 1), (first, last)):
        wrong = right.clone()
        wrong[row, column] ^= True  # a key of the prompt dropped; the future or another row leaked
        assert _difference(segments, _inputs(segments), wrong) > 1e-3
    shifted = right.roll(1, 0) | torch.eye(len(right)).bool()
    assert _difference(segments, _inputs(segments), shifted) > 1e-3


@pytest.mark.parametrize("options", [{"sliding_window": 6}, {"softcap": 2.0}, {}])
def test_what_tiles_cannot_do_takes_the_other_path(monkeypatch, options, tiles_are_used):
    segments = _segments(CASES["ragged"])  # at most 9 keys
    inputs = _inputs(segments)
    layout = AttentionLayout(segments)
    if not options:
        monkeypatch.delattr(torch, "_softmax_backward_data")
    found, _ = shared_prefix_attention(nn.Module(), *inputs, None, packed_layout=layout, **options)
    assert not tiles_are_used
    if not options:
        assert torch.allclose(found, _dense(*inputs, _dense_mask(segments), 8**-0.5), atol=1e-12)
    monkeypatch.undo()
    assert cpu_attention.can_run(inputs[0], layout.max_keys, 9, None)


def test_nothing_but_the_inputs_is_kept_for_the_backward_pass():
    segments = _segments(CASES["long prompt"])
    inputs = _inputs(segments)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        shared_prefix_attention(nn.Module(), *inputs, None, packed_layout=AttentionLayout(segments))
    assert [x.data_ptr() for x in kept] == [x.data_ptr() for x in inputs]


def test_completions_of_similar_length_share_a_tile_and_threads_get_equally_many_products():
    segments = _segments([(10, [9, 40, 38, 40, 9, 8])])
    one, two = (plan_families(segments, 3, 3, num_threads)[0] for num_threads in (1, 2))
    # The longest three are one tile; the last three another, in the order of the row.
    assert [len(batch.segments) for batch in one.batches] == [1, 3, 3]
    # 3 key heads on 2 threads: an even number of completions, or a completion in two halves.
    assert [len(batch.segments) for batch in two.batches] == [1, 2, 1, 2, 1]
    assert [len(tile.runs) for tile in two.batches[2].tiles] == [2]
    assert [slice(run.start, run.stop) for run in two.batches[2].tiles[0].runs] == [slice(59, 78), slice(78, 97)]
    assert (two.num_copies, two.num_keys) == (2, 50)
