"""The few C library calls that Python lacks, with errors raised as OSError."""

from __future__ import annotations

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47


def check(result: int, what: str) -> int:
    """Return a call's result, or raise OSError with the errno it left.

    Raises:
        OSError: if the result is negative.
    """
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def raw_syscall(number: int, *arguments: int | None) -> int:
    """Make a system call by number; integer or pointer arguments.

    Raises:
        OSError: if the kernel refuses.
    """
    packed = [None if argument is None else ctypes.c_long(argument) for argument in arguments]
    return check(libc.syscall(ctypes.c_long(number), *packed), f"system call {number}")


def prctl(option: int, value: int = 0, third: int = 0) -> None:
    """Set an attribute of the process.

    Raises:
        OSError: if the kernel refuses.
    """
    unused = ctypes.c_ulong(0)
    check(libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(third), unused, unused), f"prctl({option})")
