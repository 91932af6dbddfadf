"""The filter, simulated for both machines: a small interpreter of BPF decides on calls as the kernel would."""

from __future__ import annotations

import errno
import struct
import sys

import pytest

from trl_grpo_ext.rewards.sandbox.guest import seccomp, syscalls
from trl_grpo_ext.rewards.sandbox.guest.syscalls import AARCH64, X86_64, Machine

PID = 4242
MACHINES = [X86_64, AARCH64]


def decide(program: list[seccomp.Instruction], machine: Machine, number: int, *arguments: int, arch: int = 0) -> int:
    """Return the filter's answer to one call."""
    words = [argument & (2**64 - 1) for argument in (*arguments, *[0] * (6 - len(arguments)))]
    data = struct.pack("<iIQ6Q", number if number < 2**31 else number - 2**32, arch or machine.audit_arch, 0, *words)
    accumulator, position = 0, 0
    while True:
        code, if_true, if_false, operand = program[position]
        position += 1
        if code == 0x20:
            accumulator = struct.unpack_from("<I", data, operand)[0]
        elif code == 0x06:
            return operand
        elif code in (0x15, 0x35, 0x45):
            holds = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}
            position += if_true if holds[code] else if_false
        else:
            raise AssertionError(f"unknown instruction {code:#x}")


def answer(machine: Machine, name: str, *arguments: int, paths: bool = True, scratch: bool = False) -> str:
    """Return "allow", "kill" or the name of the error."""
    number = syscalls.number(name, machine)
    assert number is not None, name
    program = seccomp.build(machine, own_pid=PID, paths=paths, scratch=scratch)
    verdict = decide(program, machine, number, *arguments)
    if verdict == seccomp.ALLOW:
        return "allow"
    return "kill" if verdict == seccomp.KILL_PROCESS else errno.errorcode[verdict & 0xFFFF]


