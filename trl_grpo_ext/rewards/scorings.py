"""How a batch under one reward is cut into jobs for workers, and what is done when one fails.

A reward that scores samples one at a time (a verifier) is split over the workers. Any other reward gets the whole batch
in one call, as in TRL, because it may compare completions with each other. Only when that call fails is the batch
scored one sample per call, so that one bad sample of eight costs one score and not eight. A call that merely lasts is
not disturbed: the samples are tried one at a time beside it, and it is given up only once one of them is seen to hang
or crash on its own.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from trl_grpo_ext.rewards.coerce import BadValue, coerce_reward
from trl_grpo_ext.rewards.outcome import Failure, Score

Record = Score | Failure
MakeJob = Callable[[Sequence[int], bool, float], dict[str, Any]]

_HEDGE_SHARE = 0.25  # of the sample's time limit, after which samples are tried beside a lasting call …
_MAX_HEDGE_S = 0.4  # … but no later than this, so that a hang costs at most the limit and a little more
_ASYNC_GRACE_S = 0.25


class Job(NamedTuple):
    """What one worker works on: samples of one scoring."""

    scoring: EachScoring | WholeScoring
    samples: list[int]
    whole: bool
    done: set[int]
    state: dict[str, Any]  # "begun": the worker has started to score


class EachScoring:
    """Scores samples one per call, in chunks spread over the workers."""

    def __init__(
        self,
        name: str,
        samples: Sequence[int],
        make_job: MakeJob,
        *,
        timeout_s: float,
        num_workers: int,
        is_async: bool = False,
    ) -> None:
        self.name = name
        self.make_job = make_job
        self.timeout_s = timeout_s
        self.is_async = is_async
        self.records: dict[int, Record] = {}
        self.logs: dict[int, list[list[Any]]] = {}
        self.waiting = set(samples)
        self.unsendable: Exception | None = None  # its arguments do not pickle
        self.proven = False  # a sample hung or crashed on its own
        # Chunks small enough to even out, large enough that a message per chunk does not matter.
        size = max(1, min(32, -(-len(samples) // (4 * num_workers)))) if not is_async else max(1, len(samples))
        ordered = list(samples)
        self.chunks = collections.deque(ordered[start : start + size] for start in range(0, len(ordered), size))

    @property
    def finished(self) -> bool:
        return not self.waiting

    def next_job(self, now: float) -> Job | None:
        """Return the next chunk, if any is left."""
        return Job(self, self.chunks.popleft(), False, set(), {}) if self.chunks else None

    def tick(self, now: float) -> None:
        """Do nothing: nothing changes with time alone."""

    def next_tick(self) -> float | None:
        """Return when ``tick`` has something to do: never."""
        return None

    def limit_s(self, job: Job) -> float | None:
        """Return how long the worker may be silent."""
        return self.timeout_s + (_ASYNC_GRACE_S if self.is_async else 0.0)

    def settle(self, sample: int, record: Record) -> None:
        """Note the record of a sample, unless it has one already."""
        if sample in self.waiting:
            self.waiting.discard(sample)
            self.records[sample] = record

    def on_reply(self, job: Job, message: dict[str, Any]) -> None:
        """Take a sample's reply."""
        position = message.get("sample")
        if not isinstance(position, int) or not 0 <= position < len(job.samples):
            return
        job.done.add(position)
        sample = job.samples[position]
        if sample in self.waiting and message.get("logs"):
            self.logs[sample] = message["logs"]
        record = read_record(message)
        if isinstance(record, Failure) and record.reason == "timeout":
            self.proven = True
        self.settle(sample, record)

    def on_end(self, job: Job) -> None:
        """Take the end of a chunk; a sample without a reply has failed."""
        for sample in job.samples:
            self.settle(sample, Failure("crash", "the worker ended its job without a word on this sample"))

    def on_lost(self, job: Job, failure: Failure) -> None:
        """Take the loss of the worker: the sample it was at is the culprit, the others are scored again."""
        open_positions = [position for position in range(len(job.samples)) if position not in job.done]
        if not open_positions:
            return
        if self.is_async and len(open_positions) > 1:
            # All were under way, so nobody knows whose fault it was.
            self.chunks.extend([job.samples[position]] for position in open_positions)
            return
        self.proven = True
        self.settle(job.samples[open_positions[0]], failure)
        rest = [job.samples[position] for position in open_positions[1:]]
        if rest:
            self.chunks.append(rest)

    def give_up(self, failure: Failure) -> None:
        """Settle whatever has no score yet."""
        self.chunks.clear()
        for sample in list(self.waiting):
            self.settle(sample, failure)


