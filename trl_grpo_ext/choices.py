"""The words that settings of TRL take. TRL itself finds a wrong one in the middle of the first step, if at all."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trl_grpo_ext.errors import ConfigurationError, nearest

# As in TRL 1.16; a test compares them with its source. True and False are the older words of scale_rewards.
TRL_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"),
    "scale_rewards": ("group", "batch", "none", True, False),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
}


def check_choice(name: str, value: Any, allowed: Collection[Any]) -> None:
    """Raise ConfigurationError, with the nearest right word, if a setting's value is none of those it takes."""
    if value not in allowed:
        words = [str(choice) for choice in allowed]
        raise ConfigurationError(
            f"{name}={value!r} is not allowed; it must be one of {', '.join(words)}.{nearest(value, words)}"
        )
