"""What another process has used so far, as the kernel tells."""

from __future__ import annotations

import os
import time
from typing import NamedTuple


class Usage(NamedTuple):
    """CPU seconds, seconds spent waiting for a processor, and threads of a process."""

    cpu_s: float
    waited_s: float
    threads: int


def usage_of(process_id: int) -> Usage | None:
    """Return what a process has used, zeros where that cannot be known; None if it has ended."""
    cpu_s, waited_s, threads = 0.0, 0.0, 1
    if process_id <= 0:
        return Usage(cpu_s, waited_s, threads)
    try:
        # The clock id of another process's CPU time, as clock_getcpuclockid(3) makes it.
        cpu_s = time.clock_gettime((~process_id << 3) | 2)
        with open(f"/proc/{process_id}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        if fields[0] in ("Z", "X"):
            return None
        threads = int(fields[17])
        # The thread that waits the longest counts: the main one may be asleep while another starves.
        waited_s = max(_waited_s(process_id, task) for task in os.listdir(f"/proc/{process_id}/task")[:64])
    except (OSError, ValueError, IndexError):
        pass
    return Usage(cpu_s, waited_s, threads)


def _waited_s(process_id: int, task: str) -> float:
    try:
        with open(f"/proc/{process_id}/task/{task}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # the thread has ended, or the kernel keeps no such statistics
        return 0.0
