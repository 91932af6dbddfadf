"""The client's end of the fork server and of one confined process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trl_grpo_ext.errors import SandboxError
from trl_grpo_ext.rewards.sandbox.limits import SandboxLimits
from trl_grpo_ext.rewards.sandbox.results import End, ProcessResult
from trl_grpo_ext.rewards.sandbox.usage import usage_of

START_TIMEOUT_S = 30.0
_GUEST = Path(__file__).parent / "guest" / "__main__.py"
_FOLDER_PREFIX = "trl-grpo-sandbox-"
_CREDENTIALS = struct.Struct("iII")
# What a process may say over its private channel. A program's message is parsed here, so it must be short.
_CHANNEL_BYTES = {"script": 4096, "judge": 4 << 20, "canary": 1 << 16}


def memory_file(data: bytes) -> int:
    """Return a descriptor of a sealed, nameless file with ``data``, positioned at its start."""
    try:
        fd = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.seek(0)
            return os.dup(file.fileno())
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    import fcntl  # not on Windows, where this file is imported but not used

    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _clean_environment() -> dict[str, str]:
    """Return all that a program sees of an environment. The hash seed is fixed, so that verdicts repeat."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": "/",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    if "LD_LIBRARY_PATH" in os.environ:  # some interpreters do not start without it; the server removes it
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    return environment


def sweep_folders() -> None:
    """Remove empty working folders of owners that were killed before they could."""
    for path in Path(tempfile.gettempdir()).glob(_FOLDER_PREFIX + "*"):
        owner = path.name[len(_FOLDER_PREFIX) :].partition("-")[0]
        if owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            with contextlib.suppress(OSError):
                path.rmdir()


class ForkServer:
    """A running fork server.

    Args:
        packages: installed packages that programs may import; imported before the first fork.
        disabled: layers to leave out ("namespaces", "landlock", "seccomp", "uid").

    Attributes:
        layers: {layer: None if in force, else why not}, as the server reports it.
        start_s: seconds from exec to ready.

    Raises:
        SandboxError: if it does not start.
    """

    def __init__(self, packages: Sequence[str] = (), disabled: Sequence[str] = ()) -> None:
        begin = time.perf_counter()
        sweep_folders()
        self.owner = os.getpid()
        self._folder = tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}-")
        os.chmod(self._folder, 0o555)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the server
        config = {
            "control": theirs.fileno(),
            "packages": list(packages),
            "package_path": [entry for entry in sys.path if entry] if packages else [],
            "disabled": list(disabled),
            "folder": self._folder,
        }
        command = [sys.executable, "-s", "-S", "-X", "utf8", str(_GUEST), json.dumps(config)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                env=_clean_environment(),
                cwd="/",
                pass_fds=(theirs.fileno(),),
            )
        except OSError as error:
            self._control.close()
            raise SandboxError(f"the sandbox's interpreter {sys.executable!r} does not start: {error}") from error
        finally:
            theirs.close()
        self._closed = False
        self._lock = threading.Lock()
        self.layers: dict[str, str | None] = self._handshake()
        self.start_s = time.perf_counter() - begin

    def _handshake(self) -> dict[str, str | None]:
        self._control.settimeout(START_TIMEOUT_S)
        try:
            message = self._control.recv(65536)
        except OSError:
            message = b""
        if not message:
            tail = self.log()
            self.close()
            raise SandboxError(
                f"the sandbox's server did not start within {START_TIMEOUT_S:.0f} s: {tail or 'no message'}"
            )
        self._control.settimeout(None)
        return dict(json.loads(message)["layers"])

    def log(self) -> str:
        """Return the end of what the server wrote to its standard error."""
        with contextlib.suppress(OSError, ValueError):
            return os.pread(self._log.fileno(), 1 << 20, 0)[-1500:].decode(errors="replace").strip()
        return ""

    @property
    def alive(self) -> bool:
        """Whether the server can still be asked from this process."""
        return not self._closed and self.owner == os.getpid() and self._process.poll() is None

    @property
    def process_id(self) -> int:
        """Process id of the server, or of the process that waits for it outside its namespace."""
        return self._process.pid

    def send(self, order: Mapping[str, Any], fds: Sequence[int]) -> None:
        """Send one order with its descriptors.

        Raises:
            OSError: if the server is gone.
        """
        socket.send_fds(self._control, [json.dumps(order).encode()], list(fds))

    def forget(self) -> None:
        """Let go of a server that belongs to the process that this one was forked from."""
        self._closed = True
        self._control.close()
        self._log.close()

    def close(self) -> None:
        """End the server and everything in it. Harmless when repeated, or in a forked copy."""
        with getattr(self, "_lock", threading.Lock()):
            if getattr(self, "_closed", False):
                return
            self._closed = True
        if self.owner != os.getpid():
            return
        self._control.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            # A stopped process does not see that the socket closed, and would stay when its parent is gone.
            for pid in [*_descendants(self._process.pid), self._process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)


