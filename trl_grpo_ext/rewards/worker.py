"""What runs inside a worker process: take a job, score its samples, send one reply per sample.

A reply is sent as soon as its sample is done. So when the process is killed or crashes, the trainer knows which sample
it was at, and loses none of the scores before it.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import random
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

from trl_grpo_ext.rewards.coerce import BadValue, ShapeError, coerce_reward, coerce_rewards
from trl_grpo_ext.rewards.outcome import Failure, Score
from trl_grpo_ext.rewards.verifier import Verdict
from trl_grpo_ext.rewards.wire import receive_pickle, send_json

_MAX_DETAIL_CHARS = 4000
_MAX_LOGGED_CHARS = 10_000


def serve(sock: socket.socket, functions: dict[int, Any], pickles: dict[int, bytes]) -> None:
    """Run jobs until the trainer closes the connection.

    Args:
        sock: connection to the trainer.
        functions: loaded reward functions by number.
        pickles: reward functions that this process must load itself, by number.
    """
    worker = _Worker(sock, functions, pickles)
    while True:
        try:
            job = receive_pickle(sock)
        except (EOFError, ConnectionError):
            return
        worker.run(job)


class _Worker:
    def __init__(self, sock: socket.socket, functions: dict[int, Any], pickles: dict[int, bytes]) -> None:
        self.sock = sock
        self.functions = functions
        self.pickles = pickles
        self.loop: asyncio.AbstractEventLoop | None = None

    def run(self, job: dict[str, Any]) -> None:
        """Run one job: announce the start, then one reply per sample; the last reply ends the job."""
        num_samples = job["num_samples"]
        try:
            function = self._function(job["function"])
        except BaseException as error:
            failure = list(failure_of(error, loading=True))
            send_json(self.sock, {"begin": True})
            for position in range(num_samples):
                self._reply({"sample": position, "failure": failure}, last=position + 1 == num_samples)
            return
        send_json(self.sock, {"begin": True})
        if job["mode"] == "whole":
            self._score_whole(function, job)
        elif job["is_async"]:
            self._event_loop().run_until_complete(self._score_each_async(function, job))
        else:
            self._score_each(function, job)

    def _reply(self, message: dict[str, Any], *, last: bool) -> None:
        # The end travels with the last score: as a message of its own it would come after the trainer has all it wants.
        if last:
            message["end"] = True
        send_json(self.sock, message)

    def _function(self, index: int) -> Any:
        if index not in self.functions:
            self.functions[index] = pickle.loads(self.pickles[index])
            warm_up = getattr(self.functions[index], "warm_up", None)
            if callable(warm_up):
                warm_up()
        return self.functions[index]

    def _score_whole(self, function: Any, job: dict[str, Any]) -> None:
        """Score all samples in one call, as TRL does."""
        seed_everything(job["seed"])
        recorder = LogRecorder()
        try:
            output = function(**call_keywords(job, None, recorder))
            if inspect.isawaitable(output):
                output = self._event_loop().run_until_complete(contained(output))
            records = [record_of(value) for value in coerce_rewards(output, job["num_samples"])]
        except BaseException as error:
            self._reply({"whole_failure": list(failure_of(error))}, last=True)
            return
        self._reply({"whole": records, "logs": recorder.calls}, last=True)

    def _score_each(self, function: Any, job: dict[str, Any]) -> None:
        """Score one sample per call."""
        for position in range(job["num_samples"]):
            reply: dict[str, Any] = {"sample": position}
            try:
                if job["is_verifier"]:
                    reply["score"] = record_of(judge(function, job, position))
                else:
                    seed_everything(job["seed"], position)
                    recorder = LogRecorder()
                    output = function(**call_keywords(job, position, recorder))
                    if inspect.isawaitable(output):
                        output = self._event_loop().run_until_complete(contained(output))
                    reply["score"] = record_of(coerce_rewards(output, 1)[0])
                    if recorder.calls:
                        reply["logs"] = recorder.calls
            except BaseException as error:
                reply["failure"] = list(failure_of(error))
            self._reply(reply, last=position + 1 == job["num_samples"])

    async def _score_each_async(self, function: Any, job: dict[str, Any]) -> None:
        """Score one sample per call, all calls at once: an async reward mostly waits for somebody else."""
        num_open = job["num_samples"]

        async def one(position: int) -> None:
            nonlocal num_open
            reply: dict[str, Any] = {"sample": position}
            recorder = LogRecorder()
            started = time.monotonic()
            try:
                call = function(**call_keywords(job, position, recorder))
                output = await asyncio.wait_for(contained(call), job["timeout_s"])
                reply["score"] = record_of(coerce_rewards(output, 1)[0])
                if recorder.calls:
                    reply["logs"] = recorder.calls
            except BaseException as error:
                reply["failure"] = list(failure_of(error))
                # A client that gave up earlier raises the same class; only ours comes when the time is over.
                if isinstance(error, asyncio.TimeoutError) and time.monotonic() - started >= job["timeout_s"]:
                    reply["failure"] = ["timeout", f"took more than {job['timeout_s']:g} s"]
            num_open -= 1
            self._reply(reply, last=num_open == 0)

        await asyncio.gather(*(one(position) for position in range(job["num_samples"])))

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self.loop is None:  # one loop per process: clients kept between calls are bound to theirs
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        return self.loop


class LogRecorder:
    """Stands in for TRL's ``log_extra`` and ``log_metric`` and keeps the calls for the trainer."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    def log_extra(self, column: str, values: Any) -> None:
        """Keep a column for the completions table."""
        if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__iter__"):
            self.calls.append(["extra", str(column), plain(values)])
        else:
            values = values.tolist() if hasattr(values, "tolist") else values
            self.calls.append(["extra", str(column), [plain(value) for value in values]])

    def log_metric(self, name: str, value: Any) -> None:
        """Keep a scalar metric."""
        self.calls.append(["metric", str(name), plain(value)])


