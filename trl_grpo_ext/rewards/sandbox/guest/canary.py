"""A child that tries what must not work. A backend is only used after its canary was refused everything.

Every attempt returns whether it got through; an attempt that raises was refused. Raw system calls, so that no wrapper
of Python's stands between the attempt and the kernel.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from . import syscalls
from .libc import raw_syscall


def _call(name: str, *arguments: int | None) -> int:
    machine = syscalls.this_machine()
    number = syscalls.number(name, machine) if machine else None
    if number is None:
        raise OSError(38, name)
    return raw_syscall(number, *arguments)


def _read_secret(task: dict[str, Any]) -> bool:
    with open(task["secret_file"], "rb") as file:
        return file.read() == task["secret"].encode()


def _connect(task: dict[str, Any]) -> bool:
    with socket.create_connection(("127.0.0.1", task["tcp_port"]), timeout=1):
        return True


def _abstract(task: dict[str, Any]) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect("\0" + task["abstract_name"])
    return True


def _write(task: dict[str, Any]) -> bool:
    with open(os.path.join(task["folder"], "written"), "w") as file:
        file.write("x")
    return True


def _fork(_: dict[str, Any]) -> bool:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return True


def _signal(process: int) -> bool:
    os.kill(process, 0)
    return True


def _sched(task: dict[str, Any]) -> bool:
    os.sched_setscheduler(task["victim"], os.SCHED_IDLE, os.sched_param(0))
    return True


def _exec(_: dict[str, Any]) -> bool:
    try:
        os.execv("/no such program", ["x"])
    except FileNotFoundError:  # the kernel went looking for it: a real one would have replaced the canary
        return True


def _shared_memory(_: dict[str, Any]) -> bool:
    segment = _call("shmget", 0, 4096, 0o1600)
    _call("shmctl", segment, 0, 0)  # IPC_RMID: it would outlive every process
    return True


def _environment(task: dict[str, Any]) -> bool:
    with open(f"/proc/{task['victim']}/environ", "rb") as file:
        return bool(file.read())


def _attempts() -> dict[str, Callable[[dict[str, Any]], Any]]:
    return {
        "read a file of the user": _read_secret,
        "list a folder of the user": lambda task: len(os.listdir(task["folder"])) > 0,
        "write a file": _write,
        "read another process's environment": _environment,
        "connect to a TCP port": _connect,
        "connect to an abstract unix socket": _abstract,
        "open a UDP socket": lambda _: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        "open a netlink socket": lambda _: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
        "fork": _fork,
        "signal another process": lambda task: _signal(task["victim"]),
        "signal a thread of another process": lambda task: _call("tkill", task["victim"], 0) == 0,
        "signal the parent": lambda _: _signal(os.getppid()),
        "change another process's scheduling": _sched,
        "run a program": _exec,
        "make an executable in memory": lambda _: os.memfd_create("canary") > 0,
        "trace a process": lambda task: _call("ptrace", 16, task["victim"], 0, 0) == 0,
        "make an io_uring": lambda _: _call("io_uring_setup", 1, 0) >= 0,
        "use the keyring": lambda _: _call("keyctl", 0, -3 & 0xFFFFFFFF, 0) >= 0,
        "make namespaces": lambda _: _call("unshare", 0x10000000) == 0,
        "make shared memory": _shared_memory,
    }


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Try everything; return which attempts got through and how many there were.

    Args:
        task: ``secret_file``, ``secret``, ``folder``, ``tcp_port``, ``abstract_name``, ``victim`` (a process id).
    """
    through, total = [], 0
    for name, attempt in _attempts().items():
        total += 1
        try:
            got_through = bool(attempt(task))
        except Exception:
            got_through = False
        if got_through:
            through.append(name)
    return {"through": through, "total": total}
