"""What comes back from the sandbox."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class End(str, Enum):
    """How a program's process ended. All but FAULT are the program's own doing."""

    EXITED = "exited"
    CPU = "cpu"
    WALL = "wall"
    OUTPUT = "output"
    THREADS = "threads"
    SIGNAL = "signal"
    FAULT = "fault"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class ErrorReport:
    """What a program's runner says it raised. Not trustworthy, good for a reason code only.

    Attributes:
        builtin: nearest built-in exception type.
        name: the exception's own type.
        message: shortened.
        line: line of the program, 0 if unknown.
    """

    builtin: str
    name: str
    message: str
    line: int


@dataclass(frozen=True)
class ProcessResult:
    """One confined process that has ended.

    Attributes:
        end: how it ended.
        exit_code: None if a signal ended it.
        signal: None if it exited.
        stdout: captured bytes, at most ``output_bytes``.
        stderr: the same.
        channel: bytes that it sent over its private channel.
        cpu_s: CPU time, seconds.
        wall_s: wall time, seconds, queueing not included.
        waited_s: part of it spent waiting for a processor, as last seen; the rest is the program's own.
        peak_rss_kib: peak resident memory; starts at the server's own.
        detail: what went wrong, for FAULT.
    """

    end: End
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    channel: bytes = b""
    cpu_s: float = 0.0
    wall_s: float = 0.0
    waited_s: float = 0.0
    peak_rss_kib: int = 0
    detail: str = ""

    @property
    def charged_s(self) -> float:
        """Seconds that count against a budget: CPU time, or time asleep where that is more."""
        return max(self.cpu_s, self.wall_s - self.waited_s)


@dataclass(frozen=True)
class ProgramResult:
    """One program run as a script.

    Attributes:
        reason: "ok", "syntax_error", "runtime_error", "timeout", "memory", "output_limit", "forbidden", "crash" or
            "sandbox_fault" (ours, not the program's).
        process: the process behind it.
        error: what the program raised.
    """

    reason: str
    process: ProcessResult
    error: ErrorReport | None = None

    @property
    def stdout(self) -> str:
        """Captured standard output as text."""
        return self.process.stdout.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """Captured standard error as text."""
        return self.process.stderr.decode("utf-8", "replace")


@dataclass(frozen=True)
class TestOutcome:
    """A program's tests.

    Attributes:
        passed: number of tests passed.
        total: number of tests there are, run or not.
        reason: "passed" if all did, else the first failure's reason code.
        detail: for the log.
        fault: True if nothing can be said about the program: the sandbox or the tests are at fault.
    """

    __test__ = False  # not a test class, whatever pytest thinks

    passed: int
    total: int
    reason: str
    detail: str = ""
    fault: bool = False
