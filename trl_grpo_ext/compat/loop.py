"""The classic loop of TRL <= 0.11: ``generate``, ``step(queries, responses, scores)``, ``log_stats``, ``dataloader``.

Dimensions: ``B`` rows of this process, ``N`` rows of all processes, ``T`` response tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils import gather
from trl.models.utils import disable_gradient_checkpointing

from trl_grpo_ext.compat.grouping import RunningMoments, advantages_by_prompt, describe_singles, prompt_key
from trl_grpo_ext.compat.kl import summed_kl
from trl_grpo_ext.compat.loop_batch import StepInputs, build_batch, check_step_inputs, select_rows
from trl_grpo_ext.compat.loop_generate import ClassicSamplingMixin
from trl_grpo_ext.compat.loop_stats import MiniBatchStats, StepFigures, classic_stats, scalars
from trl_grpo_ext.errors import ConfigurationError

logger = logging.getLogger(__name__)

# Below this the responses cannot come from the policy with the log-probs at hand: PPO's own limit.
_IMPLAUSIBLE_KL = -1.0


class Scored(NamedTuple):
    """What was known of a batch before the first optimiser step: all (B, T) or (B,)."""

    logps: torch.Tensor
    ref_logps: torch.Tensor
    mask: torch.Tensor
    kl: torch.Tensor
    non_score_reward: torch.Tensor


class ClassicLoopMixin(ClassicSamplingMixin):
    """Add the classic loop. Nothing else in the package depends on it."""

    _loop_is_ready = False
    _best_score = float("-inf")
    _score_moments: RunningMoments
    _reward_moments: RunningMoments
    _warned: set[str]

    def _start_loop(self) -> None:
        """Create the optimiser and place the model; ``train()`` does it itself in the v2 era."""
        if self._loop_is_ready:
            return
        self._score_moments, self._reward_moments, self._warned = RunningMoments(), RunningMoments(), set()
        if self.args.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs
            )
        if self.optimizer is None:
            self.create_optimizer()
        self.model_wrapped, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        self.state.episode = getattr(self.state, "episode", 0)
        self._loop_is_ready = True

    def step(self, queries: Any, responses: Any, scores: Any, response_masks: Any = None) -> dict[str, Any]:
        """Train on one batch of responses and their scores; return the statistics of the classic trainer.

        The score counts for the whole response, the KL penalty is subtracted from it, and each response is compared
        with the others to the same query. Log-probs are computed here, so responses may come from anywhere.

        Args:
            queries: B token id tensors; equal ones form a group, in any order.
            responses: B token id tensors, without the query.
            scores: B numbers.
            response_masks: B masks, 1 for tokens to learn from.

        Returns:
            A flat dictionary; figures of the critic are NaN.

        Raises:
            ConfigurationError: for lists of the wrong length, or prompts that occur once under ungrouped='error'.
            RuntimeError: if the loss is not finite.
        """
        started = time.perf_counter()
        self._start_loop()
        rows = check_step_inputs(self._step_size, queries, responses, scores, response_masks)
        batch = build_batch(rows, self._tokenizer.pad_token_id, self.accelerator.device)
        self.model.train()
        score_B = self._shaped_scores(torch.tensor(rows.scores, device=self.accelerator.device))
        scored = self._score_batch(batch)
        forward_seconds = time.perf_counter() - started
        reward_B = score_B + scored.non_score_reward
        batch["advantages"] = self._advantages(reward_B, rows)
        batch["old_per_token_logps"] = scored.logps
        tokens = batch["completion_mask"] * batch.get("tool_mask", batch["completion_mask"])
        batch["num_items_in_batch"] = gather(tokens.sum()).sum()
        mini_batches = self._run_epochs(batch)
        total_seconds = time.perf_counter() - started
        stats = self._step_stats(rows, scored, score_B, batch, mini_batches, forward_seconds, total_seconds)
        self.kl_ctl.update(stats["objective/kl"], self._step_size * self.accelerator.num_processes)
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.state.global_step += 1
        self.state.episode += self._step_size * self.accelerator.num_processes
        self._push_if_best(stats["ppo/mean_scores"])
        return stats

    def _shaped_scores(self, score_B: torch.Tensor) -> torch.Tensor:
        """Return the scores after running scaling and clipping, where the configuration asks for them."""
        config = self._ppo.config
        if getattr(config, "use_score_scaling", False):
            self._score_moments.update(gather(score_B))
            shift = self._score_moments.mean if config.use_score_norm else 0.0
            score_B = (score_B - shift) / (self._score_moments.std + torch.finfo(score_B.dtype).eps)
        clip = getattr(config, "score_clip", None)
        return score_B if clip is None else score_B.clamp(-clip, clip)

    def _score_batch(self, batch: dict[str, torch.Tensor]) -> Scored:
        """Return log-probs under policy and reference and the KL penalty, before anything is learnt."""
        input_ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        attention_mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        width = batch["completion_ids"].size(1)
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            logps, _, _ = self._get_per_token_logps_and_entropies(
                self.model, input_ids, attention_mask, width, batch_size=self._no_grad_rows
            )
            ref_logps = self._reference_logps(input_ids, attention_mask, width) if self._ppo.needs_reference else logps
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        kl = summed_kl(logps, ref_logps, mask, self._ppo.settings.kl_estimator)
        mean_kl = gather(kl).mean().item()
        if mean_kl < _IMPLAUSIBLE_KL:
            logger.warning(
                "KL divergence is starting to become negative: %.2f - this might be a precursor for failed training: "
                "the responses were not sampled from this policy with the settings that its log-probs assume (sampling "
                "settings that cut off tokens, stored responses, another tokenizer).",
                mean_kl,
            )
        return Scored(logps, ref_logps, mask, kl, -self.kl_ctl.value * kl)

    def _advantages(self, reward_B: torch.Tensor, rows: StepInputs) -> torch.Tensor:
        """Return this process's advantages, compared over all processes."""
        keys_B = torch.tensor([prompt_key(query) for query in rows.queries], device=reward_B.device)
        reward_N, keys = gather(reward_B), gather(keys_B).tolist()
        self._reward_moments.update(reward_N)
        ungrouped = getattr(self._ppo.config, "ungrouped", "batch")
        result = advantages_by_prompt(reward_N, keys, ungrouped=ungrouped, running=self._reward_moments)
        if result.num_singles and "singles" not in self._warned:
            self._warned.add("singles")
            logger.warning(describe_singles(keys, ungrouped))
        first = self.accelerator.process_index * reward_B.numel()
        return result.values[first : first + reward_B.numel()]

    def _run_epochs(self, batch: dict[str, torch.Tensor]) -> list[MiniBatchStats]:
        """Train ``num_iterations`` times on the batch, freshly shuffled each time; return what each pass saw."""
        rows, size = batch["completion_ids"].size(0), self.args.per_device_train_batch_size
        accumulation = self.args.gradient_accumulation_steps
        seen: list[MiniBatchStats] = []
        for _ in range(self.num_iterations):
            order = torch.randperm(rows).tolist()
            epoch = []
            for start in range(0, rows, size * accumulation):
                pieces = [order[i : i + size] for i in range(start, start + size * accumulation, size)]
                epoch += [self._train_piece(batch, p, i, len(pieces)) for i, p in enumerate(pieces)]
                self._optimizer_step()
            seen += epoch
            if self._must_stop(epoch):
                break
        return seen

    def _train_piece(
        self, batch: dict[str, torch.Tensor], rows: Sequence[int], index: int, count: int
    ) -> MiniBatchStats:
        inputs = select_rows(batch, rows)
        self.current_gradient_accumulation_steps = count
        is_last = index == count - 1
        self.accelerator.gradient_state._set_sync_gradients(is_last)
        with self._sync_context(self.model_wrapped, is_last), self.compute_loss_context_manager():
            loss = self.compute_loss(self.model_wrapped, inputs)
            move = self._last_move
            if not torch.isfinite(loss):
                raise RuntimeError(
                    f"The loss is {loss.item()}; scores and log-probs must be finite. Nothing was learnt."
                )
            limit = getattr(self._ppo.config, "ratio_threshold", float("inf"))
            if move.ratio > limit:
                logger.warning(
                    "The average ratio of a mini-batch (%.2f) exceeds ratio_threshold=%.2f. Skipping it.",
                    move.ratio,
                    limit,
                )
                loss = loss * 0.0
            self._backward(loss)
        metrics = self._metrics["train"]
        clipped, entropy = metrics["clip_ratio/region_mean"][-1], metrics["entropy"][-1]
        return MiniBatchStats(loss.item() * count, move.ratio, move.approx_kl, move.policy_kl, clipped, entropy)

    def _optimizer_step(self) -> None:
        limit = self.args.max_grad_norm
        if limit is not None and limit > 0:
            self.accelerator.clip_grad_norm_(self.model_wrapped.parameters(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        every = self.args.torch_empty_cache_steps
        if every is not None and torch.cuda.is_available() and self.state.global_step % every == 0:
            torch.cuda.empty_cache()

    def _must_stop(self, epoch: Sequence[MiniBatchStats]) -> bool:
        config = self._ppo.config
        if not getattr(config, "early_stopping", False):
            return False
        moved = torch.tensor([sum(s.policy_kl for s in epoch) / len(epoch)], device=self.accelerator.device)
        return gather(moved).mean().item() > 1.5 * config.target_kl

    def _step_stats(
        self,
        rows: StepInputs,
        scored: Scored,
        score_B: torch.Tensor,
        batch: dict[str, torch.Tensor],
        mini_batches: list[MiniBatchStats],
        forward_seconds: float,
        total_seconds: float,
    ) -> dict[str, Any]:
        figures = StepFigures(
            kl=gather(scored.kl),
            kl_coef=self.kl_ctl.value,
            entropy=gather(-(scored.logps.float() * scored.mask).sum(dim=1)),
            non_score_reward=gather(scored.non_score_reward),
            num_tokens=gather(scored.mask.sum(dim=1)),
            scores=gather(score_B),
            advantages=gather(batch["advantages"]),
            logps=scored.logps,
            ref_logps=scored.ref_logps,
            query_lengths=[len(q) for q in rows.queries],
            response_lengths=[len(r) for r in rows.responses],
            learning_rate=self.optimizer.param_groups[0]["lr"],
            forward_seconds=forward_seconds,
            total_seconds=total_seconds,
        )
        self._metrics["train"].clear()
        return classic_stats(figures, mini_batches)

    def gather_stats(self, stats: dict[str, Any]) -> dict[str, Any]:
        """Return ``stats`` with every tensor averaged over the processes."""
        return {
            name: gather(value.to(self.accelerator.device)).float().mean() if isinstance(value, torch.Tensor) else value
            for name, value in stats.items()
        }

    def log_stats(
        self,
        stats: dict[str, Any],
        batch: dict[str, Any],
        rewards: Any,
        columns_to_log: Iterable[str] = ("query", "response"),
    ) -> None:
        """Send the statistics of a step, the rewards and a table of texts to the trackers.

        Args:
            stats: What ``step`` returned.
            batch: Holds the columns of the table.
            rewards: List of numbers or tensors, one per response.
            columns_to_log: Columns of ``batch`` to show.

        Raises:
            ConfigurationError: if a column is missing.
        """
        columns = list(columns_to_log)
        missing = [name for name in columns if name not in batch]
        if missing and batch:
            raise ConfigurationError(f"log_stats: columns {missing} are not in the batch, which has {sorted(batch)}.")
        values = torch.tensor([float(r) for r in rewards], device=self.accelerator.device)
        values = gather(values).float()
        if not self.accelerator.is_main_process:
            return
        logs = scalars(stats)
        logs["env/reward_mean"], logs["env/reward_std"] = values.mean().item(), values.std(unbiased=False).item()
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)
        if batch and columns and "wandb" in (self.args.report_to or []):
            import wandb

            if wandb.run is not None:
                rows = [list(row) for row in zip(*(batch[name] for name in columns), values.tolist(), strict=False)]
                wandb.log({"game_log": wandb.Table(columns=[*columns, "reward"], data=rows)})

    def _push_if_best(self, score: float) -> None:
        config = self._ppo.config
        where = getattr(config, "push_to_hub_if_best_kwargs", None)
        if not where or self.state.global_step % config.compare_steps or score <= self._best_score:
            return
        self._best_score = score
        self.push_to_hub(**dict(where))
