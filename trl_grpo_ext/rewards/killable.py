"""Call a function in another process that can be killed: for code that may hang, blow up or be attacked by its input.

    workers = KillableWorkers(num_workers=2, preload=("my_package.slow_module",))
    outcome = workers.call("my_package.slow_module:decide", ["x", 3], timeout_s=2.0)
    if outcome.status == "ok": outcome.value

A *template* process is started by exec (the trainer itself is never forked: it holds CUDA handles, locks and threads),
imports the preloaded modules once and forks a worker in a few milliseconds whenever one is missing. Calls work from
any thread, from an asyncio loop (they block it for at most the deadline) and in child processes, however those were
started; each process that calls gets its own template, on the first call. All of them end when that process ends, even
if it is killed. Arguments and results are JSON: nothing that comes back is executed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from trl_grpo_ext.errors import SandboxError
from trl_grpo_ext.rewards.killable_template import HEADER, receive, send

_BOOT = (
    "import json, sys; given = json.loads(sys.argv.pop()); sys.path[:] = given.pop('path'); "
    "from trl_grpo_ext.rewards.killable_template import serve_template; serve_template(**given)"
)
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class CallOutcome(NamedTuple):
    """What became of a call.

    Attributes:
        status: "ok"; "error" (the function raised); "timeout" (killed at the deadline); "crash" (its process ended).
        value: the result; for "error" the text of the exception.
    """

    status: Literal["ok", "error", "timeout", "crash"]
    value: Any = None


class _Connection:
    """One worker process: its socket and pid."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.sock = sock
        self.pid = pid


