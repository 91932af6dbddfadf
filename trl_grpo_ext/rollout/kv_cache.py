"""Keys and values of a rollout: one copy per distinct prompt, one buffer for the completions.

Dimensions: L layers, U prompts of a stack, R rows per prompt, C cells of the completion buffer, M rows alive,
K key/value heads, P prompt slots (padded), T completion slots, D head size.

A *stack* holds the prompts of similar length of one or more admissions, padded to a common P. A *block* is a run of
prompts of one stack together with their rows, laid out as a (U, R) grid of cells; a cell of the grid that has no row
alive is wasted work in attention only. Completion buffers are (C, K, T, D) with the cells of all blocks one after
another. The rows handed to the model are the alive ones only, in cell order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from trl_grpo_ext.rollout.scheduler import prompt_width, round_up


@dataclass
class LayerFacts:
    """What the model's own attention call said about a layer, noted during the prefill."""

    scaling: float
    softcap: float | None
    sliding_window: int | None


@dataclass
class PromptStack:
    """Prompt keys and values of some groups, one tensor (U, K, P, D) per layer."""

    groups: list[int]
    lengths: list[int]
    width: int
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def select(self, slots: Sequence[int]) -> None:
        """Keep only these slots, layer by layer so that no more than one layer exists twice."""
        for tensors in (self.keys, self.values):
            for layer, tensor in enumerate(tensors):
                tensors[layer] = tensor[list(slots)]
        self.groups = [self.groups[slot] for slot in slots]
        self.lengths = [self.lengths[slot] for slot in slots]

    def extend(self, other: PromptStack) -> None:
        """Take over the prompts of a stack of the same width, layer by layer."""
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for layer in range(len(mine)):
                mine[layer] = torch.cat((mine[layer], theirs[layer]))
                theirs[layer] = theirs[layer][:0]
        self.groups, self.lengths = self.groups + other.groups, self.lengths + other.lengths


@dataclass
class GridBlock:
    """Prompts ``first_slot : first_slot + U`` of a stack and the cells of their rows."""

    stack: PromptStack
    first_slot: int
    num_prompts: int
    num_rows: int
    first_cell: int
    bias: torch.Tensor | None = None
    """(U, 1, R, 1, P + T) additive mask of the current step."""
    sliding_bias: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def num_cells(self) -> int:
        """Cells of the grid."""
        return self.num_prompts * self.num_rows


@dataclass(frozen=True)
class Segment:
    """One prompt inside a packed prefill row and where its keys go."""

    start: int
    length: int
    stack: PromptStack
    slot: int


def plan_stacks(lengths: Sequence[int]) -> list[list[int]]:
    """Return the indices of ``lengths`` that share a padded width, by width."""
    runs: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        runs.setdefault(prompt_width(length), []).append(i)
    return [runs[width] for width in sorted(runs)]


def plan_blocks(rows_per_slot: Sequence[int], waste: float) -> list[tuple[int, int, int]]:
    """Return (first slot, number of slots, rows per slot) of the grids that cover a stack.

    Consecutive slots share a grid while at most ``waste`` of its cells are empty; slots without rows are skipped when
    they start a grid.
    """
    blocks: list[tuple[int, int, int]] = []
    used = 0
    for slot, rows in enumerate(rows_per_slot):
        if blocks and blocks[-1][0] + blocks[-1][1] == slot:
            first, count, width = blocks[-1]
            cells = (count + 1) * max(width, rows)
            if cells * (1 - waste) <= used + rows:
                blocks[-1] = (first, count + 1, max(width, rows))
                used += rows
                continue
        if rows:
            blocks.append((slot, 1, rows))
            used = rows
    return blocks


