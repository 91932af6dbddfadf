"""Rewards that have to run in the training process: they cannot be pickled, or they need live objects.

They get private copies of what they could edit, random generators of their own, and a time limit that stops Python
code but not a call into C. Everything else about them is as in the workers: same keywords, same failures, same split.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import ctypes
import inspect
import random
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from trl_grpo_ext.rewards.coerce import ShapeError, coerce_rewards
from trl_grpo_ext.rewards.outcome import Failure
from trl_grpo_ext.rewards.scorings import Record, read_record
from trl_grpo_ext.rewards.worker import LogRecorder, call_keywords, contained, failure_of, judge, record_of, score_of


class OutOfTimeError(BaseException):
    """Raised inside a reward that runs in the training process for too long. No ``except Exception`` swallows it."""


class InProcessScoring:
    """Scores a batch here and now, one function at a time.

    Attributes:
        records: {sample: score or failure} after ``run``.
        whole_logs: log calls of the whole call; ``logs`` those of single samples, where it had to be split.
    """

    def __init__(
        self,
        name: str,
        function: Any,
        job: dict[str, Any],
        *,
        timeout_s: float,
        may_split: bool,
        per_sample: bool,
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        """Prepare the call.

        Args:
            name: display name.
            function: the reward, a callable.
            job: the message that a worker would get, with all samples.
            timeout_s: time limit of one sample.
            may_split: False if samples must not be scored one at a time.
            per_sample: score samples one at a time from the start.
            loop: running event loop of another thread; needed for an async function.
        """
        self.name = name
        self.function = function
        self.job = job
        self.timeout_s = timeout_s
        self.may_split = may_split
        self.per_sample = per_sample
        self.loop = loop
        self.records: dict[int, Record] = {}
        self.whole_logs: list[list[Any]] | None = None
        self.logs: dict[int, list[list[Any]]] = {}
        self.split_used = False
        self.finished_at = 0.0

    def run(self, deadline: float) -> None:
        """Score the batch; what has no score at ``deadline`` (``time.monotonic()``) becomes a "batch_timeout"."""
        if hasattr(self.function, "judge_batch"):
            self._run_judge_batch(deadline)
            self.finished_at = time.monotonic()
            return
        failure = None if self.per_sample else self._run_whole(deadline)
        if self.per_sample or failure is not None:
            if failure is not None and (not self.may_split or failure.reason == "bad_value"):
                self.records = dict.fromkeys(range(self.job["num_samples"]), failure)
            else:
                self.split_used = not self.per_sample
                self._run_each(deadline)
        self.finished_at = time.monotonic()

    def _run_whole(self, deadline: float) -> Failure | None:
        """Score all samples in one call; return why it failed, or None."""
        recorder = LogRecorder()
        # Half of the time, so that a hang leaves the other half for the samples it has nothing to do with.
        limit_s = max(0.0, deadline - time.monotonic()) / (2 if self.may_split else 1)
        try:
            output = self._call(None, recorder, limit_s)
            values = coerce_rewards(output, self.job["num_samples"])
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return _failure(error, limit_s)
        self.records = {sample: read_record({"score": record_of(value)}) for sample, value in enumerate(values)}
        self.whole_logs = recorder.calls
        return None

    def _run_judge_batch(self, deadline: float) -> None:
        """Let a verifier with its own isolation judge the batch; it answers for every sample, so nothing is split."""
        limit_s = max(0.0, deadline - time.monotonic())
        try:
            with interrupt_after(limit_s):
                verdicts = self.function.judge_batch(self.job["call"]["completions"], self.job["columns"])
            values = [score_of(verdict) for verdict in verdicts]
            if len(values) != self.job["num_samples"]:
                raise ShapeError(
                    f"judge_batch returned {len(values)} verdicts for {self.job['num_samples']} completions"
                )
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.records = dict.fromkeys(range(self.job["num_samples"]), _failure(error, limit_s))
            return
        self.records = {sample: read_record({"score": record_of(value)}) for sample, value in enumerate(values)}

    def _run_each(self, deadline: float) -> None:
        for sample in range(self.job["num_samples"]):
            limit_s = min(self.timeout_s, deadline - time.monotonic())
            if limit_s <= 0:
                late = Failure("batch_timeout", "the time limit of the batch passed before this sample had its score")
                self.records[sample] = late
                continue
            recorder = LogRecorder()
            try:
                if self.job["is_verifier"]:
                    with interrupt_after(limit_s):
                        value: Any = judge(self.function, self.job, sample)
                else:
                    value = coerce_rewards(self._call(sample, recorder, limit_s), 1)[0]
                self.records[sample] = read_record({"score": record_of(value)})
                self.logs[sample] = recorder.calls
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self.records[sample] = _failure(error, limit_s)

    def _call(self, sample: int | None, recorder: LogRecorder, limit_s: float) -> Any:
        keywords = call_keywords(self.job, sample, recorder)
        keywords = {name: value if name == "environments" else private_copy(value) for name, value in keywords.items()}
        if self.job["is_async"]:
            return self._await(self.function(**keywords), limit_s)
        with interrupt_after(limit_s):
            output = self.function(**keywords)
            if not inspect.isawaitable(output):
                # A generator runs only when it is read, so it is read inside the time limit.
                return list(output) if inspect.isgenerator(output) else output
        return self._await(output, limit_s)

    def _await(self, awaitable: Any, limit_s: float) -> Any:
        """Run an awaitable on the other thread's loop; stop waiting when the time is up, even if it does not react."""

        async def limited() -> Any:
            return await asyncio.wait_for(contained(awaitable), limit_s)

        end = time.monotonic() + limit_s
        try:
            if self.loop is None:
                return asyncio.run(limited())
            future = asyncio.run_coroutine_threadsafe(limited(), self.loop)
            try:
                return future.result(limit_s + 1.0)
            finally:
                future.cancel()
        except (concurrent.futures.TimeoutError, asyncio.TimeoutError) as error:
            if time.monotonic() < end:  # the reward's own client gave up
                raise
            raise OutOfTimeError from error


