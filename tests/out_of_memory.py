"""Let memory run out in a chosen place, as torch would say it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from trl_grpo_ext.learner.scoring import unwrap


def cuda_error() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1 GiB")


@contextlib.contextmanager
def out_of_memory(
    trainer: Any,
    phase: str,
    at: Collection[int],
    *,
    place: str = "forward",
    error: Callable[[], Exception] = cuda_error,
    watch: Callable[[], None] = lambda: None,
) -> Iterator[list[int]]:
    """Raise in the second decoder layer, at the ``at``-th times (from 0) that it is reached in ``phase``.

    Args:
        trainer: Ours.
        phase: "train", "generate" or "score".
        at: Which times.
        place: "forward", or "backward": when the gradient reaches the layer's output.
        error: Makes what is raised.
        watch: Called just before.

    Yields:
        A list with the number of times so far.
    """
    models = [model for model in (trainer.model, trainer.ref_model) if model is not None]
    for model in models:
        trainer._shares_prompts(model, 64)  # the few tokens that are forwarded once to compare paths do not count
    seen = [0]

    def fail() -> None:
        watch()
        raise error()

    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        # recomputation under gradient checkpointing is part of the backward pass, and not another time
        if trainer._watch.phase != phase or (phase == "train" and not torch.is_grad_enabled()):
            return
        number, seen[0] = seen[0], seen[0] + 1
        if number not in at:
            return
        if place == "forward":
            fail()
        tensor = output[0] if isinstance(output, tuple) else output
        tensor.register_hook(lambda _gradient: fail())

    handles = [unwrap(model).base_model.layers[1].register_forward_hook(hook) for model in models]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
