"""A pool of confined processes: many programs at once, driven by the calling thread alone.

There are no threads and no event loop of its own, so that it works from the main thread, a worker thread, inside an
asyncio loop (which it blocks) and in a spawned child. Work comes as generators that yield runs and receive their
results, so that a program's second test starts as soon as its first has passed, while other programs go on.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trl_grpo_ext.errors import ConfigurationError, SandboxError
from trl_grpo_ext.rewards.sandbox import backends
from trl_grpo_ext.rewards.sandbox.limits import SandboxLimits
from trl_grpo_ext.rewards.sandbox.process import Confined, ForkServer
from trl_grpo_ext.rewards.sandbox.reasons import classify
from trl_grpo_ext.rewards.sandbox.results import End, ProcessResult, ProgramResult

logger = logging.getLogger(__name__)

_TICK_S = 0.02
_WORKERS_PER_SERVER = 16
_ATTEMPTS = 2


@dataclass(frozen=True)
class Script:
    """Run a program as ``__main__`` on one standard input. Its result is a :class:`ProgramResult`."""

    source: str
    stdin: bytes = b""


@dataclass(frozen=True)
class Judged:
    """Run a program as a library under tests (see ``guest.judge.run``). Its result is a :class:`JudgedResult`."""

    source: str
    task: dict[str, Any]


@dataclass(frozen=True)
class JudgedResult:
    """Both processes of a :class:`Judged` run.

    Attributes:
        program: the program's process.
        judge: the tests' process.
        verdict: what the judge sent; None if it did not get that far.
    """

    program: ProcessResult
    judge: ProcessResult
    verdict: dict[str, Any] | None


Work = Generator["Script | Judged", Any, Any]


class _Run:
    """One run in progress."""

    def __init__(self, server: ForkServer, order: Script | Judged, limits: SandboxLimits) -> None:
        self.server, self._order, self._limits = server, order, limits
        if isinstance(order, Script):
            source = order.source.encode("utf-8", "surrogatepass")
            self.processes = [Confined(server, "script", source, limits, stdin=order.stdin, capture=True)]
            return
        ours, theirs = socket.socketpair()
        wall_s = limits.effective_wall_s
        patient = dataclasses.replace(limits, cpu_s=limits.cpu_s + 2, wall_s=wall_s + limits.cpu_s + 5, scratch_mib=0)
        source = order.source.encode("utf-8", "surrogatepass")
        payload = json.dumps(order.task).encode()
        self.processes = [
            Confined(server, "calls", source, limits, fds={3: theirs.detach()}, channel=False),
            Confined(server, "judge", payload, patient, fds={4: ours.detach()}),
        ]

    @property
    def done(self) -> bool:
        if len(self.processes) == 2 and self.processes[1].result is not None:
            self.processes[0].kill(End.CANCELLED)  # nobody asks it any more
        return all(process.result is not None for process in self.processes)

    @property
    def faulty(self) -> bool:
        return any(process.result is not None and process.result.end is End.FAULT for process in self.processes)

    def result(self) -> ProgramResult | JudgedResult:
        results = [process.result for process in self.processes]
        assert results[0] is not None
        if isinstance(self._order, Script):
            return classify(results[0])
        assert results[1] is not None
        return JudgedResult(results[0], results[1], _verdict(results[1].channel))

    def abandon(self) -> None:
        for process in self.processes:
            process.abandon()


def _verdict(channel: bytes) -> dict[str, Any] | None:
    """Return the judge's message if it is whole and has the right shape."""
    try:
        message = json.loads(channel[4:])
    except (ValueError, RecursionError):
        return None
    shape = {"outcomes": list, "detail": str, "calls": int, "fault": str}
    if not isinstance(message, dict) or any(not isinstance(message.get(key), kind) for key, kind in shape.items()):
        return None
    return message


def default_workers() -> int:
    """Return how many programs run at once unless said otherwise: two per processor that this process may use."""
    try:
        processors = len(os.sched_getaffinity(0))
    except AttributeError:
        processors = os.cpu_count() or 1
    return max(2, min(2 * processors, 64))


