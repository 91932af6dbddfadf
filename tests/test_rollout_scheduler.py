"""The token budget: what is admitted when, never more than fits, nothing forgotten."""

from __future__ import annotations

import random

import pytest

from trl_grpo_ext.rollout.kv_cache import plan_blocks, plan_stacks
from trl_grpo_ext.rollout.scheduler import Scheduler, prompt_width, round_up


def test_widths_grow_in_four_steps_per_octave() -> None:
    assert [prompt_width(n) for n in (1, 16, 17, 145, 440, 1000)] == [16, 16, 32, 160, 448, 1024]
    for length in range(1, 5000):
        width = prompt_width(length)
        assert length <= width
        assert width <= max(round_up(length), 1.25 * length)


def test_everything_starts_at_once_without_a_budget() -> None:
    scheduler = Scheduler([[0, 1], [2, 3, 4]], [10, 20], max_new_tokens=8)
    admission = scheduler.admit()
    assert admission is not None
    assert admission.new_groups == [0, 1]
    assert admission.rows == [(0, 0), (0, 1), (1, 2), (1, 3), (1, 4)]
    assert scheduler.admit() is None


def test_a_group_starts_in_part_and_continues_without_a_new_prefill() -> None:
    # 16 for the prompt and 16 per row: two rows fit into 48.
    scheduler = Scheduler([[0, 1, 2], [3]], [10, 10], max_new_tokens=16, max_tokens=48)
    first = scheduler.admit()
    assert first is not None
    assert first.rows == [(0, 0), (0, 1)]
    assert scheduler.admit() is None
    scheduler.finish(0, 1)
    second = scheduler.admit()
    assert second is not None
    assert (second.new_groups, second.rows) == ([], [(0, 2)])
    assert scheduler.started_groups_waiting() == set()
    scheduler.finish(0, 0)
    scheduler.finish(0, 2)
    third = scheduler.admit()
    assert third is not None
    assert (third.new_groups, third.rows) == ([1], [(1, 3)])
    assert not scheduler.over_budget


def test_a_row_that_can_never_fit_runs_alone() -> None:
    scheduler = Scheduler([[0], [1]], [100, 100], max_new_tokens=100, max_tokens=50)
    first = scheduler.admit()
    assert first is not None
    assert first.rows == [(0, 0)]
    assert scheduler.over_budget
    assert scheduler.admit() is None


def test_small_refills_wait_until_they_are_worth_a_copy() -> None:
    scheduler = Scheduler([list(range(32))], [16], max_new_tokens=16, max_tokens=16 + 16 * 24)
    scheduler.admit()
    scheduler.finish(0, 0)
    assert scheduler.admit() is None  # one free slot next to 23 running rows
    for row in range(1, 4):
        scheduler.finish(0, row)
    refill = scheduler.admit()
    assert refill is not None
    assert len(refill.rows) == 4


@pytest.mark.parametrize("seed", range(20))
def test_any_run_stays_in_budget_and_finishes_every_row(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 6) for _ in range(rng.randint(1, 8))]
    rows = iter(range(sum(sizes)))
    groups = [[next(rows) for _ in range(n)] for n in sizes]
    lengths = [rng.randint(1, 200) for _ in sizes]
    budget = rng.randint(300, 900)
    scheduler = Scheduler(groups, lengths, max_new_tokens=rng.randint(1, 40), max_tokens=budget)
    started: list[int] = []
    alive: list[tuple[int, int]] = []
    seen_groups: set[int] = set()
    for _ in range(1000):
        while (admission := scheduler.admit()) is not None:
            assert not seen_groups & set(admission.new_groups)
            seen_groups |= set(admission.new_groups)
            started += [row for _, row in admission.rows]
            alive += admission.rows
            assert scheduler.committed_tokens() <= budget
        assert set(scheduler.live_groups()) >= {group for group, _ in alive}
        if not alive:
            break
        scheduler.finish(*alive.pop(rng.randrange(len(alive))))
    assert started == list(range(sum(sizes)))
    assert not scheduler.over_budget


def test_prompts_of_one_width_share_a_stack() -> None:
    assert plan_stacks([5, 40, 16, 33, 200]) == [[0, 2], [1, 3], [4]]


@pytest.mark.parametrize(
    ("rows", "waste", "expected"),
    [
        ([2, 2, 2], 0.0, [(0, 3, 2)]),
        ([2, 3, 3], 0.0, [(0, 1, 2), (1, 2, 3)]),
        ([3, 2, 3, 3], 0.25, [(0, 4, 3)]),
        ([8, 1, 8], 0.25, [(0, 1, 8), (1, 1, 1), (2, 1, 8)]),
        ([0, 4, 0, 4], 0.25, [(1, 1, 4), (3, 1, 4)]),
        ([0, 0], 0.25, []),
    ],
)
def test_grids_cover_the_rows_within_the_allowed_waste(
    rows: list[int], waste: float, expected: list[tuple[int, int, int]]
) -> None:
    assert plan_blocks(rows, waste) == expected
