"""What a program may use."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trl_grpo_ext.errors import ConfigurationError


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one program.

    CPU time comes first: it does not depend on what else the machine does. Wall time is the backstop for programs that
    sleep; time spent waiting for a processor is not counted, so a loaded machine turns no verdict.

    Attributes:
        cpu_s: seconds of CPU time; 0.05 or more.
        wall_s: seconds of wall time less the time spent waiting for a processor; None means ``4 * cpu_s + 1``.
        memory_mib: address space on top of the bare interpreter's; 16 or more.
        threads: threads at a time; further processes are never allowed.
        output_bytes: of standard output and of standard error, each; more ends the program.
        open_files: file descriptors; 8 or more.
        scratch_mib: size of a private, writable working folder; 0 gives an empty read-only one. Needs namespaces.
    """

    cpu_s: float = 2.0
    wall_s: float | None = None
    memory_mib: int = 512
    threads: int = 16
    output_bytes: int = 1 << 20
    open_files: int = 24
    scratch_mib: int = 0

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            ConfigurationError: naming the value and what is allowed.
        """
        smallest = {
            "cpu_s": 0.05,
            "memory_mib": 16,
            "threads": 1,
            "output_bytes": 1,
            "open_files": 8,
            "scratch_mib": 0,
        }
        for name, least in smallest.items():
            value = getattr(self, name)
            kinds = (int, float) if name == "cpu_s" else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value) or value < least:
                what = "a finite number" if name == "cpu_s" else "an integer"
                raise ConfigurationError(f"sandbox limit {name}={value!r} must be {what} of at least {least}")
        if self.wall_s is not None and not (
            isinstance(self.wall_s, (int, float)) and math.isfinite(self.wall_s) and self.wall_s >= self.cpu_s
        ):
            raise ConfigurationError(
                f"sandbox limit wall_s={self.wall_s!r} must be a number of at least cpu_s={self.cpu_s}, or None"
            )

    @property
    def effective_wall_s(self) -> float:
        """Wall time in force, seconds."""
        return 4 * self.cpu_s + 1 if self.wall_s is None else float(self.wall_s)
