"""The reward runner: scores a batch under several rewards, none of which can kill, hang or poison the run.

Order of one batch: look up what is cached, give the rest to the worker processes (and to the training process, what
has to run there), all rewards at once; then turn failures into None with a reason, count, and log.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from trl_grpo_ext.errors import ConfigurationError, RewardError, nearest
from trl_grpo_ext.rewards.cache import RewardCache
from trl_grpo_ext.rewards.dispatch import score_in_workers
from trl_grpo_ext.rewards.in_process import InProcessScoring, RewardRandomness
from trl_grpo_ext.rewards.log_calls import deliver
from trl_grpo_ext.rewards.outcome import FailedSample, Failure, FailureBudget, RewardOutcome, Score
from trl_grpo_ext.rewards.placing import Isolation, plan_reward
from trl_grpo_ext.rewards.pool import WorkerPool
from trl_grpo_ext.rewards.registry import required_columns
from trl_grpo_ext.rewards.scorings import EachScoring, MakeJob, WholeScoring
from trl_grpo_ext.rewards.summary import RewardSummary
from trl_grpo_ext.rewards.verifier import VerifierReward
from trl_grpo_ext.rewards.work import Batch, Work, job_maker


def default_num_workers() -> int:
    """Return the number of workers per training process: the usable cores shared by the node's ranks, 2 to 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
    return max(2, min(8, cores // ranks))


class RewardRunner:
    """Scores batches under K reward functions.

    Attributes:
        names: K distinct display names.
        plans: K plans; ``plan.why_here`` says why a reward runs in the training process.
        cache: scores of deterministic rewards.
        budget: give it the failure counts of every outcome, summed over ranks; it stops the run when they are too many.
    """

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        names: Sequence[str],
        *,
        timeout_s: float = 30.0,
        batch_timeout_s: float | None = None,
        num_workers: int | None = None,
        max_failure_rate: float = 0.2,
        cache_entries: int = 100_000,
        cache_path: str | os.PathLike[str] | None = None,
        isolate: Isolation = "auto",
        worker_memory_gib: float | None = None,
        async_loop: asyncio.AbstractEventLoop | None = None,
        seed: int = 0,
    ) -> None:
        """Place the rewards and start the workers in the background.

        Args:
            functions: K callables with TRL's reward signature; a reward model (``nn.Module``) is not taken.
            names: K distinct display names.
            timeout_s: most seconds for one sample, > 0. A worker that needs longer is killed.
            batch_timeout_s: most seconds for a batch, >= ``timeout_s``. None: four times ``timeout_s``.
            num_workers: worker processes, >= 1. None: the cores shared by the node's ranks, 2 to 8.
            max_failure_rate: largest tolerated share of failed samples of a step, 0 to 1; see ``FailureBudget``.
            cache_entries: most scores of deterministic rewards kept in memory; 0 caches nothing.
            cache_path: file in which they outlive the run.
            isolate: "auto", "always" (refuse what cannot be isolated) or "never".
            worker_memory_gib: address space of a worker; None sets no limit.
            async_loop: running event loop for async rewards of the training process; None: one is made when needed.
            seed: of the random generators that rewards see in the workers.

        Raises:
            ConfigurationError: for a value out of range, or a function that is no callable.
            SandboxError: if a reward needs a sandbox and this machine has none that is safe.
        """
        _check_settings(functions, names, timeout_s, batch_timeout_s, num_workers, cache_entries, isolate)
        self.names = list(names)
        self.timeout_s = timeout_s
        self.batch_timeout_s = batch_timeout_s if batch_timeout_s is not None else 4 * timeout_s
        self.plans = [plan_reward(function, name, isolate) for function, name in zip(functions, names, strict=True)]
        self.cache = RewardCache(cache_entries, cache_path)
        self.budget = FailureBudget(self.names, max_failure_rate)
        self._num_workers = num_workers or default_num_workers()
        self._memory_gib = worker_memory_gib
        self._isolate = isolate
        self._loop = async_loop
        self._own_loop: asyncio.AbstractEventLoop | None = None
        self._seed = seed
        self._num_batches = 0
        self._randomness = RewardRandomness()
        self._summary = RewardSummary(self.names)
        self._lock = threading.Lock()
        self._pool: WorkerPool | None = None
        self._start_pool()
        for plan in self.plans:
            if plan.pickled is None and isinstance(plan.function, VerifierReward):
                plan.function.warm_up()

    # -- life ---------------------------------------------------------------------------------------------------------

    def _start_pool(self) -> None:
        isolated = [plan for plan in self.plans if plan.pickled is not None]
        for index, plan in enumerate(isolated):
            plan.pool_index = index
        if isolated:
            pickles = [plan.pickled for plan in isolated if plan.pickled is not None]
            self._pool = WorkerPool(pickles, self._num_workers, memory_gib=self._memory_gib)

    def _ready_pool(self) -> WorkerPool | None:
        """Return the pool with its workers ready; what no worker can load moves to the training process."""
        if self._pool is not None and self._pool.owner_pid != os.getpid():
            self._pool = None  # this is a forked copy of the trainer; the workers belong to the original
        if self._pool is None:
            self._start_pool()
        if self._pool is None:
            return None
        self._pool.ensure_ready()
        for plan in self.plans:
            if plan.pickled is not None and plan.pool_index in self._pool.load_errors:
                why = f"a worker process cannot load it ({self._pool.load_errors[plan.pool_index].strip()})"
                if self._isolate == "always":
                    raise ConfigurationError(f"reward {plan.name!r} cannot run in a worker process: {why}")
                plan.move_here(why)
        return self._pool

    def worker_pids(self) -> list[int]:
        """Return the process numbers of the workers."""
        with self._lock:
            return [] if self._pool is None else self._pool.pids()

    def close(self) -> None:
        """End the workers and write the cache. Safe to call twice; also done when the interpreter exits."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        self.cache.close()
        if self._own_loop is not None:
            self._own_loop.call_soon_threadsafe(self._own_loop.stop)
            self._own_loop = None

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- one batch ----------------------------------------------------------------------------------------------------

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Any] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
        *,
        trainer_state: Any = None,
        log_extra: Callable[[str, Any], None] | None = None,
        log_metric: Callable[[str, Any], None] | None = None,
        environments: Sequence[Any] | None = None,
    ) -> RewardOutcome:
        """Return the rewards of a batch of B completions.

        Never raises because of what a reward does; it is for the caller to give the counts to a ``FailureBudget``.

        Args:
            prompts: B prompts, text or messages.
            completions: B completions, text or messages.
            completion_ids: B lists of token ids.
            columns: {data-set column: B values}.
            trainer_state: TRL's state; workers get a copy of its values, the log history cut to its last 100 entries.
            log_extra: TRL's function for columns of the completions table.
            log_metric: TRL's function for scalar metrics.
            environments: B live environments; only rewards in the training process see them.

        Raises:
            RewardError: if a column that a reward needs is missing, or the workers cannot be started.
        """
        with self._lock:
            self._num_batches += 1
            started = time.monotonic()
            batch = Batch(prompts, completions, completion_ids, dict(columns or {}), trainer_state, environments)
            self._check_columns(batch)
            for plan in self.plans:
                if environments is not None and plan.pickled is not None and plan.accepted.everything:
                    plan.move_here("it takes **kwargs, and with them the live environments")
            pool = self._ready_pool() if batch.size else None
            works = [Work(plan, batch, self.cache) for plan in self.plans]
            loaded = time.monotonic()  # loading the functions, once, is not held against the first batch
            self._run(works, batch, pool, loaded + self.batch_timeout_s)
            calls = {work.plan.name: work.log_calls() for work in works}
            self._store(works)
            outcome = self._outcome(works, batch, started)
        deliver(calls, log_extra, log_metric)
        return outcome

    def _check_columns(self, batch: Batch) -> None:
        for plan in self.plans:
            for column in required_columns(plan.function):
                if column not in batch.columns:
                    raise RewardError(
                        f"reward {plan.name!r} needs the column {column!r}; the batch has "
                        f"{', '.join(sorted(batch.columns)) or 'none'}.{nearest(column, batch.columns)}"
                    )

    def _run(self, works: list[Work], batch: Batch, pool: WorkerPool | None, deadline: float) -> None:
        """Score what the cache does not know: worker processes and training process at the same time."""
        seed = self._seed + 7919 * self._num_batches
        outside: list[tuple[Work, EachScoring | WholeScoring]] = []
        inside: list[tuple[Work, InProcessScoring]] = []
        for number, work in enumerate(works):
            if not work.samples:
                continue
            if work.plan.pickled is None:
                inside.append((work, self._in_process(work, batch)))
            else:
                outside.append((work, self._in_workers(work, job_maker(work, batch, seed + 104_729 * number))))
        # Quick ones first: a batch call that hangs must not keep every worker from them.
        outside.sort(key=lambda pair: (not pair[0].plan.per_sample, pair[0].plan.usual_s))
        if outside and inside:
            self._run_both(outside, inside, pool, deadline)
        elif outside:
            self._run_outside(outside, pool, deadline, None)
        else:
            self._run_inside(inside, deadline)
        unsendable = []
        for work, scoring in outside:
            if scoring.unsendable is not None:
                work.plan.move_here(f"a column it reads cannot be pickled ({scoring.unsendable!r:.200})")
                unsendable.append((work, self._in_process(work, batch)))
        self._run_inside(unsendable, deadline)

    def _run_both(
        self,
        outside: list[tuple[Work, EachScoring | WholeScoring]],
        inside: list[tuple[Work, InProcessScoring]],
        pool: WorkerPool | None,
        deadline: float,
    ) -> None:
        stop = threading.Event()
        errors: list[BaseException] = []

        def run_outside() -> None:
            try:
                self._run_outside(outside, pool, deadline, stop)
            except BaseException as error:
                errors.append(error)

        # The rewards of the training process keep the calling thread: some, such as those with an alarm, need it.
        thread = threading.Thread(target=run_outside, name="reward-workers", daemon=True)
        thread.start()
        try:
            self._run_inside(inside, deadline)
        except BaseException:
            stop.set()
            raise
        finally:
            thread.join()
        if errors:
            raise errors[0]

    def _run_outside(
        self,
        works: list[tuple[Work, EachScoring | WholeScoring]],
        pool: WorkerPool | None,
        deadline: float,
        stop: threading.Event | None,
    ) -> None:
        assert pool is not None
        finished = score_in_workers(pool, [scoring for _, scoring in works], deadline, stop)
        for work, scoring in works:
            work.scoring, work.finished_at = scoring, finished[scoring.name]

    def _run_inside(self, works: list[tuple[Work, InProcessScoring]], deadline: float) -> None:
        if not works:
            return
        with self._randomness.swapped_in():
            for work, scoring in works:
                scoring.run(deadline)
                work.scoring, work.finished_at = scoring, scoring.finished_at

    def _in_workers(self, work: Work, make_job: MakeJob) -> EachScoring | WholeScoring:
        plan = work.plan
        if plan.per_sample or (len(work.samples) == 1 and plan.may_split):
            return EachScoring(
                plan.name,
                work.samples,
                make_job,
                timeout_s=self.timeout_s,
                num_workers=self._num_workers,
                is_async=plan.is_async,
            )
        return WholeScoring(
            plan.name,
            len(work.samples),
            make_job,
            timeout_s=self.timeout_s,
            num_workers=self._num_workers,
            is_async=plan.is_async,
            may_split=plan.may_split,
            usual_s=plan.usual_s,
            keeps_state=bool(plan.changes),
        )

    def _in_process(self, work: Work, batch: Batch) -> InProcessScoring:
        plan = work.plan
        job = job_maker(work, batch, None, in_process=True)(work.samples, not plan.per_sample, self.timeout_s)
        return InProcessScoring(
            plan.name,
            plan.function,
            job,
            timeout_s=self.timeout_s,
            may_split=plan.may_split,
            per_sample=plan.per_sample,
            loop=self._event_loop() if plan.is_async else self._loop,
        )

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        """Return a running loop of another thread for async rewards."""
        if self._loop is not None:
            return self._loop
        if self._own_loop is None:
            self._own_loop = asyncio.new_event_loop()
            threading.Thread(target=self._own_loop.run_forever, name="reward-loop", daemon=True).start()
        return self._own_loop

    def _store(self, works: list[Work]) -> None:
        """Collect the records and remember what the next batches can use."""
        for work in works:
            work.collect()
            if isinstance(work.scoring, WholeScoring) and work.scoring.seconds is not None:
                work.plan.note_duration(work.scoring.seconds)
            logged = work.sample_logs()
            for sample, key in work.keys.items():
                record = work.records[sample]
                # A score that came with log calls would lose them the next time.
                if isinstance(record, Score) and sample not in logged:
                    self.cache.put(key, record)
        self.cache.flush()

    def _outcome(self, works: list[Work], batch: Batch, started: float) -> RewardOutcome:
        """Return the records of all functions as rewards, failures and metrics, and log what is new."""
        seconds = [0.0 if work.finished_at is None else work.finished_at - started for work in works]
        records = [[work.records[sample] for sample in range(batch.size)] for work in works]
        failures = [
            FailedSample(work.plan.name, sample, record.reason, record.detail)
            for work, row in zip(works, records, strict=True)
            for sample, record in enumerate(row)
            if isinstance(record, Failure)
        ]
        for work in works:
            self._summary.report(work, batch)
        return RewardOutcome(
            rewards=[[record.value if isinstance(record, Score) else None for record in row] for row in records],
            reasons=[[record.reason for record in row] for row in records],
            failures=failures,
            failure_counts=[sum(failure.function == name for failure in failures) for name in self.names],
            call_counts=[batch.size] * len(self.names),
            seconds=seconds,
            metrics=self._summary.metrics(works, seconds),
        )


def _check_settings(
    functions: Sequence[Any],
    names: Sequence[str],
    timeout_s: float,
    batch_timeout_s: float | None,
    num_workers: int | None,
    cache_entries: int,
    isolate: str,
) -> None:
    """Raise ConfigurationError for a setting out of range."""
    if len(names) != len(functions) or len(set(names)) != len(names):
        raise ConfigurationError(
            f"{len(functions)} rewards need as many distinct names, got {list(names)}; "
            "registry.unique_names makes them distinct"
        )
    if not 0 < timeout_s < float("inf"):
        raise ConfigurationError(f"reward_timeout_s={timeout_s!r} is not allowed; it must be seconds above 0")
    if batch_timeout_s is not None and not timeout_s <= batch_timeout_s < float("inf"):
        raise ConfigurationError(
            f"reward_batch_timeout_s={batch_timeout_s!r} is not allowed; it must be at least "
            f"reward_timeout_s={timeout_s:g}"
        )
    if num_workers is not None and num_workers < 1:
        raise ConfigurationError(f"reward_num_workers={num_workers!r} is not allowed; it must be at least 1")
    if cache_entries < 0:
        raise ConfigurationError(f"reward_cache_entries={cache_entries!r} is not allowed; 0 switches the cache off")
    if isolate not in get_args(Isolation):
        raise ConfigurationError(
            f"reward_isolation={isolate!r} is not allowed; it must be one of {', '.join(get_args(Isolation))}."
            + nearest(isolate, get_args(Isolation))
        )
