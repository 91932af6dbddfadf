"""The settings of a run: TRL's own plus ours."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from trl import GRPOConfig

from trl_grpo_ext.choices import TRL_CHOICES, check_choice
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.memory.mode import AUTO, MemoryMode, named_mode
from trl_grpo_ext.written import written_settings

logger = logging.getLogger(__name__)

# Above about four thousand tokens a forward pass gains little from being larger, while its memory keeps growing.
AUTO_TOKENS_PER_MICRO_BATCH = 4096
# Room for the keys and values of one generation batch: 128 KiB a token in an 8B model with grouped queries, so 4 GiB.
AUTO_TOKENS_PER_GENERATION_BATCH = 32768
ROLLOUT_ENGINES = ("auto", "trl")
OVERLONG_PROMPTS = ("drop", "truncate")
REWARD_ISOLATION = ("auto", "always", "never", "off")
REWARD_ABSTENTION = ("group_mean", "zero")
KL_REFERENCES = (None, "start", "base")


@dataclass
class GroupRelativeConfig(GRPOConfig):
    """Extend ``trl.GRPOConfig``; every field of TRL keeps its name, meaning and default.

    ``per_device_train_batch_size * gradient_accumulation_steps`` is the number of completions per optimiser step and
    device. How they are cut into forward passes is set by ``max_tokens_per_micro_batch`` and no longer by the two
    factors, and the gradient does not depend on it.

    Args:
        max_tokens_per_micro_batch: Most tokens in one forward and backward pass, at least 1. ``None``: chosen
            automatically. 0: off, TRL's own micro-batches.
        max_tokens_per_generation_batch: Most tokens (prompt plus longest allowed completion, over all rows) in one call
            of ``generate``, at least 1. ``None``: chosen automatically. 0: off, all rows of the step in one call.
        skip_dead_groups: Whether groups whose rewards are all equal get advantage exactly 0 and skip forward and
            backward where their gradient is zero (``beta=0``, no entropy bonus, no router loss,
            ``multi_objective_aggregation="sum_then_normalize"``). They stay in every normaliser.
        shared_prefix_forward: Whether log-probabilities are computed on packed rows, each distinct prompt once, where
            that is exact. Elsewhere, and with False, TRL's padded forward runs.
        rollout_engine: ``"auto"``: completions are sampled by our engine where it is exact (each prompt once, finished
            rows leave), elsewhere by ``model.generate``. ``"trl"``: always by ``model.generate``. vLLM and continuous
            batching, when chosen, come first.
        rollout_seeded: Whether every completion has a random stream of its own, so that it does not depend on which
            other rows are sampled with it. Needs the engine.
        old_logps_from_rollout: Whether the log-probabilities seen while sampling stand in for the forward pass that TRL
            runs after each rollout that more than one optimiser step learns from. Needs the engine. In bfloat16 they
            differ from the forward pass by its rounding, so the first ratios are no longer exactly 1.
        max_prompt_length: Most tokens of a prompt, at least 1. ``None``: no limit.
        overlong_prompts: ``"drop"``: rows with longer prompts are left out and counted. ``"truncate"``: the start of
            the longest turn is cut; system turn and generation header stay.
        oom_max_halvings: How often, in each of training, sampling and scoring, the token budget is halved and the work
            done again when memory runs out. 0: never, the error ends the run. See ``docs/out_of_memory.md``.
        memory_metrics: Whether the peak memory of each phase is logged as ``memory/…``.
        reward_isolation: ``"auto"``: reward functions run in worker processes, those that cannot be sent there in the
            training process with one warning. ``"always"``: refuse what cannot be sent. ``"never"``: all in the
            training process, failures still counted. ``"off"``: TRL's own call, in which one exception ends the run.
        reward_abstention: What stands in where one function has no score for a rollout (it abstained or failed) and
            others do. ``"group_mean"``: the function's mean over the group's rows it did score, so that nothing is
            compared on another scale. ``"zero"``: TRL's sum, which leaves it out.
        reward_timeout_s: Most seconds for one sample under one reward function, above 0.
        reward_batch_timeout_s: Most seconds for a batch under all of them. ``None``: four times ``reward_timeout_s``.
        reward_num_workers: Worker processes for rewards. ``None``: the cores of the node shared by its ranks, 2 to 8.
        reward_max_failure_rate: Largest tolerated share of failed samples of a step, 0 to 1; above it the run stops.
        reward_cache_entries: Most scores of deterministic rewards kept in memory; 0 switches the cache off.
        reward_cache_path: File in which these scores outlive the run.
        memory: How the policy is held and trained: ``"full"``, ``"lora"``, ``"qlora"``, ``"qlora-8bit"``, ``"auto"``, a
            ``MemoryMode`` or a mapping of its fields. Settings written beside it win over what a mode suggests. None:
            TRL's behaviour. See ``docs/memory.md``.
        adapter: An adapter to go on training, a directory or a hub id. It is put on ``model``, whatever its name was.
        kl_reference: What the KL term is measured against (``beta`` > 0). ``"start"``: the policy as it is given, with
            the adapter it is given with. ``"base"``: without any adapter, or the weights that the model's name stands
            for. None: ``"start"`` where an adapter or a loaded model is given, elsewhere the two are the same.
        float32_adapters: Whether adapters on a quantised base are trained in float32. False: TRL's bfloat16, in which
            small updates round to nothing.
        watch_updates: Whether to count the weights that each step changes (``update/moved_entries``), to warn when
            hardly any do, and to end with an error when none did in a whole run.
    """

    _written: ClassVar[frozenset[str]] = frozenset()
    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "memory"]  # noqa: RUF012 (TRL types it so)

    max_tokens_per_micro_batch: int | None = field(
        default=None,
        metadata={"help": "Most tokens in one forward and backward pass. None: automatic. 0: TRL's micro-batches."},
    )
    max_tokens_per_generation_batch: int | None = field(
        default=None,
        metadata={"help": "Most tokens in one call of generate. None: automatic. 0: all rows in one call."},
    )
    skip_dead_groups: bool = field(
        default=True,
        metadata={"help": "Whether groups with equal rewards skip forward and backward where their gradient is zero."},
    )
    shared_prefix_forward: bool = field(
        default=True,
        metadata={"help": "Whether to compute log-probabilities on packed rows, each distinct prompt once."},
    )
    rollout_engine: str = field(
        default="auto",
        metadata={"help": "What samples completions.", "choices": list(ROLLOUT_ENGINES)},
    )
    rollout_seeded: bool = field(
        default=False,
        metadata={"help": "Whether a completion does not depend on the rows it is sampled with."},
    )
    old_logps_from_rollout: bool = field(
        default=False,
        metadata={"help": "Whether sampling's log-probabilities save TRL's forward pass for the old ones."},
    )
    max_prompt_length: int | None = field(default=None, metadata={"help": "Most tokens of a prompt. None: no limit."})
    overlong_prompts: str = field(
        default="drop",
        metadata={"help": "What happens to longer prompts.", "choices": list(OVERLONG_PROMPTS)},
    )
    oom_max_halvings: int = field(
        default=4,
        metadata={"help": "How often a token budget is halved when memory runs out. 0: never."},
    )
    memory_metrics: bool = field(default=True, metadata={"help": "Whether to log the peak memory of each phase."})
    reward_isolation: str = field(
        default="auto",
        metadata={"help": "Where reward functions run.", "choices": list(REWARD_ISOLATION)},
    )
    reward_abstention: str = field(
        default="group_mean",
        metadata={"help": "What stands in for a score a function did not give.", "choices": list(REWARD_ABSTENTION)},
    )
    reward_timeout_s: float = field(
        default=30.0, metadata={"help": "Most seconds for one sample under one reward function."}
    )
    reward_batch_timeout_s: float | None = field(
        default=None, metadata={"help": "Most seconds for a batch under all rewards. None: 4 x reward_timeout_s."}
    )
    reward_num_workers: int | None = field(
        default=None, metadata={"help": "Worker processes for rewards. None: the cores shared by the ranks, 2 to 8."}
    )
    reward_max_failure_rate: float = field(
        default=0.2, metadata={"help": "Largest tolerated share of failed reward samples of a step, 0 to 1."}
    )
    reward_cache_entries: int = field(
        default=100_000, metadata={"help": "Most scores of deterministic rewards kept in memory. 0: no cache."}
    )
    reward_cache_path: str | None = field(
        default=None, metadata={"help": "File in which the scores of deterministic rewards outlive the run."}
    )
    watch_updates: bool = field(default=True, metadata={"help": "Whether to count the weights that each step changes."})
    # A union whose second member is str: what the command lines of transformers and TRL make of it is a string.
    memory: dict | str | None = field(
        default=None,
        metadata={"help": "How the policy is held: full, lora, qlora, qlora-8bit, auto, or fields of MemoryMode."},
    )
    adapter: str | None = field(
        default=None, metadata={"help": "An adapter to go on training, a directory or a hub id."}
    )
    kl_reference: str | None = field(
        default=None, metadata={"help": "What the KL term is measured against: start or base. None: automatic."}
    )
    float32_adapters: bool = field(
        default=True, metadata={"help": "Whether adapters on a quantised base are trained in float32."}
    )

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Note which settings were written, so that a memory mode can tell them from defaults of the same value."""
        config = super().__new__(cls)
        # A parser and dataclasses.replace write every field, which says nothing.
        writes_all = len(kwargs) >= len([field for field in dataclasses.fields(cls) if field.init])
        config.__dict__["_written"] = frozenset() if writes_all else frozenset(kwargs)
        return config

    def __post_init__(self) -> None:
        self._check_memory()
        for name, allowed in (
            ("rollout_engine", ROLLOUT_ENGINES),
            ("overlong_prompts", OVERLONG_PROMPTS),
            ("reward_isolation", REWARD_ISOLATION),
            ("reward_abstention", REWARD_ABSTENTION),
            ("kl_reference", KL_REFERENCES),
            *TRL_CHOICES.items(),
        ):
            check_choice(name, getattr(self, name), allowed)
        for name in ("rollout_seeded", "old_logps_from_rollout"):
            if getattr(self, name) and self.rollout_engine == "trl":
                raise ConfigurationError(f'{name}=True needs rollout_engine="auto"; model.generate cannot do it.')
        for name in ("max_tokens_per_micro_batch", "max_tokens_per_generation_batch"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigurationError(
                    f"{name}={value} is not a number of tokens. Use a positive number, 0 (off) or None (automatic)."
                )
        if self.max_prompt_length is not None and self.max_prompt_length < 1:
            raise ConfigurationError(
                f"max_prompt_length={self.max_prompt_length} is not a number of tokens. Use 1 or more, or None (no "
                "limit)."
            )
        if self.oom_max_halvings < 0:
            raise ConfigurationError(
                f"oom_max_halvings={self.oom_max_halvings} is not a number of halvings. Use 0 (never) or more."
            )
        self._align_eval_batch()
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            # transformers would pick the loss, which in policy optimisation says nothing about quality.
            self.metric_for_best_model, self.greater_is_better = "reward", True
        super().__post_init__()

    def _check_memory(self) -> None:
        """Raise for a memory mode that does not exist; write a record as a mapping, which can be saved as JSON."""
        if isinstance(self.memory, str) and self.memory.startswith("{"):
            self.memory = json.loads(self.memory)
        if isinstance(self.memory, MemoryMode):
            self.memory = self.memory.differences()
        if self.memory is not None and self.memory != AUTO:
            named_mode(self.memory)

    def _align_eval_batch(self) -> None:
        """Round the evaluation batch so that it holds whole groups: rewards are compared inside a group."""
        group = self.num_generations_eval or self.num_generations or 1
        num_processes = int(os.environ.get("WORLD_SIZE", "1"))
        if (self.per_device_eval_batch_size * num_processes) % group == 0:
            return
        aligned = max(self.per_device_eval_batch_size // group, 1) * group
        if written_settings(self, ("per_device_eval_batch_size",)):  # else nobody chose what is rounded
            logger.warning(
                "per_device_eval_batch_size=%d does not hold whole groups of %d completions; using %d. Any multiple of "
                "%d is legal; num_generations_eval=1 allows every size.",
                self.per_device_eval_batch_size,
                group,
                aligned,
                group,
            )
        self.per_device_eval_batch_size = aligned


class EngineSettings(NamedTuple):
    """How rollouts are forwarded, as flat values; a budget of 0 is off."""

    max_tokens_per_micro_batch: int
    max_tokens_per_generation_batch: int
    skip_dead_groups: bool
    shared_prefix_forward: bool
    rollout_engine: str
    rollout_seeded: bool
    old_logps_from_rollout: bool
    oom_max_halvings: int
    memory_metrics: bool

    @classmethod
    def of(cls, args: Any) -> EngineSettings:
        """Return the settings in ``args``; a plain ``trl.GRPOConfig`` gets our defaults."""

        def budget(name: str, automatic: int) -> int:
            value = setting(args, name)
            return automatic if value is None else int(value)

        return cls(
            budget("max_tokens_per_micro_batch", AUTO_TOKENS_PER_MICRO_BATCH),
            budget("max_tokens_per_generation_batch", AUTO_TOKENS_PER_GENERATION_BATCH),
            bool(setting(args, "skip_dead_groups")),
            bool(setting(args, "shared_prefix_forward")),
            setting(args, "rollout_engine"),
            bool(setting(args, "rollout_seeded")),
            bool(setting(args, "old_logps_from_rollout")),
            int(setting(args, "oom_max_halvings")),
            bool(setting(args, "memory_metrics")),
        )


class RewardSettings(NamedTuple):
    """How rewards are run, as flat values; times in seconds."""

    isolation: Any
    abstention: str
    timeout_s: float
    batch_timeout_s: float | None
    num_workers: int | None
    max_failure_rate: float
    cache_entries: int
    cache_path: str | None

    @classmethod
    def of(cls, args: Any) -> RewardSettings:
        """Return the settings in ``args``; a plain ``trl.GRPOConfig`` gets our defaults."""
        return cls(*(setting(args, f"reward_{name}") for name in cls._fields))


def setting(args: Any, name: str) -> Any:
    """Return one of our settings from ``args``; a plain ``trl.GRPOConfig`` gets our default."""
    return getattr(args, name, getattr(GroupRelativeConfig, name))
