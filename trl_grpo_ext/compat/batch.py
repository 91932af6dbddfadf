"""The arithmetic that turns a PPO batch into a group-relative one. Pure integers.

Completions per update stay what the PPO user asked for: an "episode" of PPO was one sampled response, so an update of B
episodes becomes B / G prompts with G responses each, and compute, memory and number of updates stay as they were.

Dimensions: ``pd`` per-device batch, ``ga`` gradient accumulation, ``M`` mini-batches, ``E`` epochs over a batch, ``W``
processes, ``B`` completions per update, ``G`` completions per prompt.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from trl_grpo_ext.errors import ConfigurationError

# TRL's own default for GRPO; larger groups bring little and cost distinct prompts.
LARGEST_USUAL_GROUP = 8


class BatchPlan(NamedTuple):
    """How one update is cut, in the names of ``GRPOConfig``.

    Attributes:
        per_device_train_batch_size: Rows of one forward and backward pass on a device.
        gradient_accumulation_steps: Passes per optimiser step.
        steps_per_generation: Passes that share one generation.
        num_iterations: Times every completion is trained on (E).
        num_generations: Completions per prompt (G).
        completions: Completions per update over all processes (B).
        optimizer_steps: Optimiser steps per update (E * M).
    """

    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    num_iterations: int
    num_generations: int
    completions: int
    optimizer_steps: int

    @property
    def prompts(self) -> int:
        """Distinct prompts per update, B / G."""
        return self.completions // self.num_generations


def group_size(completions: int, wanted: int | None = None, *, factors: tuple[int, ...] = ()) -> int:
    """Return G: the largest divisor of ``completions`` from 2 to 8, failing that the smallest above 8.

    Args:
        completions: B, completions per update.
        wanted: G as the user set it, or None.
        factors: The factors that B came from, for the message.

    Raises:
        ConfigurationError: if B allows no group of at least two, or ``wanted`` does not divide it.
    """
    product = f" ({' x '.join(map(str, factors))})" if factors else ""
    if completions < 2:
        raise ConfigurationError(
            "Group-relative advantages need at least two responses per prompt, but the update holds "
            f"B={completions} sample{product}. Raise per_device_train_batch_size or gradient_accumulation_steps."
        )
    divisors = [d for d in range(2, completions + 1) if completions % d == 0]
    if wanted is None:
        usual = [d for d in divisors if d <= LARGEST_USUAL_GROUP]
        return usual[-1] if usual else divisors[0]
    if wanted not in divisors:
        near = sorted(divisors, key=lambda d: (abs(d - wanted), d))[:2]
        raise ConfigurationError(
            f"num_generations={wanted} does not divide the {completions} completions of an update{product}. "
            f"Nearest valid values: {' and '.join(map(str, sorted(near)))}; or change one of the factors."
        )
    return wanted


def plan_v2(
    per_device: int,
    accumulation: int,
    mini_batches: int,
    epochs: int,
    *,
    world_size: int = 1,
    num_generations: int | None = None,
) -> BatchPlan:
    """Return the plan of a v2 update: E epochs of M optimiser steps each over B = pd * ga * W completions.

    TRL >= 0.17 stepped the optimiser once per epoch whenever M <= ga, whatever M said (issue 5645). Here M means what
    its documentation said.

    Raises:
        ConfigurationError: if the mini-batches do not fit or no group is possible.
    """
    for name, value in (
        ("per_device_train_batch_size", per_device),
        ("gradient_accumulation_steps", accumulation),
        ("num_mini_batches", mini_batches),
        ("num_ppo_epochs", epochs),
    ):
        if value < 1:
            raise ConfigurationError(f"{name}={value} must be at least 1.")
    completions = per_device * accumulation * world_size
    group = group_size(completions, num_generations, factors=(per_device, accumulation, world_size))
    if accumulation % mini_batches == 0:
        rows, passes_per_step, passes = per_device, accumulation // mini_batches, accumulation
    elif mini_batches % accumulation == 0 and (per_device * accumulation) % mini_batches == 0:
        rows, passes_per_step, passes = per_device * accumulation // mini_batches, 1, mini_batches
    else:
        raise ConfigurationError(
            f"num_mini_batches={mini_batches} does not cut per_device_train_batch_size x gradient_accumulation_steps = "
            f"{per_device} x {accumulation} = {per_device * accumulation} completions into equal mini-batches of whole "
            f"passes. Change num_mini_batches to a divisor of gradient_accumulation_steps={accumulation}, or set "
            f"gradient_accumulation_steps={mini_batches}."
        )
    return BatchPlan(rows, passes_per_step, passes, epochs, group, completions, epochs * mini_batches)


def plan_classic(
    batch: int, mini_batch: int, accumulation: int, epochs: int, *, num_generations: int | None = None
) -> BatchPlan:
    """Return the plan of a classic ``step``: epochs * batch / (mini * accumulation) optimiser steps.

    Args:
        batch: ``batch_size``, responses per ``step`` and process.
        mini_batch: ``mini_batch_size``, rows of one pass.
        accumulation: ``gradient_accumulation_steps``.
        epochs: ``ppo_epochs``.
        num_generations: G as the user set it, or None.

    Raises:
        ConfigurationError: if the backward batch does not divide the batch, or no group is possible.
    """
    for name, value in (
        ("batch_size", batch),
        ("mini_batch_size", mini_batch),
        ("gradient_accumulation_steps", accumulation),
        ("ppo_epochs", epochs),
    ):
        if value < 1:
            raise ConfigurationError(f"{name}={value} must be at least 1.")
    if batch < 2:
        raise ConfigurationError(
            f"Group-relative advantages need at least two responses per prompt, but batch_size={batch} holds one. "
            "Raise batch_size (and mini_batch_size): repeat the query, or iterate trainer.dataloader, which repeats "
            "every prompt inside a batch."
        )
    backward = mini_batch * accumulation
    if batch % backward:
        raise ConfigurationError(
            f"batch_size={batch} must be a multiple of mini_batch_size * gradient_accumulation_steps = "
            f"{mini_batch} * {accumulation} = {backward}."
        )
    group = group_size(batch, num_generations)
    return BatchPlan(mini_batch, accumulation, batch // mini_batch, epochs, group, batch, epochs * (batch // backward))


def updates_for(total_episodes: int, completions: int) -> int:
    """Return how many updates of ``completions`` responses cover ``total_episodes``, as PPO rounded: up."""
    return math.ceil(total_episodes / completions)
