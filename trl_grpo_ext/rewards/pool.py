"""The trainer's side of the worker processes: start them, hand out jobs, hear back, kill, replace.

Mechanics only. Which job goes where, and how long it may take, is decided in ``dispatch``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from trl_grpo_ext.errors import RewardError
from trl_grpo_ext.rewards.outcome import Failure
from trl_grpo_ext.rewards.wire import BrokenFrameError, FrameReader, parse_json, send_pickle

logger = logging.getLogger(__name__)

_BOOT = (
    "import json, sys; given = json.loads(sys.argv.pop()); sys.path[:] = given.pop('path'); "
    "from trl_grpo_ext.rewards.pool_server import main; main(**given)"
)
# One thread per worker: there are several workers already, and a process with threads cannot fork safely.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_SEND_TIMEOUT_S = 60.0
_STATUS_WAIT_S = 0.5
_PID_WAIT_S = 5.0


class Worker:
    """One worker process as the trainer sees it."""

    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number = number
        self.sock = sock
        self.pid: int | None = None
        self.reader = FrameReader()
        self.job: Any = None  # what it works on; None if idle
        self.last_heard = 0.0  # time.monotonic()
        self.waited_before_s = 0.0  # for a processor, when it got its job
        self.homes: set[str] = set()  # rewards whose batch calls it has had; they come back here if they can
        self.closed_at: float | None = None  # it hung up, its exit status is not here yet


class Event(NamedTuple):
    """Something a worker did: a reply (``message``), or its death (``failure``)."""

    kind: Literal["reply", "died"]
    worker: Worker
    message: dict[str, Any] | None = None
    failure: Failure | None = None


class WorkerPool:
    """A fixed number of worker processes, replaced when they die.

    Attributes:
        num_workers: size of the pool.
        load_errors: {function number: why no worker can load it}, complete after ``ensure_ready``.
        num_replaced: workers that died or were killed so far.
    """

    def __init__(
        self,
        pickles: Sequence[bytes],
        num_workers: int,
        *,
        load_timeout_s: float = 120.0,
        memory_gib: float | None = None,
    ) -> None:
        """Start the server process in the background; ``ensure_ready`` waits for it.

        Args:
            pickles: pickled reward functions.
            num_workers: number of processes, >= 1.
            load_timeout_s: most time that unpickling one function, its imports included, may take.
            memory_gib: address space of a worker (RLIMIT_AS); None sets no limit.
        """
        self.num_workers = num_workers
        self.load_errors: dict[int, str] = {}
        self.num_replaced = 0
        self.owner_pid = os.getpid()
        self._pickles = list(pickles)
        self._load_timeout_s = load_timeout_s
        self._memory_bytes = None if memory_gib is None else int(memory_gib * 2**30)
        self._cold: set[int] = set()  # loading them in the server would leave threads behind
        self._workers: dict[int, Worker] = {}
        self._next_number = 0
        self._ready = False
        self._backlog: list[Event] = []
        self._start_server()

    # -- life ---------------------------------------------------------------------------------------------------------

    def _start_server(self) -> None:
        ours, theirs = socket.socketpair()
        given = {
            "path": [entry or os.getcwd() for entry in sys.path],
            "control_fd": theirs.fileno(),
            "parent_pid": os.getpid(),
            "memory_bytes": self._memory_bytes,
        }
        environment = {**os.environ, **{name: os.environ.get(name, "1") for name in _ONE_THREAD}}
        environment.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(given)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env=environment,
            )
        except OSError as error:
            ours.close()
            raise RewardError(f"no worker process can be started with {sys.executable!r}: {error}") from error
        finally:
            theirs.close()
        self._control = ours
        self._control_reader = FrameReader()
        self._control_messages: list[dict[str, Any]] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(ours, selectors.EVENT_READ, None)
        self._finalizer = weakref.finalize(self, _end_server, self._process, ours, os.getpid())
        self._to_load = [index for index in range(len(self._pickles)) if index not in self.load_errors]
        for index in self._to_load:
            self._ask_server("load", index, self._pickles[index], index not in self._cold)

    def ensure_ready(self) -> None:
        """Wait until every function is loaded, and start the workers.

        A function whose loading fails, crashes the server or never ends gets an entry in ``load_errors``; the others
        are not affected.

        Raises:
            RewardError: if the server cannot be kept alive.
        """
        for _ in range(2 * len(self._pickles) + 3):
            if self._ready:
                break
            self._ready = self._finish_loading()
        if not self._ready:
            raise RewardError("the server of the reward workers does not stay alive; see the messages above")
        self.fill()

    def _finish_loading(self) -> bool:
        """Collect the server's replies; return False where it was restarted and has to be waited for again."""
        while self._to_load:
            index = self._to_load[0]
            reply = self._next_control_message(self._load_timeout_s)
            if reply is None:
                alive = self._process.poll() is None
                reason = f"took more than {self._load_timeout_s:g} s" if alive else "ended the process"
                self.load_errors[index] = f"loading it in a fresh process {reason}"
                self._restart_server()
                return False
            if reply.get("loaded") != index:
                continue
            self._to_load.pop(0)
            if reply["error"] is not None:
                self.load_errors[index] = reply["error"]
            elif reply["threads"] > 1:
                self._cold.add(index)
                self._restart_server()
                return False
        return True

    def _next_control_message(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the server's next message, or None if it hung up or stays silent."""
        end = time.monotonic() + timeout_s
        while not self._control_messages and (left := end - time.monotonic()) > 0:
            if self._selector.select(left):
                data = _receive_now(self._control, 2**16)
                if not data:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(5)
                    return None
                self._control_messages += [parse_json(payload) for payload in self._control_reader.feed(data)]
        return self._control_messages.pop(0) if self._control_messages else None

    def _restart_server(self) -> None:
        self._drop_all_workers()
        self._selector.close()
        self._finalizer()
        self._ready = False
        self._start_server()

    def _drop_all_workers(self) -> None:
        for worker in list(self._workers.values()):
            self._forget(worker)

    def close(self) -> None:
        """End every worker and the server. Safe to call twice."""
        self._drop_all_workers()
        self._selector.close()
        self._finalizer()

    # -- workers ------------------------------------------------------------------------------------------------------

    def fill(self, extra: int = 0) -> None:
        """Start workers until there are ``num_workers`` and ``extra`` more; retire idle ones above that."""
        target = self.num_workers + extra
        while len(self._workers) < target:
            self._spawn()
        for worker in self.idle():
            if len(self._workers) <= target:
                break
            self._forget(worker)  # it ends when its connection closes

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(_SEND_TIMEOUT_S)
        self._next_number += 1
        try:
            self._ask_server("spawn", self._next_number, fds=(theirs.fileno(),))
        finally:
            theirs.close()
        worker = Worker(self._next_number, ours)
        self._workers[worker.number] = worker
        self._selector.register(ours, selectors.EVENT_READ, worker)

    def idle(self) -> list[Worker]:
        """Return the workers that wait for a job."""
        return [worker for worker in self._workers.values() if worker.job is None and worker.closed_at is None]

    def busy(self) -> list[Worker]:
        """Return the workers that have a job."""
        return [worker for worker in self._workers.values() if worker.job is not None]

    def home_of(self, name: str) -> Worker | None:
        """Return the worker that has had the batch calls of a reward."""
        return next((worker for worker in self._workers.values() if name in worker.homes), None)

    def pids(self) -> list[int]:
        """Return the process numbers of the workers; wait for those that have only just been asked for."""
        end = time.monotonic() + _PID_WAIT_S
        while any(worker.pid is None for worker in self._workers.values()) and time.monotonic() < end:
            self._backlog = self.wait(0.05, only_control=True)
        return [worker.pid for worker in self._workers.values() if worker.pid is not None]

    def submit(self, worker: Worker, job: Any, message: dict[str, Any]) -> bool:
        """Give an idle worker a job; return False if it turns out to be dead (it is replaced by the next ``fill``).

        Raises:
            Exception: what pickling the message raises; the worker stays idle then.
        """
        try:
            send_pickle(worker.sock, message)
        except OSError:
            self.kill(worker)
            return False
        worker.job = job
        worker.last_heard = time.monotonic()
        worker.waited_before_s = waited_for_cpu_s(worker.pid)
        return True

    def kill(self, worker: Worker) -> None:
        """End a worker now, whatever it is doing; it is replaced by the next ``fill``."""
        if worker.number not in self._workers:
            return
        end = time.monotonic() + _PID_WAIT_S
        while worker.pid is None and time.monotonic() < end and worker.number in self._workers:
            self._backlog = self.wait(0.05, only_control=True)
        if worker.pid is not None:
            self._ask_server("kill", worker.pid)
        self._forget(worker)
        self.num_replaced += 1

    def _forget(self, worker: Worker) -> None:
        self._workers.pop(worker.number, None)
        worker.job = None
        self._unwatch(worker)
        worker.sock.close()

    def _unwatch(self, worker: Worker) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(worker.sock)

    def _ask_server(self, *request: Any, fds: tuple[int, ...] = ()) -> None:
        self._control.settimeout(_SEND_TIMEOUT_S)
        # If the server is gone, the next ``wait`` or ``ensure_ready`` notices and starts another.
        with contextlib.suppress(OSError):
            send_pickle(self._control, request, fds)

    # -- hearing back -------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float, *, only_control: bool = False) -> list[Event]:
        """Return what happened within the time, as soon as anything has; an empty list if nothing did."""
        events, self._backlog = self._backlog, []
        for key, _ in self._selector.select(0.0 if events else max(0.0, timeout_s)):
            if key.data is None:
                events += self._read_control()
            elif not only_control and key.data.number in self._workers:
                events += self._read_worker(key.data)
        now = time.monotonic()
        for worker in list(self._workers.values()):
            if worker.closed_at is not None and now - worker.closed_at > _STATUS_WAIT_S:
                # It closed its connection without dying, so no status will come.
                events.append(self._killed(worker, "closed its connection to the trainer"))
        return events

    def _killed(self, worker: Worker, detail: str) -> Event:
        """Kill a worker that broke the protocol, and return its death with the job it had."""
        job = worker.job
        self.kill(worker)
        worker.job = job
        return Event("died", worker, failure=Failure("crash", detail))

    def _read_worker(self, worker: Worker) -> list[Event]:
        try:
            data = _receive_now(worker.sock, 2**20)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            worker.closed_at = time.monotonic()
            self._unwatch(worker)
            return []
        worker.last_heard = time.monotonic()
        try:
            messages = [parse_json(payload) for payload in worker.reader.feed(data)]
        except BrokenFrameError as error:
            return [self._killed(worker, f"wrote into its connection to the trainer: {error}")]
        return [Event("reply", worker, message=message) for message in messages]

    def _read_control(self) -> list[Event]:
        try:
            data = _receive_now(self._control, 2**16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            return self._server_died()
        events: list[Event] = []
        messages = [*self._control_messages, *(parse_json(payload) for payload in self._control_reader.feed(data))]
        self._control_messages = []
        for message in messages:
            if "spawned" in message and message["spawned"] in self._workers:
                self._workers[message["spawned"]].pid = message["pid"]
            elif "spawned" in message:
                self._ask_server("kill", message["pid"])
            elif "dead" in message:
                events += self._worker_died(message["dead"], message["status"])
        return events

    def _worker_died(self, pid: int, status: int) -> list[Event]:
        worker = next((worker for worker in self._workers.values() if worker.pid == pid), None)
        if worker is None:
            return []
        events: list[Event] = []
        while worker.closed_at is None and worker.number in self._workers:
            new = self._read_worker(worker)  # replies that it sent before it died
            if not new:
                break
            events += new
        job = worker.job
        self._forget(worker)
        worker.job = job
        self.num_replaced += 1
        return [*events, Event("died", worker, failure=death_of(status))]

    def _server_died(self) -> list[Event]:
        lost = list(self._workers.values())
        jobs = [worker.job for worker in lost]
        logger.warning("The server of the reward workers died (killed from outside?); it is started again")
        self._restart_server()
        self.ensure_ready()
        events = []
        for worker, job in zip(lost, jobs, strict=True):
            worker.job = job
            events.append(Event("died", worker, failure=Failure("crash", "the server of the reward workers died")))
        return events


def _receive_now(sock: socket.socket, num_bytes: int) -> bytes:
    """Return what has arrived; raise BlockingIOError if nothing has (a socket with a time-out would wait)."""
    sock.settimeout(0)
    try:
        return sock.recv(num_bytes)
    finally:
        sock.settimeout(_SEND_TIMEOUT_S)


def waited_for_cpu_s(pid: int | None) -> float:
    """Return how long a process has been ready to run without getting a processor (Linux; 0 elsewhere)."""
    if pid is None:
        return 0.0
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def death_of(status: int) -> Failure:
    """Return the failure for a worker's exit code (negative: a signal)."""
    if status >= 0:
        return Failure("exit", f"ended its process with exit code {status}")
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = ", perhaps because memory ran out" if -status == signal.SIGKILL else ""
    return Failure("crash", f"its process was ended by {name}{hint}")


def _end_server(process: subprocess.Popen[bytes], control: socket.socket, owner_pid: int) -> None:
    """End the server, which ends its workers; runs on close, on garbage collection and when the interpreter exits."""
    if os.getpid() != owner_pid:  # a child that the trainer forked has a copy of the connection, but not the say
        return
    try:
        control.settimeout(1.0)
        send_pickle(control, ("exit",))
    except OSError:
        pass
    control.close()
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        process.kill()  # the workers are told by the kernel that their parent died
        process.wait()
