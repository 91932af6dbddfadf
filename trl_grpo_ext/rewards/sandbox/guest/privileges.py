"""Limits, user ids and capabilities of one process: the layers that every Unix has."""

from __future__ import annotations

import ctypes
import os
import pwd
import resource

from . import syscalls
from .libc import PR_CAP_AMBIENT, libc, raw_syscall

_CAPABILITY_VERSION_3 = 0x20080522
_CAP_SYS_ADMIN = 21
_UNUSED_UIDS = range(60101, 60800)  # between systemd's ranges, inside the 65536 ids that a container usually has


def unused_uid() -> int | None:
    """Return a user id that no account and no running process has, None if this user may not change its id."""
    if os.geteuid() != 0:
        return None
    try:
        with open("/proc/self/uid_map") as file:
            ranges = [tuple(map(int, line.split())) for line in file]
    except OSError:
        ranges = [(0, 0, 2**32 - 1)]
    used = {entry.pw_uid for entry in pwd.getpwall()}
    try:
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    used.add(os.stat(f"/proc/{name}").st_uid)
                except OSError:
                    continue
    except OSError:
        pass
    # Start at a place that depends on the process, so that two runs on one machine do not meet.
    offset = os.getpid() % len(_UNUSED_UIDS)
    for uid in (*_UNUSED_UIDS[offset:], *_UNUSED_UIDS[:offset]):
        if uid not in used and any(first <= uid < first + count for first, _, count in ranges):
            return uid
    return None


def become(uid: int) -> None:
    """Change to a user and group id without supplementary groups; from root this drops every capability.

    Raises:
        OSError: if the change is refused.
    """
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def blocked_as(uid: int, paths: tuple[str, ...]) -> str | None:
    """Return None if this process can become ``uid`` and read all paths then, else what stands against it.

    Asked in a child, because there is no way back.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            become(uid)
            blocked = [path for path in paths if not os.access(path, os.R_OK)]
            if blocked:
                os.write(write_end, f"user id kept: another user cannot read {blocked[0]}".encode()[:500])
        except OSError as error:
            os.write(write_end, f"user id kept: {error}".encode()[:500])
        finally:
            os._exit(0)
    os.close(write_end)
    reason = os.read(read_end, 4096).decode(errors="replace")
    os.close(read_end)
    os.waitpid(child, 0)
    return reason or None


def _set_capabilities(bits: int) -> None:
    machine = syscalls.this_machine()
    if machine is None:
        return
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    low, high = bits & 0xFFFFFFFF, bits >> 32
    data = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)  # effective, permitted, inheritable; twice
    raw_syscall(syscalls.number("capset", machine) or 0, ctypes.addressof(header), ctypes.addressof(data))


def drop_capabilities() -> None:
    """Give up every capability for good.

    Raises:
        OSError: if the kernel refuses.
    """
    libc.prctl(PR_CAP_AMBIENT, ctypes.c_ulong(4), 0, 0, 0)  # PR_CAP_AMBIENT_CLEAR_ALL
    _set_capabilities(0)


def raise_capabilities() -> None:
    """Make CAP_SYS_ADMIN, kept over a change of user id, effective again, and drop all others.

    Raises:
        OSError: if it was not kept.
    """
    _set_capabilities(1 << _CAP_SYS_ADMIN)


def address_space_bytes() -> int:
    """Return this process's address space, which RLIMIT_AS counts whole."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 256 << 20


def set_limits(*, cpu_s: int, address_space: int, file_bytes: int, open_files: int, threads: int | None) -> None:
    """Set hard limits; they can be lowered afterwards but not raised.

    Args:
        cpu_s: seconds of CPU time; the kernel's backstop behind the finer limit that the client watches.
        address_space: bytes.
        file_bytes: size of any one file.
        open_files: descriptors.
        threads: processes and threads of this user id; None where that would count the user's other processes.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
    resource.setrlimit(resource.RLIMIT_MSGQUEUE, (0, 0))
    resource.setrlimit(resource.RLIMIT_SIGPENDING, (64, 64))
    if threads is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))
