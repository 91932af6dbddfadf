"""The rollout engine on a transformers model: each prompt once, finished rows out, waiting rows in.

Dimensions: B rows asked for, M rows alive, V vocabulary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import torch

from trl_grpo_ext.errors import ConfigurationError, DataError
from trl_grpo_ext.rollout import support
from trl_grpo_ext.rollout.attention import UnsupportedModelError
from trl_grpo_ext.rollout.engine import ProgressCallback, RolloutBatch, RolloutProgress, RolloutStats, SamplingParams
from trl_grpo_ext.rollout.kv_cache import RolloutCache, Segment
from trl_grpo_ext.rollout.module_decoder import ModuleDecoder, prefill, rollout_mode
from trl_grpo_ext.rollout.packed_decoder import PackedDecoder, why_not_packed
from trl_grpo_ext.rollout.rows import RowState
from trl_grpo_ext.rollout.sampling import choose
from trl_grpo_ext.rollout.scheduler import Scheduler

logger = logging.getLogger(__name__)

_COMPACT_BELOW = 0.8
"""Cells are laid out anew when at most this fraction of them is alive: dead cells cost attention, a copy costs memory
bandwidth."""

_PACKING_PAYS_FROM = 16
"""Decode steps from which reordering the weights is cheaper than reading them as they are."""


class TransformersRolloutEngine:
    """Samples completions from a transformers model, exactly as ``model.generate`` does but for rounding.

    Each distinct prompt is computed and cached once, however many rows share it; rows that are done leave the batch;
    keys and values stay within a token budget, and waiting rows take the place of finished ones.

    Args:
        tokenizer: needed for stop strings only.
        decoder: "auto" (packed weights where they apply and pay, else the modules), "modules" or "packed".
        max_prefill_tokens: prompt tokens of one prefill forward; a longer prompt gets a forward of its own.
        progress_interval_s: least time between two calls of ``progress``.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        *,
        decoder: str = "auto",
        max_prefill_tokens: int = 4096,
        progress_interval_s: float = 5.0,
    ) -> None:
        if decoder not in ("auto", "modules", "packed"):
            raise ConfigurationError(f"decoder={decoder!r} is unknown; use 'auto', 'modules' or 'packed'.")
        self.tokenizer = tokenizer
        self.decoder = decoder
        self.max_prefill_tokens = max_prefill_tokens
        self.progress_interval_s = progress_interval_s
        self.packed_verdicts: dict[str, bool] = {}

    def why_unsupported(
        self, model: Any, params: SamplingParams, generation_kwargs: Mapping[str, Any] | None = None
    ) -> str | None:
        """Return why ``model.generate`` must be used instead, in a few words for a log line, or None.

        Args:
            model: the model as it would generate (call this where its parameters are gathered).
            params: the sampling parameters.
            generation_kwargs: the merged settings (``support.merged_generation_settings``); any that the engine does
                not honour is a reason.
        """
        return (
            support.unsupported_setting(generation_kwargs or {})
            or support.unsupported_params(params, self.tokenizer)
            or support.unsupported_model(model)
        )

    def generate(
        self,
        model: Any,
        prompt_ids: list[list[int]],
        params: SamplingParams,
        *,
        max_tokens: int | None = None,
        return_logprobs: bool = False,
        progress: ProgressCallback | None = None,
    ) -> RolloutBatch:
        """Return one completion per entry of ``prompt_ids``, in order.

        Args:
            model: a supported model (``why_unsupported`` is None), unwrapped from DDP; its state is as before
                afterwards, also on an error.
            prompt_ids: token ids, one entry per row; equal entries share one prefill and one copy of keys and values.
            params: how to sample.
            max_tokens: budget of cached token slots, prompts and the full length of alive rows; None for no limit.
            return_logprobs: also return the log-probability of every token drawn.
            progress: called about every ``progress_interval_s`` seconds.

        Returns:
            Completions, log-probabilities and what it cost.

        Raises:
            DataError: for an empty prompt or the wrong number of row seeds.
            RolloutError: when a row's logits are not finite.
            UnsupportedModelError: when the model's attention does something the engine does not compute.
        """
        _check_prompts(prompt_ids, params)
        if not prompt_ids:
            return RolloutBatch([], [] if return_logprobs else None, RolloutStats())
        with rollout_mode(model):
            run = _Run(self, model, prompt_ids, params, max_tokens, return_logprobs, progress)
            return run.finish()


