"""The allocator's model against cases worked out by hand from its rules, and invariants over random traces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_grpo_ext.memory.caching_allocator import KIB, MIB, CachingAllocator, Usage, replay, round_up, segment_size


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (300 * MIB, 300 * MIB),
        (301 * MIB, 302 * MIB),
    ],
)
def test_segments(size: int, segment: int) -> None:
    assert segment_size(size) == segment


def test_small_requests_share_a_segment() -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, 1)
    assert (allocator.allocated, allocator.reserved) == (512, 2 * MIB)
    allocator.allocate(1, MIB)
    assert allocator.reserved == 2 * MIB
    allocator.allocate(2, MIB)  # only 1 MiB - 512 are left
    assert (allocator.allocated, allocator.reserved) == (512 + 2 * MIB, 4 * MIB)


def test_pools_do_not_mix() -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, 2 * MIB)
    allocator.allocate(1, 2 * KIB)
    assert allocator.reserved == 22 * MIB


def test_a_large_block_is_split_only_where_more_than_one_mebibyte_is_left() -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, 19 * MIB)  # a segment of its own, 20 MiB; 1 MiB is left and stays with the block
    allocator.allocate(1, MIB + 512)
    assert allocator.reserved == 40 * MIB
    allocator = CachingAllocator()
    allocator.allocate(0, 9 * MIB)  # from a segment of 20 MiB; 11 are split off
    allocator.allocate(1, 11 * MIB)
    assert allocator.reserved == 20 * MIB


def test_best_fit() -> None:
    allocator = CachingAllocator()
    for number, size in enumerate((40 * MIB, 12 * MIB)):
        allocator.allocate(number, size)
    assert allocator.reserved == 52 * MIB
    allocator.release(0)
    allocator.release(1)
    allocator.allocate(3, 11 * MIB + MIB // 2)  # takes the 12, not the 40, and cannot split it
    allocator.allocate(4, 40 * MIB)
    assert allocator.reserved == 52 * MIB


def test_free_neighbours_merge() -> None:
    allocator = CachingAllocator()
    for number in range(4):
        allocator.allocate(number, 5 * MIB)  # all in one segment of 20 MiB
    assert allocator.reserved == 20 * MIB
    for number in (1, 3, 2):
        allocator.release(number)
    allocator.allocate(4, 15 * MIB)
    assert allocator.reserved == 20 * MIB


def test_segments_do_not_merge_and_expandable_ones_do() -> None:
    """Fragmentation: 30 MiB are free in two pieces, and 30 MiB more are taken; one growing range serves them."""
    for expandable, reserved in ((False, 60 * MIB), (True, 40 * MIB)):
        allocator = CachingAllocator(expandable_segments=expandable)
        allocator.allocate(0, 16 * MIB)
        allocator.allocate(1, 14 * MIB)
        allocator.release(0)
        allocator.release(1)
        allocator.allocate(2, 30 * MIB)
        assert allocator.reserved == reserved, expandable


def test_expandable_grows_at_the_end() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    allocator.allocate(0, 15 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.allocate(1, 15 * MIB)  # 5 free at the end, 10 more needed: one page
    assert allocator.reserved == 40 * MIB
    allocator.allocate(2, 10 * MIB)
    assert allocator.reserved == 40 * MIB


def test_empty_cache_gives_whole_segments_back() -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, 50 * MIB)
    allocator.allocate(1, 5 * MIB)
    allocator.allocate(2, 5 * MIB)
    allocator.release(0)
    allocator.release(1)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB
    assert allocator.peak_reserved == 70 * MIB


def test_replay_tells_phases_apart() -> None:
    events = [(0, 12 * MIB, "load"), (1, 30 * MIB, "forward"), (1, -30 * MIB, "backward"), (2, 20 * MIB, "backward")]
    assert replay(events) == {
        "load": Usage(12 * MIB, 12 * MIB),
        "forward": Usage(42 * MIB, 42 * MIB),
        "backward": Usage(32 * MIB, 42 * MIB),
    }


@given(
    st.lists(st.tuples(st.integers(1, 64 * MIB), st.integers(0, 30)), min_size=1, max_size=60),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_invariants(requests: list[tuple[int, int]], expandable: bool) -> None:
    """Reserved never falls below allocated nor below what it was; whatever the order of releases, nothing overlaps."""
    allocator = CachingAllocator(expandable_segments=expandable)
    alive: dict[int, int] = {}
    reserved = 0
    for number, (size, victim) in enumerate(requests):
        allocator.allocate(number, size)
        alive[number] = round_up(size, 512)
        if victim in alive:
            allocator.release(victim)
            del alive[victim]
        assert allocator.allocated == sum(alive.values())
        assert allocator.reserved >= allocator.allocated
        assert allocator.reserved >= reserved
        reserved = allocator.reserved
        spans = sorted((pool is allocator._large, b.start, b.size) for pool, b, _ in allocator._taken.values())
        for (pool, start, length), (next_pool, next_start, _) in itertools.pairwise(spans):
            assert pool != next_pool or start + length <= next_start
    for number in list(alive):
        allocator.release(number)
    assert allocator.allocated == 0
    total = allocator.reserved
    allocator.allocate(-1, 1)  # free memory serves what fits into it
    assert allocator.reserved == total or total == 0 or all(size > MIB for size, _ in requests)


@given(st.lists(st.integers(2 * MIB, 64 * MIB), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_repeating_a_step_reserves_nothing_more(sizes: list[int]) -> None:
    allocator = CachingAllocator()
    reserved = []
    for _ in range(3):
        for number, size in enumerate(sizes):
            allocator.allocate(number, size)
        for number in range(len(sizes)):
            allocator.release(number)
        reserved.append(allocator.reserved)
    assert reserved[2] == reserved[1]
