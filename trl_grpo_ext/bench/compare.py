"""Run one job on both trainers, a process each, in turns: at any moment one of them computes and the other waits."""

from __future__ import annotations

import math
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trl_grpo_ext.bench.clock import PHASES
from trl_grpo_ext.bench.floor import FloorSeconds, TokenCounts
from trl_grpo_ext.bench.side import Failed, run_side
from trl_grpo_ext.errors import GroupRelativeError

SIDES = ("trl", "ours")


class BenchError(GroupRelativeError, RuntimeError):
    """One side of a comparison ended before its last step."""


class Ratio(NamedTuple):
    """TRL's seconds over ours, step against step: the median, the smallest and the largest."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """What one job took on each side.

    Attributes:
        job: Its name.
        about: What it stands for.
        dtype: Of the base weights.
        num_threads: Of torch, per process.
        steps: {side: a dict of wall seconds per phase for every timed step}; ``cpu`` is processor seconds.
        counts: {side: the tokens of every timed step}.
        peak_bytes: {side: the most memory of its process}.
        gradient_error: Norm of the difference of the gradients on the same rollouts over the norm of TRL's.
        floor: Seconds of the unavoidable matrix products of the last step.
    """

    job: str
    about: str
    dtype: str
    num_threads: int
    steps: dict[str, list[dict[str, float]]]
    counts: dict[str, list[TokenCounts]]
    peak_bytes: dict[str, int]
    gradient_error: float
    floor: FloorSeconds

    def seconds(self, side: str, phase: str) -> float:
        """Return the median over the timed steps."""
        return statistics.median(step[phase] for step in self.steps[side])

    def ratio(self, phase: str) -> Ratio:
        """Return how many times longer TRL took."""
        ratios = [
            theirs[phase] / max(ours[phase], 1e-9)
            for theirs, ours in zip(self.steps["trl"], self.steps["ours"], strict=True)
        ]
        return Ratio(statistics.median(ratios), min(ratios), max(ratios))

    @property
    def memory_ratio(self) -> float:
        """Our peak over TRL's."""
        return self.peak_bytes["ours"] / self.peak_bytes["trl"]

    def tokens_per_second(self, side: str) -> float:
        """Return completion tokens sampled and trained on per second of whole steps."""
        total = sum(step["step"] for step in self.steps[side])
        return sum(counts.num_completion for counts in self.counts[side]) / total

    @property
    def scored_share(self) -> float:
        """Share of our completion tokens that had a gradient; the rest were in groups with equal rewards."""
        total = sum(counts.num_completion for counts in self.counts["ours"])
        return sum(counts.num_completion * counts.scored_share for counts in self.counts["ours"]) / max(total, 1)

    @property
    def above_floor(self) -> float:
        """Our sampling, forward and backward over their floor, in the last step."""
        last = self.steps["ours"][-1]
        return (last["rollout"] + last["forward_backward"]) / sum(self.floor)

    def to_json(self) -> dict[str, Any]:
        """Return everything measured and the figures of the table."""
        return {
            "job": self.job,
            "about": self.about,
            "dtype": self.dtype,
            "num_threads": self.num_threads,
            "ratio": {phase: self.ratio(phase)._asdict() for phase in (*PHASES, "cpu")},
            "seconds": {side: {phase: self.seconds(side, phase) for phase in (*PHASES, "cpu")} for side in SIDES},
            "tokens_per_second": {side: self.tokens_per_second(side) for side in SIDES},
            "peak_bytes": self.peak_bytes,
            "memory_ratio": self.memory_ratio,
            "gradient_error": self.gradient_error,
            "scored_share": self.scored_share,
            "floor_seconds": self.floor._asdict(),
            "above_floor": self.above_floor,
            "steps": self.steps,
            "counts": {side: [counts._asdict() for counts in self.counts[side]] for side in SIDES},
        }


def compare(
    job: str,
    about: str,
    make_call: Callable[[Path], dict[str, Any]],
    *,
    dtype: str,
    num_steps: int,
    num_threads: int = 0,
    announce: Callable[[str], None] = lambda _line: None,
) -> Comparison:
    """Return the comparison of one job; ``num_steps`` steps are timed on each side, after one that is not.

    Args:
        job: its name.
        about: what it stands for.
        make_call: picklable; returns the trainer's keyword arguments for an output directory. It is called in each of
            the two processes and must give both the same; ``max_steps`` has to be ``num_steps + 1``.
        dtype: of the base weights, for the report.
        num_steps: timed steps, at least 1.
        num_threads: torch's, per process; 0 leaves the default.
        announce: called with a line before each step.

    Raises:
        BenchError: one side ended early; the message ends with its traceback.
    """
    context = multiprocessing.get_context("spawn")
    steps: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    counts: dict[str, list[TokenCounts]] = {side: [] for side in SIDES}
    peak_bytes: dict[str, int] = {}
    floor = FloorSeconds(0.0, 0.0)
    with tempfile.TemporaryDirectory(prefix="trl-grpo-bench-") as directory:
        gradients = {side: Path(directory) / f"{side}.pt" for side in SIDES}
        connections: dict[str, Connection] = {}
        processes = []
        try:
            for side in SIDES:
                connections[side], theirs = context.Pipe()
                processes.append(
                    context.Process(
                        target=run_side,
                        args=(side == "ours", make_call, num_threads, gradients[side], theirs),
                        # not a daemon: our trainer starts reward workers of its own
                    )
                )
                processes[-1].start()
                theirs.close()
            for number in range(num_steps + 1):
                for side in SIDES:
                    announce(f"{job} {dtype}: step {number} of {num_steps} on {side}")
                    answer = _turn(connections[side], side)
                    peak_bytes[side] = answer["peak_bytes"]
                    floor = answer.get("floor", floor)
                    if number > 0:  # the first step is scripted, warms up and gives the gradients
                        steps[side].append(answer["seconds"])
                        counts[side].append(answer["counts"])
            for connection in connections.values():
                connection.send("leave")
            for process in processes:
                process.join()
        finally:
            for process in processes:
                if process.is_alive():
                    process.terminate()
                    process.join()
        error = gradient_error(torch.load(gradients["ours"]), torch.load(gradients["trl"]))
    threads = num_threads or torch.get_num_threads()
    return Comparison(job, about, dtype, threads, steps, counts, peak_bytes, error, floor)


def _turn(connection: Connection, side: str) -> dict[str, Any]:
    """Let one side take a step and return its answer."""
    try:
        connection.send("step")
        answer = connection.recv()
    except (EOFError, BrokenPipeError, ConnectionResetError) as error:
        raise BenchError(
            f"the process of {side} was ended from outside, as a machine short of memory does; "
            "choose a smaller job or a larger machine"
        ) from error
    if isinstance(answer, Failed):
        raise BenchError(f"{side} failed: {answer.trace}")
    return answer


def gradient_error(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return |ours - theirs| / |theirs|, Euclidean, over all tensors; NaN where both are zero, as in dead groups.

    Raises:
        BenchError: the two did not train the same tensors.
    """
    if ours.keys() != theirs.keys():
        raise BenchError(f"not the same tensors have gradients: {sorted(ours.keys() ^ theirs.keys())[:3]} …")
    difference = sum(float((ours[name].double() - theirs[name].double()).square().sum()) for name in theirs)
    size = sum(float(gradient.double().square().sum()) for gradient in theirs.values())
    if size == 0:
        return math.inf if difference else math.nan
    return (difference / size) ** 0.5
