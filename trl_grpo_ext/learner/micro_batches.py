"""Cut the rows of one optimiser step into micro-batches that fit a token budget.

Pure planning: no tensors, no configuration. Groups stay whole where they fit, so that their prompt can be shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Row(NamedTuple):
    """One rollout of the window.

    Attributes:
        batch: Index of TRL's own micro-batch that holds the row.
        position: Place of the row inside that micro-batch.
        group: Number of the row's group; rows of one group answer the same prompt.
        prompt_tokens: Length of the prompt, in tokens, padding left out.
        completion_tokens: Length of the completion, in tokens, padding left out.
    """

    batch: int
    position: int
    group: int
    prompt_tokens: int
    completion_tokens: int


def num_tokens(rows: Sequence[Row], *, shared_prompts: bool) -> int:
    """Return how many tokens one forward pass over ``rows`` processes.

    Args:
        rows: Rows of one micro-batch.
        shared_prompts: True if the forward pass lays a group out as its prompt once, then every completion. False if
            every row is padded to the longest prompt and the longest completion.

    Returns:
        Tokens, at least 0.
    """
    if not rows:
        return 0
    if shared_prompts:
        prompts = {row.group: row.prompt_tokens for row in rows}
        return sum(prompts.values()) + sum(row.completion_tokens for row in rows)
    width = max(row.prompt_tokens for row in rows) + max(row.completion_tokens for row in rows)
    return len(rows) * width


def plan_micro_batches(rows: Iterable[Row], max_tokens: int, *, shared_prompts: bool) -> list[list[Row]]:
    """Return the rows cut into micro-batches of at most ``max_tokens`` each.

    Groups of similar length are put together, so that little is padded. A group is cut only where it does not fit the
    budget by itself, and then by completion length. A single row longer than the budget is a micro-batch of its own:
    it cannot be made smaller.

    Args:
        rows: The rows to process, in any order; rows to skip are simply left out.
        max_tokens: Budget in tokens as counted by :func:`num_tokens`, at least 1.
        shared_prompts: See :func:`num_tokens`.

    Returns:
        Micro-batches that hold every row exactly once. Empty if there are no rows.

    Raises:
        ValueError: if ``max_tokens`` is below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}.")
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)

    def longest(group: list[Row]) -> tuple[int, int]:
        return max(r.prompt_tokens + r.completion_tokens for r in group), -group[0].group

    plan: list[list[Row]] = []
    for group in sorted(groups.values(), key=longest, reverse=True):
        for piece in _pieces(group, max_tokens, shared_prompts=shared_prompts):
            if plan and num_tokens(plan[-1] + piece, shared_prompts=shared_prompts) <= max_tokens:
                plan[-1].extend(piece)
            else:
                plan.append(list(piece))
    return plan


def _pieces(group: list[Row], max_tokens: int, *, shared_prompts: bool) -> list[list[Row]]:
    """Return the group whole if it fits, otherwise cut into pieces that fit, longest completions first."""
    if num_tokens(group, shared_prompts=shared_prompts) <= max_tokens:
        return [group]
    pieces: list[list[Row]] = []
    for row in sorted(group, key=lambda r: r.completion_tokens, reverse=True):
        if pieces and num_tokens([*pieces[-1], row], shared_prompts=shared_prompts) <= max_tokens:
            pieces[-1].append(row)
        else:
            pieces.append([row])
    return pieces


def plan_generation_batches(
    prompt_tokens: Sequence[int], max_new_tokens: int, num_generations: int, max_tokens: int
) -> list[slice]:
    """Return consecutive slices of rows whose padded generation batch holds at most ``max_tokens`` tokens.

    A row may grow to its batch's longest prompt plus ``max_new_tokens``, so a batch of ``n`` rows needs room for
    ``n * (longest prompt + max_new_tokens)`` tokens. Groups stay whole where one fits the budget.

    Args:
        prompt_tokens: Prompt length of each row, in tokens; rows of one group are neighbours.
        max_new_tokens: Largest completion, in tokens.
        num_generations: Rows per group, at least 1.
        max_tokens: Budget in tokens, at least 1.

    Returns:
        Slices that cover every row once, in order.

    Raises:
        ValueError: if a bound is below 1.
    """
    if max_tokens < 1 or num_generations < 1:
        raise ValueError(
            f"max_tokens and num_generations must be at least 1, got max_tokens={max_tokens} and "
            f"num_generations={num_generations}."
        )
    longest = max(prompt_tokens, default=0)
    unit = num_generations if num_generations * (longest + max_new_tokens) <= max_tokens else 1
    slices: list[slice] = []
    start, width = 0, 0
    for stop in range(0, len(prompt_tokens), unit):
        wider = max(width, *prompt_tokens[stop : stop + unit])
        rows = min(stop + unit, len(prompt_tokens)) - start
        if stop > start and rows * (wider + max_new_tokens) > max_tokens:
            slices.append(slice(start, stop))
            start, wider = stop, max(prompt_tokens[stop : stop + unit])
        width = wider
    if start < len(prompt_tokens):
        slices.append(slice(start, len(prompt_tokens)))
    return slices
