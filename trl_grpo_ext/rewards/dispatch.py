"""Who scores what, and for how long: hands jobs to the worker pool, watches their deadlines, kills what is overdue."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Sequence

from trl_grpo_ext.rewards.outcome import Failure
from trl_grpo_ext.rewards.pool import Event, Worker, WorkerPool, waited_for_cpu_s
from trl_grpo_ext.rewards.scorings import EachScoring, Job, WholeScoring

_LOAD_TIMEOUT_S = 120.0
_STOP_CHECK_S = 0.5
# On a crowded machine a healthy sample may be late only because nobody let it run. More than this is not granted, so
# that a hang is still over within a second after its time limit.
_MAX_GRACE_S = 0.4


def score_in_workers(
    pool: WorkerPool,
    scorings: Sequence[EachScoring | WholeScoring],
    deadline: float,
    stop: threading.Event | None = None,
) -> dict[str, float]:
    """Run all scorings to their end on the pool, all at once, and return {name: monotonic time of its last score}.

    Args:
        pool: ready workers.
        scorings: one per function, with distinct names; each ends with a record for every sample.
        deadline: ``time.monotonic()`` after which what is left becomes a "batch_timeout".
        stop: when set by another thread, the deadline has come.
    """
    finished_at: dict[str, float] = {}
    order: collections.deque[EachScoring | WholeScoring] = collections.deque(scorings)
    try:
        while True:
            now = time.monotonic()
            if now >= deadline or (stop is not None and stop.is_set()):
                _give_up(pool, scorings)
            for scoring in scorings:
                scoring.tick(now)
                if scoring.finished and scoring.name not in finished_at:
                    finished_at[scoring.name] = now
                    _stop_jobs_of(pool, scoring)
            if len(finished_at) == len(scorings):
                return finished_at
            _stop_overdue(pool)
            pool.fill(extra=sum(isinstance(scoring, WholeScoring) and scoring.hedged for scoring in scorings))
            _hand_out(pool, order, now)
            wait_s = _next_wake(pool, scorings, deadline) - time.monotonic()
            for event in pool.wait(min(wait_s, _STOP_CHECK_S) if stop is not None else wait_s):
                _take(event)
    finally:
        for worker in pool.busy():  # only where an exception, such as Ctrl-C, cut the loop short
            pool.kill(worker)
        pool.fill()


def _hand_out(pool: WorkerPool, order: collections.deque[EachScoring | WholeScoring], now: float) -> None:
    """Give idle workers jobs, function by function in turn, so that no reward waits for another."""
    idle = pool.idle()
    without_job = 0
    while idle and without_job < len(order):
        scoring = order[0]
        order.rotate(-1)
        job = scoring.next_job(now) if _may_go_out(pool, scoring, idle) else None
        if job is None:
            without_job += 1
            continue
        without_job = 0
        worker = _worker_for(job, idle)
        idle.remove(worker)
        try:
            message = job.scoring.make_job(job.samples, job.whole, job.scoring.timeout_s)
            if not pool.submit(worker, job, message):
                job.scoring.on_lost(job, Failure("crash", "the worker was dead before it got its job"))
        except Exception as error:  # a column that does not pickle
            scoring.unsendable = error
            scoring.give_up(Failure("exception", f"its arguments cannot be sent to a worker process: {error!r}"))


def _may_go_out(pool: WorkerPool, scoring: EachScoring | WholeScoring, idle: Sequence[Worker]) -> bool:
    """Return False while the worker with the state of a reward is busy with something else."""
    if not isinstance(scoring, WholeScoring) or not scoring.keeps_state or scoring.given_out:
        return True
    home = pool.home_of(scoring.name)
    return home is None or home in idle


def _worker_for(job: Job, idle: Sequence[Worker]) -> Worker:
    """Return the worker that had the reward's last batch call, so that what it keeps between batches is there."""
    name = job.scoring.name
    if not job.whole:
        return next((worker for worker in reversed(idle) if not worker.homes), idle[-1])
    worker = next((worker for worker in idle if name in worker.homes), idle[0])
    worker.homes.add(name)
    return worker


def _take(event: Event) -> None:
    job: Job | None = event.worker.job
    if job is None:
        return
    if event.kind == "died":
        event.worker.job = None
        assert event.failure is not None
        job.scoring.on_lost(job, event.failure)
        return
    assert event.message is not None
    if "begin" in event.message:
        job.state["begun"] = True
    job.scoring.on_reply(job, event.message)
    if "end" in event.message:
        event.worker.job = None
        job.scoring.on_end(job)


def _limit_of(worker: Worker) -> float | None:
    """Return the monotonic time at which a busy worker is overdue, None if it has no limit of its own."""
    job: Job = worker.job
    if not job.state.get("begun"):
        return worker.last_heard + _LOAD_TIMEOUT_S
    limit_s = job.scoring.limit_s(job)
    if limit_s is None:
        return None
    # Noted by ``_overdue``; a later sample of the job starts without it.
    grace_s = job.state["grace_s"] if job.state.get("grace_since") == worker.last_heard else 0.0
    return worker.last_heard + limit_s + grace_s


def _stop_overdue(pool: WorkerPool) -> None:
    """Kill workers that are silent for too long."""
    if not _overdue(pool):
        return
    # The trainer may have been busy itself: what has arrived in the meantime counts before anybody is killed.
    for event in pool.wait(0):
        _take(event)
    for worker in _overdue(pool):
        job = worker.job
        begun = job.state.get("begun")
        limit_s = job.scoring.timeout_s if begun else _LOAD_TIMEOUT_S
        pool.kill(worker)
        what = "took" if begun else "took to load"
        job.scoring.on_lost(job, Failure("timeout", f"{what} more than {limit_s:g} s and was stopped"))


def _overdue(pool: WorkerPool) -> list[Worker]:
    """Return the workers whose time is up, after allowing for time in which they did not get a processor."""
    now = time.monotonic()
    found = []
    for worker in pool.busy():
        limit, state = _limit_of(worker), worker.job.state
        if limit is None or now < limit:
            continue
        if state.get("begun") and state.get("grace_since") != worker.last_heard:
            waited_s = waited_for_cpu_s(worker.pid) - worker.waited_before_s
            state["grace_s"], state["grace_since"] = min(max(0.0, waited_s), _MAX_GRACE_S), worker.last_heard
            limit += state["grace_s"]
        if now >= limit:
            found.append(worker)
    return found


def _stop_jobs_of(pool: WorkerPool, scoring: EachScoring | WholeScoring) -> None:
    """End work whose result nobody needs any more."""
    split = scoring.split if isinstance(scoring, WholeScoring) else None
    for worker in pool.busy():
        if worker.job.scoring is scoring or (split is not None and worker.job.scoring is split):
            pool.kill(worker)


def _give_up(pool: WorkerPool, scorings: Sequence[EachScoring | WholeScoring]) -> None:
    failure = Failure("batch_timeout", "the time limit of the batch passed before this sample had its score")
    for scoring in scorings:
        if not scoring.finished:
            scoring.give_up(failure)


def _next_wake(pool: WorkerPool, scorings: Sequence[EachScoring | WholeScoring], deadline: float) -> float:
    times = [deadline]
    times += [tick for scoring in scorings if (tick := scoring.next_tick()) is not None]
    times += [limit for worker in pool.busy() if (limit := _limit_of(worker)) is not None]
    return min(times)
