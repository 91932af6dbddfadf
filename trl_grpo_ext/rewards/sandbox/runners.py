"""The plug-in point for running programs elsewhere: in a container, on another machine, through a service.

A runner runs one program on one standard input; everything else is done here. Tests never leave this process: calls
with known arguments are sent along as data, and their results are compared here. Tests that are statements are reduced
to such calls where they have the form ``assert f(...) == value``; others need the local sandbox and are reported as
unsupported.

An outage is no verdict: the sample is left out and counted, never scored 0.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.rewards.sandbox.compare import same_output
from trl_grpo_ext.rewards.sandbox.grading import Calls, Case, InputOutput, Statements, Tests, num_tests
from trl_grpo_ext.rewards.sandbox.guest.judge import equal
from trl_grpo_ext.rewards.sandbox.limits import SandboxLimits
from trl_grpo_ext.rewards.sandbox.results import End, ProcessResult, ProgramResult, TestOutcome

# A hostile reply is decoded in this process, so it must be small: building a dict of colliding keys is quadratic.
_MAX_REPLY_BYTES = 64 << 10
_SOURCE_BYTES = 100 << 10  # Linux allows 128 KiB in one argument


class RunnerOutageError(Exception):
    """The runner cannot run programs now; nothing is known about the program."""


@runtime_checkable
class ProgramRunner(Protocol):
    """Runs programs somewhere else. Implementations are used from several threads at once."""

    name: str

    def run_program(self, source: str, stdin: bytes, limits: SandboxLimits) -> ProgramResult:
        """Run one program as a script, within ``limits``, and return its result.

        Raises:
            RunnerOutageError: if it could not be run (any other exception counts as the same).
        """


class CommandRunner:
    """Runs every program by a command of the user's: Docker, Podman, gVisor's ``runsc``, bubblewrap, ssh.

    Example:
        ``CommandRunner(["docker", "run", "--rm", "-i", "--network=none", "--memory=512m", "--pids-limit=64",
        "--read-only", "python:3.12-slim", "python", "-I", "-c", "{program}"])``

    Args:
        command: argument list; the argument "{program}" is replaced by the program's text.
        name: for messages.

    Raises:
        ConfigurationError: if no argument is "{program}".
    """

    def __init__(self, command: Sequence[str], *, name: str = "command") -> None:
        if isinstance(command, str) or "{program}" not in command:
            raise ConfigurationError(f"command={command!r} must be a list of arguments, one of them '{{program}}'")
        self.command = tuple(command)
        self.name = name

    def run_program(self, source: str, stdin: bytes, limits: SandboxLimits) -> ProgramResult:
        """Run the command; on a failure that the command itself may have caused, make sure that it works at all.

        Raises:
            RunnerOutageError: if a trivial program does not come back either.
        """
        if len(source.encode("utf-8", "surrogatepass")) > _SOURCE_BYTES:
            return ProgramResult("output_limit", ProcessResult(End.OUTPUT, detail="the program's text is too long"))
        result = self._run(source, stdin, limits)
        # 125 to 127 are what docker and shells answer when they themselves fail, but a program can exit with them too.
        if result.exit_code in (125, 126, 127) or result.end is End.WALL:
            word = secrets.token_hex(8)
            if self._run(f"print({word!r})", b"", limits).stdout.strip() != word.encode():
                raise RunnerOutageError(f"{self.name}: a program that prints one word does not come back")
        ok = result.end is End.EXITED and result.exit_code == 0
        reasons = {End.WALL: "timeout", End.OUTPUT: "output_limit", End.SIGNAL: "crash"}
        return ProgramResult("ok" if ok else reasons.get(result.end, stderr_reason(result.stderr)), result)

    def _run(self, source: str, stdin: bytes, limits: SandboxLimits) -> ProcessResult:
        command = [source if part == "{program}" else part for part in self.command]
        begin = time.monotonic()
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            try:
                process = subprocess.Popen(
                    command, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
                )
            except (OSError, ValueError) as error:
                raise RunnerOutageError(f"{self.name}: {error}") from error
        outputs: list[bytearray] = [bytearray(), bytearray()]
        flooded = threading.Event()
        readers = [
            threading.Thread(target=_drain, args=(stream, buffer, limits.output_bytes, process, flooded), daemon=True)
            for stream, buffer in zip((process.stdout, process.stderr), outputs, strict=True)
        ]
        for reader in readers:
            reader.start()
        end = End.EXITED
        try:
            code = process.wait(limits.effective_wall_s)
        except subprocess.TimeoutExpired:
            end, code = End.WALL, None
        _kill_group(process)
        for reader in readers:
            reader.join(2)
        if flooded.is_set():
            end = End.OUTPUT
        elif code is not None and code < 0:
            end = End.SIGNAL
        return ProcessResult(
            end,
            exit_code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            stdout=bytes(outputs[0]),
            stderr=bytes(outputs[1]),
            wall_s=time.monotonic() - begin,
        )


def _drain(
    stream: Any, buffer: bytearray, most: int, process: subprocess.Popen[bytes], flooded: threading.Event
) -> None:
    with contextlib.suppress(OSError, ValueError):
        while part := os.read(stream.fileno(), 65536):
            buffer += part
            if len(buffer) > most:
                del buffer[most:]
                flooded.set()
                _kill_group(process)
                return


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def stderr_reason(stderr: bytes) -> str:
    """Return a reason code from a traceback's last line."""
    last = stderr.decode(errors="replace").rstrip().rpartition("\n")[2]
    for name, reason in (
        ("SyntaxError", "syntax_error"),
        ("IndentationError", "syntax_error"),
        ("MemoryError", "memory"),
    ):
        if last.startswith(name):
            return reason
    return "forbidden" if last.startswith("PermissionError") else "runtime_error"


