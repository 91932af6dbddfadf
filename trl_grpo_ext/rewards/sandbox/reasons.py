"""From how a process ended to a reason code."""

from __future__ import annotations

import json
import signal

from trl_grpo_ext.rewards.sandbox.results import End, ErrorReport, ProcessResult, ProgramResult


def error_report(channel: bytes) -> ErrorReport | None:
    """Return what a program's runner said it raised, None if it said nothing readable."""
    try:
        parts = json.loads(channel[4:])
        return ErrorReport(str(parts[0]), str(parts[1]), str(parts[2])[:300], int(parts[3]))
    except (ValueError, RecursionError, TypeError, IndexError, KeyError):
        return None


def end_reason(process: ProcessResult) -> str | None:
    """Return the reason code of an end that was not the program's own exit, None for an exit."""
    if process.end in (End.CPU, End.WALL):
        return "timeout"
    named = {End.OUTPUT: "output_limit", End.THREADS: "forbidden", End.FAULT: "sandbox_fault"}
    if process.end in named:
        return named[process.end]
    if process.end is End.SIGNAL and process.signal is not None:
        # A kill that nobody here asked for is the kernel's, for want of memory.
        return {"SIGKILL": "memory", "SIGSYS": "forbidden", "SIGXFSZ": "forbidden"}.get(
            signal_name(process.signal), "crash"
        )
    return None


def error_reason(builtin: str) -> str:
    """Return the reason code of an exception by its built-in type."""
    if builtin in ("SyntaxError", "IndentationError", "TabError"):
        return "syntax_error"
    return {"MemoryError": "memory", "PermissionError": "forbidden", "SystemExit": "exit"}.get(builtin, "runtime_error")


def classify(process: ProcessResult) -> ProgramResult:
    """Return a script's result with its reason code."""
    error = error_report(process.channel) if process.channel else None
    reason = end_reason(process)
    if reason is None:
        reason = "ok" if process.exit_code == 0 else error_reason(error.builtin) if error else "runtime_error"
    return ProgramResult(reason, process, error)


def signal_name(number: int) -> str:
    """Return "SIGSEGV" for 11, the number itself if it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
