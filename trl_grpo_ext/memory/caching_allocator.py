"""A model of PyTorch's CUDA caching allocator: what it reserves for a given sequence of allocations.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` for one stream without options but expandable segments:
sizes are rounded up to 512 bytes; requests of at most 1 MiB come from a small pool in segments of 2 MiB, others from a
large one in segments of 20 MiB, or of their own size in steps of 2 MiB from 10 MiB on; the smallest free block that is
large enough is taken and split where the rest is worth keeping; free neighbours merge; segments are given back to the
driver only when it has no more.

With expandable segments a pool is one range of addresses that grows page by page, so a free block can always be
extended at the end, and whole free pages can be given back.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

KIB, MIB = 2**10, 2**20
ROUND = 512
SMALL_REQUEST = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
MIN_OWN_SEGMENT = 10 * MIB
SEGMENT_STEP = 2 * MIB
LARGE_PAGE = 20 * MIB


class Usage(NamedTuple):
    """Bytes at some moment: asked for after rounding, and taken from the driver."""

    allocated: int
    reserved: int


def round_up(size: int, step: int) -> int:
    """Return ``size`` rounded up to a multiple of ``step``."""
    return -(-size // step) * step


def segment_size(size: int) -> int:
    """Return the segment that the default allocator asks the driver for to serve a rounded request."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < MIN_OWN_SEGMENT:
        return LARGE_SEGMENT
    return round_up(size, SEGMENT_STEP)


@dataclass(eq=False)
class _Block:
    """A run of bytes inside a segment; ``start`` is counted over all segments, so blocks are ordered by it."""

    start: int
    size: int
    is_free: bool
    before: _Block | None = None
    after: _Block | None = None


class _Pool:
    """The blocks of one pool, free ones sorted by size and then by address, as the allocator picks them."""

    def __init__(self, *, is_small: bool, expandable: bool) -> None:
        self.is_small, self.expandable = is_small, expandable
        self.reserved = 0
        self._free: list[tuple[int, int]] = []
        self._block_at: dict[int, _Block] = {}
        self._next_start = 0
        self._last: _Block | None = None

    def take(self, size: int) -> _Block:
        position = bisect.bisect_left(self._free, (size, -1))
        if position < len(self._free):
            block = self._block_at[self._free.pop(position)[1]]
        else:
            block = self._grow(size)
        rest = block.size - size
        if rest and self._is_worth_splitting(rest):
            tail = _Block(block.start + size, rest, True, block, block.after)
            if block.after is not None:
                block.after.before = tail
            elif self._last is block:
                self._last = tail
            block.size, block.after = size, tail
            self._put(tail)
        block.is_free = False
        return block

    def give(self, block: _Block) -> None:
        block.is_free = True
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._remove(other)
                first, second = (other, block) if other is block.before else (block, other)
                first.size += second.size
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                elif self._last is second:
                    self._last = first
                block = first
        self._put(block)

    def _is_worth_splitting(self, rest: int) -> bool:
        # Expandable segments are split to the byte: what is left over can always be joined again.
        return rest >= ROUND if self.is_small or self.expandable else rest > SMALL_REQUEST

    def _grow(self, size: int) -> _Block:
        """Return a free block, listed nowhere, of at least ``size`` bytes from the driver."""
        if not self.expandable:
            new = segment_size(size)
            self.reserved += new
            block = _Block(self._next_start, new, True)
            self._next_start += new + 1  # a gap: blocks of different segments never merge
            return block
        page = SMALL_SEGMENT if self.is_small else LARGE_PAGE
        last = self._last
        usable = last.size if last is not None and last.is_free else 0
        more = round_up(size - usable, page)
        self.reserved += more
        if usable and last is not None:
            self._remove(last)
            last.size += more
            return last
        block = _Block(self._next_start if last is None else last.start + last.size, more, True, last)
        if last is not None:
            last.after = block
        self._last = block
        return block

    def trim(self) -> int:
        """Give free memory back to the driver; return the bytes."""
        given = 0
        for size, start in list(self._free):
            block = self._block_at[start]
            if self.expandable:
                page = SMALL_SEGMENT if self.is_small else LARGE_PAGE
                whole = (block.start + size) // page * page - round_up(block.start, page)
                # Pages leave the middle of the range; the addresses stay, so nothing is renumbered.
                given += max(whole, 0)
            elif block.before is None and block.after is None:
                self._remove(block)
                given += size
        if not self.expandable:
            self.reserved -= given
        return given

    def _put(self, block: _Block) -> None:
        bisect.insort(self._free, (block.size, block.start))
        self._block_at[block.start] = block

    def _remove(self, block: _Block) -> None:
        self._free.pop(bisect.bisect_left(self._free, (block.size, block.start)))


class CachingAllocator:
    """Serve allocations as PyTorch's CUDA allocator would.

    Args:
        expandable_segments: as in ``PYTORCH_CUDA_ALLOC_CONF``.

    Attributes:
        allocated: Bytes handed out, rounded as the allocator counts them.
        peak_allocated: The most of them.
        peak_reserved: The most bytes taken from the driver.
    """

    def __init__(self, *, expandable_segments: bool = False) -> None:
        self.allocated = self.peak_allocated = self.peak_reserved = 0
        self._small = _Pool(is_small=True, expandable=expandable_segments)
        self._large = _Pool(is_small=False, expandable=expandable_segments)
        self._taken: dict[int, tuple[_Pool, _Block, int]] = {}

    @property
    def reserved(self) -> int:
        """Bytes taken from the driver now."""
        return self._small.reserved + self._large.reserved

    def allocate(self, number: int, num_bytes: int) -> None:
        """Serve a request; ``number`` names it for :meth:`release`."""
        size = round_up(max(num_bytes, 1), ROUND)
        pool = self._small if size <= SMALL_REQUEST else self._large
        self._taken[number] = (pool, pool.take(size), size)
        self.allocated += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def release(self, number: int) -> None:
        """Take a request back; its memory stays reserved."""
        pool, block, size = self._taken.pop(number)
        pool.give(block)
        self.allocated -= size

    def empty_cache(self) -> None:
        """Give what is wholly free back to the driver, as ``torch.cuda.empty_cache`` does."""
        self._small.trim()
        self._large.trim()


def replay(events: Iterable[tuple[int, int, str]], *, expandable_segments: bool = False) -> dict[str, Usage]:
    """Return, for each phase of a trace, the most bytes allocated and the most reserved.

    Args:
        events: (block, bytes, phase); negative bytes release the block.
        expandable_segments: which allocator.
    """
    allocator = CachingAllocator(expandable_segments=expandable_segments)
    usage: dict[str, Usage] = {}
    for number, num_bytes, phase in events:
        if num_bytes > 0:
            allocator.allocate(number, num_bytes)
        else:
            allocator.release(number)
        before = usage.get(phase, Usage(0, 0))
        usage[phase] = Usage(max(before.allocated, allocator.allocated), max(before.reserved, allocator.reserved))
    return usage
