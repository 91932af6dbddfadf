"""Planning of micro-batches and generation batches: everything once, groups whole where they fit, budgets kept."""

from __future__ import annotations

import random

import pytest

from trl_grpo_ext.learner.micro_batches import Row, num_tokens, plan_generation_batches, plan_micro_batches


def rows_of(groups: list[tuple[int, list[int]]]) -> list[Row]:
    """Return rows from (prompt tokens, completion tokens of each rollout) per group, one TRL micro-batch each."""
    return [
        Row(number, position, number, prompt, completion)
        for number, (prompt, completions) in enumerate(groups)
        for position, completion in enumerate(completions)
    ]


def test_token_count_pads_or_shares() -> None:
    rows = rows_of([(10, [5, 3]), (4, [8])])
    assert num_tokens(rows, shared_prompts=False) == 3 * (10 + 8)
    assert num_tokens(rows, shared_prompts=True) == (10 + 5 + 3) + (4 + 8)
    assert num_tokens([], shared_prompts=True) == 0


def test_groups_stay_whole_where_they_fit() -> None:
    rows = rows_of([(4, [4, 4]), (4, [4, 4]), (4, [4, 4])])
    plan = plan_micro_batches(rows, 32, shared_prompts=False)  # a group is 16 tokens: two of them fit
    assert [sorted({row.group for row in batch}) for batch in plan] == [[0, 1], [2]]


def test_a_group_larger_than_the_budget_is_cut_and_a_long_row_stands_alone() -> None:
    rows = rows_of([(4, [4, 4, 4, 40])])
    plan = plan_micro_batches(rows, 16, shared_prompts=False)
    assert [[row.completion_tokens for row in batch] for batch in plan] == [[40], [4, 4], [4]]


def test_interleaved_rows_of_a_group_come_together() -> None:
    rows = [Row(0, 0, 7, 4, 4), Row(0, 1, 8, 4, 4), Row(1, 0, 7, 4, 4), Row(1, 1, 8, 4, 4)]
    plan = plan_micro_batches(rows, 16, shared_prompts=False)
    assert [[row.group for row in batch] for batch in plan] == [[7, 7], [8, 8]]


@pytest.mark.parametrize("shared", [False, True])
def test_every_row_once_and_no_budget_exceeded(shared: bool) -> None:
    draw = random.Random(3)
    for _ in range(200):
        groups = [
            (draw.randint(1, 30), [draw.randint(0, 40) for _ in range(draw.randint(1, 6))])
            for _ in range(draw.randint(1, 6))
        ]
        rows, budget = rows_of(groups), draw.randint(1, 200)
        plan = plan_micro_batches(rows, budget, shared_prompts=shared)
        assert sorted(row for batch in plan for row in batch) == sorted(rows)
        assert all(num_tokens(batch, shared_prompts=shared) <= budget or len(batch) == 1 for batch in plan)
        for group in {row.group for row in rows}:
            members = [row for row in rows if row.group == group]
            if num_tokens(members, shared_prompts=shared) <= budget:
                assert sum(any(row.group == group for row in batch) for batch in plan) == 1


def test_budget_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        plan_micro_batches([], 0, shared_prompts=False)


def test_generation_batches_cover_rows_in_order_within_the_budget() -> None:
    lengths = [3, 3, 9, 9, 2, 2, 2, 2]
    slices = plan_generation_batches(lengths, max_new_tokens=6, num_generations=2, max_tokens=40)
    assert slices == [slice(0, 2), slice(2, 4), slice(4, 8)]  # 2 x 9, 2 x 15, 4 x 8 tokens


def test_generation_of_one_group_is_cut_when_it_does_not_fit() -> None:
    slices = plan_generation_batches([4] * 4, max_new_tokens=4, num_generations=4, max_tokens=17)
    assert slices == [slice(0, 2), slice(2, 4)]


def test_generation_batches_for_random_lengths() -> None:
    draw = random.Random(5)
    for _ in range(200):
        size = draw.randint(1, 5)
        lengths = [length for _ in range(draw.randint(1, 6)) for length in [draw.randint(1, 20)] * size]
        budget = draw.randint(1, 150)
        slices = plan_generation_batches(lengths, 5, size, budget)
        assert [i for piece in slices for i in range(len(lengths))[piece]] == list(range(len(lengths)))
        for piece in slices:
            cost = len(lengths[piece]) * (max(lengths[piece]) + 5)
            assert cost <= budget or len(lengths[piece]) == 1
    assert plan_generation_batches([], 5, 2, 10) == []
