"""One side of the comparison: a process that holds a trainer and takes one step each time it is told to."""

from __future__ import annotations

import tempfile
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOTrainer

from trl_grpo_ext.bench.clock import PhaseClock
from trl_grpo_ext.bench.floor import TokenCounts, floor_seconds
from trl_grpo_ext.bench.jobs import scripted_completions
from trl_grpo_ext.memory.watch import resident_bytes
from trl_grpo_ext.trainer import GroupRelativeTrainer


class Failed(NamedTuple):
    """A side that could not go on, as data: the other process prints it."""

    trace: str


def run_side(
    is_ours: bool,
    make_call: Callable[[Path], dict[str, Any]],
    num_threads: int,
    gradient_path: Path,
    connection: Connection,
) -> None:
    """Take a step for every message received, answering each with its seconds; the first step is scripted.

    Args:
        is_ours: True for ``GroupRelativeTrainer``, False for ``trl.GRPOTrainer``.
        make_call: returns the keyword arguments of the trainer, the same for both sides, given an output directory.
        num_threads: torch's; 0 leaves the default.
        gradient_path: where the gradient of the scripted step goes.
        connection: to the process that compares.
    """
    if num_threads:
        torch.set_num_threads(num_threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        with tempfile.TemporaryDirectory(prefix="trl-grpo-bench-") as directory:
            trainer_class = GroupRelativeTrainer if is_ours else GRPOTrainer
            trainer = trainer_class(**make_call(Path(directory)))
            trainer.remove_callback(PrinterCallback)
            trainer.add_callback(Turnstile(trainer, gradient_path, connection, measures_floor=is_ours))
            trainer.train()
    except BaseException:
        connection.send(Failed(traceback.format_exc()))
    connection.close()


class Turnstile(TrainerCallback):
    """Hold the trainer before each step until a message comes."""

    def __init__(self, trainer: Any, gradient_path: Path, connection: Connection, *, measures_floor: bool) -> None:
        self._trainer, self._gradient_path, self._connection = trainer, gradient_path, connection
        self._measures_floor = measures_floor
        self._sample = trainer._generate_single_turn
        trainer._generate_single_turn = self._generate_single_turn
        self._clock = PhaseClock(trainer)
        self._is_scripted = True
        self._counts = TokenCounts(0, 0, 0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the other side to have had its turn."""
        self._connection.recv()
        self._clock.start()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Keep the gradient of the scripted step."""
        if self._is_scripted:
            gradients = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
            torch.save({name: grad for name, grad in gradients.items() if grad is not None}, self._gradient_path)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Send the seconds, the tokens and the peak so far."""
        seconds = self._clock.stop()
        share = self._trainer._metrics["train"].get("window/scored_token_share")
        counts = self._counts._replace(scored_share=share[-1] if share else 1.0)
        answer: dict[str, Any] = {"seconds": seconds, "counts": counts, "peak_bytes": peak_bytes(self._trainer)}
        if self._measures_floor and state.global_step == state.max_steps:
            model = self._trainer.accelerator.unwrap_model(self._trainer.model)
            answer["floor"] = floor_seconds(model, counts)
        self._is_scripted = False
        self._connection.send(answer)
        if state.global_step == state.max_steps:
            self._connection.recv()  # giving gigabytes back takes seconds that the other side would pay

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        result = self._sample(prompt_ids, *args, **kwargs)
        if self._is_scripted:  # what was sampled only warmed the sampler up
            trainer = self._trainer
            vocab_size = trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings().weight.size(0)
            result = scripted_completions(len(prompt_ids), trainer.max_completion_length, vocab_size), None
        self._counts = TokenCounts(
            num_prompt=sum(map(len, {tuple(ids) for ids in prompt_ids})),
            num_completion=sum(map(len, result[0])),
            num_rows=len(prompt_ids),
        )
        return result


def peak_bytes(trainer: Any) -> int:
    """Return the most memory this process held: of the GPU where there is one, else of the process (resident set)."""
    if not torch.cuda.is_available():
        return resident_bytes()[0]
    # Our trainer starts torch's counter anew for every phase and keeps the highest itself.
    watch = getattr(trainer, "_watch", None)
    return torch.cuda.max_memory_allocated() if watch is None else watch.highest_bytes
