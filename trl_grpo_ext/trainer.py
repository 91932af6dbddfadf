"""The trainer: the order of one step, nothing else. What a step does lives in the rooms next to this file."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from trl_grpo_ext.budget_step import BudgetStepMixin
from trl_grpo_ext.compat.call import accepts_ppo_calls
from trl_grpo_ext.config import EngineSettings, GroupRelativeConfig, RewardSettings
from trl_grpo_ext.errors import DataError
from trl_grpo_ext.learner.window import RolloutWindow
from trl_grpo_ext.learner.window_step import WindowStepMixin
from trl_grpo_ext.monitor.user_logs import UserLogs
from trl_grpo_ext.objective.dead_groups import find_dead_groups
from trl_grpo_ext.policy.setup import own_reference, prepare_policy
from trl_grpo_ext.policy.step import PolicyStepMixin
from trl_grpo_ext.preflight.data import check_one_step_of_data, check_reward_columns
from trl_grpo_ext.prompt_step import PromptStepMixin
from trl_grpo_ext.reward_step import RewardStepMixin
from trl_grpo_ext.rewards.registry import unique_names
from trl_grpo_ext.rng import preserved_rng
from trl_grpo_ext.rollout.rollout_step import RolloutStepMixin
from trl_grpo_ext.sampled_logps import SampledLogpsMixin
from trl_grpo_ext.seams import check_seams

logger = logging.getLogger(__name__)

# Once, at import: a TRL whose methods changed is named here and not found out in the middle of a step.
check_seams()


class GroupRelativeTrainer(
    BudgetStepMixin,
    PromptStepMixin,
    PolicyStepMixin,
    SampledLogpsMixin,
    WindowStepMixin,
    RolloutStepMixin,
    RewardStepMixin,
    GRPOTrainer,
):
    """Train a policy with group-relative advantages: a drop-in for ``trl.GRPOTrainer``.

    Takes the arguments of ``trl.GRPOTrainer`` in its order; ``args`` may be a plain ``trl.GRPOConfig``. One optimiser
    step forwards its rollouts in micro-batches that fit a token budget and skips groups without a gradient; the
    gradient is TRL's. See ``docs/window.md``. Two keywords come after TRL's: ``memory``, how the policy is held and
    trained, and ``adapter``, an adapter to go on training; both are settings too. See ``docs/memory.md``.

    Raises:
        ConfigurationError: for settings that contradict each other, and where nothing would be trained.
        DataError: if the data set cannot fill one optimiser step, or lacks a column that a reward needs, before any
            model is loaded.
    """

    _tag_names = [*GRPOTrainer._tag_names, "trl-grpo-ext"]  # noqa: RUF012 (TRL types it as an instance variable)

    @accepts_ppo_calls
    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable] | None = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        *,
        memory: Any = None,
        adapter: str | None = None,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else getattr(model.config, "_name_or_path", "") or "model"
            args = GroupRelativeConfig(f"{name.split('/')[-1]}-GRPO")
        check_one_step_of_data(train_dataset, args.generation_batch_size, args.num_generations)
        adds_columns = rollout_func is not None or environment_factory is not None
        check_reward_columns(train_dataset, reward_funcs, adds_columns=adds_columns)
        self._reward_settings = RewardSettings.of(args)
        self._user_logs = UserLogs()
        policy = prepare_policy(
            model,
            args,
            quantization_config=quantization_config,
            peft_config=peft_config,
            memory=memory,
            adapter=adapter,
            reward_funcs=reward_funcs,
            train_dataset=train_dataset,
            processing_class=processing_class,
        )
        with own_reference(policy, args):
            super().__init__(
                model=policy.model,
                reward_funcs=reward_funcs,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=policy.quantization_config,
                peft_config=policy.peft_config,
                tools=tools,
                rollout_func=rollout_func,
                environment_factory=environment_factory,
            )
        self._settle_policy(policy)
        self._settle_prompts()
        self.engine_settings = EngineSettings.of(args)
        self.reward_func_names = unique_names(self.reward_func_names)
        self._window = RolloutWindow()
        self._packed_forward_is_on = self.engine_settings.shared_prefix_forward
        self._engine_is_on = self.engine_settings.rollout_engine == "auto"
        self._rollout_is_seeded = self.engine_settings.rollout_seeded
        self._old_logps_from_rollout = self.engine_settings.old_logps_from_rollout
        self._set_up_memory(self.engine_settings)
        self._why_no_window = self._find_why_no_window()
        if self._why_no_window is not None and self.engine_settings.max_tokens_per_micro_batch:
            logger.warning("Using TRL's own micro-batches, and skipping no dead group: %s.", self._why_no_window)

    def _find_why_no_window(self) -> str | None:
        """Return why the window cannot give TRL's gradient here, or None where it can."""
        for name in ("compute_loss", "_compute_loss"):
            home = next(c for c in type(self).__mro__ if name in vars(c))
            if home is not GRPOTrainer and not getattr(vars(home)[name], "keeps_window", False):
                return f"{home.__name__} overrides {name}, which may look at the model itself"
        if not self.engine_settings.max_tokens_per_micro_batch:
            return "max_tokens_per_micro_batch is 0"
        if self._is_vlm:
            return "images are cut along TRL's micro-batches"
        if self.aux_loss_enabled:
            return "the router's balancing loss depends on which rows share a micro-batch"
        if self.top_entropy_quantile < 1.0:
            return "top_entropy_quantile ranks the entropies inside a TRL micro-batch"
        if self.use_adaptive_entropy:
            return "use_adaptive_entropy updates its coefficient from every TRL micro-batch"
        return None

    @property
    def _can_skip_dead_groups(self) -> bool:
        """Whether equal rewards mean a zero gradient under the settings of this run."""
        return (
            self.engine_settings.skip_dead_groups
            and self._why_no_window is None
            and self.beta == 0.0
            and not self._entropy_bonus_enabled
            and self.multi_objective_aggregation == "sum_then_normalize"
        )

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as ``transformers.Trainer.train`` does.

        Raises:
            DataError: if the data ran out before one optimiser step was made.
            NothingTrainedError: if no weight changed, although some group's rewards differed.
            MemoryBudgetError: if memory ran out and no smaller piece of work was left to try.
        """
        self._window.clear()
        self._watch.abandon()
        self._start_reward_workers()
        with self._explaining_out_of_memory():
            result = super().train(*args, **kwargs)
        if self.state.global_step == 0 and self.state.max_steps > 0:
            raise DataError(
                f"Training ended without one optimiser step: the data ran out before {self.args.generation_batch_size} "
                f"rows ({self.args.generation_batch_size // self.num_generations} prompts) came together. Provide more "
                "prompts, or lower per_device_train_batch_size or gradient_accumulation_steps."
            )
        if self._update_guard is not None:
            self._update_guard.finish(self.model)
        return result

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as ``transformers.Trainer.evaluate`` does; the random state of training is untouched."""
        with preserved_rng():
            return super().evaluate(*args, **kwargs)

    def training_step(self, model: torch.nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Collect TRL's micro-batches of one optimiser step; with the last one, run them all."""
        with self._saved_for_backward():
            if self._why_no_window is not None:
                with self._watch.watching("train"):
                    return super().training_step(model, inputs, num_items_in_batch)
            return self._window_step(model, inputs)

    def _window_step(self, model: torch.nn.Module, inputs: Any) -> torch.Tensor:
        started = time.perf_counter()
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        self._window.add(self._prepare_inputs(inputs), self.current_gradient_accumulation_steps)
        loss = torch.zeros((), device=self.args.device)
        if self.accelerator.sync_gradients:
            with self._watch.watching("train"):
                loss = self._run_window(model, self._window, self._train_budget)
            self._window.clear()
        self._step += 1
        self._current_train_step_time += time.perf_counter() - started
        if self.accelerator.sync_gradients:
            self._metrics["train"]["step_time"].append(self._current_train_step_time)
            self._current_train_step_time = 0.0
        return loss

    def _log_completion_extra(self, column: str, values: list) -> None:
        if self._user_logs.accepts_column(column, values):
            super()._log_completion_extra(column, list(values))

    def _log_metric(self, name: str, value: float) -> None:
        if self._user_logs.accepts_metric(name, value):
            super()._log_metric(name, float(value))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        self._agree_on_budgets()
        if self.model.training and self._why_no_window is None:
            self._mark_groups(output)
        return output

    def _mark_groups(self, output: dict[str, Any]) -> None:
        """Add each row's group and whether it is dead; give dead groups the advantage they should have, exactly 0."""
        device = output["advantages"].device
        size = output["advantages"].size(0)
        row = torch.arange(size, device=device) + self.accelerator.process_index * size
        output["group_index"] = row // self.num_generations
        if self.engine_settings.skip_dead_groups and self.multi_objective_aggregation == "sum_then_normalize":
            dead = find_dead_groups(self._rewards_per_func, self.reward_weights, self.args.num_generations)
            if self._update_guard is not None:
                self._update_guard.saw_groups(int((~dead).sum()))
            is_dead = dead[output["group_index"]]
            output["advantages"][is_dead] = 0.0
            output["is_dead"] = is_dead & self._can_skip_dead_groups
            self._metrics["train"]["dead_groups/share"].append(dead.float().mean().item())
            self._metrics["train"]["dead_groups/skipped_share"].append(
                dead.float().mean().item() if self._can_skip_dead_groups else 0.0
            )