def _descendants(pid: int) -> list[int]:
    """Return the processes below ``pid``, the deepest first."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [found for child in children for found in (*_descendants(child), child)]


class Confined:
    """One confined process: its pipes, limits and end.

    Args:
        server: who forks it.
        kind: "script", "calls", "judge" or "canary".
        payload: what it reads first.
        limits: what it may use.
        stdin: standard input; None leads nowhere.
        capture: whether standard output and error are kept.
        fds: further descriptors, {number in the child: descriptor here}; closed here once sent.
        channel: whether it gets a private pipe (number 3) to this process.

    Attributes:
        result: None while it runs.
    """

    def __init__(
        self,
        server: ForkServer,
        kind: str,
        payload: bytes,
        limits: SandboxLimits,
        *,
        stdin: bytes | None = None,
        capture: bool = False,
        fds: Mapping[int, int] | None = None,
        channel: bool = True,
    ) -> None:
        self.result: ProcessResult | None = None
        self._server = server
        self._channel_bytes = _CHANNEL_BYTES.get(kind, 0)
        self._limits = limits
        self._end: End | None = None
        self._process_id = 0
        self._detail = "the process could not be confined"
        self._begin = time.monotonic()
        self._running = False
        self._waited_s = self._killed_at = 0.0
        self._buffers: dict[int, bytearray] = {}  # descriptor here: what was read
        self._sources: dict[int, int] = {}  # descriptor here: number in the child
        self._quiet: set[int] = set()  # descriptors with nothing more to say
        theirs: dict[int, int] = dict(fds or {})
        if stdin is not None:
            theirs[0] = memory_file(stdin)
        for number in [*((1, 2) if capture else ()), *((3,) if channel else ())]:
            ours, theirs[number] = os.pipe()
            os.set_blocking(ours, False)
            self._buffers[ours], self._sources[ours] = bytearray(), number
        self._lifeline, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lifeline.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._lifeline.setblocking(False)
        payload_fd = memory_file(payload)
        try:
            server.send(
                {"kind": kind, "targets": list(theirs), "limits": self._server_limits()},
                [payload_fd, far_end.fileno(), *theirs.values()],
            )
        except OSError as error:
            self._finish(ProcessResult(End.FAULT, detail=f"the sandbox's server is gone: {error}"))
        finally:
            far_end.close()
            for fd in (payload_fd, *theirs.values()):
                os.close(fd)

    def _server_limits(self) -> dict[str, int]:
        limits = self._limits
        return {
            "cpu_s": int(limits.cpu_s) + 2,  # the kernel counts whole seconds; check() is finer
            "memory_bytes": limits.memory_mib << 20,
            "open_files": limits.open_files,
            "scratch_bytes": limits.scratch_mib << 20,
            "scratch_files": 256,
        }

    def descriptors(self) -> list[int]:
        """Return the descriptors to wait for; none once it has ended."""
        if self.result is not None:
            return []
        return [self._lifeline.fileno(), *(fd for fd in self._buffers if fd not in self._quiet)]

    def on_ready(self, fd: int) -> None:
        """Take what is there to be read."""
        if self.result is not None:
            return
        if fd == self._lifeline.fileno():
            self._on_lifeline()
        elif fd in self._buffers:
            self._read(fd)

    def _on_lifeline(self) -> None:
        message, ancillary = b"", []  # type: bytes, list[Any]
        for _ in range(2):
            try:
                message, ancillary, _, _ = self._lifeline.recvmsg(4096, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it ended as our order to kill it was under way; its report comes behind this error
            except OSError:
                pass
            break
        if message == b"running":
            self._running, self._begin = True, time.monotonic()
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                    self._process_id = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0]
        elif message.startswith(b"failed: "):
            self._detail = message.decode(errors="replace")
        elif message:
            self._on_report(json.loads(message))
        else:
            detail = f"the sandbox's server ended, or could not fork {self._server.log()}"
            self._finish(ProcessResult(End.FAULT, detail=detail))

    def _on_report(self, report: dict[str, Any]) -> None:
        for fd in list(self._buffers):
            self._read(fd)
        exited = os.WIFEXITED(report["status"])
        end = self._end
        if exited and end is not End.OUTPUT:
            end = None  # it was faster than the order to kill it
        if end in (None, End.CANCELLED) and report["cpu_s"] > self._limits.cpu_s:
            end = End.CPU  # whether a tick saw it or not
        if end is None and not self._running:
            end = End.FAULT
        output = {number: bytes(self._buffers[fd]) for fd, number in self._sources.items() if fd in self._buffers}
        self._finish(
            ProcessResult(
                end or (End.EXITED if exited else End.SIGNAL),
                exit_code=os.WEXITSTATUS(report["status"]) if exited else None,
                signal=None if exited else os.WTERMSIG(report["status"]),
                stdout=output.get(1, b"")[: self._limits.output_bytes],
                stderr=output.get(2, b"")[: self._limits.output_bytes],
                channel=output.get(3, b"")[: self._channel_bytes],
                cpu_s=report["cpu_s"],
                wall_s=time.monotonic() - self._begin,
                waited_s=self._waited_s,
                peak_rss_kib=report["rss_kib"],
                detail="" if self._running else self._detail,
            )
        )

    def _read(self, fd: int) -> None:
        """Read what a pipe holds; end the process once it has written more than it may."""
        buffer = self._buffers[fd]
        allowed = self._channel_bytes if self._sources[fd] == 3 else self._limits.output_bytes
        try:
            while len(buffer) <= allowed:
                part = os.read(fd, 65536)
                if not part:
                    self._quiet.add(fd)
                    return
                buffer += part
        except BlockingIOError:
            return
        del buffer[allowed:]
        self.kill(End.OUTPUT)
        self._quiet.add(fd)

    def check(self, now: float) -> None:
        """Kill the process if it has used more than it may."""
        if self.result is not None:
            return
        if self._end is not None:
            self._check_killed(now)
            return
        elapsed = now - self._begin
        if not self._running:
            if elapsed > START_TIMEOUT_S:
                self.kill(End.FAULT)
            return
        usage = usage_of(self._process_id)
        if usage is None:  # it has ended; its report is under way
            return
        self._waited_s = max(self._waited_s, usage.waited_s)
        if usage.cpu_s > self._limits.cpu_s:
            self.kill(End.CPU)
        elif usage.threads > self._limits.threads + 1:
            self.kill(End.THREADS)
        elif elapsed - self._waited_s > self._limits.effective_wall_s:
            self.kill(End.WALL)

    def _check_killed(self, now: float) -> None:
        """Give up on a server that does not report on a process that it was told to kill."""
        if now - self._killed_at > START_TIMEOUT_S:
            self._finish(ProcessResult(End.FAULT, detail="the sandbox's server does not answer"))
            self._server.close()

    def kill(self, end: End) -> None:
        """Have the process killed; ``end`` becomes its end. Its report follows."""
        if self.result is None and self._end is None:
            self._end, self._killed_at = end, time.monotonic()
            with contextlib.suppress(OSError):
                self._lifeline.send(b"k")

    def _finish(self, result: ProcessResult) -> None:
        self.result = result
        for fd in self._buffers:
            os.close(fd)
        self._buffers.clear()
        self._lifeline.close()

    def abandon(self) -> None:
        """Close everything; the server kills the process when its lifeline closes."""
        if self.result is None:
            self._finish(ProcessResult(End.CANCELLED))
