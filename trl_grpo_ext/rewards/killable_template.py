"""The template process of ``killable`` and its workers, and the messages both sides exchange.

Started by exec with one thread, it imports what was asked for and forks a worker for each request. It ends, and its
workers with it, when the process that started it closes the connection or dies.
"""

from __future__ import annotations

import array
import contextlib
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

HEADER = struct.Struct(">I")
_MAX_REPLY_BYTES = 4 * 2**20
_PARENT_CHECK_S = 1.0


def send(sock: socket.socket, message: Any, descriptor: int | None = None) -> None:
    """Send a JSON message, and an open file descriptor with it."""
    payload = json.dumps(message).encode()
    data = HEADER.pack(len(payload)) + payload
    if descriptor is None:
        sock.sendall(data)
    else:
        sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])


def receive(sock: socket.socket, timeout_s: float | None) -> Any:
    """Return the next message.

    Raises:
        EOFError: if the other side is gone.
        TimeoutError: if the time is over.
        OSError: if it sends something that is no message.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    (length,) = HEADER.unpack(_read(sock, HEADER.size, end))
    if length > _MAX_REPLY_BYTES:
        raise OSError(f"a message of {length} bytes")
    return json.loads(_read(sock, length, end))


def _read(sock: socket.socket, length: int, end: float | None) -> bytes:
    chunks = bytearray()
    while len(chunks) < length:
        if end is not None:
            left = end - time.monotonic()
            # poll, not select: descriptors above 1023 are common in a trainer.
            poller = select.poll()
            poller.register(sock, select.POLLIN)
            if left <= 0 or not poller.poll(left * 1000):
                raise TimeoutError
        chunk = sock.recv(length - len(chunks))
        if not chunk:
            raise EOFError("the other side hung up")
        chunks += chunk
    return bytes(chunks)


def serve_template(control_fd: int, parent_pid: int, preload: Sequence[str], memory_bytes: int | None) -> None:
    """Serve the parent until it closes the connection or dies; runs in the template process."""
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for name in preload:
            module, _, function = name.partition(":")
            loaded = importlib.import_module(module)
            if function:
                getattr(loaded, function)()
        greeting: dict[str, Any] = {"ready": True}
    except BaseException as error:
        greeting = {"error": f"{type(error).__name__}: {error}"}
    try:
        send(control, greeting)
    except OSError:
        return  # the parent is gone already
    if "error" in greeting:
        return
    children: set[int] = set()
    try:
        while os.getppid() == parent_pid:
            _reap(children)
            if not select.select([control], [], [], _PARENT_CHECK_S)[0]:
                continue
            request, descriptors = _receive_with_descriptors(control)
            if request is None:
                return
            if "spawn" in request:
                _spawn_child(control, descriptors[0], children, memory_bytes)
            else:
                _kill_child(int(request["kill"]), children)
                send(control, {"killed": True})
    except OSError:
        return
    finally:
        for pid in list(children):
            _kill_child(pid, children)


def _receive_with_descriptors(control: socket.socket) -> tuple[Any, list[int]]:
    data, descriptors, _, _ = socket.recv_fds(control, HEADER.size, 1)
    if not data:
        return None, []
    data += control.recv(HEADER.size - len(data)) if len(data) < HEADER.size else b""
    return json.loads(_read(control, HEADER.unpack(data)[0], None)), descriptors


def _reap(children: set[int]) -> None:
    for pid in list(children):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                children.discard(pid)


def _kill_child(pid: int, children: set[int]) -> None:
    if pid in children:  # not reaped yet, so the number still belongs to it
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        children.discard(pid)


def _spawn_child(control: socket.socket, descriptor: int, children: set[int], memory_bytes: int | None) -> None:
    template_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        control.close()
        _become_worker(descriptor, template_pid, memory_bytes)
    os.close(descriptor)
    children.add(pid)
    send(control, {"pid": pid})


def _become_worker(descriptor: int, template_pid: int, memory_bytes: int | None) -> NoReturn:
    try:
        _die_with(template_pid)
        _limit(memory_bytes)
        _serve_calls(socket.socket(fileno=descriptor))
    except BaseException:
        os._exit(1)
    os._exit(0)


def _die_with(template_pid: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != template_pid:
        os._exit(1)


def _limit(memory_bytes: int | None) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes is None:
        return
    used = 0
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = used + memory_bytes
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


def _serve_calls(sock: socket.socket) -> None:
    functions: dict[str, Any] = {}
    while True:
        try:
            path, arguments = receive(sock, None)
        except (EOFError, ConnectionError):
            return
        try:
            if path not in functions:
                module, _, name = path.partition(":")
                functions[path] = getattr(importlib.import_module(module), name)
            reply = json.dumps(["ok", functions[path](*arguments)])
            if len(reply) > _MAX_REPLY_BYTES:
                raise ValueError("the result is too long")
        except Exception as error:
            reply = json.dumps(["error", f"{type(error).__name__}: {error}"[:2000]])
        payload = reply.encode()
        sock.sendall(HEADER.pack(len(payload)) + payload)
