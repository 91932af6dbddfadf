"""How attention on the CPU cuts a packed row into tiles: pure functions on lengths.

A tile is a few runs of equally many queries. A run is a completion, several of which are computed together, or part of
a segment that is too long for one tile. Each run has a copy of its keys: the prompt's, then its own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from trl_grpo_ext.learner.packing import Segment

# Tokens of a long segment in one tile. Fewer leave out more keys behind the diagonal, more make better products.
_MAX_TILE_TOKENS = 128
# A tile has no fewer, however many keys there are.
_MIN_TILE_TOKENS = 16
# Weights of a tile for each thread, 2 MiB in float32: smaller tiles stay in the cache, larger ones are fewer calls.
_TILE_WEIGHTS_PER_THREAD = 2**19
# Tiles do not grow with the threads beyond this many, nor hold more copies of a prompt's keys than that.
_MAX_TILE_THREADS = 4
_MAX_COMPLETIONS = 8
# Completions share a tile while the shorter is at least this share of the longest; what it lacks is padding.
_MIN_FILL = 0.8
# Rows that a product must have left for a segment to be split among threads.
_MIN_RUN_ROWS = 48


class Tile(NamedTuple):
    """Queries that are computed together."""

    runs: tuple[slice, ...]
    """Packed tokens of each run; some may be short of ``length``."""
    length: int
    first_own_key: int
    """Key of the first token of the first run; every token of the tile sees all keys before it."""
    num_keys: int
    """Most keys that a token of the tile sees."""
    stagger: int
    """How many keys more a token sees than the same one of the run before: 0 where runs are completions."""

    def whole(self) -> slice | None:
        """Return the tokens of all runs, if they lie one behind the other and none is short."""
        return _join(self.runs, self.length)


class Batch(NamedTuple):
    """Segments whose keys are loaded together: one, for all runs of its tiles, or one for each run of one tile."""

    segments: tuple[Segment, ...]
    first_own_key: int
    length: int
    tiles: tuple[Tile, ...]

    def whole(self) -> slice | None:
        """Return the tokens of all segments, if they lie one behind the other and all have the full length."""
        return _join([slice(s.start, s.start + s.length) for s in self.segments], self.length)


class Family(NamedTuple):
    """A segment without prefix, and the segments that have it as theirs."""

    batches: tuple[Batch, ...]
    """That of the prompt first."""
    num_copies: int
    """Most runs of a tile: copies of the prompt's keys."""
    num_keys: int


def _join(runs: tuple[slice, ...] | list[slice], length: int) -> slice | None:
    is_whole = all(
        run.start == runs[0].start + i * length and run.stop - run.start == length for i, run in enumerate(runs)
    )
    return slice(runs[0].start, runs[-1].stop) if is_whole else None


def plan_families(
    segments: tuple[Segment, ...], num_key_heads: int, num_repeats: int, num_threads: int
) -> list[Family]:
    """Return the tiles of a packed row.

    The products of a tile are as many as its runs times the key heads, and a thread takes whole ones: 3 key heads on
    2 threads take as long as 4. So the number of runs is such that the threads get equally many, where lengths allow.

    Args:
        segments: of the row.
        num_key_heads: of the attention.
        num_repeats: query heads of each key head.
        num_threads: that compute.
    """
    completions_of: dict[int, list[Segment]] = {i: [] for i, segment in enumerate(segments) if segment.prefix < 0}
    for segment in segments:
        if segment.prefix >= 0:
            completions_of[segment.prefix].append(segment)
    balance = num_threads // math.gcd(num_threads, num_key_heads)
    max_rows = _TILE_WEIGHTS_PER_THREAD * min(num_threads, _MAX_TILE_THREADS) // (num_key_heads * num_repeats)
    families = []
    for i, completions in completions_of.items():
        prompt = segments[i]
        batches = [_split(prompt, 0, balance, num_repeats, max_rows)]
        rest = sorted(completions, key=lambda segment: -segment.length)
        while rest:
            num_keys = prompt.length + rest[0].length
            num_fitting = min(_MAX_COMPLETIONS, max_rows // (num_keys * rest[0].length))
            members = [s for s in rest[:num_fitting] if s.length >= _MIN_FILL * rest[0].length]
            if len(members) >= balance:
                del members[len(members) // balance * balance :]
            if len(members) > 1:
                batches.append(_gather(members, prompt.length))
            else:
                members = rest[:1]
                batches.append(_split(rest[0], prompt.length, balance, num_repeats, max_rows))
            del rest[: len(members)]
        num_copies = max(len(tile.runs) for batch in batches for tile in batch.tiles)
        families.append(Family(tuple(batches), num_copies, max(b.first_own_key + b.length for b in batches)))
    return families


def _gather(members: list[Segment], num_prompt_keys: int) -> Batch:
    """Return completions of similar length as one tile."""
    length = members[0].length
    members = sorted(members)
    runs = tuple(slice(s.start, s.start + s.length) for s in members)
    tile = Tile(runs, length, num_prompt_keys, num_prompt_keys + length, stagger=0)
    return Batch(tuple(members), num_prompt_keys, length, (tile,))


def _split(segment: Segment, first_own_key: int, balance: int, num_repeats: int, max_rows: int) -> Batch:
    """Return one segment as tiles of nearly one size, each split into runs."""
    fitting = max_rows // (first_own_key + segment.length)
    max_tokens = max(_MIN_TILE_TOKENS, min(_MAX_TILE_TOKENS, fitting))
    num_tokens = math.ceil(segment.length / math.ceil(segment.length / max_tokens))
    num_runs = max(1, min(balance, num_tokens, num_tokens * num_repeats // _MIN_RUN_ROWS))
    num_tokens = math.ceil(num_tokens / num_runs) * num_runs
    tiles = []
    for offset in range(0, segment.length, num_tokens):
        end = min(offset + num_tokens, segment.length)
        length = math.ceil((end - offset) / num_runs)
        starts = range(offset, end, length)
        runs = tuple(slice(segment.start + a, segment.start + min(a + length, end)) for a in starts)
        tiles.append(Tile(runs, length, first_own_key + offset, first_own_key + end, stagger=length))
    return Batch((segment,), first_own_key, segment.length, tuple(tiles))