# Runs after the program's text in the same interpreter: calls the function with the given arguments and prints what
# comes back as tagged JSON after a line of its own. The program could print such a line itself; it would only be giving
# an answer, which is then compared like any other.
_DRIVER = """
def __drive__():
    import io, json, sys
    task = json.loads(sys.stdin.read())
    namespace = {"__name__": "solution"}
    out, sys.stdout = sys.stdout, io.StringIO()
    try:
        exec(compile(task["source"], "<program>", "exec"), namespace)
        owner, _, method = task["entry_point"].partition(".")
        for args, kwargs in task["calls"]:
            target = namespace[owner]
            result = (getattr(target(), method) if method else target)(*eval(args), **eval(kwargs))
            out.write("\\n" + task["mark"] + repr(result))
            out.flush()
    finally:
        out.flush()
__drive__()
"""


def reduce_statements(tests: Statements) -> Calls | None:
    """Return tests of the form ``assert f(literals) == literal`` as calls, None if any has another form."""
    cases, names = [], set()
    for source in tests.tests:
        try:
            tree = ast.parse(source).body
            node = tree[0].test if len(tree) == 1 and isinstance(tree[0], ast.Assert) else None
            if not isinstance(node, ast.Compare) or len(node.ops) != 1 or not isinstance(node.ops[0], ast.Eq):
                return None
            call = node.left
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                return None
            args = tuple(ast.literal_eval(argument) for argument in call.args)
            kwargs = tuple((str(word.arg), ast.literal_eval(word.value)) for word in call.keywords if word.arg)
            cases.append(Case(args, ast.literal_eval(node.comparators[0]), kwargs))
            names.add(call.func.id)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return None
    return Calls(names.pop(), tuple(cases), loose_sequences=False) if len(names) == 1 else None


