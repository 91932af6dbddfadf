"""Trainer callbacks: mark checkpoints, log metrics, show progress. Thin: the work is in the files they call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback

from trl_grpo_ext.monitor.checkpoints import checkpoint_step, mark_complete
from trl_grpo_ext.monitor.metrics_log import MetricsLog
from trl_grpo_ext.monitor.progress import ProgressDisplay


class CheckpointMarker(TrainerCallback):
    """Mark each checkpoint as whole once every process has written its part."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the manifest; runs on every process, because all of them must have finished."""
        PartialState().wait_for_everyone()
        if state.is_world_process_zero:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            if checkpoint_step(checkpoint) >= 0 and checkpoint.is_dir():
                mark_complete(checkpoint)


class MetricsWriter(TrainerCallback):
    """Write each log entry to ``metrics.jsonl``."""

    def __init__(self, log: MetricsLog) -> None:
        self.log = log

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Append the entry; only the main process writes."""
        if state.is_world_process_zero and logs:
            self.log.append(state.global_step, {key: _number(value) for key, value in logs.items()})


class ProgressCallback(TrainerCallback):
    """Feed the display."""

    def __init__(self, display: ProgressDisplay) -> None:
        self.display = display

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start at the step reached so far."""
        if state.is_world_process_zero:
            self.display.start(state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Show the entry."""
        if state.is_world_process_zero and logs:
            self.display.update(state.global_step, logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the last state on the screen."""
        self.display.stop()


class StopWhen(TrainerCallback):
    """End the run after a step at which a condition holds (a time limit, a file that asks for it)."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        self.condition = condition

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask the trainer to save and stop."""
        if self.condition():
            control.should_save = True
            control.should_training_stop = True


def _number(value: Any) -> Any:
    """Return a number for the text that some versions of transformers log."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