def test_numbers_agree_with_libseccomp() -> None:
    library = pytest.importorskip("pyseccomp", exc_type=Exception)
    for name, (x86, arm) in syscalls.NUMBERS.items():
        for column, arch in ((x86, library.Arch.X86_64), (arm, library.Arch.AARCH64)):
            found = library.resolve_syscall(arch, name)
            assert (column if column is not None else -1) == (found if found >= 0 else -1), name


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
class TestPolicy:
    def test_fits_the_kernel(self, machine: Machine) -> None:
        program = seccomp.build(machine, own_pid=PID, paths=True, scratch=True)
        assert len(program) <= 4096
        assert all(0 <= step.if_true <= 255 and 0 <= step.if_false <= 255 for step in program)

    def test_everything_unnamed_is_refused(self, machine: Machine) -> None:
        allowed = {"clone3"}
        program = seccomp.build(machine, own_pid=PID, paths=True, scratch=True)
        named = {pair[machine.column]: name for name, pair in syscalls.NUMBERS.items()}
        through = [number for number in range(1024) if decide(program, machine, number) == seccomp.ALLOW]
        names = {named.get(number, str(number)) for number in through}
        harmful = {"execve", "fork", "vfork", "ptrace", "socket", "memfd_create", "io_uring_setup", "bpf", "mount"}
        harmful |= {"unshare", "setns", "keyctl"}
        assert not names & {*harmful, "process_vm_readv", "sched_setscheduler", "setpriority", "pidfd_open", "capset"}
        assert names <= {*syscalls.ALWAYS, *syscalls.PATH_READING, *syscalls.SCRATCH, *seccomp_conditions()} - allowed

    def test_other_doors_kill(self, machine: Machine) -> None:
        program = seccomp.build(machine, own_pid=PID, paths=True, scratch=False)
        assert decide(program, machine, 20, arch=0x40000003) == seccomp.KILL_PROCESS  # i386
        assert decide(program, machine, 20, arch=0x40000028) == seccomp.KILL_PROCESS  # arm, 32 bit
        other = AARCH64 if machine is X86_64 else X86_64
        assert decide(program, machine, 0, arch=other.audit_arch) == seccomp.KILL_PROCESS
        if machine is X86_64:
            assert decide(program, machine, 0x40000000 | 39) == seccomp.KILL_PROCESS

    @pytest.mark.parametrize("name", ["kill", "tkill", "tgkill"])
    def test_signals_go_to_oneself_only(self, machine: Machine, name: str) -> None:
        assert answer(machine, name, PID, 9) == "allow"
        for target in (1, 0, -1, PID + 1, -PID, PID + (1 << 16)):
            assert answer(machine, name, target, 9) == "EPERM"

    def test_threads_but_no_processes(self, machine: Machine) -> None:
        glibc, musl, fork, vfork = 0x3D0F00, 0x7D0F00, 17, 0x4111
        assert answer(machine, "clone", glibc) == answer(machine, "clone", musl) == "allow"
        for flags in (fork, vfork, glibc & ~0x10000, glibc | 0x10000000, glibc | 0x20000, glibc | 1 << 35, 0x10000000):
            assert answer(machine, "clone", flags) == "EPERM"
        assert answer(machine, "clone3", 1, 2) == "ENOSYS"

    def test_fcntl_commands(self, machine: Machine) -> None:
        for command in (0, 1, 2, 3, 1030):
            assert answer(machine, "fcntl", 3, command) == "allow"
        assert answer(machine, "fcntl", 3, 4, 0o4000) == "allow"
        assert answer(machine, "fcntl", 3, 4, 0o20000) == "EACCES"  # O_ASYNC: signals to the owner
        for command in (
            8,
            10,
            15,
            1024,
            1031,
            1033,
        ):  # F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_SETPIPE_SZ, seals
            assert answer(machine, "fcntl", 3, command) == "EPERM"

    def test_other_conditions(self, machine: Machine) -> None:
        assert answer(machine, "ioctl", 0, 0x5401) == "allow"
        assert answer(machine, "ioctl", 0, 0x5412) == "EPERM"  # TIOCSTI types into a terminal
        assert answer(machine, "prctl", 15) == "allow"
        assert answer(machine, "prctl", 4, 1) == answer(machine, "prctl", 22, 2) == "EPERM"
        assert answer(machine, "prlimit64", 0, 7) == answer(machine, "prlimit64", PID, 7) == "allow"
        assert answer(machine, "prlimit64", 1, 7) == "EPERM"
        assert answer(machine, "socketpair", 1, 1 | 0o2000000) == "allow"
        assert answer(machine, "socketpair", 2, 1) == answer(machine, "socketpair", 1, 3) == "EPERM"
        assert answer(machine, "sendto", 3, 4, 5, 0, 0, 0) == "allow"
        assert answer(machine, "sendto", 3, 4, 5, 0, 1 << 40, 16) == "EPERM"
        assert answer(machine, "sendto", 3, 4, 5, 0, 4096, 16) == "EPERM"

    def test_opening(self, machine: Machine) -> None:
        reading, writing = 0o2000000, (0o1, 0o2, 0o101, 0o1000, 0o20000002)
        assert answer(machine, "openat", -100, 1, reading) == "allow"
        for flags in writing:
            assert answer(machine, "openat", -100, 1, flags) == "EACCES"
            assert answer(machine, "openat", -100, 1, flags, scratch=True) == "allow"
            assert answer(machine, "openat", -100, 1, flags, paths=False) == "EACCES"
        assert answer(machine, "openat", -100, 1, reading, paths=False) == "EACCES"
        # fstat is newfstatat with AT_EMPTY_PATH
        assert answer(machine, "newfstatat", 3, 1, 2, 0x1000, paths=False) == "allow"
        assert answer(machine, "newfstatat", -100, 1, 2, 0, paths=False) == "EPERM"
        assert answer(machine, "mkdirat", -100, 1, 0o777) == "EPERM"
        assert answer(machine, "mkdirat", -100, 1, 0o777, scratch=True) == "allow"


def seccomp_conditions() -> set[str]:
    return set(seccomp._conditions(PID, True, True))


def test_the_process_id_is_filled_in() -> None:
    template = seccomp.Template(X86_64, paths=True, scratch=False)
    assert len(template._places) >= 3
    assert all(template._filters[index].k == template._PLACE for index in template._places)


def test_this_machine_is_known() -> None:
    if sys.platform.startswith("linux"):
        assert syscalls.this_machine() in (*MACHINES, None)
