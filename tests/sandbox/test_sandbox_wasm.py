"""The WASM backend: what it stops and what it cannot do. Skipped without wasmtime and a WASI build of CPython."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trl_grpo_ext.errors import MissingDependencyError
from trl_grpo_ext.rewards.sandbox import SandboxLimits
from trl_grpo_ext.rewards.sandbox.grading import Calls, Case, InputOutput, Statements
from trl_grpo_ext.rewards.sandbox.runners import ProgramRunner, grade_with
from trl_grpo_ext.rewards.sandbox.wasm import PATH_VARIABLE, WasmRunner, find_interpreter

LIMITS = SandboxLimits(cpu_s=1.0, wall_s=4.0, memory_mib=64)


@pytest.fixture(scope="module")
def runner() -> Iterator[ProgramRunner]:
    try:
        yield WasmRunner()  # compiles the interpreter on first use, half a minute
    except MissingDependencyError as error:
        pytest.skip(str(error))


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATH_VARIABLE, "/no/such/file")
    with pytest.raises(MissingDependencyError, match="no such file"):
        find_interpreter()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "reasons"),
    [
        ("print(input())", "ok"),
        ("1 / 0", "runtime_error"),
        ("def f(:", "syntax_error"),
        ("while True: pass", "timeout"),
        ("x = bytearray(10**9)", "memory"),
        ("while True: print('y' * 1000)", "output_limit"),
        ("open('/etc/passwd')", "runtime_error"),
        ("open('x', 'w')", "runtime_error"),
        ("import os; os.listdir('/')", "runtime_error"),
        ("import socket; socket.socket()", "runtime_error"),
        ("import subprocess; subprocess.run(['ls'])", "runtime_error"),
        ("import os; os.fork()", "runtime_error"),
        ("import os; os.kill(1, 0)", "runtime_error"),
        ("import ctypes", "runtime_error"),
        ("import os; assert not set(os.environ) - {'PYTHONHASHSEED'}", "ok"),
    ],
)
def test_programs(runner: ProgramRunner, source: str, reasons: str) -> None:
    assert runner.run_program(source, b"hello\n", LIMITS).reason in reasons.split("|")


@pytest.mark.slow
def test_tests(runner: ProgramRunner) -> None:
    add = "def add(a, b): return a + b"
    calls = Calls("add", (Case((1, 2), 3), Case((1.5, 2), 3.5)))
    assert grade_with(runner, add, calls, LIMITS, stop_early=True).reason == "passed"
    assert grade_with(runner, add, Statements(("assert add(1, 2) == 3",)), LIMITS, stop_early=True).reason == "passed"
    assert grade_with(runner, "def add(a, b): return 3", calls, LIMITS, stop_early=True).reason == "wrong_answer"
    output = InputOutput((("1\n", "2\n"),))
    assert grade_with(runner, "print(int(input()) + 1)", output, LIMITS, stop_early=True).reason == "passed"
    check = Statements(("check(add)",), ("def check(c): assert c(1, 2) == 3",), "add")
    assert grade_with(runner, add, check, LIMITS, stop_early=True).reason == "unsupported_by_runner"