def grade_with(
    runner: ProgramRunner, source: str, tests: Tests, limits: SandboxLimits, *, stop_early: bool
) -> TestOutcome:
    """Return the outcome of a program's tests with a plug-in runner; an outage is a fault."""
    try:
        if isinstance(tests, InputOutput):
            return _grade_output(runner, source, tests, limits, stop_early)
        calls = tests if isinstance(tests, Calls) else reduce_statements(tests) if not tests.setup else None
        if calls is None:
            detail = f"runner {runner.name!r} cannot run tests of this form; the local sandbox can"
            return TestOutcome(0, num_tests(tests), "unsupported_by_runner", detail, fault=True)
        return _grade_calls(runner, source, calls, limits)
    except Exception as error:
        return TestOutcome(0, num_tests(tests), "runner_outage", f"{type(error).__name__}: {error}"[:300], fault=True)


def _grade_output(
    runner: ProgramRunner, source: str, tests: InputOutput, limits: SandboxLimits, stop_early: bool
) -> TestOutcome:
    passed, reason, detail = 0, "passed", ""
    for number, (given, expected) in enumerate(tests.cases, start=1):
        result = runner.run_program(source, given.encode("utf-8", "surrogatepass"), limits)
        if result.reason == "sandbox_fault":
            raise RunnerOutageError(result.process.detail)
        same = same_output(expected, result.stdout, tests.mode, rel_tol=tests.rel_tol, abs_tol=tests.abs_tol)
        if result.reason == "ok" and same:
            passed += 1
            continue
        if reason == "passed":
            reason, detail = "wrong_answer" if result.reason == "ok" else result.reason, f"test {number}"
        if stop_early:
            break
    return TestOutcome(passed, len(tests.cases), reason, detail)


def _grade_calls(runner: ProgramRunner, source: str, tests: Calls, limits: SandboxLimits) -> TestOutcome:
    mark = secrets.token_hex(16)
    task = {
        "source": source,
        "entry_point": tests.entry_point,
        "mark": mark,
        "calls": [(repr(case.args), repr(dict(case.kwargs))) for case in tests.cases],
    }
    result = runner.run_program(_DRIVER, json.dumps(task).encode(), limits)
    if result.reason == "sandbox_fault":
        raise RunnerOutageError(result.process.detail)
    replies = result.stdout[:_MAX_REPLY_BYTES].split("\n" + mark)[1:]
    passed = 0
    options: Any = {"rel_tol": tests.rel_tol, "abs_tol": tests.abs_tol, "loose_sequences": tests.loose_sequences}
    for case, reply in zip(tests.cases, replies, strict=False):
        with contextlib.suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            passed += equal(case.expected, _literal(reply), **options)
    total = len(tests.cases)
    if passed == total:
        return TestOutcome(passed, total, "passed")
    return TestOutcome(passed, total, "wrong_answer" if result.reason == "ok" else result.reason)


def _literal(text: str) -> Any:
    """Return the value of a literal; ``inf`` and ``nan``, which repr() writes bare, included."""
    words = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}
    return words[text.strip()] if text.strip() in words else ast.literal_eval(text.strip())


def drive_with(
    runner: ProgramRunner, jobs: Sequence[tuple[str, Tests]], limits: SandboxLimits, *, stop_early: bool, workers: int
) -> list[TestOutcome]:
    """Return the outcomes of (program, tests) pairs, ``workers`` at a time."""
    with ThreadPoolExecutor(max_workers=max(1, min(workers, len(jobs) or 1))) as threads:
        return list(threads.map(lambda job: grade_with(runner, job[0], job[1], limits, stop_early=stop_early), jobs))


def load_runner(path: str) -> ProgramRunner:
    """Return the runner at "module:attribute", calling it if it is a class or factory.

    Raises:
        ConfigurationError: if there is none.
    """
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"sandbox={path!r}: there is no such runner ({error})") from error
    if isinstance(found, type) or not isinstance(found, ProgramRunner):
        found = found() if callable(found) else found
    if not isinstance(found, ProgramRunner):
        raise ConfigurationError(
            f"sandbox={path!r} is a {type(found).__name__}; a runner has a 'name' and a method 'run_program'"
        )
    return found