class WholeScoring:
    """Scores the batch in one call, and one sample per call where that fails."""

    def __init__(
        self,
        name: str,
        num_samples: int,
        make_job: MakeJob,
        *,
        timeout_s: float,
        num_workers: int,
        is_async: bool = False,
        may_split: bool = True,
        usual_s: float = 0.0,
        keeps_state: bool = False,
    ) -> None:
        """Prepare the call.

        Args:
            name: display name.
            num_samples: size of the batch.
            make_job: makes the message for a worker from (samples, whole, timeout_s).
            timeout_s: time limit of one sample; of the whole call if it may not be split.
            num_workers: size of the pool.
            is_async: the function is a coroutine function.
            may_split: False if samples must not be scored one at a time.
            usual_s: longest that whole calls of this function took lately; none counts as slow before twice that.
            keeps_state: True sends every batch call to the same worker, as long as that lives.
        """
        self.name = name
        self.make_job = make_job
        self.timeout_s = timeout_s
        self.may_split = may_split
        self.keeps_state = keeps_state
        self.samples = list(range(num_samples))
        self.records: dict[int, Record] = {}
        self.logs: dict[int, list[list[Any]]] = {}
        self.whole_logs: list[list[Any]] | None = None
        self.split_used = False
        self.unsendable: Exception | None = None  # its arguments do not pickle
        self.seconds: float | None = None  # how long the whole call took
        self._new_split = lambda: EachScoring(
            name, self.samples, make_job, timeout_s=timeout_s, num_workers=num_workers, is_async=is_async
        )
        self._patience_s = max(min(_HEDGE_SHARE * timeout_s, _MAX_HEDGE_S), 2 * usual_s)
        self.given_out = False
        self._begun_at: float | None = None
        self._whole_failed: Failure | None = None
        self.split: EachScoring | None = None

    @property
    def finished(self) -> bool:
        return bool(self.records)

    @property
    def hedged(self) -> bool:
        """Whether samples are tried while the whole call still runs; that call then takes no place in the pool."""
        return self.split is not None and self._whole_failed is None and not self.finished

    def next_job(self, now: float) -> Job | None:
        """Return the whole call first, then chunks of the split."""
        if self.finished:
            return None
        if not self.given_out:
            self.given_out = True
            return Job(self, self.samples, True, set(), {})
        return self.split.next_job(now) if self.split is not None else None

    def next_tick(self) -> float | None:
        """Return when the whole call counts as slow."""
        waits = self.may_split and self.split is None and self._begun_at is not None and not self.finished
        return self._begun_at + self._patience_s if waits and self._begun_at is not None else None

    def tick(self, now: float) -> None:
        """Start the split beside a slow call, and take its records over once that is justified."""
        due = self.next_tick()
        if due is not None and now >= due:
            self.split = self._new_split()
        if self._whole_failed is not None and self.split is not None and self.split.finished and not self.finished:
            self._take_split()

    def limit_s(self, job: Job) -> float | None:
        """Return how long the whole call may last: until a sample is seen to hang or crash alone."""
        if not self.may_split:
            return self.timeout_s
        return 0.0 if self.split is not None and self.split.proven else None

    def on_reply(self, job: Job, message: dict[str, Any]) -> None:
        """Take the start or the result of the whole call."""
        now = time.monotonic()
        if "begin" in message:
            self._begun_at = now
        elif "whole_failure" in message:
            self._fail(read_failure(message["whole_failure"]))
        elif isinstance(message.get("whole"), list) and len(message["whole"]) == len(self.samples):
            self.records = {sample: read_record({"score": entry}) for sample, entry in enumerate(message["whole"])}
            self.whole_logs = message.get("logs") or []
            self.seconds = now - (self._begun_at or now)
        elif "sample" in message:  # the function could not be loaded
            self._fail(read_failure(message.get("failure")), final=True)

    def on_end(self, job: Job) -> None:
        """Take the end of the job; by now it has a result or has failed."""
        if not self.finished and self._whole_failed is None:
            self._fail(Failure("crash", "the worker ended its job without a result"))

    def on_lost(self, job: Job, failure: Failure) -> None:
        """Take the loss of the worker that had the whole call."""
        if not self.finished:
            self._fail(failure)

    def _fail(self, failure: Failure, final: bool = False) -> None:
        self._whole_failed = failure
        # A return value of the wrong shape is a mistake of the function; one sample at a time it could look right.
        if not self.may_split or final or failure.reason == "bad_value":
            self.records = dict.fromkeys(self.samples, failure)
        elif self.split is None:
            self.split = self._new_split()
        elif self.split.finished:
            self._take_split()

    def _take_split(self) -> None:
        assert self.split is not None
        self.records, self.logs, self.split_used = self.split.records, self.split.logs, True

    def give_up(self, failure: Failure) -> None:
        """Settle whatever has no score yet, with what the split has found so far."""
        if self.split is not None:
            self.split.give_up(failure)
            self._take_split()
        else:
            self.records = dict.fromkeys(self.samples, failure)


def read_record(message: dict[str, Any]) -> Record:
    """Return the score or failure in a worker's reply. A worker is not trusted, so the value is checked again."""
    if "failure" in message:
        return read_failure(message["failure"])
    entry = message.get("score")
    if not isinstance(entry, list) or len(entry) != 4:
        return Failure("crash", "the worker sent a reply that is no score")
    value, reason, text, failed = entry
    if failed is not None:
        return Failure(str(failed), str(text))
    score = (
        coerce_reward(value) if value is None or isinstance(value, (int, float)) else BadValue("bad_value", "no number")
    )
    if isinstance(score, BadValue):
        return Failure(score.reason, score.detail)
    return Score(score, None if reason is None else str(reason), None if text is None else str(text))


def read_failure(entry: Any) -> Failure:
    """Return the failure in a worker's reply."""
    if isinstance(entry, list) and len(entry) == 2:
        return Failure(str(entry[0]), str(entry[1]))
    return Failure("crash", "the worker sent a failure that cannot be read")
