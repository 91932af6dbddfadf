"""What a trainer does about memory: budgets that fall when it runs out, peaks per phase, errors that say what helps."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from transformers import TrainerCallback
from transformers.training_args import OptimizerNames
from trl import GRPOTrainer

from trl_grpo_ext.config import EngineSettings
from trl_grpo_ext.errors import MemoryBudgetError
from trl_grpo_ext.memory.host_allocator import keep_freed_memory
from trl_grpo_ext.memory.levers import Levers, advice
from trl_grpo_ext.memory.oom import TokenBudget, first_line, is_out_of_memory
from trl_grpo_ext.memory.watch import MemoryWatch
from trl_grpo_ext.monitor.files import write_json

BUDGETS_FILE = "memory_budgets.json"

# Kinds of run in which one process can take a failed pass back without the others noticing.
_REPLICATED = (
    DistributedType.NO,
    DistributedType.MULTI_CPU,
    DistributedType.MULTI_GPU,
    DistributedType.MULTI_NPU,
    DistributedType.MULTI_MLU,
    DistributedType.MULTI_MUSA,
    DistributedType.MULTI_XPU,
)


class BudgetStepMixin(GRPOTrainer):
    """Own the token budgets and the watch, and keep the budgets in checkpoints."""

    args: Any
    model: Any
    engine_settings: EngineSettings
    _given_scores: Any
    _train_budget: TokenBudget
    _score_budget: TokenBudget
    _generation_budget: TokenBudget
    _watch: MemoryWatch
    _why_no_recovery: str | None = None
    _logs_memory = False

    def _set_up_memory(self, settings: EngineSettings) -> None:
        """Make budgets and watch; called once accelerator and model are there."""
        self._why_no_recovery = self._find_why_no_recovery(settings.oom_max_halvings)
        halvings = 0 if self._why_no_recovery else settings.oom_max_halvings
        undoable = 0 if self._find_why_no_undoing() else halvings
        per_pass = settings.max_tokens_per_micro_batch or None
        per_generation = settings.max_tokens_per_generation_batch or None
        pass_field, generation_field = "max_tokens_per_micro_batch", "max_tokens_per_generation_batch"
        self._train_budget = TokenBudget("train", pass_field, per_pass, undoable, self._advise)
        self._score_budget = TokenBudget("score", pass_field, per_pass, halvings, self._advise)
        self._generation_budget = TokenBudget("generate", generation_field, per_generation, halvings, self._advise)
        self._watch = MemoryWatch()
        if self.accelerator.device.type == "cpu":
            keep_freed_memory()
        self._logs_memory = settings.memory_metrics
        if self._logs_memory:
            self.add_callback(_WatchOptimizer(self))

    def compare_memory_with(self, plan: Any) -> None:
        """Log what ``plan``, a ``MemoryPlan``, expects of each phase beside the peak that is measured."""
        planned = dict(plan.planned_gib)
        passes = [planned.pop(name) for name in ("forward", "backward") if name in planned]
        if passes:  # one phase here: the window runs both, pass after pass
            planned["train"] = max([*passes, planned.get("train", 0.0)])
        self._watch.planned_gib = planned

    def _find_why_no_recovery(self, max_halvings: int) -> str | None:
        """Return why work that ran out of memory cannot be done again by one process, or None."""
        if not max_halvings:
            return "oom_max_halvings is 0"
        kind = self.accelerator.distributed_type
        if kind not in _REPLICATED or getattr(self, "is_distributed_loading_by_transformers", False):
            return f"the model is spread over processes ({kind.value}), which are now in different places"
        if getattr(self.model, "tp_size", None) or getattr(self.accelerator, "parallelism_config", None):
            return "every forward is shared by several processes, which are now in different places"
        return None

    def _find_why_no_undoing(self) -> str | None:
        """Return why a half-made backward pass cannot be taken back, or None."""
        optim = str(getattr(self.args.optim, "value", self.args.optim))
        if self.args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO) or "layerwise" in optim:
            return f"optim={optim} changes weights during the backward pass"
        if self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
            return "sync_each_batch sends gradients after every pass"
        return None

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        with self._watch.watching("generate"):
            return super()._generate_single_turn(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or self._given_scores is not None:
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)
        with self._watch.watching("score"):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _advise(self, phase: str) -> str:
        return advice(phase, self._levers())

    def _levers(self) -> Levers:
        optim = str(getattr(self.args.optim, "value", self.args.optim))
        allocator = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        return Levers(
            gradient_checkpointing=bool(self.args.gradient_checkpointing),
            eight_bit_optimizer="8bit" in optim or optim.startswith("sgd"),
            has_adapter=hasattr(self.accelerator.unwrap_model(self.model), "peft_config"),
            is_quantised=bool(getattr(self.model, "is_quantized", False)),
            uses_vllm=self.use_vllm and getattr(self.args, "vllm_mode", None) == "colocate",
            expandable_segments=not torch.cuda.is_available() or "expandable_segments:True" in allocator,
        )

    @contextlib.contextmanager
    def _explaining_out_of_memory(self) -> Iterator[None]:
        """Say of an error that nothing caught in which phase memory ran out and what would help.

        Raises:
            MemoryBudgetError: in the place of any error that means it; as it was with ``oom_max_halvings=0``.
        """
        try:
            yield
        except MemoryBudgetError:
            raise
        except Exception as error:
            if not self.engine_settings.oom_max_halvings or not is_out_of_memory(error):
                raise
            phase = self._watch.phase or "train"
            reason = self._why_no_recovery or (self._find_why_no_undoing() if phase == "train" else None)
            again = f" It was not tried again with less, because {reason}." if reason else ""
            raise MemoryBudgetError(
                f"Out of memory in the phase {phase!r}: {first_line(error)}.{again} {self._advise(phase)}"
            ) from error

    def _agree_on_budgets(self) -> None:
        """Let every process take the lowest budget of any; a collective call where there are several.

        A process that ran out while it sampled or scored did its own rows again and the others waited for it.
        """
        budgets = (self._generation_budget, self._score_budget)
        if self.accelerator.num_processes == 1 or not any(budget.can_recover for budget in budgets):
            return
        mine = [[budget.max_tokens or 2**62, -budget.num_halvings] for budget in budgets]
        everyone = self.accelerator.gather(torch.tensor([mine], device=self.accelerator.device))
        for budget, (tokens, halvings) in zip(budgets, everyone.amin(0).tolist(), strict=True):
            budget.take(None if tokens == 2**62 else tokens, -halvings)

    def _log_memory(self) -> None:
        """Add the metrics of a step to TRL's."""
        if not self._logs_memory:
            return
        values = self._watch.take_metrics()
        values["memory/oom_retries"] = float(sum(budget.num_halvings for budget in self._budgets().values()))
        for budget in (self._train_budget, self._generation_budget):
            if budget.max_tokens is not None:
                values[f"memory/{budget.setting}"] = float(budget.max_tokens)
        for name, value in values.items():
            self._metrics["train"][name].append(value)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save and any(budget.num_halvings for budget in self._budgets().values()):
            folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            states = {name: budget.state_dict() for name, budget in self._budgets().items()}
            write_json(folder / BUDGETS_FILE, states)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (path := Path(checkpoint) / BUDGETS_FILE).is_file():
            states = json.loads(path.read_text(encoding="utf-8"))
            for name, budget in self._budgets().items():
                if name in states:
                    budget.load_state_dict(states[name])

    def _budgets(self) -> dict[str, TokenBudget]:
        budgets = (self._train_budget, self._score_budget, self._generation_budget)
        return {budget.phase: budget for budget in budgets}


class _WatchOptimizer(TrainerCallback):
    """Watch the optimiser's step, which no method of the trainer is around."""

    def __init__(self, trainer: BudgetStepMixin) -> None:
        self._trainer = trainer

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Begin."""
        self._trainer._watch.begin("optimizer")

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """End, and with it the step."""
        self._trainer._watch.end()
        self._trainer._log_memory()