def _failure(error: BaseException, limit_s: float) -> Failure:
    if isinstance(error, OutOfTimeError):
        return Failure("timeout", f"took more than {limit_s:g} s and was interrupted")
    return failure_of(error)


@contextlib.contextmanager
def interrupt_after(limit_s: float) -> Iterator[None]:
    """Raise OutOfTimeError in this thread if the block takes longer. It takes effect between two Python instructions,
    so a call into C is not stopped, and works in any thread, which an alarm signal does not."""
    thread = ctypes.c_ulong(threading.get_ident())
    lock, over = threading.Lock(), False

    def fire() -> None:
        with lock:
            if not over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(OutOfTimeError))

    timer = threading.Timer(limit_s, fire)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            over = True
        timer.cancel()
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)  # one that was set but not raised yet


def private_copy(value: Any) -> Any:
    """Return the value with every list, dict and tuple in it new, so that nobody sees edits; the rest is shared."""
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if type(value) is list:
        if value and type(value[0]) in (int, float, str) and all(type(item) is type(value[0]) for item in value):
            return value.copy()
        return [private_copy(item) for item in value]
    if type(value) is dict:
        return {key: private_copy(item) for key, item in value.items()}
    if type(value) is tuple:
        return tuple(private_copy(item) for item in value)
    if isinstance(value, (list, dict, set)):
        with contextlib.suppress(Exception):
            return copy.deepcopy(value)
    return value


class RewardRandomness:
    """Random generators of the rewards' own: what they draw or seed moves neither sampling nor shuffling.

    Their states carry on from one batch to the next, so a random reward does not repeat itself either.
    """

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Put the rewards' generator states in for the block, and the trainer's back afterwards."""
        trainer_states = _get_states()
        _set_states({**trainer_states, **self._states})
        try:
            yield
        finally:
            self._states = _get_states()
            # A generator that a reward has only just imported has no state of the trainer's to go back to.
            _set_states(trainer_states)


def _get_states() -> dict[str, Any]:
    """Return the states of Python's generator and of those of numpy and torch, where they are loaded."""
    states: dict[str, Any] = {"python": random.getstate()}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    if torch is not None:
        states["torch"] = torch.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _set_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "torch" in states:
        sys.modules["torch"].set_rng_state(states["torch"])
    if "cuda" in states:
        sys.modules["torch"].cuda.set_rng_state_all(states["cuda"])
