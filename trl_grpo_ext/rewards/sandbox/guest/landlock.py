"""Landlock: which files a process may read, and that it may reach no TCP port, abstract socket or foreign process.

An unprivileged process can confine itself; Docker's default profile allows the calls. What the kernel's version of
Landlock lacks (network before 6.7, scopes before 6.12) seccomp covers. Landlock does not restrict ``stat`` and
``chdir``: that a file exists, its size and its dates stay visible where the mount namespace does not hide it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from . import syscalls
from .libc import PR_SET_NO_NEW_PRIVS, prctl, raw_syscall

READ_FILE = 1 << 2
READ_DIR = 1 << 3
_FS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_MAKE_SPECIAL = sum(1 << bit for bit in (6, 9, 10, 11, 12))  # character device, socket, fifo, block device, symlink
_EXECUTE = 1
_IOCTL_DEVICE = 1 << 15
_NET_ALL = 0b11  # bind and connect TCP
_SCOPE_ALL = 0b11  # abstract unix sockets, signals
_RULE_PATH_BENEATH = 1


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"  # what packing means; Python 3.14 wants it said
    _fields_ = (("access", ctypes.c_uint64), ("fd", ctypes.c_int32))


def _number(name: str) -> int:
    machine = syscalls.this_machine()
    if machine is None:
        raise OSError(38, "no system call table for this machine")
    return syscalls.number(name, machine) or 0


def abi() -> int:
    """Return the kernel's Landlock version, 1 or more.

    Raises:
        OSError: if the kernel has none (ENOSYS) or it is switched off (EOPNOTSUPP).
    """
    return raw_syscall(_number("landlock_create_ruleset"), None, 0, 1)


def _handled(version: int) -> tuple[int, int, int]:
    """Return (file rights, network rights, scopes) that this version can take away."""
    files = _FS_BY_ABI[min(version, 5)]
    return files, _NET_ALL if version >= 4 else 0, _SCOPE_ALL if version >= 6 else 0


class Ruleset:
    """A prepared ruleset: made once by the server, enforced by each child on itself.

    Each enforcing makes a domain of its own, so that siblings are out of reach of each other's signals, abstract
    sockets and ptrace as well.

    Args:
        readable: files and trees that may be read; those that do not exist are left out.
        writable: folders in which ordinary files may be made, changed and removed.

    Raises:
        OSError: if the kernel has no Landlock or refuses.
    """

    def __init__(self, readable: Iterable[str], writable: Iterable[str] = ()) -> None:
        self.version = abi()
        files, net, scopes = _handled(self.version)
        attributes = _RulesetAttributes(files, net, scopes)
        size = 24 if self.version >= 6 else 16 if self.version >= 4 else 8
        self.fd = raw_syscall(_number("landlock_create_ruleset"), ctypes.addressof(attributes), size, 0)
        for path in readable:
            self._allow(path, READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE)
        # Ordinary files only, no program to run, no device.
        for path in writable:
            self._allow(path, files & ~(_MAKE_SPECIAL | _EXECUTE | _IOCTL_DEVICE))

    def _allow(self, path: str, access: int) -> None:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return
        try:
            rule = _PathBeneath(access, fd)
            raw_syscall(_number("landlock_add_rule"), self.fd, _RULE_PATH_BENEATH, ctypes.addressof(rule), 0)
        finally:
            os.close(fd)

    def enforce(self) -> None:
        """Confine this process for ever.

        Raises:
            OSError: if the kernel refuses.
        """
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        raw_syscall(_number("landlock_restrict_self"), self.fd, 0)
