"""A seccomp allow-list as a classic BPF program: what is not named is refused.

A deny-list is not enough: ``tkill``, ``fcntl(F_SETOWN)`` and ``sched_setscheduler`` on other processes all slipped
through one. The program first checks the architecture (so that 32-bit and x32 calls kill the process), then compares
the number; some calls have conditions on their arguments. Pointers cannot be inspected, so a call that hides its
arguments in memory (``clone3``, ``openat2``) is answered with ENOSYS, on which libc falls back to the older call.
"""

from __future__ import annotations

import ctypes
import errno
from typing import NamedTuple

from . import syscalls
from .libc import PR_SET_NO_NEW_PRIVS, libc, prctl, raw_syscall
from .syscalls import Machine

KILL_PROCESS = 0x80000000
ALLOW = 0x7FFF0000
ERRNO = 0x00050000

_LD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_JEQ = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JGE = 0x35
_JSET = 0x45
_RET = 0x06
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGS = 0, 4, 16

_X32_BIT = 0x40000000
_AF_UNIX = 1
_SOCK_KINDS = (1, 2, 5)  # stream, datagram, seqpacket
_SOCK_FLAGS = 0o4000 | 0o2000000  # SOCK_NONBLOCK | SOCK_CLOEXEC
# CLONE_VM, FS, FILES, SIGHAND, THREAD, SYSVSEM, SETTLS, PARENT_SETTID, CHILD_CLEARTID, DETACHED: glibc's and musl's
# pthread_create. Nothing else may be asked for, above all no namespace.
_THREAD_FLAGS = 0x3D0F00 | 0x400000
_CLONE_THREAD = 0x10000
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC; F_SETFL is checked apart, F_SETOWN and F_SETSIG are not there.
_FCNTL_COMMANDS = (0, 1, 2, 3, 1030)
_F_SETFL, _O_ASYNC = 4, 0o20000
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_PRCTL_OPTIONS = (15, 16, 0x53564D41)  # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA (glibc labels its heaps)
# O_WRONLY, O_RDWR, O_CREAT, O_EXCL, O_TRUNC, O_APPEND, O_ASYNC and the tmpfile bit: a read-only open has none.
_OPEN_WRITING = 0o1 | 0o2 | 0o100 | 0o200 | 0o1000 | 0o2000 | 0o20000 | 0o20000000
_AT_EMPTY_PATH = 0x1000


class Instruction(NamedTuple):
    """One ``struct sock_filter``: operation, jumps if true and if false, operand."""

    code: int
    if_true: int
    if_false: int
    operand: int


def _load(offset: int) -> Instruction:
    return Instruction(_LD_WORD, 0, 0, offset)


def _low(argument: int) -> Instruction:
    """Load the low half of an argument: all the kernel looks at where the parameter is an int (little-endian)."""
    return _load(_OFFSET_ARGS + 8 * argument)


def _high(argument: int) -> Instruction:
    return _load(_OFFSET_ARGS + 8 * argument + 4)


def _ret(value: int) -> Instruction:
    return Instruction(_RET, 0, 0, value)


def _refuse(code: int = errno.EPERM) -> Instruction:
    return _ret(ERRNO | code)


def _one_of(values: tuple[int, ...]) -> list[Instruction]:
    """Allow if the loaded word is one of the values, else refuse."""
    steps = [Instruction(_JEQ, len(values) - index, 0, value) for index, value in enumerate(values)]
    return [*steps, _refuse(), _ret(ALLOW)]


def _none_of_bits(bits: int) -> list[Instruction]:
    """Allow if the loaded word has none of the bits, else refuse."""
    return [Instruction(_JSET, 0, 1, bits), _refuse(errno.EACCES), _ret(ALLOW)]