class RolloutCache:
    """All keys and values of a running rollout and the masks of the current step.

    Args:
        max_new_tokens: most tokens a row can draw; completion buffers grow by doubling up to this.
        max_tokens: budget in token slots, None for no limit; only decides whether grids may have empty cells.
        initial_slots: completion slots allocated at first.
        store_dtype: dtype of keys, values and scores; None keeps what the model produces.
    """

    def __init__(
        self,
        max_new_tokens: int,
        max_tokens: int | None = None,
        initial_slots: int = 64,
        store_dtype: torch.dtype | None = None,
    ) -> None:
        self.max_tokens = max_tokens
        self.max_slots = round_up(max_new_tokens)
        self.store_dtype = store_dtype
        self.layers: dict[int, LayerFacts] = {}
        self.stacks: list[PromptStack] = []
        self.blocks: list[GridBlock] = []
        self.segments: list[Segment] = []
        self.autocast_dtype: torch.dtype | None = None
        self.output_dtype: torch.dtype | None = None
        self.peak_tokens = 0
        self.num_cells = 0
        self.capacity = min(self.max_slots, round_up(initial_slots))
        self.width = 0
        self.cells_M: torch.Tensor | None = None
        self.steps_M: torch.Tensor | None = None
        self.uniform_step: int | None = None
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    # -- prompts ------------------------------------------------------------------------------------------------

    def add_groups(self, groups: Sequence[int], lengths: Sequence[int]) -> list[tuple[PromptStack, int]]:
        """Make stacks for new prompts and return, per prompt, the stack and slot its keys go to."""
        places: dict[int, tuple[PromptStack, int]] = {}
        for run in plan_stacks(lengths):
            stack_lengths = [lengths[i] for i in run]
            stack = PromptStack([groups[i] for i in run], stack_lengths, prompt_width(stack_lengths[0]))
            self.stacks.append(stack)
            places.update({i: (stack, slot) for slot, i in enumerate(run)})
        return [places[i] for i in range(len(groups))]

    def store_prompt(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the packed keys and values (1, K, S, D) of a prefill into the stacks of its segments."""
        for segment in self.segments:
            stack, span = segment.stack, slice(segment.start, segment.start + segment.length)
            if len(stack.keys) == layer:
                shape = (len(stack.groups), keys.shape[1], stack.width)
                stack.keys.append(keys.new_zeros(*shape, keys.shape[-1], dtype=self.store_dtype or keys.dtype))
                stack.values.append(values.new_zeros(*shape, values.shape[-1], dtype=self.store_dtype or values.dtype))
            stack.keys[layer][segment.slot, :, : segment.length] = keys[0, :, span]
            stack.values[layer][segment.slot, :, : segment.length] = values[0, :, span]

    # -- completions --------------------------------------------------------------------------------------------

    def arrange(self, rows_of_group: dict[int, list[int]], old_cell_of_row: dict[int, int]) -> dict[int, int]:
        """Lay the alive rows out anew, dropping dead cells and prompts nobody needs; return the cell of each row.

        Args:
            rows_of_group: alive rows of every group whose prompt must stay; a group may have none for the moment.
            old_cell_of_row: where the rows that already have completion keys keep them.
        """
        live = set(rows_of_group)
        self._drop_dead_prompts(live, allowed_waste=0.5)
        plans = self._plan_grids(rows_of_group, waste=0.25)
        if self.max_tokens is not None and self._num_slots(plans, self.max_slots) > self.max_tokens:
            self._drop_dead_prompts(live, allowed_waste=0.0)
            plans = self._plan_grids(rows_of_group, waste=0.0)
        self.blocks = []
        sources: list[int] = []
        cell_of_row: dict[int, int] = {}
        for stack, plan in zip(self.stacks, plans, strict=True):
            for first_slot, count, width in plan:
                self.blocks.append(GridBlock(stack, first_slot, count, width, len(sources)))
                for group in stack.groups[first_slot : first_slot + count]:
                    rows = rows_of_group.get(group, [])
                    cell_of_row.update({row: len(sources) + i for i, row in enumerate(rows)})
                    sources.extend(old_cell_of_row.get(row, 0) for row in rows)
                    sources.extend([0] * (width - len(rows)))
        self._move_cells(sources)
        self.peak_tokens = max(self.peak_tokens, self._num_slots(plans, self.capacity))
        return cell_of_row

    def _plan_grids(self, rows_of_group: dict[int, list[int]], waste: float) -> list[list[tuple[int, int, int]]]:
        return [
            plan_blocks([len(rows_of_group.get(group, ())) for group in stack.groups], waste) for stack in self.stacks
        ]

    def _num_slots(self, plans: list[list[tuple[int, int, int]]], slots_per_cell: int) -> int:
        num_cells = sum(count * width for plan in plans for _, count, width in plan)
        return sum(len(stack.groups) * stack.width for stack in self.stacks) + num_cells * slots_per_cell

    def _drop_dead_prompts(self, live: set[int], allowed_waste: float) -> None:
        """Free the prompts of finished groups: whole stacks at once, a stack in part when enough of it is dead.

        Stacks of one width are joined once there are three of them, since every stack costs a dozen small kernels per
        layer and step.
        """
        for stack in self.stacks:
            slots = [slot for slot, group in enumerate(stack.groups) if group in live]
            if slots and len(stack.groups) - len(slots) > allowed_waste * len(stack.groups):
                stack.select(slots)
        stacks = [stack for stack in self.stacks if any(group in live for group in stack.groups)]
        for width in {stack.width for stack in stacks}:
            same = [stack for stack in stacks if stack.width == width]
            if len(same) >= 3:
                for other in same[1:]:
                    same[0].extend(other)
                    stacks.remove(other)
        self.stacks = stacks

    def _move_cells(self, sources: list[int]) -> None:
        previous, self.num_cells = self.num_cells, len(sources)
        if not sources:
            self._keys, self._values = [], []
            return
        if previous == 0:
            self._keys = [self._new_buffer(tensor) for tensor in self.stacks[0].keys]
            self._values = [self._new_buffer(tensor) for tensor in self.stacks[0].values]
            return
        if sources == list(range(previous)):
            return
        index = torch.tensor(sources, device=self._keys[0].device)
        for tensors in (self._keys, self._values):
            for layer, tensor in enumerate(tensors):
                tensors[layer] = tensor.index_select(0, index)

    def _new_buffer(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self.num_cells, like.shape[1], self.capacity, like.shape[3])

    def _grow(self, num_slots: int) -> None:
        if num_slots <= self.capacity:
            return
        old = self.capacity
        while self.capacity < num_slots:
            self.capacity = min(self.max_slots, 2 * self.capacity)
        for tensors in (self._keys, self._values):
            for layer, tensor in enumerate(tensors):
                tensors[layer] = self._new_buffer(tensor)
                tensors[layer][:, :, :old] = tensor
        prompt_tokens = sum(len(stack.groups) * stack.width for stack in self.stacks)
        self.peak_tokens = max(self.peak_tokens, prompt_tokens + self.num_cells * self.capacity)

    # -- one step -----------------------------------------------------------------------------------------------

    def begin_step(self, cells: Sequence[int], steps: Sequence[int], device: torch.device) -> None:
        """Prepare masks and indices for feeding one token per alive row.

        Args:
            cells: cell of each alive row, ascending.
            steps: completion tokens each of them already has cached; the new one goes to that slot.
            device: of the model.
        """
        longest = max(steps)
        self._grow(longest + 1)
        self.width = min(self.capacity, round_up(longest + 1))
        uniform = min(steps) == longest
        self.uniform_step = longest if uniform else None
        dense = len(cells) == self.num_cells
        self.cells_M = None if dense and uniform else torch.tensor(cells, device=device)
        self.steps_M = None if uniform else torch.tensor(steps, device=device)
        steps_C = [longest] * self.num_cells
        for cell, step in zip(cells, steps, strict=True):
            steps_C[cell] = step
        self._is_dense = dense
        self._set_masks(torch.tensor(steps_C, device=device))

    def _set_masks(self, steps_C: torch.Tensor) -> None:
        slots_T = torch.arange(self.width, device=steps_C.device)
        hidden_CT = slots_T > steps_C[:, None]
        windows = {facts.sliding_window for facts in self.layers.values()} - {None}
        for block in self.blocks:
            cells = slice(block.first_cell, block.first_cell + block.num_cells)
            shape = (block.num_prompts, block.num_rows, -1)
            lengths = block.stack.lengths[block.first_slot : block.first_slot + block.num_prompts]
            lengths_U = torch.tensor(lengths, device=steps_C.device)
            prompt_P = torch.arange(block.stack.width, device=steps_C.device)
            hidden_prompt = (prompt_P >= lengths_U[:, None])[:, None].expand(*shape[:2], prompt_P.numel())
            block.bias = self._bias(hidden_prompt, hidden_CT[cells].view(*shape))
            block.sliding_bias = {}
            for window in windows:
                assert window is not None
                query_UR = lengths_U[:, None] + steps_C[cells].view(shape[:2])
                if int(max(lengths)) + self.width <= window:
                    continue
                prompt_out = query_UR[..., None] - prompt_P >= window
                own_out = (steps_C[cells].view(shape[:2])[..., None] - slots_T) >= window
                block.sliding_bias[window] = self._bias(
                    hidden_prompt | prompt_out, hidden_CT[cells].view(*shape) | own_out
                )

    def _bias(self, hidden_prompt: torch.Tensor, hidden_own: torch.Tensor) -> torch.Tensor:
        hidden = torch.cat((hidden_prompt, hidden_own), -1)[:, None, :, None]
        zeros = torch.zeros(hidden.shape, dtype=self._keys[0].dtype, device=hidden.device)
        return zeros.masked_fill_(hidden, float("-inf"))

    def append(self, layer: int, keys_MKD: torch.Tensor, values_MKD: torch.Tensor) -> None:
        """Write the keys and values of the tokens just fed."""
        for tensor, new in ((self._keys[layer], keys_MKD), (self._values[layer], values_MKD)):
            new = new.to(tensor.dtype)
            if self.uniform_step is not None and self._is_dense:
                tensor[:, :, self.uniform_step] = new
            elif self.uniform_step is not None:
                tensor[:, :, self.uniform_step].index_copy_(0, self.cells_M, new)  # type: ignore[arg-type]
            else:
                tensor[self.cells_M, :, self.steps_M] = new  # type: ignore[index]

    def own(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the completion keys and values (C, K, T, D) of the current width, as views."""
        return self._keys[layer][:, :, : self.width], self._values[layer][:, :, : self.width]
