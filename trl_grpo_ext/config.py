"""The settings of a run: TRL's own plus ours."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trl import GRPOConfig

from trl_grpo_ext.errors import ConfigurationError

logger = logging.getLogger(__name__)

# Above about four thousand tokens a forward pass gains little from being larger, while its memory keeps growing.
AUTO_TOKENS_PER_MICRO_BATCH = 4096
# Room for the keys and values of one generation batch: 128 KiB a token in an 8B model with grouped queries, so 4 GiB.
AUTO_TOKENS_PER_GENERATION_BATCH = 32768


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
    """

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

    def __post_init__(self) -> None:
        for name in ("max_tokens_per_micro_batch", "max_tokens_per_generation_batch"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigurationError(
                    f"{name}={value} is not a number of tokens. Use a positive number, 0 (off) or None (automatic)."
                )
        self._align_eval_batch()
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            # transformers would pick the loss, which in policy optimisation says nothing about quality.
            self.metric_for_best_model, self.greater_is_better = "reward", True
        super().__post_init__()

    def _align_eval_batch(self) -> None:
        """Round the evaluation batch so that it holds whole groups: rewards are compared inside a group."""
        group = self.num_generations_eval or self.num_generations or 1
        num_processes = int(os.environ.get("WORLD_SIZE", "1"))
        if (self.per_device_eval_batch_size * num_processes) % group == 0:
            return
        aligned = max(self.per_device_eval_batch_size // group, 1) * group
        logger.warning(
            "per_device_eval_batch_size=%d does not hold whole groups of %d completions; using %d. Any multiple of %d "
            "is legal; num_generations_eval=1 allows every size.",
            self.per_device_eval_batch_size,
            group,
            aligned,
            group,
        )
        self.per_device_eval_batch_size = aligned


class EngineSettings(NamedTuple):
    """Our settings as flat values; what the trainer reads."""

    max_tokens_per_micro_batch: int
    max_tokens_per_generation_batch: int
    skip_dead_groups: bool

    @classmethod
    def of(cls, args: Any) -> EngineSettings:
        """Return the settings in ``args``; a plain ``trl.GRPOConfig`` gets our defaults, 0 means off."""

        def budget(name: str, automatic: int) -> int:
            value = getattr(args, name, None)
            return automatic if value is None else int(value)

        return cls(
            budget("max_tokens_per_micro_batch", AUTO_TOKENS_PER_MICRO_BATCH),
            budget("max_tokens_per_generation_batch", AUTO_TOKENS_PER_GENERATION_BATCH),
            bool(getattr(args, "skip_dead_groups", True)),
        )
