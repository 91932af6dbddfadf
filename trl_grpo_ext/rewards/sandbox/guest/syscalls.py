"""System call numbers of the two supported machines, and the groups that the policy is written in.

Numbers are facts of the kernel's ABI (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h);
``tests/sandbox/test_seccomp.py`` compares every one of them with libseccomp's table.
"""

from __future__ import annotations

import platform
from typing import NamedTuple


class Machine(NamedTuple):
    """What a filter must know of a machine.

    Attributes:
        name: as in ``platform.machine()``.
        audit_arch: the AUDIT_ARCH_* value that the kernel puts into ``seccomp_data.arch``.
        column: index into the pairs of :data:`NUMBERS`.
    """

    name: str
    audit_arch: int
    column: int


X86_64 = Machine("x86_64", 0xC000003E, 0)
AARCH64 = Machine("aarch64", 0xC00000B7, 1)

# name: (x86-64, aarch64); None where the machine lacks the call.
NUMBERS: dict[str, tuple[int | None, int | None]] = {
    # descriptors and data
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "preadv": (295, 69),
    "pwritev": (296, 70),
    "close": (3, 57),
    "close_range": (436, 436),
    "lseek": (8, 62),
    "fstat": (5, 80),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "fcntl": (72, 25),
    "ioctl": (16, 29),
    # paths
    "newfstatat": (262, 79),
    "stat": (4, None),
    "lstat": (6, None),
    "statx": (332, 291),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "open": (2, None),
    "openat": (257, 56),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getdents64": (217, 61),
    # changes to a scratch directory
    "ftruncate": (77, 46),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "flock": (73, 32),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    # memory
    "brk": (12, 214),
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "mprotect": (10, 226),
    "madvise": (28, 233),
    # signals and timers of the process itself
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "pause": (34, None),
    "alarm": (37, None),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    # time
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "nanosleep": (35, 101),
    "times": (100, 153),
    "getrusage": (98, 165),
    # threads and the process itself
    "clone": (56, 220),
    "clone3": (435, 435),
    "futex": (202, 98),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "set_tid_address": (218, 96),
    "gettid": (186, 178),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getgroups": (115, 158),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getpgrp": (111, None),
    "membarrier": (324, 283),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "restart_syscall": (219, 128),
    "wait4": (61, 260),
    "waitid": (247, 95),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "getcpu": (309, 168),
    "getrandom": (318, 278),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "umask": (95, 166),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "getrlimit": (97, 163),
    "setrlimit": (160, 164),
    # waiting for descriptors; pairs of connected sockets (asyncio's wake-up)
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "eventfd2": (290, 19),
    "socketpair": (53, 199),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "shutdown": (48, 210),
    # used by the confinement itself, never allowed to a program
    "seccomp": (317, 277),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
    "pivot_root": (155, 41),
    "unshare": (272, 97),
    "capset": (126, 91),
    "execve": (59, 221),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "memfd_create": (319, 279),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "setns": (308, 268),
    "sched_setscheduler": (144, 119),
    "setpriority": (141, 140),
    "socket": (41, 198),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "pidfd_open": (434, 434),
    "rt_sigqueueinfo": (129, 138),
    "mount": (165, 40),
    "shmget": (29, 194),
    "shmctl": (31, 195),
    "fchmod": (91, 52),
    "fork": (57, None),
    "vfork": (58, None),
}

# Allowed whatever the arguments.
_ALWAYS = """
    read write readv writev pread64 pwrite64 preadv pwritev close close_range lseek fstat dup dup2 dup3 pipe pipe2
    brk mmap munmap mremap mprotect madvise
    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack pause alarm
    getitimer setitimer clock_gettime clock_getres clock_nanosleep gettimeofday time nanosleep times getrusage
    futex set_robust_list rseq set_tid_address gettid getpid getppid getuid geteuid getgid getegid getgroups
    getresuid getresgid getpgrp membarrier exit exit_group restart_syscall wait4 waitid sched_yield
    sched_getaffinity getcpu getrandom uname sysinfo umask getrlimit setrlimit
    poll ppoll select pselect6 epoll_create1 epoll_ctl epoll_wait epoll_pwait eventfd2 recvfrom shutdown getcwd
"""

# Allowed where Landlock or a private root bounds what a path can reach.
_PATH_READING = """
    newfstatat stat lstat statx access faccessat faccessat2 chdir readlink readlinkat getdents64
"""

# Allowed only to a program that was given a scratch directory of its own.
_SCRATCH = """
    open openat ftruncate fsync fdatasync flock mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2
"""


ALWAYS, PATH_READING, SCRATCH = _ALWAYS.split(), _PATH_READING.split(), _SCRATCH.split()


def this_machine() -> Machine | None:
    """Return the machine that this interpreter runs on, or None if its system calls are not in the table."""
    name = platform.machine().lower()
    if name in ("x86_64", "amd64"):
        return X86_64
    if name in ("aarch64", "arm64"):
        return AARCH64
    return None


def number(name: str, machine: Machine) -> int | None:
    """Return the number of a system call on a machine, None where the machine lacks it."""
    return NUMBERS[name][machine.column]
