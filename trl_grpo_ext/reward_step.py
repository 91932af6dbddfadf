"""Hand the scoring of a batch to the reward runner, at TRL's seam for rewards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate.utils import gather
from torch import nn
from trl import GRPOTrainer
from trl.trainer.utils import nanstd

from trl_grpo_ext.config import RewardSettings
from trl_grpo_ext.monitor.user_logs import UserLogs
from trl_grpo_ext.objective.abstention import fill_abstained
from trl_grpo_ext.rewards.runner import RewardRunner

# TRL keeps these from rewards under their column names; prompts and completions arrive in arguments of their own.
_NOT_PASSED_ON = ("prompt", "completion", "completion_ids")


class RewardStepMixin(GRPOTrainer):
    """Score rewards in isolation: a failure is a missing value with a reason, never the end of the run.

    Reward models (``nn.Module``) stay on TRL's path, on the accelerator. ``_rewards_per_func`` keeps the last (B, K)
    rewards of all processes that advantages are made of, ``_given_rewards`` what the functions returned.
    """

    model: Any
    num_generations: Any
    num_generations_eval: Any
    reward_funcs: Any
    reward_processing_classes: Any
    _reward_settings: RewardSettings
    _user_logs: UserLogs
    _rewards_per_func: torch.Tensor
    _given_rewards: torch.Tensor
    _runner: RewardRunner | None = None

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        if self._reward_settings.isolation == "off":
            rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        else:
            rewards_per_func = self._rewards_in_isolation(inputs, prompts, completions, completion_ids_list)
        self._user_logs.drop_unusable_columns(self._pending_extra_logs, num_rows=len(prompts))
        self._given_rewards = self._rewards_per_func = rewards_per_func
        centres_itself = self.multi_objective_aggregation == "normalize_then_sum"
        if self._reward_settings.abstention == "group_mean" and not centres_itself:
            size = self.num_generations if self.model.training else self.num_generations_eval
            self._rewards_per_func = fill_abstained(rewards_per_func, size)
        return self._rewards_per_func

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self._given_rewards is not self._rewards_per_func:
            self._log_given_rewards()
        return output

    def _log_given_rewards(self) -> None:
        """Put the rewards as the functions gave them where TRL logged what stands in for missing ones."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        for i, name in enumerate(self.reward_func_names):
            given = self._given_rewards[:, i]
            metrics[f"rewards/{name}/mean"][-1] = torch.nanmean(given).item()
            metrics[f"rewards/{name}/std"][-1] = nanstd(given).item()
            table: Any = self._logs["rewards"][name]  # type: ignore[index]
            for _ in range(min(len(table), len(given))):
                table.pop()
            table.extend(given.tolist())

    def _rewards_in_isolation(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        functions = self._reward_functions()
        models = [i for i in range(len(self.reward_funcs)) if i not in functions]
        parts: list[torch.Tensor] = []
        if models:
            with self._only_rewards(models):
                parts.append(super()._calculate_rewards(inputs, prompts, completions, completion_ids_list))
        if functions:
            columns = {str(name): [row[name] for row in inputs] for name in inputs[0] if name not in _NOT_PASSED_ON}
            outcome = self._runner_for(functions).score(
                prompts,
                completions,
                completion_ids_list,
                columns,
                trainer_state=self.state,
                log_extra=self._log_completion_extra,
                log_metric=self._log_metric,
                environments=self.environments,
            )
            rewards = torch.tensor(
                [[float("nan") if value is None else value for value in column] for column in outcome.rewards],
                dtype=torch.float32,
                device=self.accelerator.device,
            )
            parts.append(gather(rewards.T.contiguous()))
            self._stop_if_rewards_fail(outcome)
            mode = "train" if self.model.training else "eval"
            for name, value in outcome.metrics.items():
                self._metrics[mode][name].append(value)
        order = torch.tensor([*models, *functions], device=self.accelerator.device).argsort()
        return torch.cat(parts, dim=1)[:, order]

    def _start_reward_workers(self) -> None:
        """Let worker processes import and load the rewards while the first completions are being sampled."""
        functions = self._reward_functions()
        if functions and self._reward_settings.isolation != "off":
            self._runner_for(functions)

    def _reward_functions(self) -> list[int]:
        """Return the places of the rewards that are functions, not models."""
        return [i for i, function in enumerate(self.reward_funcs) if not isinstance(function, nn.Module)]

    def _runner_for(self, functions: Sequence[int]) -> RewardRunner:
        """Return the runner of the reward functions."""
        if self._runner is None:
            settings = self._reward_settings
            self._runner = RewardRunner(
                [self.reward_funcs[i] for i in functions],
                [self.reward_func_names[i] for i in functions],
                timeout_s=settings.timeout_s,
                batch_timeout_s=settings.batch_timeout_s,
                num_workers=settings.num_workers,
                max_failure_rate=settings.max_failure_rate,
                cache_entries=settings.cache_entries,
                cache_path=settings.cache_path,
                isolate=settings.isolation,
                async_loop=getattr(self, "async_loop", None),
                seed=self.args.seed,
            )
        return self._runner

    def _stop_if_rewards_fail(self, outcome: Any) -> None:
        """Raise RewardError on every process in the same step if rewards failed too often over all of them."""
        assert self._runner is not None
        counts = torch.tensor([outcome.failure_counts, outcome.call_counts], device=self.accelerator.device)
        failed, called = self.accelerator.reduce(counts, reduction="sum").tolist()
        self._runner.budget.check(failed, called, outcome.failures)

    @contextlib.contextmanager
    def _only_rewards(self, chosen: Sequence[int]) -> Iterator[None]:
        """Let TRL see only the rewards ``chosen``."""
        kept = self.reward_funcs, self.reward_processing_classes, self.reward_func_names
        self.reward_funcs = [self.reward_funcs[i] for i in chosen]
        self.reward_processing_classes = [self.reward_processing_classes[i] for i in chosen]
        self.reward_func_names = [self.reward_func_names[i] for i in chosen]
        try:
            yield
        finally:
            self.reward_funcs, self.reward_processing_classes, self.reward_func_names = kept
