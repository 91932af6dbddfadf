"""Turn a ``PPOConfig`` into the ``GroupRelativeConfig`` that trains the same way, and say what was done."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from transformers import TrainingArguments

from trl_grpo_ext.compat.batch import BatchPlan, plan_classic, plan_v2, updates_for
from trl_grpo_ext.compat.config import PPOConfig
from trl_grpo_ext.compat.fields import CRITIC_DEFAULTS, CRITIC_FIELDS, TRANSLATED_ARGUMENTS
from trl_grpo_ext.config import GroupRelativeConfig
from trl_grpo_ext.errors import ConfigurationError, nearest

_CURRENT = frozenset(f.name for f in dataclasses.fields(TrainingArguments))
# Passed on as they are, unless this file sets them.
_PASSED_ON = _CURRENT - TRANSLATED_ARGUMENTS.keys() - {"gradient_checkpointing", "activation_checkpointing"}
_ACCELERATOR_CONFIG = frozenset({"split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler"})


class PPOSettings(NamedTuple):
    """What PPO did beyond GRPO's settings, as flat values.

    Attributes:
        kl_in_reward: Whether the KL penalty is subtracted from the reward.
        kl_coef: Its weight (the starting weight when adaptive), at least 0.
        kl_estimator: "k1", "abs", "k2" or "k3".
        kl_target: Target of the adaptive weight in nats per response, or None for a fixed weight.
        kl_horizon: Responses over which the weight adapts.
        missing_eos_penalty: Subtracted from the score of a response without EOS, or None.
        stop_token_id: A further token that ends a response, or None.
        rollout_rows: Rows per call of ``generate`` and per forward pass without gradient; None: the trainer's budgets.
        num_sample_generations: How often sample tables are printed over the run.
        ref_adapter_name: PEFT adapter that is the reference, or None: the base model.
        model_adapter_name: PEFT adapter that is trained, or None: the active one.
    """

    kl_in_reward: bool = False
    kl_coef: float = 0.0
    kl_estimator: str = "k1"
    kl_target: float | None = None
    kl_horizon: float = 10000.0
    missing_eos_penalty: float | None = None
    stop_token_id: int | None = None
    rollout_rows: int | None = None
    num_sample_generations: int = 0
    ref_adapter_name: str | None = None
    model_adapter_name: str | None = None


class Translation(NamedTuple):
    """The outcome: settings for the trainer, PPO's extras, the batch plan, and lines for the start-up report."""

    args: TranslatedConfig
    settings: PPOSettings
    plan: BatchPlan
    notes: tuple[str, ...]
    ignored: tuple[str, ...]


class TranslatedConfig(GroupRelativeConfig):
    """Our settings, which also answer for every field of the ``PPOConfig`` they came from.

    So scripts that read ``trainer.args.response_length`` go on working. ``ppo_args`` is the user's own object.
    """

    ppo_args: Any

    def __getattr__(self, name: str) -> Any:
        source = self.__dict__.get("ppo_args")
        if source is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(source, name)


def translate(config: PPOConfig, *, world_size: int = 1, num_rows: int | None = None) -> Translation:
    """Return the group-relative form of ``config``, whose era must be settled.

    Also fills in the outputs that PPO wrote into its configuration (``batch_size``, ``num_total_batches``, ...).

    Args:
        config: The user's object.
        world_size: Number of processes.
        num_rows: Rows of the training data, or None when unknown.

    Raises:
        ConfigurationError: if the batch cannot be cut into groups or mini-batches, or a setting is not supported.
    """
    if config.era == "classic":
        return _translate_classic(config, world_size)
    return _translate_v2(config, world_size, num_rows)


