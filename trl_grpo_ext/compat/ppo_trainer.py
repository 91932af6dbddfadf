"""``PPOTrainer``: a PPO call of either era on the group-relative trainer.

Everything that PPO did beyond GRPO is added here, on top of ``GroupRelativeTrainer``: the KL penalty and the penalty
for a missing end inside the reward, an explicit reference, reward models on token ids, prompts given as ids, PPO's
metrics, and the classic loop.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, overload

from torch import nn
from trl.trainer.callbacks import SyncRefModelCallback

from trl_grpo_ext.compat.fields import DEAD_HOOKS
from trl_grpo_ext.compat.kl import AdaptiveKLController, FixedKLController
from trl_grpo_ext.compat.loop import ClassicLoopMixin
from trl_grpo_ext.compat.methods import SampleTables
from trl_grpo_ext.compat.reference import install_reference, is_peft
from trl_grpo_ext.compat.setup import PPOSetup, prepare_call
from trl_grpo_ext.compat.tokens import count_positions_from_mask
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.trainer import GroupRelativeTrainer

logger = logging.getLogger(__name__)


class PPOTrainer(ClassicLoopMixin):
    """Train with group-relative advantages from a script written for TRL's ``PPOTrainer``.

    Takes the arguments of TRL 0.9.3 to 1.12 (v2, then call ``train()``) or those of TRL <= 0.11 (classic, then call
    ``generate`` and ``step``), by position or keyword, and GRPO's as keywords. There is no critic: ``value_model``,
    value heads and their settings are accepted and named once in the start-up report. See ``docs/from_ppo.md``.

    Raises:
        ConfigurationError: for arguments that cannot work; the message names what to pass instead.
        DataError: for data without a usable column, or too little of it.
    """

    @overload
    def __init__(
        self,
        args: Any,
        processing_class: Any = None,
        model: Any = None,
        ref_model: Any = None,
        reward_model: Any = None,
        train_dataset: Any = None,
        value_model: Any = None,
        data_collator: Any = None,
        eval_dataset: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        callbacks: list[Any] | None = None,
        peft_config: Any = None,
        *,
        reward_funcs: Any = None,
        num_generations: int | None = None,
        **grpo: Any,
    ) -> None: ...

    @overload
    def __init__(
        self,
        config: Any = None,
        model: Any = None,
        ref_model: Any = None,
        tokenizer: Any = None,
        dataset: Any = None,
        optimizer: Any = None,
        data_collator: Any = None,
        num_shared_layers: int | None = None,
        lr_scheduler: Any = None,
        training_data_collator: Any = None,
        *,
        num_generations: int | None = None,
        **grpo: Any,
    ) -> None: ...

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._set_up(prepare_call(args, kwargs))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for owner in cls.__mro__:
            if owner.__module__.startswith(("trl_grpo_ext.", "trl.", "transformers.", "builtins")):
                continue
            dead = sorted(DEAD_HOOKS & vars(owner).keys())
            if dead:
                raise ConfigurationError(
                    f"{owner.__name__} overrides {', '.join(dead)}, never called here. Override _calculate_rewards "
                    "(what a response is worth) or _compute_loss (what is minimised)."
                )

    def _set_up(self, setup: PPOSetup) -> None:
        """Build the trainer underneath and put on top what PPO did beyond it."""
        self._ppo = setup
        settings, args, model = setup.settings, setup.grpo["args"], setup.grpo["model"]
        self.kl_ctl = (
            FixedKLController(settings.kl_coef)
            if settings.kl_target is None
            else AdaptiveKLController(settings.kl_coef, settings.kl_target, settings.kl_horizon)
        )
        generation_config = getattr(model, "generation_config", None)
        ends = getattr(generation_config, "eos_token_id", None)
        if settings.stop_token_id is not None and generation_config is not None:
            known = ends if isinstance(ends, list) else [] if ends is None else [ends]
            generation_config.eos_token_id = list(dict.fromkeys([*known, settings.stop_token_id]))
        syncs = bool(args.sync_ref_model)
        try:
            args.beta, args.sync_ref_model = 0.0, False  # TRL would reload a reference by name
            super(ClassicLoopMixin, self).__init__(**setup.grpo)
        finally:
            args.beta, args.sync_ref_model = setup.beta, syncs
            if generation_config is not None:
                generation_config.eos_token_id = ends
        self.beta = setup.beta
        self.processing_class = setup.tokenizer  # the padding copy stays in self._tokenizer
        bare = self.model.get_base_model() if is_peft(self.model) else self.model
        count_positions_from_mask(bare)
        if setup.reference is not None:
            reference = setup.reference
            count_positions_from_mask(reference.get_base_model() if is_peft(reference) else reference)
            self.ref_model = install_reference(self, reference)
            if syncs:
                self.add_callback(SyncRefModelCallback(ref_model=self.ref_model, accelerator=self.accelerator))
        for column, module in setup.token_rewards.items():
            setup.token_rewards[column] = self._place(module)
        if setup.plan is not None and settings.num_sample_generations > 0 and self.eval_dataset is not None:
            self.add_callback(SampleTables(self, settings.num_sample_generations, setup.plan.optimizer_steps))
        if setup.era == "classic":
            self._start_loop()
        elif not hasattr(self.model, "policy"):
            # PPO's model held policy and critic; past nn.Module, which would take it for a submodule of itself
            self.model.__dict__["policy"] = self.model
        if self.accelerator.is_main_process:
            logger.warning("%s", setup.report)

    def _place(self, module: nn.Module) -> nn.Module:
        """Freeze a reward model and put it where the policy is; one that is quantised or spread stays."""
        module.eval()
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        if getattr(module, "hf_device_map", None) or getattr(module, "quantization_method", None):
            return module
        if self.is_deepspeed_enabled:
            from trl.models import prepare_deepspeed

            return prepare_deepspeed(module, self.accelerator)
        return self.accelerator.prepare_model(module, evaluation_mode=True, device_placement=True)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as ``transformers.Trainer.train`` does.

        Raises:
            ConfigurationError: without a reward source.
        """
        if not self._ppo.has_reward:
            raise ConfigurationError(
                "train() has no reward source: pass reward_model or reward_funcs, or call step() with scores."
            )
        self._began_at = time.perf_counter()
        return super().train(*args, **kwargs)


@functools.cache
def _with_ppo(cls: type) -> type:
    """Return ``cls`` with PPO's behaviour beneath the user's overrides."""
    if cls is GroupRelativeTrainer:
        return PPOTrainer
    return type(cls.__name__, (cls, PPOTrainer), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def become_ppo_trainer(trainer: GroupRelativeTrainer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Turn a ``GroupRelativeTrainer`` under construction into a ``PPOTrainer`` and construct that."""
    setup = prepare_call(args, kwargs)
    trainer.__class__ = _with_ppo(type(trainer))  # type: ignore[arg-type]
    PPOTrainer._set_up(trainer, setup)  # type: ignore[arg-type]