def _check_prompts(prompt_ids: list[list[int]], params: SamplingParams) -> None:
    empty = [row for row, ids in enumerate(prompt_ids) if not ids]
    if empty:
        raise DataError(f"prompt of row {empty[0]} is empty; a model needs at least one token to start from.")
    if params.row_seeds is not None and len(params.row_seeds) != len(prompt_ids):
        raise DataError(f"{len(params.row_seeds)} row seeds for {len(prompt_ids)} rows; give one seed per row.")


class _Run:
    """One call of ``generate``: the order of things, and what they share."""

    def __init__(
        self,
        engine: TransformersRolloutEngine,
        model: Any,
        prompt_ids: list[list[int]],
        params: SamplingParams,
        max_tokens: int | None,
        return_logprobs: bool,
        progress: ProgressCallback | None,
    ) -> None:
        self.engine, self.model, self.params = engine, model, params
        self.max_tokens, self.return_logprobs, self.progress = max_tokens, return_logprobs, progress
        self.device = support.device_of(model)
        groups: dict[tuple[int, ...], list[int]] = {}
        for row, ids in enumerate(prompt_ids):
            groups.setdefault(tuple(ids), []).append(row)
        self.prompts = [list(ids) for ids in groups]
        lengths = [len(ids) for ids in self.prompts]
        self.rows = RowState(prompt_ids, params, engine.tokenizer, self.device)
        self.scheduler = Scheduler(list(groups.values()), lengths, params.max_new_tokens, max_tokens)
        self.cache = RolloutCache(params.max_new_tokens, max_tokens)
        self.decoder: ModuleDecoder | PackedDecoder | None = None
        self.prompt_logits: dict[int, torch.Tensor] = {}
        self.stats = RolloutStats(
            num_rows=len(prompt_ids),
            num_prompts=len(lengths),
            prompt_tokens=sum(lengths),
            prompt_tokens_padded_rows=len(prompt_ids) * max(lengths),
        )
        self.started_s = self.reported_s = time.perf_counter()

    def finish(self) -> RolloutBatch:
        """Run to the end."""
        num_done = -1
        while True:
            if self.rows.num_done != num_done:
                self._admit_and_arrange()
                num_done = self.rows.num_done
            if not self.rows.alive:
                break
            self._decode_step()
            self._report(final=False)
        assert self.rows.num_done == len(self.rows.completions)
        self.stats.num_tokens = self.rows.num_tokens
        self.stats.peak_kv_tokens = self.cache.peak_tokens
        if self.scheduler.over_budget:
            self.stats.notes.append(f"one row alone needs more than max_tokens={self.max_tokens}")
        self._report(final=True)
        return RolloutBatch(self.rows.completions, self.rows.logprobs if self.return_logprobs else None, self.stats)

    def _admit_and_arrange(self) -> None:
        """Take waiting rows in, draw their first token, and lay the cache out anew where that pays."""
        started = False
        while (admission := self.scheduler.admit()) is not None:
            if self.rows.alive and not started:
                self._arrange(self.rows.alive)  # free what finished rows held before prompts are added
            started = True
            self.stats.num_admissions += 1
            self._prefill(admission.new_groups)
            self._first_tokens(admission.rows)
        if self.rows.alive and (started or len(self.rows.alive) <= _COMPACT_BELOW * self.cache.num_cells):
            self._arrange(self.rows.alive)

    def _arrange(self, rows: list[int]) -> None:
        cached = {row: cell for row, cell in self.rows.cells.items() if row in set(rows)}
        self.rows.place(self.cache.arrange(self.scheduler.live_groups(), cached))

    def _prefill(self, groups: list[int]) -> None:
        """Compute the prompts of new groups in packed forwards of at most ``max_prefill_tokens``.

        With row seeds each prompt is computed alone, so that its rounding does not depend on its neighbours.
        """
        start_s = time.perf_counter()
        places = self.cache.add_groups(groups, [len(self.prompts[group]) for group in groups])
        limit = 1 if self.params.row_seeds is not None else self.engine.max_prefill_tokens
        segments: dict[int, Segment] = {}
        used = 0
        for group, (stack, slot) in zip(groups, places, strict=True):
            length = len(self.prompts[group])
            if segments and used + length > limit:
                self._prefill_chunk(segments)
                segments, used = {}, 0
            segments[group] = Segment(used, length, stack, slot)
            used += length
        if segments:
            self._prefill_chunk(segments)
        self.stats.prefill_s += time.perf_counter() - start_s

    def _prefill_chunk(self, segments: dict[int, Segment]) -> None:
        prompts = [self.prompts[group] for group in segments]
        logits = prefill(self.model, self.cache, prompts, list(segments.values()), self.device)
        self.prompt_logits.update(zip(segments, logits, strict=True))

    def _first_tokens(self, pairs: list[tuple[int, int]]) -> None:
        logits = torch.stack([self.prompt_logits[group] for group, _ in pairs])
        self.rows.start(pairs)
        self._choose([row for _, row in pairs], logits)
        waiting = self.scheduler.started_groups_waiting()
        self.prompt_logits = {group: row for group, row in self.prompt_logits.items() if group in waiting}

    def _choose(self, rows: list[int], logits: torch.Tensor) -> None:
        """Draw the next token of these rows and take out those that are done."""
        inputs = self.rows.sampling_inputs(rows, logits.shape[-1])
        drawn = choose(logits, self.params, **inputs, return_logprobs=self.return_logprobs)  # type: ignore[arg-type]
        for group, row in self.rows.record(rows, drawn):
            self.scheduler.finish(group, row)

    def _decode_step(self) -> None:
        """Feed the last token of every alive row and draw the next."""
        start_s = time.perf_counter()
        rows = self.rows.alive
        self.cache.begin_step([self.rows.cells[row] for row in rows], self.rows.num_cached(), self.device)
        token_ids, positions = self.rows.model_inputs()
        if self.decoder is None:
            logits = self._first_step(token_ids, positions)
        else:
            logits = self.decoder.step(token_ids, positions)
        self._choose(rows, logits)
        self.stats.decode_steps += 1
        self.stats.row_steps += len(token_ids)
        self.stats.decode_s += time.perf_counter() - start_s

    def _first_step(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Choose the decoder and run the first step with it.

        The first time an engine packs a kind of model it runs the step both ways and keeps the packed path only if they
        agree. The one that is kept runs last: both write the same slots of the cache.
        """
        modules = ModuleDecoder(self.model, self.cache)
        packed = self._make_packed(len(token_ids))
        if packed is not None and not self._agree(packed, modules, token_ids, positions):
            self.stats.notes.append("modules, because packed decoding disagreed with the model")
            packed = None
        self.decoder = packed or modules
        self.stats.decoder = self.decoder.name
        return self.decoder.step(token_ids, positions)

    def _agree(
        self, packed: PackedDecoder, modules: ModuleDecoder, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> bool:
        """Whether both decoders give the same logits but for rounding; asked once per engine and kind of model."""
        base = support.base_model(self.model)
        kind = f"{type(base).__name__} in {base.dtype}, autocast {self.cache.autocast_dtype}"
        if kind not in self.engine.packed_verdicts:
            got, expected = packed.step(token_ids, positions), modules.step(token_ids, positions)
            self.engine.packed_verdicts[kind] = _same_but_for_rounding(got, expected)
            if not self.engine.packed_verdicts[kind]:
                logger.warning("packed decoding of %s disagrees with the model; using the model's modules", kind)
        return self.engine.packed_verdicts[kind]

    def _make_packed(self, num_rows: int) -> PackedDecoder | None:
        wanted = self.engine.decoder
        if wanted == "modules" or (wanted == "auto" and self.params.max_new_tokens < _PACKING_PAYS_FROM):
            return None
        reason = why_not_packed(self.model)
        if reason is not None:
            if wanted == "packed":
                raise UnsupportedModelError(f"decoder='packed' cannot be used: {reason}")
            self.stats.notes.append(f"modules, because {reason}")
            return None
        start_s = time.perf_counter()
        packed = PackedDecoder(self.model, self.cache, num_rows)
        self.stats.prepare_s += time.perf_counter() - start_s
        return packed

    def _report(self, final: bool) -> None:
        now_s = time.perf_counter()
        if self.progress is None or (not final and now_s - self.reported_s < self.engine.progress_interval_s):
            return
        self.reported_s = now_s
        self.progress(
            RolloutProgress(self.rows.num_done, self.stats.num_rows, self.rows.num_tokens, now_s - self.started_s)
        )


def _same_but_for_rounding(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether the mean total variation between two sets of next-token distributions is that of rounding."""
    p, q = torch.softmax(logits.float(), -1), torch.softmax(expected.float(), -1)
    distance = float((p - q).abs().sum(-1).mean()) / 2
    return distance < (1e-3 if logits.dtype == torch.float32 else 0.1)