def _translate_v2(config: PPOConfig, world_size: int, num_rows: int | None) -> Translation:
    plan = plan_v2(
        config.per_device_train_batch_size,
        config.gradient_accumulation_steps,
        config.num_mini_batches,
        config.num_ppo_epochs,
        world_size=world_size,
        num_generations=config.num_generations,
    )
    chosen = config.chosen()
    notes: list[str] = []
    per_update = plan.optimizer_steps
    fields = _common(config, plan, chosen)
    fields |= {
        "max_completion_length": config.response_length,
        "temperature": config.temperature,
        "beta": config.kl_coef if config.kl_in == "loss" else 0.0,
        "ds3_gather_for_generation": config.ds3_gather_for_generation,
        "logging_steps": _in_steps(chosen.get("logging_steps", 1), per_update),
        "save_steps": _in_steps(config.save_steps, per_update),
        "warmup_steps": _in_steps(config.warmup_steps, per_update),
    }
    if config.total_episodes is not None:
        fields["max_steps"] = updates_for(config.total_episodes, plan.completions) * per_update
        if config.max_steps > 0:
            notes.append(f"max_steps={config.max_steps} is not used, total_episodes={config.total_episodes} is")
    elif config.max_steps > 0:
        fields["max_steps"] = config.max_steps
    elif num_rows:
        notes.append(
            f"total_episodes is not set: every one of the {num_rows} prompts is visited {config.num_train_epochs:g} "
            f"times with {plan.num_generations} responses each, {plan.num_generations} times the responses of PPO; "
            f"total_episodes={int(config.num_train_epochs * num_rows)} keeps PPO's number"
        )
    if config.auto_find_batch_size:
        notes.append("auto_find_batch_size is off: groups must stay whole")
    if config.load_best_model_at_end:
        notes.append("load_best_model_at_end is off: PPO had no evaluation loop")
    if per_update > 1:
        notes.append(
            f"global_step and checkpoint names count optimiser steps, {per_update} per update; save_steps, "
            "warmup_steps and logging_steps still count updates"
        )
    _fill_outputs(config, plan, world_size, num_rows)
    settings = PPOSettings(
        kl_in_reward=config.kl_in == "reward",
        kl_coef=config.kl_coef,
        kl_estimator=config.kl_estimator,
        missing_eos_penalty=config.missing_eos_penalty,
        stop_token_id=config.stop_token_id,
        # PPO's 64 was a bound on memory; the budgets of the trainer bound it unless the user did
        rollout_rows=chosen.get("local_rollout_forward_batch_size"),
        num_sample_generations=config.num_sample_generations,
        ref_adapter_name=config.ref_adapter_name,
        model_adapter_name=config.model_adapter_name,
    )
    return Translation(_build(config, fields), settings, plan, tuple(notes), _ignored(config))


def _translate_classic(config: PPOConfig, world_size: int) -> Translation:
    assert config.batch_size is not None  # settled
    assert config.mini_batch_size is not None
    plan = plan_classic(
        config.batch_size,
        config.mini_batch_size,
        config.gradient_accumulation_steps,
        config.ppo_epochs,
        num_generations=config.num_generations,
    )
    chosen = config.chosen()
    notes: list[str] = []
    fields = _common(config, plan, chosen)
    fields |= {
        "temperature": 1.0,  # the classic log-probs ignored the sampling temperature
        "beta": 0.0,
        "lr_scheduler_type": chosen.get("lr_scheduler_type", "constant"),
        "optim": chosen.get("optim", "adamw_torch"),
        "max_grad_norm": chosen.get("max_grad_norm") or 0.0,
        "report_to": chosen.get("report_to", config.log_with or "none"),
        "max_steps": 1,
    }
    if config.optimize_cuda_cache or config.optimize_device_cache:
        fields["torch_empty_cache_steps"] = 1
    fields |= _tracker_fields(config, chosen, notes)
    fields |= _accelerator_fields(config.accelerator_kwargs, notes)
    if config.kl_penalty == "full":
        notes.append("kl_penalty='full' is 'kl': the same expectation with more variance, without the full logits")
    backward, rows = config.mini_batch_size * config.gradient_accumulation_steps, config.batch_size * world_size
    outputs = {
        "backward_batch_size": backward,
        "global_batch_size": rows,
        "global_backward_batch_size": backward * world_size,
        "total_ppo_epochs": math.ceil(config.steps / rows),
    }
    for name, value in outputs.items():
        setattr(config, name, value)
    settings = PPOSettings(
        kl_in_reward=True,
        kl_coef=config.init_kl_coef,
        kl_estimator={"kl": "k1", "full": "k1", "mse": "k2", "abs": "abs"}[config.kl_penalty],
        kl_target=config.target if config.adap_kl_ctrl else None,
        kl_horizon=config.horizon,
        rollout_rows=config.mini_batch_size,
        ref_adapter_name=config.ref_adapter_name,
        model_adapter_name=config.model_adapter_name,
    )
    return Translation(_build(config, fields), settings, plan, tuple(notes), _ignored(config))


