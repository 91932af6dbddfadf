"""Run a command as it would run elsewhere, as far as that can be emulated:

    python tests/sandbox/like.py docker COMMAND...    Docker's default profile: no namespaces, no mounts
    python tests/sandbox/like.py gvisor COMMAND...    besides, no Landlock (ENOSYS), as in gVisor
    python tests/sandbox/like.py bare COMMAND...      besides, no seccomp either: nothing safe is left

The calls that such a place refuses are refused here by a seccomp filter that the command inherits.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from trl_grpo_ext.rewards.sandbox.guest import privileges, seccomp, syscalls
from trl_grpo_ext.rewards.sandbox.guest.libc import PR_SET_NO_NEW_PRIVS, prctl, raw_syscall
from trl_grpo_ext.rewards.sandbox.guest.seccomp import Instruction

_NAMESPACES = ["unshare", "mount", "setns", "pivot_root", "keyctl", "bpf", "perf_event_open", "userfaultfd"]
_LANDLOCK = ["landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"]
_REFUSED = {
    "docker": {"EPERM": _NAMESPACES},
    "gvisor": {"EPERM": _NAMESPACES, "ENOSYS": _LANDLOCK},
    "bare": {"EPERM": [*_NAMESPACES, "seccomp"], "ENOSYS": _LANDLOCK},
}
# chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap, net_bind_service, net_raw, sys_chroot, mknod,
# audit_write, setfcap: what Docker leaves to root.
_DOCKER_CAPABILITIES = sum(1 << bit for bit in (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31))


def refuse(place: str) -> None:
    """Install the filter of a place in this process."""
    machine = syscalls.this_machine()
    assert machine is not None
    program = [Instruction(0x20, 0, 0, 0)]
    for code, names in _REFUSED[place].items():
        for name in names:
            number = syscalls.number(name, machine)
            if number is not None:
                action = seccomp.ERRNO | getattr(errno, code)
                program += [Instruction(0x15, 0, 1, number), Instruction(0x06, 0, 0, action)]
    # clone with a namespace flag
    clone = syscalls.number("clone", machine)
    flags = 0x7E020000
    program += [
        Instruction(0x15, 0, 3, clone or 0),
        Instruction(0x20, 0, 0, 16),
        Instruction(0x45, 0, 1, flags),
        Instruction(0x06, 0, 0, seccomp.ERRNO | errno.EPERM),
        Instruction(0x06, 0, 0, seccomp.ALLOW),
    ]
    filters = (seccomp._SockFilter * len(program))(*(seccomp._SockFilter(*step) for step in program))

    prctl(PR_SET_NO_NEW_PRIVS, 1)
    header = seccomp._SockProgram(len(filters), ctypes.cast(filters, ctypes.POINTER(seccomp._SockFilter)))
    raw_syscall(syscalls.number("seccomp", machine) or 0, 1, 0, ctypes.addressof(header))


def main() -> None:
    place, command = sys.argv[1], sys.argv[2:]
    if os.geteuid() == 0:
        for capability in range(41):
            if not _DOCKER_CAPABILITIES >> capability & 1:
                ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
        privileges._set_capabilities(_DOCKER_CAPABILITIES)
    refuse(place)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
