"""``PPOConfig``: the settings of both PPO eras in one class, still a ``TrainingArguments``.

It is not a ``GRPOConfig``: that class checks at construction that groups divide the batch, and here neither the era nor
the number of processes is known before the trainer is built. ``compat.translate`` turns it into a
``GroupRelativeConfig`` then.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from transformers import TrainingArguments

from trl_grpo_ext.compat.fields import CLASSIC_ONLY, OUTPUT_ONLY, REMOVED_ARGUMENTS, V2_FIELDS, Era
from trl_grpo_ext.errors import ConfigurationError, nearest

_CURRENT_ARGUMENTS = frozenset(f.name for f in dataclasses.fields(TrainingArguments))
# Where the two eras had different defaults. Fields left at None get these once the era is known.
_ERA_DEFAULTS: dict[Era, dict[str, Any]] = {
    "classic": {
        "learning_rate": 1.41e-5,
        "seed": 0,
        "gradient_checkpointing": False,
        "bf16": False,
        "batch_size": 128,
        "mini_batch_size": 128,
    },
    "v2": {
        "learning_rate": 3e-6,
        "seed": 42,
        "gradient_checkpointing": True,
        "bf16": None,  # on unless fp16 is, as in TRL
        "batch_size": None,
        "mini_batch_size": None,
    },
}


def _help(text: str) -> dict[str, str]:
    return {"help": text}


def _gone(text: str = "Removed from transformers 5; accepted, no effect.") -> dict[str, str]:
    return {"help": text}


@dataclass
class RemovedArguments:
    """Arguments that ``TrainingArguments`` lost in transformers 5, so that old launch scripts still parse."""

    evaluation_strategy: str | None = field(default=None, metadata=_gone("Old name of eval_strategy."))
    warmup_ratio: float | None = field(default=None, metadata=_gone("Old form of warmup_steps below 1."))
    per_gpu_train_batch_size: int | None = field(
        default=None, metadata=_gone("Old name of per_device_train_batch_size.")
    )
    per_gpu_eval_batch_size: int | None = field(default=None, metadata=_gone("Old name of per_device_eval_batch_size."))
    no_cuda: bool = field(default=False, metadata=_gone("Old name of use_cpu."))
    adafactor: bool = field(default=False, metadata=_gone("Old form of optim='adafactor'."))
    push_to_hub_token: str | None = field(default=None, metadata=_gone("Old name of hub_token."))
    push_to_hub_model_id: str | None = field(default=None, metadata=_gone("Old name of hub_model_id."))
    push_to_hub_organization: str | None = field(default=None, metadata=_gone())
    overwrite_output_dir: bool = field(default=False, metadata=_gone())
    logging_dir: str | None = field(default=None, metadata=_gone())
    save_safetensors: bool = field(default=False, metadata=_gone())
    group_by_length: bool = field(default=False, metadata=_gone())
    use_mps_device: bool = field(default=False, metadata=_gone())
    half_precision_backend: str | None = field(default=None, metadata=_gone())
    fp16_backend: str | None = field(default=None, metadata=_gone())
    fp16_opt_level: str | None = field(default=None, metadata=_gone())
    include_inputs_for_metrics: bool = field(default=False, metadata=_gone())
    include_tokens_per_second: bool = field(default=False, metadata=_gone())
    dispatch_batches: bool = field(default=False, metadata=_gone())
    split_batches: bool = field(default=False, metadata=_gone())
    past_index: int | None = field(default=None, metadata=_gone())
    jit_mode_eval: bool = field(default=False, metadata=_gone())
    use_ipex: bool = field(default=False, metadata=_gone())
    ray_scope: str | None = field(default=None, metadata=_gone())
    tpu_num_cores: int | None = field(default=None, metadata=_gone())
    tpu_metrics_debug: bool = field(default=False, metadata=_gone())
    use_legacy_prediction_loop: bool = field(default=False, metadata=_gone())
    mp_parameters: str | None = field(default=None, metadata=_gone())
    xpu_backend: str | None = field(default=None, metadata=_gone())
    torchdynamo: str | None = field(default=None, metadata=_gone())
    sharded_ddp: str | None = field(default=None, metadata=_gone())
    fsdp_min_num_params: int | None = field(default=None, metadata=_gone())
    fsdp_transformer_layer_cls_to_wrap: str | None = field(default=None, metadata=_gone())


@dataclass
class PPOConfig(TrainingArguments, RemovedArguments):
    """Hold the settings of a PPO script of either era, and read them as the group-relative trainer can use them.

    Names, meanings and defaults are those of TRL 0.11.4 (classic) and 1.12.0 (v2). Where the two eras differ, the
    default is ``None`` until the era is known: at construction it is guessed from the fields that are set, and the
    trainer's call decides. ``docs/from_ppo.md`` has the table of what becomes of each field.

    Args:
        num_generations: Responses per prompt. ``None``: the largest divisor of the completions per update up to 8.
        kl_in: ``"reward"`` as PPO did, or ``"loss"``: GRPO's k3 term with ``beta=kl_coef``.
        ungrouped: Classic loop, what to do with prompts that occur once in a batch: ``"batch"`` uses the batch mean as
            baseline, ``"running"`` the mean over all scores so far, ``"error"`` refuses.
        grpo_kwargs: Further fields of ``GroupRelativeConfig``; they win over the translation.
    """

    # None until the era is known, see _ERA_DEFAULTS
    learning_rate: float | None = field(
        default=None, metadata=_help("Initial learning rate. 1.41e-5 classic, 3e-6 v2.")
    )  # type: ignore[assignment]
    seed: int | None = field(default=None, metadata=_help("Random seed. 0 classic, 42 v2."))  # type: ignore[assignment]
    gradient_checkpointing: bool | None = field(
        default=None, metadata=_help("Trade compute for memory. Off classic, on v2.")
    )
    bf16: bool | None = field(default=None, metadata=_help("Mixed precision. Off classic; v2: on unless fp16 is."))  # type: ignore[assignment]
    batch_size: int | None = field(
        default=None, metadata=_help("Classic: responses per step, 128. v2: filled in by the trainer.")
    )
    mini_batch_size: int | None = field(
        default=None, metadata=_help("Classic: rows per backward pass, 128. v2: filled in by the trainer.")
    )
    logging_steps: float = field(default=10, metadata=_help("Updates between two logs; not set: every update."))

    # both eras
    exp_name: str = field(
        default=os.path.basename(sys.argv[0])[: -len(".py")] if sys.argv[0].endswith(".py") else "ppo",
        metadata=_help("Name of the experiment; for the script to read."),
    )
    dataset_num_proc: int | None = field(default=None, metadata=_help("Processes for data; for the script to read."))
    cliprange: float = field(default=0.2, metadata=_help("Clip range of the probability ratio."))
    whiten_rewards: bool = field(default=False, metadata=_help("No effect: rewards are compared inside a group."))
    vf_coef: float = field(default=0.1, metadata=_help("No effect: there is no critic."))
    cliprange_value: float = field(default=0.2, metadata=_help("No effect: there is no critic."))
    gamma: float = field(default=1.0, metadata=_help("No effect: rewards are not discounted."))
    lam: float = field(default=0.95, metadata=_help("No effect: there is no critic."))

    # v2
    num_mini_batches: int = field(default=1, metadata=_help("Optimiser steps per epoch over one batch."))
    num_ppo_epochs: int = field(default=4, metadata=_help("Epochs over one batch of completions."))
    total_episodes: int | None = field(default=None, metadata=_help("Completions of the whole run."))
    local_rollout_forward_batch_size: int = field(default=64, metadata=_help("Rows per call without gradient."))
    num_sample_generations: int = field(default=10, metadata=_help("How often to print sample completions. 0: never."))
    response_length: int = field(default=53, metadata=_help("Most tokens of a completion."))
    stop_token: Literal["eos"] | None = field(default=None, metadata=_help("'eos' or None; generation stops at EOS."))
    stop_token_id: int | None = field(default=None, metadata=_help("A further token that ends a completion."))
    temperature: float = field(default=0.7, metadata=_help("Sampling temperature; scales the log-probs too."))
    missing_eos_penalty: float | None = field(default=None, metadata=_help("Taken off the score without EOS."))
    sft_model_path: str = field(default="EleutherAI/pythia-160m", metadata=_help("For the script to read."))
    reward_model_path: str = field(default="EleutherAI/pythia-160m", metadata=_help("For the script to read."))
    model_adapter_name: str | None = field(default=None, metadata=_help("PEFT adapter to train."))
    ref_adapter_name: str | None = field(default=None, metadata=_help("PEFT adapter that is the reference."))
    kl_coef: float = field(default=0.05, metadata=_help("Weight of the KL penalty in the reward."))
    kl_estimator: str = field(default="k1", metadata=_help("'k1' or 'k3'."))
    ds3_gather_for_generation: bool = field(default=True, metadata=_help("Gather ZeRO-3 weights for generation."))
    num_total_batches: int | None = field(default=None, metadata=_help("Filled in: updates of the run."))
    num_updates: int | None = field(default=None, metadata=_help("Filled in: num_total_batches, as TRL 0.9 named it."))
    micro_batch_size: int | None = field(default=None, metadata=_help("Filled in: rows of one pass, all processes."))
    local_batch_size: int | None = field(default=None, metadata=_help("Filled in: completions per update, a process."))
    local_mini_batch_size: int | None = field(default=None, metadata=_help("Filled in: completions per step."))
    base_model: str = field(default="EleutherAI/pythia-160m", metadata=_help("For the script to read."))
    sanity_check: bool = field(default=False, metadata=_help("For the script to read."))
    non_eos_penalty: bool = field(default=False, metadata=_help("Refused: use missing_eos_penalty."))
    penalty_reward_value: float | None = field(default=None, metadata=_help("Refused: use missing_eos_penalty."))

    # classic
    log_with: str | None = field(default=None, metadata=_help("Tracker; becomes report_to."))
    task_name: str | None = field(default=None, metadata=_help("For the script to read."))
    model_name: str | None = field(default="gpt2", metadata=_help("For the script to read."))
    query_dataset: str | None = field(default="stanfordnlp/imdb", metadata=_help("For the script to read."))
    reward_model: str | None = field(
        default="sentiment-analysis:lvwerra/distilbert-imdb", metadata=_help("For the script to read.")
    )
    tracker_kwargs: dict | str | None = field(default=None, metadata=_help("The tracker's run name is used."))
    accelerator_kwargs: dict | str | None = field(default=None, metadata=_help("Known keys become settings."))
    project_kwargs: dict | str | None = field(default=None, metadata=_help("logging_dir is used."))
    tracker_project_name: str = field(default="trl", metadata=_help("Project of the tracker."))
    push_to_hub_if_best_kwargs: dict | str | None = field(default=None, metadata=_help("Push when the score is best."))
    steps: int = field(default=20000, metadata=_help("Responses of the whole run; gives total_ppo_epochs."))
    adap_kl_ctrl: bool = field(default=True, metadata=_help("Adapt the KL weight to a target."))
    init_kl_coef: float = field(default=0.2, metadata=_help("KL weight at the start."))
    kl_penalty: str = field(default="kl", metadata=_help("'kl' (k1), 'abs', 'mse' (k2) or 'full'."))
    target: float = field(default=6.0, metadata=_help("Target of the adaptive KL weight, summed over tokens."))
    horizon: float = field(default=10000.0, metadata=_help("Responses over which the KL weight adapts."))
    forward_batch_size: int | None = field(default=None, metadata=_help("Old name of mini_batch_size."))
    ppo_epochs: int = field(default=4, metadata=_help("Epochs over one batch."))
    optimize_cuda_cache: bool = field(default=False, metadata=_help("Empty the cache every step."))
    optimize_device_cache: bool = field(default=False, metadata=_help("Empty the cache every step."))
    early_stopping: bool = field(default=False, metadata=_help("Stop the epochs over a batch at 1.5 * target_kl."))
    target_kl: float = field(default=1.0, metadata=_help("Target of early stopping."))
    compare_steps: int = field(default=1, metadata=_help("Steps between two comparisons with the best score."))
    ratio_threshold: float = field(default=10.0, metadata=_help("Skip a mini-batch with a larger mean ratio."))
    use_score_scaling: bool = field(default=False, metadata=_help("Divide scores by their running deviation."))
    use_score_norm: bool = field(default=False, metadata=_help("Subtract the running mean; needs score scaling."))
    score_clip: float | None = field(default=None, metadata=_help("Clip scores to this magnitude."))

    # new
    num_generations: int | None = field(default=None, metadata=_help("Responses per prompt. None: automatic, up to 8."))
    kl_in: str = field(default="reward", metadata=_help("'reward' as PPO, or 'loss' as GRPO with beta=kl_coef."))
    ungrouped: str = field(default="batch", metadata=_help("Prompts that occur once: 'batch', 'running' or 'error'."))
    grpo_kwargs: dict | str | None = field(
        default=None, metadata=_help("Further GroupRelativeConfig fields; they win.")
    )

    # Filled in by the trainer; no fields, so that nobody takes them for settings.
    total_ppo_epochs: ClassVar[int] = 0
    backward_batch_size: ClassVar[int] = 0
    global_batch_size: ClassVar[int] = 0
    global_backward_batch_size: ClassVar[int] = 0

    _VALID_DICT_FIELDS = [  # noqa: RUF012 (TrainingArguments types it as an instance variable)
        *TrainingArguments._VALID_DICT_FIELDS,
        "tracker_kwargs",
        "accelerator_kwargs",
        "project_kwargs",
        "push_to_hub_if_best_kwargs",
        "grpo_kwargs",
    ]

    def __post_init__(self) -> None:
        self._given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if _differs(self, f)}
        self._replace_removed_arguments()
        self._refuse_replaced_fields()
        self._unset = [name for name in _ERA_DEFAULTS["v2"] if getattr(self, name) is None]
        self._take_era_defaults(self.era_hint or "v2")
        super().__post_init__()
        for name in ("tracker_kwargs", "accelerator_kwargs", "project_kwargs", "push_to_hub_if_best_kwargs"):
            if getattr(self, name) is None:
                setattr(self, name, {})
        self._built = dict(self.__dict__)

    @property
    def era_hint(self) -> Era | None:
        """The era that the fields set by the user belong to, or None where nothing tells."""
        if CLASSIC_ONLY & self._given.keys():
            return "classic"
        if V2_FIELDS.keys() - {"batch_size", "mini_batch_size"} - _SHARED & self._given.keys():
            return "v2"
        sized = {"batch_size", "mini_batch_size"} & self._given.keys()
        return "classic" if sized and "output_dir" not in self._given else None

    def settle(self, era: Era) -> None:
        """Give the fields that the user left open the defaults of ``era``; called by the trainer."""
        if era == self.era:
            return
        self._unset = [name for name in self._unset if _same(getattr(self, name), self._built[name])]
        self._take_era_defaults(era)

    def chosen(self) -> dict[str, Any]:
        """Return what the user set, as it was written: at construction, or later by assigning to an attribute."""
        later = {
            name: value
            for name, value in self.__dict__.items()
            if not name.startswith("_") and name in self._built and not _same(value, self._built[name])
        }
        return {**self._given, **later}

    def _take_era_defaults(self, era: Era) -> None:
        self.era: Era = era
        for name in self._unset:
            setattr(self, name, _ERA_DEFAULTS[era][name])
        if self.bf16 is None:
            self.bf16 = not self.fp16
        if "activation_checkpointing" not in self._given:  # the name that transformers 5.20 gave it; else it warns
            self.activation_checkpointing = self.gradient_checkpointing
        if era == "classic":
            if self.forward_batch_size is not None and "mini_batch_size" in self._unset:
                self.mini_batch_size = self.forward_batch_size
            self.__dict__["total_ppo_epochs"] = math.ceil(self.steps / (self.batch_size or 1))

    def _replace_removed_arguments(self) -> None:
        for old, new in REMOVED_ARGUMENTS.items():
            value = self._given.get(old)
            if old in _CURRENT_ARGUMENTS or new is None or value is None or new in self._given:
                continue
            if old == "adafactor":
                value = "adafactor"
            if old == "warmup_ratio" and not 0 <= float(value) < 1:
                raise ConfigurationError(f"warmup_ratio={value} must be in [0, 1).")
            setattr(self, new, value)
            self._given[new] = value

    def _refuse_replaced_fields(self) -> None:
        if self.non_eos_penalty or self.penalty_reward_value is not None:
            raise ConfigurationError(
                "non_eos_penalty and penalty_reward_value replaced the score of a response without EOS. Use "
                "missing_eos_penalty, a positive number that is subtracted from the score."
            )
        if self.stop_token is not None and self.stop_token_id is not None:
            raise ConfigurationError(
                f"Both stop_token={self.stop_token!r} and stop_token_id={self.stop_token_id} are set. Keep one."
            )
        if self.stop_token not in (None, "eos"):
            raise ConfigurationError(f"stop_token={self.stop_token!r} is unknown. Use 'eos' or None, or stop_token_id.")
        if self.missing_eos_penalty is not None and self.missing_eos_penalty < 0:
            raise ConfigurationError(
                f"missing_eos_penalty={self.missing_eos_penalty} must not be negative: it is subtracted from the score."
            )
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r} is not one of {', '.join(map(repr, allowed))}."
                    f"{nearest(getattr(self, name), allowed)}"
                )


_CHOICES: dict[str, tuple[str, ...]] = {
    "kl_estimator": ("k1", "k3"),
    "kl_penalty": ("kl", "abs", "mse", "full"),
    "kl_in": ("reward", "loss"),
    "ungrouped": ("batch", "running", "error"),
}
# Fields that both eras, or TrainingArguments, have: setting one says nothing about the era.
_SHARED = frozenset(
    {"exp_name", "dataset_num_proc", "cliprange", "whiten_rewards", "vf_coef", "cliprange_value", "gamma", "lam"}
)
FIELD_NAMES = frozenset(f.name for f in dataclasses.fields(PPOConfig))


def _differs(config: Any, spec: dataclasses.Field) -> bool:
    """Return whether the field was set to something other than its default."""
    value = getattr(config, spec.name)
    if spec.default is not dataclasses.MISSING:
        return not _same(value, spec.default)
    return spec.default_factory is dataclasses.MISSING or not _same(value, spec.default_factory())


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and bool(a == b)) or (isinstance(a, int | float) and a == b)


def _name_unknown_fields(cls: type) -> type:
    """Make the constructor drop outputs that old scripts pass in, and name the nearest field for a wrong one."""
    init = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 (it is the method)
        known = {f.name for f in dataclasses.fields(self)}
        # By position as TrainingArguments takes them, output_dir first, whatever order the fields have here.
        names = [f.name for f in dataclasses.fields(TrainingArguments)]
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        for name in [name for name in kwargs if name not in known]:
            if name not in OUTPUT_ONLY:
                raise _UnknownFieldError(f"PPOConfig has no field {name!r}.{nearest(name, known)}")
            del kwargs[name]
        init(self, **kwargs)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


class _UnknownFieldError(ConfigurationError, TypeError):
    """An argument that no era of ``PPOConfig`` had; a TypeError too, as a wrong keyword always was."""


_name_unknown_fields(PPOConfig)