def plain(value: Any) -> Any:
    """Return a value that JSON can carry: numbers, text, bools and None as they are, anything else as text."""
    if hasattr(value, "item") and not isinstance(value, (str, int, float)):
        try:
            value = value.item()
        except Exception:
            value = repr(value)
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return repr(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = value if isinstance(value, str) else repr(value)
    return text[:_MAX_LOGGED_CHARS]


def record_of(value: Any) -> list[Any]:
    """Return ``[score, reason, extracted, failure reason]`` of a coerced reward or a verdict."""
    if isinstance(value, BadValue):
        return [None, None, value.detail, value.reason]
    if isinstance(value, Score):
        return [value.value, value.reason, value.extracted, None]
    return [value, None, None, None]


def judge(function: Any, job: dict[str, Any], position: int) -> Score | BadValue:
    """Return a verifier's verdict on one sample of a job as a score or a bad value."""
    call = job["call"]
    return score_of(
        function.judge_row(
            call["prompts"][position] if "prompts" in call else None,
            call["completions"][position],
            call["completion_ids"][position] if call.get("completion_ids") is not None else None,
            {name: values[position] for name, values in job["columns"].items()},
        )
    )


def score_of(verdict: Verdict) -> Score | BadValue:
    """Return a verdict as a score that may be a reward, or as a bad value."""
    score = coerce_reward(verdict.score)
    if isinstance(score, BadValue):
        return score
    extracted = None if verdict.extracted is None else str(verdict.extracted)[:_MAX_LOGGED_CHARS]
    return Score(score, str(verdict.reason), extracted)


def call_keywords(job: dict[str, Any], position: int | None, recorder: LogRecorder) -> dict[str, Any]:
    """Return the keywords of a reward call, for one sample or (position None) for all samples of the job."""
    per_sample = {**job["call"], **job["columns"]}
    if position is not None:
        per_sample = {name: None if values is None else [values[position]] for name, values in per_sample.items()}
    constants = dict(job.get("constants", {}))
    if job.get("state") is not None:
        constants["trainer_state"] = pickle.loads(job["state"])
    for name in job["log_names"]:
        constants[name] = getattr(recorder, name)
    return {**per_sample, **constants}


def failure_of(error: BaseException, *, loading: bool = False) -> Failure:
    """Return the reason and the text for an exception that a reward raised."""
    if isinstance(error, ContainedError):
        error = error.original
    if isinstance(error, ShapeError):
        return Failure("bad_value", str(error))
    if isinstance(error, SystemExit):
        return Failure("exit", f"called sys.exit({error.code!r})"[:_MAX_DETAIL_CHARS])
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=-8))
    where = "could not be loaded in a worker process: " if loading else ""
    return Failure("exception", where + text[-_MAX_DETAIL_CHARS:])


def seed_everything(seed: int | None, position: int = 0) -> None:
    """Seed the global generators, so that a reward that draws random numbers does not depend on which worker it got."""
    if seed is None:
        return
    number = (seed + 1_000_003 * position) % 2**32
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number)
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "manual_seed"):
        torch.manual_seed(number)


class ContainedError(Exception):
    """Carries an exit out of a coroutine: asyncio would let it end the loop, and with it the process."""

    def __init__(self, original: BaseException) -> None:
        super().__init__(repr(original))
        self.original = original


async def contained(awaitable: Any) -> Any:
    """Return the result of an awaitable; SystemExit and KeyboardInterrupt come as ContainedError."""
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:
        raise ContainedError(error) from error
