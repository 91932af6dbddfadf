"""Cascade attention against plain attention over the concatenated sequence, for awkward layouts."""

from __future__ import annotations

import math

import pytest
import torch

from trl_grpo_ext.rollout.attention import UnsupportedModelError, decode_attention, rollout_attention
from trl_grpo_ext.rollout.kv_cache import LayerFacts, RolloutCache, Segment

H, K, D = 4, 2, 8


class Case:
    """A cache filled with random prompts and completions, and the plain tensors it was filled from."""

    def __init__(self, lengths: list[int], rows_of_group: list[int], steps: list[int], facts: LayerFacts) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.facts = facts
        self.cache = RolloutCache(max_new_tokens=40, initial_slots=16)
        self.cache.layers[0] = facts
        self.cache.output_dtype = torch.float64
        self.prompts = [(self.random(K, n, D), self.random(K, n, D)) for n in lengths]
        places = self.cache.add_groups(list(range(len(lengths))), lengths)
        start = 0
        for (keys, values), (stack, slot), length in zip(self.prompts, places, lengths, strict=True):
            self.cache.segments = [Segment(0, length, stack, slot)]
            self.cache.store_prompt(0, keys[None], values[None])
            start += length
        self.cache.segments = []
        rows = iter(range(sum(rows_of_group)))
        self.rows = {group: [next(rows) for _ in range(n)] for group, n in enumerate(rows_of_group)}
        self.group_of = {row: group for group, members in self.rows.items() for row in members}
        self.own: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {row: [] for row in self.group_of}
        self.cells = self.cache.arrange(self.rows, {})
        self.steps = dict(zip(self.group_of, steps, strict=True))
        for step in range(max(steps) + 1):
            self.feed([row for row in self.group_of if step <= self.steps[row]], step)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def feed(self, rows: list[int], step: int | None) -> torch.Tensor:
        """Feed one token to these rows; return and remember (got, expected) of the last call."""
        rows = sorted(rows, key=self.cells.__getitem__)
        query, key, value = self.random(len(rows), H, D), self.random(len(rows), K, D), self.random(len(rows), K, D)
        for row, k, v in zip(rows, key, value, strict=True):
            self.own[row].append((k, v))
        steps = [len(self.own[row]) - 1 for row in rows]
        self.cache.begin_step([self.cells[row] for row in rows], steps, torch.device("cpu"))
        self.got = decode_attention(self.cache, 0, query, key, value)
        self.expected = torch.stack([self.plain(row, q) for row, q in zip(rows, query, strict=True)])
        return self.got

    def plain(self, row: int, query: torch.Tensor) -> torch.Tensor:
        """Return attention of one query over the row's whole sequence, written out."""
        prompt_keys, prompt_values = self.prompts[self.group_of[row]]
        keys = torch.cat((prompt_keys, torch.stack([k for k, _ in self.own[row]], 1)), 1)
        values = torch.cat((prompt_values, torch.stack([v for _, v in self.own[row]], 1)), 1)
        keys, values = keys.repeat_interleave(H // K, 0), values.repeat_interleave(H // K, 0)
        scores = torch.einsum("hd,hnd->hn", query, keys) * self.facts.scaling
        if self.facts.softcap is not None:
            scores = torch.tanh(scores / self.facts.softcap) * self.facts.softcap
        if self.facts.sliding_window is not None:
            scores[:, : max(0, keys.shape[1] - self.facts.sliding_window)] = -math.inf
        return torch.einsum("hn,hnd->hd", scores.softmax(-1), values)


LAYOUTS = {
    "one row": ([5], [1], [0]),
    "equal": ([7, 7], [3, 3], [4] * 6),
    "ragged prompts of one width": ([3, 16, 9], [2, 2, 2], [5] * 6),
    "several widths": ([3, 40, 100, 17], [2, 2, 2, 2], [18] * 8),
    "ragged groups": ([5, 6, 30], [4, 1, 3], [2] * 8),
    "ragged steps": ([5, 30], [3, 2], [17, 0, 3, 20, 1]),
    "buffer grows": ([5], [2], [39, 39]),
    "a group without rows": ([5, 6, 7], [2, 0, 2], [1] * 4),
}
FACTS = {
    "plain": LayerFacts(0.3, None, None),
    "softcap": LayerFacts(0.3, 2.0, None),
    "window inside the completion": LayerFacts(0.3, None, 3),
    "window inside the prompt": LayerFacts(0.3, None, 20),
    "window wider than everything": LayerFacts(0.3, None, 4000),
}


@pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_cascade_equals_attention_over_the_whole_sequence(layout: tuple, facts: LayerFacts) -> None:
    case = Case(*layout, facts)
    torch.testing.assert_close(case.got, case.expected, rtol=1e-12, atol=1e-12)


def test_rows_that_leave_and_cells_that_move_do_not_change_the_others() -> None:
    case = Case([5, 30, 6], [4, 3, 2], [2] * 9, FACTS["plain"])
    case.feed([0, 2, 3, 5, 8], None)  # 1, 4, 6 and 7 are done; their cells stay
    torch.testing.assert_close(case.got, case.expected, rtol=1e-12, atol=1e-12)
    alive = {0: [0, 3], 1: [5], 2: [8]}
    case.cells = case.cache.arrange(alive, {row: case.cells[row] for rows in alive.values() for row in rows})
    assert case.cache.num_cells < 9
    case.feed([0, 3, 5, 8], None)
    torch.testing.assert_close(case.got, case.expected, rtol=1e-12, atol=1e-12)


def test_groups_that_join_later_attend_to_their_own_prompt() -> None:
    case = Case([5, 6], [2, 2], [3] * 4, FACTS["plain"])
    keys, values = case.random(K, 6, D), case.random(K, 6, D)
    (stack, slot), *_ = case.cache.add_groups([2], [6])
    case.cache.segments = [Segment(0, 6, stack, slot)]
    case.cache.store_prompt(0, keys[None], values[None])
    case.cache.segments = []
    case.prompts.append((keys, values))
    case.rows[2] = [4, 5]
    for row in (4, 5):
        case.group_of[row], case.own[row] = 2, []
    case.cells = case.cache.arrange(case.rows, case.cells)
    case.feed([0, 1, 2, 3, 4, 5], None)
    torch.testing.assert_close(case.got, case.expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fault", ["leaked row", "shifted slot", "dropped mask", "neighbour's prompt"])
def test_negative_controls_are_noticed(fault: str) -> None:
    case = Case([5, 9], [2, 2], [6] * 4, FACTS["plain"])
    cache = case.cache
    if fault == "leaked row":
        cache._keys[0][0], cache._keys[0][1] = cache._keys[0][1].clone(), cache._keys[0][0].clone()
    elif fault == "shifted slot":
        cache._values[0][0] = cache._values[0][0].roll(1, dims=1)
    elif fault == "neighbour's prompt":
        cache.stacks[0].keys[0] = cache.stacks[0].keys[0].flip(0)
    else:
        original = cache._set_masks
        cache._set_masks = lambda steps: (original(steps), [block.bias.zero_() for block in cache.blocks])  # type: ignore[method-assign]
    case.feed([0, 1, 2, 3], None)
    assert float((case.got - case.expected).abs().max()) > 1e-3


class _Attention(torch.nn.Module):
    layer_idx = 0


@pytest.mark.parametrize(
    "extra",
    [
        {"dropout": 0.1},
        {"s_aux": torch.zeros(4)},
        {"position_bias": torch.zeros(1)},
        {"attention_mask": torch.zeros(1)},
    ],
    ids=str,
)
def test_what_the_attention_does_not_know_is_refused(extra: dict) -> None:
    cache = RolloutCache(max_new_tokens=4)
    tensors = [torch.zeros(1, n, 3, D) for n in (H, K, K)]
    arguments = {"attention_mask": None, "scaling": 1.0, "rollout_cache": cache, **extra}
    with pytest.raises(UnsupportedModelError):
        rollout_attention(_Attention(), *tensors, **arguments)


def test_prefill_attends_inside_each_prompt_only() -> None:
    cache = RolloutCache(max_new_tokens=4)
    lengths = [3, 7, 1]
    places = cache.add_groups([0, 1, 2], lengths)
    starts = [0, 3, 10]
    cache.segments = [Segment(s, n, *place) for s, n, place in zip(starts, lengths, places, strict=True)]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, n, 11, D, generator=generator) for n in (H, K, K))
    output, _ = rollout_attention(_Attention(), query, key, value, None, scaling=0.3, rollout_cache=cache)
    for start, length in zip(starts, lengths, strict=True):
        span = slice(start, start + length)
        keys = key[0, :, span].repeat_interleave(H // K, 0)
        values = value[0, :, span].repeat_interleave(H // K, 0)
        scores = query[0, :, span] @ keys.transpose(1, 2) * 0.3
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        torch.testing.assert_close(output[0, span], (scores.softmax(-1) @ values).transpose(0, 1))
