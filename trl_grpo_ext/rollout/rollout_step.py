"""Sample the completions of a step, at TRL's seam for one turn of generation."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation

from trl_grpo_ext.learner.micro_batches import plan_generation_batches
from trl_grpo_ext.memory.oom import TokenBudget, Work, recover
from trl_grpo_ext.rollout.attention import UnsupportedModelError
from trl_grpo_ext.rollout.engine import RolloutBatch, RolloutProgress, SamplingParams
from trl_grpo_ext.rollout.scheduler import slots_needed
from trl_grpo_ext.rollout.support import merged_generation_settings
from trl_grpo_ext.rollout.transformers_engine import TransformersRolloutEngine

logger = logging.getLogger(__name__)

Completions = tuple[list[list[int]], list[list[float]] | None]


class RolloutStepMixin(GRPOTrainer):
    """Sample with the rollout engine where it is exact, with ``model.generate`` in pieces of a token budget elsewhere.

    vLLM, continuous batching and images stay on TRL's path.
    """

    args: Any
    model: Any
    _engine_is_on = False
    _rollout_is_seeded = False
    _generation_budget = TokenBudget("generate", "max_tokens_per_generation_batch", None, max_halvings=0)
    _engine: TransformersRolloutEngine | None = None
    _num_rollouts = 0
    _sampled_logps: list[list[float]] | None = None

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: dict[str, Any],
        num_generations: int,
        has_tool_images: bool = False,
    ) -> Completions:
        if self.use_vllm or self.use_transformers_continuous_batching or images is not None or multimodal_fields:
            return super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, has_tool_images
            )
        row_seeds = self._row_seeds(len(prompt_ids)) if self._engine_is_on else None
        longest = self.max_completion_length or 0

        def sample(max_tokens: int | None) -> Completions:
            if self._engine_is_on:
                batch = self._sample_with_engine(prompt_ids, row_seeds, max_tokens)
                if batch is not None:
                    return batch.completion_ids, None
            if max_tokens is None or not longest:
                return super(RolloutStepMixin, self)._generate_single_turn(prompt_ids, None, {}, num_generations)
            completion_ids: list[list[int]] = []
            lengths = [len(ids) for ids in prompt_ids]
            for rows in plan_generation_batches(lengths, longest, num_generations, max_tokens):
                ids, _ = super(RolloutStepMixin, self)._generate_single_turn(
                    prompt_ids[rows], None, {}, num_generations
                )
                completion_ids.extend(ids)
            return completion_ids, None

        def sample_from(max_tokens: int | None) -> Completions:
            with self._checkpointing_kept():
                return sample(max_tokens)

        return recover(self._generation_budget, sample_from, lambda: Work(*slots_needed(prompt_ids, longest)))

    @contextlib.contextmanager
    def _checkpointing_kept(self) -> Iterator[None]:
        """Switch gradient checkpointing on again when an error ends sampling: TRL, which switches it off, does not."""
        model = self.accelerator.unwrap_model(self.model_wrapped)
        was_on = bool(getattr(model, "is_gradient_checkpointing", False))
        try:
            yield
        finally:
            if was_on and not model.is_gradient_checkpointing:
                model.gradient_checkpointing_enable(self.args.gradient_checkpointing_kwargs)

    def _sample_with_engine(
        self, prompt_ids: list[list[int]], row_seeds: list[int] | None, max_tokens: int | None
    ) -> RolloutBatch | None:
        """Return completions from the engine, or None (and say why, once) where it would not be exact."""
        if self._engine is None:
            self._engine = TransformersRolloutEngine(self._tokenizer)
        with (
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                generation_kwargs=self.generation_kwargs,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as model,
            torch.no_grad(),
            self._dist.summon_full_params(self.model_wrapped, recurse=False),
        ):
            settings = merged_generation_settings(model, self.generation_config)
            params = SamplingParams.from_generation_settings(settings, row_seeds)
            reason = self._engine.why_unsupported(model, params, settings)
            if reason is not None:
                self._say_why_generate(reason)
                return None
            try:
                batch = self._engine.generate(
                    model,
                    prompt_ids,
                    params,
                    max_tokens=max_tokens,
                    return_logprobs=self._wants_sampled_logps(model, params),
                    progress=_log_progress,
                )
            except UnsupportedModelError as error:  # found in the attention itself, which no look at the model foresees
                self._say_why_generate(str(error))
                self._engine_is_on = False
                return None
        if batch.logprobs is not None and self._sampled_logps is not None:
            self._sampled_logps += batch.logprobs
        seconds = batch.stats.prefill_s + batch.stats.decode_s
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["rollout/seconds"].append(seconds)
        metrics["rollout/tokens_per_second"].append(batch.stats.num_tokens / max(seconds, 1e-9))
        return batch

    def _wants_sampled_logps(self, model: Any, params: SamplingParams) -> bool:
        """Return whether the log-probabilities of the tokens drawn have a use (``trl_grpo_ext.sampled_logps``)."""
        return False

    def _row_seeds(self, num_rows: int) -> list[int] | None:
        """Return a seed for each row that depends on run, step, call, process and row, not on how rows are batched."""
        if not self._rollout_is_seeded:
            return None
        self._num_rollouts += 1
        place = [self.args.seed, self.state.global_step, self._num_rollouts, self.accelerator.process_index]
        return [int(seed) for seed in np.random.SeedSequence(place).generate_state(num_rows, np.uint64)]

    def _say_why_generate(self, reason: str) -> None:
        said: set[str] = self.__dict__.setdefault("_generate_reasons_said", set())
        if reason not in said:
            said.add(reason)
            logger.warning("Sampling with model.generate: %s.", reason)


def _log_progress(progress: RolloutProgress) -> None:
    logger.info(
        "rollout: %d of %d completions, %d tokens, %.0f s",
        progress.num_rows_done,
        progress.num_rows,
        progress.num_tokens,
        progress.elapsed_s,
    )
