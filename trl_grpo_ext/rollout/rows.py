"""The rows of a rollout: what they drew so far, where their keys are, and when they are done.

Dimensions: B rows asked for, M rows alive, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from trl_grpo_ext.errors import GroupRelativeError
from trl_grpo_ext.rollout.engine import SamplingParams
from trl_grpo_ext.rollout.sampling import Drawn, seeded_uniforms


class RolloutError(GroupRelativeError, RuntimeError):
    """The model produced scores from which no token can be drawn."""


class RowState:
    """Book-keeping of all rows; the only place where drawn tokens come back to Python, once per step.

    Args:
        prompt_ids: one entry per row.
        params: how to sample and when to stop.
        tokenizer: for stop strings.
        device: of the model.
    """

    def __init__(
        self, prompt_ids: list[list[int]], params: SamplingParams, tokenizer: Any, device: torch.device
    ) -> None:
        self._prompt_ids, self._params, self._device = prompt_ids, params, device
        self.completions: list[list[int]] = [[] for _ in prompt_ids]
        self.logprobs: list[list[float]] = [[] for _ in prompt_ids]
        self.alive: list[int] = []
        self.cells: dict[int, int] = {}
        self.num_done = 0
        self.num_tokens = 0
        self._group_of: dict[int, int] = {}
        self._eos = frozenset(params.eos_token_ids)
        self._seeds = None if params.row_seeds is None else [_to_int64(seed) for seed in params.row_seeds]
        self._seen_BV: torch.Tensor | None = None
        self._stop = _StopStrings(params.stop_strings, tokenizer) if params.stop_strings else None

    def start(self, pairs: list[tuple[int, int]]) -> None:
        """Note (group, row) pairs that begin now."""
        self._group_of.update({row: group for group, row in pairs})
        self.alive.extend(row for _, row in pairs)

    def place(self, cell_of_row: dict[int, int]) -> None:
        """Take over a new arrangement of the cache; alive rows are kept in cell order."""
        self.cells = cell_of_row
        self.alive.sort(key=cell_of_row.__getitem__)

    def num_cached(self) -> list[int]:
        """Return how many completion tokens of each alive row are in the cache: all but the last drawn."""
        return [len(self.completions[row]) - 1 for row in self.alive]

    def model_inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the last token (M,) of each alive row and its position (M,)."""
        tokens = [self.completions[row][-1] for row in self.alive]
        positions = [len(self._prompt_ids[row]) + len(self.completions[row]) - 1 for row in self.alive]
        both = torch.tensor([tokens, positions]).to(self._device)
        return both[0], both[1]

    def sampling_inputs(self, rows: list[int], vocab_size: int) -> dict[str, torch.Tensor | None]:
        """Return uniforms, steps and seen tokens of these rows for ``sampling.choose``."""
        params = self._params
        uniforms = steps = seen = None
        if self._seeds is not None or params.min_new_tokens:
            steps = torch.tensor([len(self.completions[row]) for row in rows], device=self._device)
        if params.do_sample and self._seeds is not None:
            assert steps is not None
            seeds = torch.tensor([self._seeds[row] for row in rows], device=self._device)
            uniforms = seeded_uniforms(seeds, steps)
        elif params.do_sample:
            uniforms = torch.rand(len(rows), dtype=torch.float64, device=self._device)
        if params.repetition_penalty != 1.0:
            seen = self._seen(rows, vocab_size)
        return {"uniforms_M": uniforms, "steps_M": steps, "seen_MV": seen}

    def _seen(self, rows: list[int], vocab_size: int) -> torch.Tensor:
        """Return (M, V) bool, True for tokens in the prompt or completion of each row."""
        if self._seen_BV is None:
            shape = (len(self._prompt_ids), vocab_size)
            self._seen_BV = torch.zeros(shape, dtype=torch.bool, device=self._device)
        for row in rows:
            new = self.completions[row][-1:] or self._prompt_ids[row]
            self._seen_BV[row, torch.tensor(new, device=self._device)] = True
        return self._seen_BV[torch.tensor(rows, device=self._device)]

    def record(self, rows: list[int], drawn: Drawn) -> list[tuple[int, int]]:
        """Append the drawn tokens, take the rows that are done out of ``alive`` and return them as (group, row).

        Raises:
            RolloutError: when a row had no distribution to draw from.
        """
        tokens = drawn.token_ids.tolist()
        if min(tokens) < 0:
            row = rows[tokens.index(min(tokens))]
            raise RolloutError(
                f"no token can be drawn for row {row} after {len(self.completions[row])} tokens: its scores are not "
                "finite, or every token is suppressed. Look for a learning rate that is too high or an overflow."
            )
        for row, token in zip(rows, tokens, strict=True):
            self.completions[row].append(token)
        if drawn.logprobs is not None:
            for row, logprob in zip(rows, drawn.logprobs.tolist(), strict=True):
                self.logprobs[row].append(logprob)
        self.num_tokens += len(rows)
        done = [row for row, token in zip(rows, tokens, strict=True) if self._is_done(row, token)]
        if self._stop is not None:
            rest = [row for row in rows if row not in set(done)]
            tails = [(self._prompt_ids[row] + self.completions[row])[-self._stop.reach :] for row in rest]
            done += [row for row, hit in zip(rest, self._stop.hits(tails), strict=True) if hit]
        if done:
            gone = set(done)
            self.alive = [row for row in self.alive if row not in gone]
            self.num_done += len(done)
        return [(self._group_of[row], row) for row in done]

    def _is_done(self, row: int, token: int) -> bool:
        return token in self._eos or len(self.completions[row]) >= self._params.max_new_tokens


class _StopStrings:
    """transformers' stop-string criterion on the last few tokens of each row, prompt included, as ``generate`` does."""

    def __init__(self, stop_strings: tuple[str, ...], tokenizer: Any) -> None:
        from transformers.generation.stopping_criteria import StopStringCriteria

        self._criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=list(stop_strings))
        self.reach = int(self._criterion.maximum_token_len)

    def hits(self, tails: list[list[int]]) -> list[bool]:
        """Return for each tail whether its last token completes a stop string; tails of one length go together."""
        result = [False] * len(tails)
        for length in {len(tail) for tail in tails}:
            members = [i for i, tail in enumerate(tails) if len(tail) == length]
            hits = self._criterion(torch.tensor([tails[i] for i in members]), None)  # type: ignore[arg-type]
            for i, hit in zip(members, hits.tolist(), strict=True):
                result[i] = bool(hit)
        return result


def _to_int64(seed: int) -> int:
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >= 1 << 63 else seed