class SandboxPool:
    """Runs programs in confined processes.

    Args:
        limits: of each program.
        workers: programs at a time; None means two per processor.
        backend: "auto" (the best that its canary shows to hold), a name from ``backends.BACKENDS``, or "unsafe".
        packages: installed packages that programs may import besides the standard library.

    Raises:
        ConfigurationError: for an unknown backend, or a scratch folder without namespaces asked for.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        workers: int | None = None,
        backend: str = "auto",
        packages: Sequence[str] = (),
    ) -> None:
        self.limits = limits or SandboxLimits()
        self.workers = default_workers() if workers is None else workers
        if isinstance(self.workers, bool) or not isinstance(self.workers, int) or self.workers < 1:
            raise ConfigurationError(f"workers={workers!r} must be an integer of at least 1")
        self._disabled = backends.disabled_layers(backend)
        if self.limits.scratch_mib and "namespaces" in self._disabled:
            raise ConfigurationError(
                f"scratch_mib={self.limits.scratch_mib} needs namespaces, which backend={backend!r} does without"
            )
        self._backend, self._packages = backend, tuple(packages)
        self._lock = threading.RLock()
        self._slots = threading.BoundedSemaphore(self.workers)
        self._servers: list[ForkServer] = []
        self._owner = os.getpid()
        self._report: backends.SandboxReport | None = None
        self.counters = {"programs": 0, "faults": 0, "restarts": 0}
        _POOLS.add(self)

    @property
    def report(self) -> backends.SandboxReport:
        """What confines the programs; starts the first server if none runs yet.

        Raises:
            SandboxError: if this machine offers no safe way.
        """
        self._server(0)
        assert self._report is not None
        return self._report

    def run_program(self, source: str, stdin: str | bytes = b"") -> ProgramResult:
        """Run one program as a script and return its result."""
        return self.run_programs([(source, stdin)])[0]

    def run_programs(self, programs: Iterable[tuple[str, str | bytes]]) -> list[ProgramResult]:
        """Run (source, standard input) pairs and return their results in order."""

        def work(source: str, stdin: str | bytes) -> Work:
            data = stdin.encode("utf-8", "surrogatepass") if isinstance(stdin, str) else stdin
            return (yield Script(source, data))

        return self.drive([work(source, stdin) for source, stdin in programs])

    def drive(self, works: Sequence[Work]) -> list[Any]:
        """Drive all works to their end, ``workers`` at a time, and return what they return, in order.

        Raises:
            SandboxError: if there is no safe way to run programs, or the server cannot be started.
        """
        results: list[Any] = [None] * len(works)
        waiting = deque(range(len(works)))
        active: dict[int, _Run] = {}
        attempts = dict.fromkeys(waiting, 0)
        orders: dict[int, Script | Judged] = {}
        try:
            while waiting or active:
                while waiting and self._slots.acquire(blocking=not active):
                    index = waiting.popleft()
                    try:
                        orders[index] = works[index].send(None)
                        active[index] = self._start(index, orders[index])
                    except BaseException as stop:
                        self._slots.release()
                        if not isinstance(stop, StopIteration):
                            raise
                        results[index] = stop.value
                _wait(list(active.values()))
                for index in [index for index, run in active.items() if run.done]:
                    self._advance(index, active, works, orders, attempts, results)
        finally:
            for run in active.values():
                run.abandon()
                self._slots.release()
        return results

    def _advance(
        self,
        index: int,
        active: dict[int, _Run],
        works: Sequence[Work],
        orders: dict[int, Script | Judged],
        attempts: dict[int, int],
        results: list[Any],
    ) -> None:
        """Hand a finished run to its work, and start what the work wants next; a fault of ours is tried once more."""
        run = active[index]
        try:
            if run.faulty:
                self.counters["faults"] += 1
                attempts[index] += 1
                if attempts[index] < _ATTEMPTS:
                    active[index] = self._start(index, orders[index])
                    return
            attempts[index] = 0
            orders[index] = works[index].send(run.result())
            active[index] = self._start(index, orders[index])
        except StopIteration as stop:
            results[index] = stop.value
            del active[index]
            self._slots.release()

    def _start(self, index: int, order: Script | Judged) -> _Run:
        self.counters["programs"] += 1
        return _Run(self._server(index), order, self.limits)

    def _server(self, index: int) -> ForkServer:
        """Return a running server for the n-th work, starting or replacing it if need be.

        Raises:
            SandboxError: if it cannot be started or does not hold.
        """
        with self._lock:
            if self._owner != os.getpid():
                self._disown()
            number = index % (1 + (self.workers - 1) // _WORKERS_PER_SERVER)
            number = min(number, len(self._servers))  # one more at a time
            if number < len(self._servers) and self._servers[number].alive:
                return self._servers[number]
            reason = backends.platform_reason()
            if reason is not None:
                raise SandboxError(reason)
            server = ForkServer(self._packages, self._disabled)
            try:
                report = backends.choose(server, self._backend)
                if self.limits.scratch_mib and server.layers.get("namespaces") is not None:
                    raise ConfigurationError(
                        f"scratch_mib={self.limits.scratch_mib} needs namespaces, which this machine lacks "
                        f"({server.layers['namespaces']}); set it to 0"
                    )
            except BaseException:
                server.close()
                raise
            if number < len(self._servers):
                self.counters["restarts"] += 1
                self._servers[number].close()
                self._servers[number] = server
            else:
                self._servers.append(server)
            if self._report is None:
                for line in report.lines():
                    logger.log(logging.WARNING if report.backend == backends.UNSAFE else logging.INFO, line)
            self._report = report
            return server

    def _disown(self) -> None:
        """Start afresh in a forked copy of the process: the servers and the slots belong to the original."""
        for server in self._servers:
            server.forget()
        self._servers.clear()
        self._slots = threading.BoundedSemaphore(self.workers)
        self._owner = os.getpid()

    def close(self) -> None:
        """End the servers and with them every program; the pool starts anew when it is used again."""
        with self._lock:
            if self._owner == os.getpid():
                for server in self._servers:
                    server.close()
            self._servers.clear()

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _wait(runs: list[_Run]) -> None:
    """Wait a tick at most for something to happen in one of the runs, then hold all to their limits."""
    owner: dict[int, Confined] = {}
    processes = [process for run in runs for process in run.processes]
    for process in processes:
        owner.update(dict.fromkeys(process.descriptors(), process))
    if not owner:
        return
    poll = select.poll()
    for fd in owner:
        poll.register(fd, select.POLLIN)
    for fd, _ in poll.poll(_TICK_S * 1000):
        owner[fd].on_ready(fd)
    now = time.monotonic()
    for process in processes:
        process.check(now)


_POOLS: weakref.WeakSet[SandboxPool] = weakref.WeakSet()
_SHARED: dict[tuple[Any, ...], SandboxPool] = {}
_SHARED_LOCK = threading.Lock()


def shared_pool(
    limits: SandboxLimits, *, workers: int | None = None, backend: str = "auto", packages: Sequence[str] = ()
) -> SandboxPool:
    """Return this process's pool for these settings, made on first use and kept to the end of the process."""
    key = (os.getpid(), limits, workers, backend, tuple(packages))
    with _SHARED_LOCK:
        if key not in _SHARED:
            _SHARED[key] = SandboxPool(limits, workers=workers, backend=backend, packages=packages)
        return _SHARED[key]


def close_all() -> None:
    """Close every pool of this process."""
    for pool in list(_POOLS):
        with contextlib.suppress(Exception):
            pool.close()


def _after_fork_in_child() -> None:
    global _SHARED_LOCK
    _SHARED_LOCK = threading.Lock()  # another thread may have held it at the fork
    for pool in list(_POOLS):
        pool._lock = threading.RLock()
        pool._disown()
    _SHARED.clear()


atexit.register(close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