class KillableWorkers:
    """A few warm worker processes for calls that may have to be killed.

    Attributes:
        num_workers: most calls that run at the same time; further callers wait.
        num_killed: workers killed at their deadline or found dead, in this process.
    """

    def __init__(
        self,
        *,
        num_workers: int = 1,
        preload: Sequence[str] = (),
        memory_gib: float | None = 2.0,
        start_timeout_s: float = 120.0,
    ) -> None:
        """Set up; no process is started before the first call.

        Args:
            num_workers: size, >= 1.
            preload: modules that the template imports; ``"module:function"`` also calls a function, to fill caches.
            memory_gib: address space of a worker above what the template has; None sets no limit.
            start_timeout_s: most time that starting the template may take, its imports included. This is not part of
                a call's deadline.
        """
        self.num_workers = num_workers
        self.num_killed = 0
        self._preload = tuple(preload)
        self._memory_gib = memory_gib
        self._start_timeout_s = start_timeout_s
        self._reset()
        _INSTANCES.add(self)

    def _reset(self) -> None:
        """Forget every process without touching it: they belong to the process that this one was forked from."""
        self._owner_pid = os.getpid()
        self._condition = threading.Condition()
        self._control_lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._num_alive = 0
        self._control: socket.socket | None = None
        self._template: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {
            "num_workers": self.num_workers,
            "_preload": self._preload,
            "_memory_gib": self._memory_gib,
            "_start_timeout_s": self._start_timeout_s,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.num_killed = 0
        self._reset()
        _INSTANCES.add(self)

    # -- calling ------------------------------------------------------------------------------------------------------
    def call(self, function: str, arguments: Sequence[Any], timeout_s: float) -> CallOutcome:
        """Return what ``function(*arguments)`` returns in a worker.

        Args:
            function: ``"module:name"``, importable in a fresh process.
            arguments: positional arguments, JSON values.
            timeout_s: deadline for the function alone; waiting for a free worker is not part of it.

        Raises:
            SandboxError: if no worker process can be started.
        """
        request = json.dumps([function, list(arguments)]).encode()
        for attempt in range(2):
            connection = self._acquire()
            try:
                outcome = _exchange(connection.sock, request, timeout_s)
            except BaseException:
                self._discard(connection)
                raise
            if outcome.status in ("ok", "error"):
                self._release(connection)
                return outcome
            self._discard(connection)
            if outcome.status == "crash" and attempt == 0 and outcome.value == "before the call":
                continue  # it died while idle, the call never started
            return outcome
        return CallOutcome("crash")

    def warm_up(self) -> None:
        """Start one worker now, so that the first call does not wait for imports."""
        self._release(self._acquire())

    def pids(self) -> list[int]:
        """Return the process numbers of the template and the idle workers."""
        template = [] if self._template is None else [self._template.pid]
        return template + [connection.pid for connection in self._idle]

    def close(self) -> None:
        """End all processes; a later call starts them again."""
        with self._condition:
            if self._finalizer is not None and self._owner_pid == os.getpid():
                self._finalizer()
            for connection in self._idle:
                connection.sock.close()
            self._reset()

    # -- workers ------------------------------------------------------------------------------------------------------
    def _acquire(self) -> _Connection:
        if self._owner_pid != os.getpid():
            self._reset()
        with self._condition:
            while True:
                if self._idle:
                    return self._idle.pop()
                if self._num_alive < self.num_workers:
                    self._num_alive += 1
                    break
                self._condition.wait()
        try:
            return self._spawn()
        except BaseException:
            self._one_less()
            raise

    def _release(self, connection: _Connection) -> None:
        with self._condition:
            self._idle.append(connection)
            self._condition.notify()

    def _discard(self, connection: _Connection) -> None:
        self.num_killed += 1
        connection.sock.close()
        with self._control_lock, contextlib.suppress(OSError):
            if self._control is not None:
                send(self._control, {"kill": connection.pid})
                receive(self._control, self._start_timeout_s)
        self._one_less()

    def _one_less(self) -> None:
        with self._condition:
            self._num_alive -= 1
            self._condition.notify()

    def _spawn(self) -> _Connection:
        with self._control_lock:
            for attempt in range(2):
                if self._control is None or self._template is None or self._template.poll() is not None:
                    self._start_template()
                ours, theirs = socket.socketpair()
                try:
                    assert self._control is not None
                    send(self._control, {"spawn": True}, theirs.fileno())
                    return _Connection(ours, int(receive(self._control, self._start_timeout_s)["pid"]))
                except (OSError, EOFError, KeyError) as error:
                    ours.close()
                    self._end_template()
                    if attempt:
                        raise SandboxError(f"a worker process does not start: {error}") from error
                finally:
                    theirs.close()
        raise AssertionError("unreachable")

    def _start_template(self) -> None:
        ours, theirs = socket.socketpair()
        given = {
            "path": [entry or os.getcwd() for entry in sys.path],
            "control_fd": theirs.fileno(),
            "parent_pid": os.getpid(),
            "preload": list(self._preload),
            "memory_bytes": None if self._memory_gib is None else int(self._memory_gib * 2**30),
        }
        environment = {**os.environ, **{name: os.environ.get(name, "1") for name in _ONE_THREAD}}
        try:
            self._template = subprocess.Popen(
                [sys.executable, "-c", _BOOT, json.dumps(given)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
            )
        except OSError as error:
            ours.close()
            raise SandboxError(f"no worker process can be started with {sys.executable!r}: {error}") from error
        finally:
            theirs.close()
        self._control = ours
        self._finalizer = weakref.finalize(self, _end_process, self._template, ours, os.getpid())
        try:
            reply = receive(ours, self._start_timeout_s)
        except TimeoutError:
            reply = {"error": f"not ready after {self._start_timeout_s:g} s"}
        except (OSError, EOFError) as error:
            reply = {"error": f"it ended at once ({error})"}
        if "error" in reply:
            self._end_template(at_once=True)
            modules = ", ".join(self._preload) or "this package"
            raise SandboxError(f"a worker process that imports {modules} does not start: {reply['error']}")

    def _end_template(self, *, at_once: bool = False) -> None:
        if at_once and self._template is not None:
            self._template.kill()
        if self._finalizer is not None:
            self._finalizer()
        self._control, self._template, self._finalizer = None, None, None


_INSTANCES: weakref.WeakSet[KillableWorkers] = weakref.WeakSet()


def _forget_after_fork() -> None:
    for instance in list(_INSTANCES):
        if instance._finalizer is not None:
            instance._finalizer.detach()
        instance._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


def _end_process(process: subprocess.Popen[bytes], control: socket.socket, owner_pid: int) -> None:
    control.close()  # the template ends, and its workers with it, when this connection closes
    if os.getpid() != owner_pid:
        return
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _exchange(sock: socket.socket, request: bytes, timeout_s: float) -> CallOutcome:
    try:
        sock.settimeout(max(timeout_s, 10.0))
        sock.sendall(HEADER.pack(len(request)) + request)
    except OSError:
        return CallOutcome("crash", "before the call")
    try:
        status, value = receive(sock, timeout_s)
    except TimeoutError:
        return CallOutcome("timeout", f"killed after {timeout_s:g} s")
    except (EOFError, OSError, ValueError) as error:
        return CallOutcome("crash", str(error))
    return CallOutcome("ok" if status == "ok" else "error", value)
