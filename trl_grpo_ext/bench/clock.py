"""Time the phases of a trainer's steps, TRL's or ours, from outside."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

PHASES = ("rollout", "scoring", "forward_backward", "optimizer", "step")


class PhaseClock:
    """Wrap the methods that both trainers share and add up the seconds spent in each, from step to step.

    ``rollout`` is ``_generate``; ``scoring`` the rest of ``_generate_and_score_completions`` (rewards, old and
    reference log-probabilities); ``forward_backward`` the rest of ``training_step``; ``optimizer`` what is left.
    """

    def __init__(self, trainer: Any) -> None:
        self._seconds: dict[str, float] = {}
        self._cpu_seconds = 0.0
        self._started = 0.0
        for name in ("_generate", "_generate_and_score_completions", "training_step"):
            setattr(trainer, name, self._timed(name, getattr(trainer, name)))

    def start(self) -> None:
        """Begin a step."""
        self._seconds = {}
        self._cpu_seconds, self._started = time.process_time(), _now()

    def stop(self) -> dict[str, float]:
        """End the step and return ``{phase: wall seconds}``, with ``cpu``, the seconds of all threads together."""
        step = _now() - self._started
        rollout, scored, trained = (
            self._seconds.get(name, 0.0) for name in ("_generate", "_generate_and_score_completions", "training_step")
        )
        return {
            "rollout": rollout,
            "scoring": scored - rollout,
            "forward_backward": trained - scored,
            "optimizer": step - trained,
            "step": step,
            "cpu": time.process_time() - self._cpu_seconds,
        }

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = _now()
            try:
                return method(*args, **kwargs)
            finally:
                self._seconds[name] = self._seconds.get(name, 0.0) + _now() - started

        return call


def _now() -> float:
    """Return the time at which everything launched so far is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