def _common(config: PPOConfig, plan: BatchPlan, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that both eras translate alike."""
    fields = {name: value for name, value in chosen.items() if name in _PASSED_ON}
    fields |= {
        "output_dir": config.output_dir,
        "learning_rate": config.learning_rate,
        "seed": config.seed,
        "bf16": config.bf16,
        "activation_checkpointing": config.gradient_checkpointing,
        "gradient_checkpointing": config.gradient_checkpointing,
        "per_device_train_batch_size": plan.per_device_train_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "steps_per_generation": plan.steps_per_generation,
        "num_iterations": plan.num_iterations,
        "num_generations": plan.num_generations,
        "num_generations_eval": 1,  # PPO sampled one response per evaluation prompt
        "epsilon": config.cliprange,
        "loss_type": "bnpo",  # PPO's mean over the tokens of one backward pass
        "scale_rewards": "batch",  # PPO whitened advantages over the batch
        "disable_dropout": True,
        "remove_unused_columns": False,
        "eval_strategy": "no",
    }
    return fields


def _build(config: PPOConfig, fields: dict[str, Any]) -> TranslatedConfig:
    extra = dict(config.grpo_kwargs or {}) if not isinstance(config.grpo_kwargs, str) else {}
    known = {f.name for f in dataclasses.fields(GroupRelativeConfig)}
    for name in extra:
        if name not in known:
            raise ConfigurationError(f"grpo_kwargs has {name!r}, no GroupRelativeConfig field.{nearest(name, known)}")
    args = TranslatedConfig(**{name: value for name, value in (fields | extra).items() if name in known})
    args.ppo_args = config
    return args


def _in_steps(value: float, per_update: int) -> float:
    """Return ``value`` updates in optimiser steps; a ratio of the run (below 1) stays one."""
    return value * per_update if value >= 1 else value


def _ignored(config: PPOConfig) -> tuple[str, ...]:
    """Return the critic settings that the user changed; gamma with its value, since it changed the objective."""
    changed = [name for name in CRITIC_FIELDS if getattr(config, name) != CRITIC_DEFAULTS[name]]
    return tuple(f"gamma={config.gamma:g} (rewards are not discounted)" if n == "gamma" else n for n in changed)


def _fill_outputs(config: PPOConfig, plan: BatchPlan, world_size: int, num_rows: int | None) -> None:
    """Write into the user's object what PPO wrote there."""
    episodes = config.total_episodes
    if episodes is None and num_rows:
        episodes = int(config.num_train_epochs * num_rows * plan.num_generations)
    config.micro_batch_size = config.per_device_train_batch_size * world_size
    config.local_batch_size = config.per_device_train_batch_size * config.gradient_accumulation_steps
    config.batch_size = plan.completions
    config.mini_batch_size = plan.completions // config.num_mini_batches
    config.local_mini_batch_size = config.local_batch_size // config.num_mini_batches
    config.num_total_batches = updates_for(episodes, plan.completions) if episodes else None
    config.num_updates = config.num_total_batches


def _tracker_fields(config: PPOConfig, chosen: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return ``project`` and ``run_name``; what transformers reads from the environment goes there."""
    fields: dict[str, Any] = {"project": config.tracker_project_name}
    if config.log_with == "wandb":
        os.environ.setdefault("WANDB_PROJECT", config.tracker_project_name)
    project = config.project_kwargs if isinstance(config.project_kwargs, Mapping) else {}
    directory = project.get("logging_dir")
    if directory:
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(directory))
    tracker = config.tracker_kwargs if isinstance(config.tracker_kwargs, Mapping) else {}
    for values in (tracker, *(value for value in tracker.values() if isinstance(value, Mapping))):
        if isinstance(values.get("name"), str) and "run_name" not in chosen:
            fields["run_name"] = values["name"]
    unused = sorted({*project} - {"logging_dir"})
    if unused:
        notes.append(f"project_kwargs {', '.join(unused)} have no effect")
    return fields


def _accelerator_fields(kwargs: Any, notes: list[str]) -> dict[str, Any]:
    """Return the fields that stand for ``accelerate.Accelerator`` arguments.

    Raises:
        ConfigurationError: for an argument that nothing stands for.
    """
    fields: dict[str, Any] = {}
    config: dict[str, Any] = {}
    for name, value in (kwargs or {}).items():
        if name == "mixed_precision":
            fields["bf16"], fields["fp16"] = value == "bf16", value == "fp16"
        elif name == "cpu":
            fields["use_cpu"] = bool(value)
        elif name in _ACCELERATOR_CONFIG:
            config[name] = value
        elif name in ("log_with", "project_dir", "gradient_accumulation_steps", "device_placement"):
            notes.append(f"accelerator_kwargs {name} has no effect")
        else:
            allowed = ("mixed_precision", "cpu", *sorted(_ACCELERATOR_CONFIG))
            raise ConfigurationError(
                f"accelerator_kwargs has {name!r}; supported are {', '.join(allowed)}.{nearest(name, allowed)}"
            )
    if config:
        fields["accelerator_config"] = config
    return fields
