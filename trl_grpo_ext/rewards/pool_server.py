"""The process that workers are forked from: small, single-threaded, started by exec and not by forking the trainer.

Forking the trainer would copy CUDA handles, held locks and all its memory. This process holds only the reward
functions, so a worker that was killed is replaced in a few milliseconds with everything imported already. It is also
the one that reaps and kills: it adopts whatever a dead worker leaves behind, and when the trainer is gone it ends
every process it knows of. It never calls a reward.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import pickle
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from trl_grpo_ext.rewards.wire import FrameReader, send_json
from trl_grpo_ext.rewards.worker import serve

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PARENT_CHECK_S = 1.0
_MAX_DESCRIPTORS = 64


def main(control_fd: int, parent_pid: int, memory_bytes: int | None) -> None:
    """Serve the trainer until it closes the control connection, asks to end, or dies."""
    _Server(socket.socket(fileno=control_fd), parent_pid, memory_bytes).run()


class _Server:
    def __init__(self, control: socket.socket, parent_pid: int, memory_bytes: int | None) -> None:
        self.control = control
        self.parent_pid = parent_pid
        self.memory_bytes = memory_bytes
        self.functions: dict[int, Any] = {}
        self.pickles: dict[int, bytes] = {}
        self.workers: set[int] = set()
        self.reader = FrameReader(max_bytes=2**32)
        self.descriptors: collections.deque[int] = collections.deque()
        self.wake_read, self.wake_write = socket.socketpair()
        self.own_pid = os.getpid()

    def run(self) -> None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.wake_read.setblocking(False)
        self.wake_write.setblocking(False)
        signal.set_wakeup_fd(self.wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(self.control, selectors.EVENT_READ)
        selector.register(self.wake_read, selectors.EVENT_READ)
        try:
            while True:
                ready = {key.fileobj for key, _ in selector.select(_PARENT_CHECK_S)}
                # The parent is checked by pid too: a child the trainer forked may hold the connection open for it.
                if os.getppid() != self.parent_pid:
                    return
                if self.wake_read in ready:
                    self._reap()
                if self.control in ready and not self._handle_requests():
                    return
        except ConnectionError:  # the trainer went away between two messages
            return
        finally:
            self._end_all()

    def _handle_requests(self) -> bool:
        """Handle what has arrived; return False when the trainer is done."""
        data, descriptors, _, _ = socket.recv_fds(self.control, 2**20, _MAX_DESCRIPTORS)
        self.descriptors.extend(descriptors)
        if not data:
            return False
        for payload in self.reader.feed(data):
            request = pickle.loads(payload)
            if request[0] == "exit":
                return False
            getattr(self, f"_do_{request[0]}")(*request[1:])
        return True

    def _do_load(self, index: int, pickled: bytes, in_server: bool) -> None:
        """Load a function, so that every worker is born with it; or keep its pickle for the workers to load."""
        if not in_server:
            self.pickles[index] = pickled
            send_json(self.control, {"loaded": index, "error": None, "threads": 1})
            return
        error = None
        try:
            function = pickle.loads(pickled)
            warm_up = getattr(function, "warm_up", None)
            if callable(warm_up):
                warm_up()
            self.functions[index] = function
        except BaseException:  # an import may raise anything, SystemExit included
            error = traceback.format_exc(limit=-4)
        gc.collect()
        gc.freeze()  # so that collecting in a worker does not touch, and hence copy, the shared pages
        send_json(self.control, {"loaded": index, "error": error, "threads": _num_threads()})

    def _do_spawn(self, worker_id: int) -> None:
        descriptor = self.descriptors.popleft()
        pid = os.fork()
        if pid == 0:
            self._become_worker(descriptor)
        os.close(descriptor)
        _quietly(os.setpgid, pid, pid)  # the child does it too; whoever is first
        self.workers.add(pid)
        send_json(self.control, {"spawned": worker_id, "pid": pid})

    def _become_worker(self, descriptor: int) -> NoReturn:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _quietly(os.setpgid, 0, 0)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            server_is_gone = os.getppid() != self.own_pid
            for owned in (self.control, self.wake_read, self.wake_write):
                owned.close()
            if not server_is_gone:
                _lower_standing(self.memory_bytes)
                serve(socket.socket(fileno=descriptor), self.functions, self.pickles)
            status = 0
        finally:
            os._exit(status)

    def _do_kill(self, pid: int) -> None:
        if pid in self.workers:  # not reaped yet, so the number cannot belong to anybody else
            _quietly(os.killpg, pid, signal.SIGKILL)
            _quietly(os.kill, pid, signal.SIGKILL)

    def _reap(self) -> None:
        try:
            while self.wake_read.recv(4096):
                pass
        except BlockingIOError:
            pass
        died = False
        while True:
            try:
                # Look first and reap later: until it is reaped, the number still names this process and its group.
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if info is None or info.si_pid == 0:
                break
            if info.si_pid in self.workers:
                _quietly(os.killpg, info.si_pid, signal.SIGKILL)
            _, status = os.waitpid(info.si_pid, 0)
            if info.si_pid in self.workers:
                self.workers.discard(info.si_pid)
                died = True
                _quietly(send_json, self.control, {"dead": info.si_pid, "status": os.waitstatus_to_exitcode(status)})
        if died:
            self._kill_strays()

    def _kill_strays(self) -> None:
        """Kill processes that a dead worker left behind in a session of their own; they are our children now."""
        for _ in range(20):
            strays = [pid for pid in _children() if pid not in self.workers]
            if not strays:
                return
            for pid in strays:
                _quietly(os.kill, pid, signal.SIGKILL)
                _quietly(os.waitpid, pid, 0)

    def _end_all(self) -> None:
        for pid in list(self.workers):
            self._do_kill(pid)
            _quietly(os.waitpid, pid, 0)
        self.workers.clear()
        self._kill_strays()


def _lower_standing(memory_bytes: int | None) -> None:
    """Make this worker the first to go when memory runs out, and keep a crash from filling the disk."""
    import resource

    _quietly(resource.setrlimit, resource.RLIMIT_CORE, (0, 0))
    if memory_bytes is not None:
        _quietly(resource.setrlimit, resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass


def _children() -> list[int]:
    """Return the pids of this process's children (Linux; empty elsewhere)."""
    own = os.getpid()
    try:
        with open(f"/proc/self/task/{own}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        pass
    found = []
    try:
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/stat", "rb") as file:
                        parent = int(file.read().rpartition(b")")[2].split()[1])
                except (OSError, IndexError, ValueError):
                    continue
                if parent == own:
                    found.append(int(name))
    except OSError:
        pass
    return found


def _num_threads() -> int:
    """Return how many threads this process has; forking is safe with one only."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        import threading

        return threading.active_count()


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _quietly(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function whose failure means only that the work was done already."""
    with contextlib.suppress(OSError, ValueError):
        function(*arguments)
