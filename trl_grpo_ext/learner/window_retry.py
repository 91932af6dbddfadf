"""Take an optimiser step back that ran out of memory half-way, so that it can be done again in smaller passes.

What a process changed on the way is its gradients, its random generators and the scores the window remembers; all are
put back. Gradients must not have left the process yet: with several processes they travel in a pass of their own, which
starts only when every process says that its passes are done. That pass holds two tokens, fewer than any before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from trl_grpo_ext.learner.micro_batches import Row, num_tokens
from trl_grpo_ext.learner.window import RolloutWindow
from trl_grpo_ext.memory.oom import TokenBudget, free_memory
from trl_grpo_ext.rng import RandomState

_ALL_DONE = 2**62  # above any budget, so that the smallest of all answers tells whether one process failed


class Pass(NamedTuple):
    """One forward and backward; a pass that does not count has a loss of zero."""

    rows: Sequence[Row]
    counts: bool


class FailedPass(NamedTuple):
    """The rows whose pass ran out of memory, and the first line of the error."""

    rows: Sequence[Row]
    cause: str


class WindowStart:
    """What a window found: gradients and random generators."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._random_state = RandomState.now()
        # The trainer leaves no gradient behind, so this holds no memory; one that is there must survive all the same.
        self._gradients = [
            (parameter, None if parameter.grad is None else parameter.grad.clone())
            for parameter in model.parameters()
            if parameter.requires_grad
        ]

    def return_to(self, window: RolloutWindow) -> None:
        """Make gradients, generators and ``window`` what they were."""
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.clone()
        window.forget_scores()
        free_memory()
        self._random_state.restore()


def agree_on_budget(
    failed: FailedPass | None,
    passes: Sequence[Pass],
    budget: TokenBudget,
    accelerator: Any,
    *,
    shared_prompts: bool,
) -> int | None:
    """Return the budget that every process tries next, or None if no process ran out of memory.

    A collective call: one number travels. 0 means that some process cannot hold even one row.

    Args:
        failed: the pass of this process that failed, if one did.
        passes: all that this process meant to make.
        budget: the one in force.
        accelerator: of the trainer.
        shared_prompts: as for ``num_tokens``.
    """
    answer = _ALL_DONE
    if failed is not None:
        largest = max(num_tokens(rows, shared_prompts=shared_prompts) for rows, _ in passes)
        failed_tokens = num_tokens(failed.rows, shared_prompts=shared_prompts)
        # A row that fails although larger passes went through may still fit once those no longer fragment memory.
        answer = 0 if len(failed.rows) == 1 and failed_tokens == largest else budget.smaller(largest)
    if accelerator.num_processes > 1:
        answer = int(accelerator.gather(torch.tensor([answer], device=accelerator.device)).min())
    return None if answer == _ALL_DONE else answer


def sync_buffers_in_next_forward(model: torch.nn.Module, wanted: bool) -> None:
    """Tell a DDP model whether its next forward broadcasts buffers; of no effect on other models.

    Left alone, the first forward of a step does. A process that failed before it would then be alone in the broadcast
    when it starts again, so the pass in which all processes meet takes it over.
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            module.require_forward_param_sync = wanted
            return
