"""Watch that training changes weights: a metric for every step, an alarm, and an error for a run that changed none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import TrainerCallback

from trl_grpo_ext.errors import NothingTrainedError
from trl_grpo_ext.memory.adapter import trainable
from trl_grpo_ext.memory.moved import SampledEntries

logger = logging.getLogger(__name__)

METRIC = "update/moved_entries"
# An alarm when fewer than this share of the entries with a gradient moved, in so many steps one after the other. In
# float32 nearly all of them move; bfloat16 adapters at a learning rate of 1e-6 come to less than one in a hundred.
_ALARM_SHARE = 0.05
_ALARM_STEPS = 3


class UpdateGuard(TrainerCallback):
    """Compare a sample of the trained entries before and after each optimiser step.

    The sample is taken at the beginning of a step, since DeepSpeed updates weights inside the backward pass.

    Args:
        log_metric: Called with name and value once per optimiser step.
        step_was_skipped: Returns whether the gradient scaler left out the step just made.
    """

    def __init__(self, log_metric: Callable[[str, float], None], step_was_skipped: Callable[[], bool]) -> None:
        self._log_metric = log_metric
        self._step_was_skipped = step_was_skipped
        self._sample: SampledEntries | None = None
        self._saw_live_group: bool | None = None
        self._forget()

    def _forget(self) -> None:
        self._saw_live_group = None
        self._num_steps = self._num_skipped = self._num_still = 0
        self._moved = self._had_gradient = self._warned = self._is_resumed = False
        self._rate = 0.0

    def saw_groups(self, num_live: int) -> None:
        """Note how many groups of a step, over all processes, had rewards that differ."""
        self._saw_live_group = bool(self._saw_live_group) or num_live > 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget an earlier run, and note whether this one goes on from a checkpoint."""
        self._sample = None
        self._forget()
        self._is_resumed = state.global_step > 0

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Remember the entries."""
        if self._sample is None:
            self._sample = SampledEntries(parameter for _, parameter in trainable(model))
        self._sample.take()

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Compare, log, and warn once when hardly anything moves."""
        if self._sample is None:
            return
        movement = self._sample.compare()
        if movement.entries == 0:  # sharded away from this process
            return
        self._num_steps += 1
        rate = max((float(group["lr"]) for group in getattr(optimizer, "param_groups", [])), default=0.0)
        self._rate = max(self._rate, rate)
        if self._step_was_skipped():
            self._num_skipped += 1
            return
        self._log_metric(METRIC, movement.moved_share)
        self._moved = self._moved or movement.moved > 0
        self._had_gradient = self._had_gradient or movement.with_gradient > 0
        is_still = rate > 0.0 and movement.moved < _ALARM_SHARE * movement.with_gradient
        self._num_still = self._num_still + 1 if is_still else 0
        if self._num_still >= _ALARM_STEPS and not self._warned:
            self._warned = True
            share = movement.moved / movement.with_gradient
            logger.warning("%s", _why_still(model, share, rate, _ALARM_STEPS))

    def finish(self, model: nn.Module) -> None:
        """Judge the run that just ended; a resumed one is not judged, since what its earlier part moved is not known.

        Raises:
            NothingTrainedError: if not one of the entries looked at changed in the whole run, although the learning
                rate was above 0 and some group's rewards differed.
        """
        if self._is_resumed or self._num_steps == 0 or self._rate == 0.0:
            return
        if self._saw_live_group is False:
            logger.warning(
                "Nothing was learnt from the rewards: in all %d steps those of every group were equal, so that no "
                "completion was better than another. Use a reward that tells them apart, easier or harder prompts, "
                "or a larger num_generations or temperature.",
                self._num_steps,
            )
            return
        if self._moved:
            return
        if self._num_skipped == self._num_steps:
            why = (
                "the gradient scaler skipped every step, because gradients overflowed float16. Use bf16=True, or a "
                "lower max_grad_norm or loss scale"
            )
        elif not self._had_gradient:
            why = "every gradient was 0. Look for a frozen or detached part between the weights and the loss"
        else:
            why = f"every update was rounded away: {_rounding(model, self._rate)}"
        raise NothingTrainedError(f"Nothing was trained: not one entry changed in {self._num_steps} steps: {why}.")


def _why_still(model: nn.Module, share: float, rate: float, num_steps: int) -> str:
    return (
        f"The weights hardly move: in each of the last {num_steps} steps fewer than {_ALARM_SHARE:.0%} of the trained "
        f"entries that have a gradient changed ({share:.2%} in the last), at learning_rate={rate:g}. "
        f"{_rounding(model, rate)}."
    )


def _rounding(model: nn.Module, rate: float) -> str:
    """Return why updates vanish in the dtype that most trained entries have, and what to do, without a full stop."""
    sizes: dict[Any, int] = {}
    for _, parameter in trainable(model):
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    dtype = max(sizes, key=lambda key: sizes[key])
    name = str(dtype).removeprefix("torch.")
    digits = {"bfloat16": 256, "float16": 2048}.get(name)
    if digits is None:
        return f"the weights are {name}, so look at optimiser, learning rate ({rate:g}) and gradient clipping"
    return (
        f"most are {name}, in which a value keeps its old digits unless the update exceeds 1/{2 * digits} of it, and "
        f"an Adam step is about as large as the learning rate ({rate:g}). Train in float32 (adapters: "
        'float32_adapters=True, memory="lora" or "qlora"; every weight: model_init_kwargs={"dtype": "float32"}), or '
        "raise learning_rate"
    )