def _conditions(own_pid: int, paths: bool, scratch: bool) -> dict[str, list[Instruction]]:
    """Return {call: instructions that decide on its arguments}; each list ends every path with a verdict."""
    own = _one_of((own_pid,))
    conditions = {
        # A pid of 0 or below would reach a group or everybody.
        "kill": [_low(0), *own],
        "tkill": [_low(0), *own],
        "tgkill": [_low(0), *own],
        "clone": [
            _high(0),
            Instruction(_JEQ, 0, 4, 0),
            _low(0),
            Instruction(_JSET, 0, 2, _CLONE_THREAD),
            Instruction(_JSET, 1, 0, ~_THREAD_FLAGS & 0xFFFFFFFF),
            _ret(ALLOW),
            _refuse(),
        ],
        "fcntl": [
            _low(1),
            Instruction(_JEQ, 0, 4, _F_SETFL),
            _low(2),
            *_none_of_bits(_O_ASYNC),
            *_one_of(_FCNTL_COMMANDS),
        ],
        "ioctl": [_low(1), *_one_of(_IOCTLS)],
        "prctl": [_low(0), *_one_of(_PRCTL_OPTIONS)],
        "prlimit64": [_low(0), *_one_of((0, own_pid))],
        "socketpair": [
            _low(0),
            Instruction(_JEQ, 1, 0, _AF_UNIX),
            _refuse(),
            _low(1),
            *_one_of(tuple(kind | flags for kind in _SOCK_KINDS for flags in (0, 0o4000, 0o2000000, _SOCK_FLAGS))),
        ],
        # With an address it could reach another socket.
        "sendto": [_low(4), Instruction(_JEQ, 0, 2, 0), _high(4), Instruction(_JEQ, 1, 0, 0), _refuse(), _ret(ALLOW)],
        "clone3": [_refuse(errno.ENOSYS)],
    }
    if not paths:
        # glibc's fstat is newfstatat with an empty path. The path itself cannot be checked: see docs/sandbox.md.
        conditions["newfstatat"] = [_low(3), Instruction(_JSET, 0, 1, _AT_EMPTY_PATH), _ret(ALLOW), _refuse()]
        for name in ("open", "openat", "stat", "lstat", "statx", "access", "faccessat", "readlink", "readlinkat"):
            conditions[name] = [_refuse(errno.EACCES)]
    elif not scratch:
        conditions["open"] = [_low(1), *_none_of_bits(_OPEN_WRITING)]
        conditions["openat"] = [_low(2), *_none_of_bits(_OPEN_WRITING)]
    return conditions


def build(machine: Machine, *, own_pid: int, paths: bool, scratch: bool) -> list[Instruction]:
    """Return the filter program.

    Args:
        machine: whose numbers to use.
        own_pid: the process's id as it sees itself; the only one it may signal.
        paths: whether files may be opened for reading (only where another layer bounds which).
        scratch: whether the calls that write files are allowed (only where another layer bounds where).
    """
    conditions = _conditions(own_pid, paths, scratch)
    allowed = list(syscalls.ALWAYS)
    if paths:
        allowed += syscalls.PATH_READING
        if scratch:
            allowed += syscalls.SCRATCH
    program = [_load(_OFFSET_ARCH), Instruction(_JEQ, 1, 0, machine.audit_arch), _ret(KILL_PROCESS)]
    program.append(_load(_OFFSET_NUMBER))
    if machine is syscalls.X86_64:
        program += [Instruction(_JGE, 0, 1, _X32_BIT), _ret(KILL_PROCESS)]
    for name in allowed:
        value = syscalls.number(name, machine)
        if value is not None and name not in conditions:
            program += [Instruction(_JEQ, 0, 1, value), _ret(ALLOW)]
    for name, steps in conditions.items():
        value = syscalls.number(name, machine)
        if value is not None:
            program += [Instruction(_JEQ, 0, len(steps), value), *steps]
    program.append(_refuse())
    return program


class _SockFilter(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jt", ctypes.c_uint8),
        ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )


class _SockProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_SockFilter)))


class Template:
    """A filter built once in the server and completed with each child's pid (building it costs a millisecond)."""

    _PLACE = 0x7FFFFFF1  # no pid: the kernel's limit is 2**22

    def __init__(self, machine: Machine, *, paths: bool, scratch: bool) -> None:
        program = build(machine, own_pid=self._PLACE, paths=paths, scratch=scratch)
        self.number = syscalls.number("seccomp", machine) or 0
        self._filters = (_SockFilter * len(program))(*(_SockFilter(*step) for step in program))
        self._places = [index for index, step in enumerate(program) if step.operand == self._PLACE]

    def install(self, own_pid: int) -> None:
        """Confine the calling thread, for ever; it must be the only one.

        Raises:
            OSError: if the kernel refuses; the process must then not run the program.
        """
        for index in self._places:
            self._filters[index].k = own_pid
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        program = _SockProgram(len(self._filters), ctypes.cast(self._filters, ctypes.POINTER(_SockFilter)))
        raw_syscall(self.number, 1, 0, ctypes.addressof(program))  # SECCOMP_SET_MODE_FILTER


def available() -> str | None:
    """Return None if filters can be installed here, else the reason why not."""
    if syscalls.this_machine() is None:
        return "no system call table for this machine; x86-64 and aarch64 are supported"
    ctypes.set_errno(0)
    # PR_GET_SECCOMP succeeds only if the kernel knows seccomp; whether a filter holds is for the canary to show.
    if libc.prctl(21, 0, 0, 0, 0) < 0:
        return f"the kernel has no seccomp ({errno.errorcode.get(ctypes.get_errno(), '?')})"
    return None
