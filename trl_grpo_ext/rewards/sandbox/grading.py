"""A program against its tests: which runs it takes, and what their results mean.

Whatever the program does is a score of 0 with a reason; only a failure of the sandbox or of the tests themselves is a
fault, which takes the sample out. A program must not be able to turn one into the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from trl_grpo_ext.rewards.sandbox.compare import same_output
from trl_grpo_ext.rewards.sandbox.guest import codec
from trl_grpo_ext.rewards.sandbox.pool import Judged, JudgedResult, Script
from trl_grpo_ext.rewards.sandbox.reasons import end_reason, error_reason
from trl_grpo_ext.rewards.sandbox.results import ProgramResult, TestOutcome


@dataclass(frozen=True)
class Statements:
    """Tests that are Python: assert statements, or definitions and a statement that calls them.

    Attributes:
        tests: one source per test; all are counted, whether they ran or not.
        setup: sources that run first (imports, helper functions, HumanEval's prompt and its ``check``).
        entry_point: the name that always means the program's function, also where ``setup`` defines it; None if the
            tests name what they call.
    """

    tests: tuple[str, ...]
    setup: tuple[str, ...] = ()
    entry_point: str | None = None


@dataclass(frozen=True)
class Case:
    """One call and its result; built-in values only."""

    args: tuple[Any, ...]
    expected: Any
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Calls:
    """Tests that are calls of one function, or of a method of a fresh instance ("Solution.two_sum").

    Attributes:
        entry_point: what to call.
        cases: arguments and expected results.
        loose_sequences: a tuple equals a list with the same items.
        rel_tol: relative tolerance for floats.
        abs_tol: absolute tolerance for floats.
    """

    entry_point: str
    cases: tuple[Case, ...]
    loose_sequences: bool = True
    rel_tol: float = 0.0
    abs_tol: float = 0.0


@dataclass(frozen=True)
class InputOutput:
    """Tests that are standard inputs with the outputs expected for them.

    Attributes:
        cases: (input, expected output) pairs.
        mode: see ``compare.same_output``.
        rel_tol: relative tolerance for floats.
        abs_tol: absolute tolerance for floats.
        budget_s: seconds for all inputs together (CPU time, or time asleep where that is more); each input has the
            limits of a program besides.
    """

    cases: tuple[tuple[str, str], ...]
    mode: str = "lines"
    rel_tol: float = 0.0
    abs_tol: float = 0.0
    budget_s: float = 20.0


Tests = Statements | Calls | InputOutput


def num_tests(tests: Tests) -> int:
    """Return how many tests there are."""
    return len(tests.tests) if isinstance(tests, Statements) else len(tests.cases)


def task_of(tests: Statements | Calls, *, stop_early: bool) -> dict[str, Any]:
    """Return the message for the judge.

    Raises:
        codec.OpaqueError: if an argument or expected value is no built-in value.
    """
    if isinstance(tests, Statements):
        return {
            "setup": list(tests.setup),
            "tests": list(tests.tests),
            "entry_point": tests.entry_point,
            "stop_early": stop_early,
        }
    encoder = codec.Encoder(codec.no_handle)
    cases = [
        {
            "args": encoder.encode(list(case.args)),
            "kwargs": encoder.encode(dict(case.kwargs)),
            "expected": encoder.encode(case.expected),
        }
        for case in tests.cases
    ]
    return {
        "cases": cases,
        "entry_point": tests.entry_point,
        "stop_early": stop_early,
        "loose_sequences": tests.loose_sequences,
        "rel_tol": tests.rel_tol,
        "abs_tol": tests.abs_tol,
    }


def grade(source: str, tests: Tests, *, stop_early: bool) -> Generator[Script | Judged, Any, TestOutcome]:
    """Yield the runs that judging takes, and return the outcome; for ``SandboxPool.drive``.

    Args:
        source: the program.
        tests: what it must pass.
        stop_early: end at the first failure, where only passing all counts.
    """
    if isinstance(tests, InputOutput):
        return (yield from _grade_output(source, tests, stop_early))
    try:
        task = task_of(tests, stop_early=stop_early)
    except codec.OpaqueError as error:
        return TestOutcome(0, num_tests(tests), "test_error", str(error), fault=True)
    result: JudgedResult = yield Judged(source, task)
    return judge_outcome(result, num_tests(tests))


def _grade_output(source: str, tests: InputOutput, stop_early: bool) -> Generator[Script | Judged, Any, TestOutcome]:
    passed, reason, detail, spent_s = 0, "passed", "", 0.0
    for number, (given, expected) in enumerate(tests.cases, start=1):
        if spent_s > tests.budget_s:
            detail = detail or f"{number - 1} tests took {spent_s:.1f} s"
            return TestOutcome(passed, len(tests.cases), "timeout" if reason == "passed" else reason, detail)
        result: ProgramResult = yield Script(source, given.encode("utf-8", "surrogatepass"))
        spent_s += result.process.charged_s
        if result.reason == "sandbox_fault":
            return TestOutcome(passed, len(tests.cases), result.reason, result.process.detail, fault=True)
        if result.reason == "ok" and same_output(
            expected, result.stdout, tests.mode, rel_tol=tests.rel_tol, abs_tol=tests.abs_tol
        ):
            passed += 1
            continue
        if reason == "passed":
            reason = "wrong_answer" if result.reason == "ok" else result.reason
            message = f"{result.error.name}: {result.error.message}" if result.error else ""
            detail = f"test {number}: {message}".rstrip(": ")
        if stop_early or result.reason == "syntax_error":
            break
    return TestOutcome(passed, len(tests.cases), reason, detail)


def judge_outcome(result: JudgedResult, total: int) -> TestOutcome:
    """Return what a judged run means.

    Args:
        result: of a :class:`Judged` run.
        total: number of tests that there are; those that did not run count as failed.
    """
    program_reason = end_reason(result.program)
    if "sandbox_fault" in (program_reason, end_reason(result.judge)):
        detail = result.program.detail or result.judge.detail
        return TestOutcome(0, total, "sandbox_fault", detail, fault=True)
    if result.verdict is None:
        return _without_verdict(result, total, program_reason)
    verdict = result.verdict
    if verdict["fault"]:
        return TestOutcome(0, total, "test_error", verdict["fault"], fault=True)
    load_error = verdict.get("load_error")
    if load_error:
        reason = error_reason(str(load_error[0])) if load_error[0] else program_reason or "exit"
        return TestOutcome(0, total, reason, f"{load_error[1]}: {load_error[2]}".strip(": "))
    outcomes = [str(outcome) for outcome in verdict["outcomes"]]
    if "test_error" in outcomes:
        return TestOutcome(0, total, "test_error", verdict["detail"], fault=True)
    if verdict["calls"] == 0:
        return TestOutcome(0, total, "test_error", "the tests never called the program", fault=True)
    passed = min(Counter(outcomes)["passed"], total)
    if passed == total and len(outcomes) == total:
        return TestOutcome(passed, total, "passed")
    reason = next((outcome for outcome in outcomes if outcome != "passed"), "wrong_answer")
    if reason == "died":
        reason = program_reason or "exit"
    return TestOutcome(passed, total, reason, verdict["detail"])


def _without_verdict(result: JudgedResult, total: int, program_reason: str | None) -> TestOutcome:
    """Return the outcome of a judge that did not finish: the program kept it waiting, or fed it something too heavy."""
    if program_reason == "timeout" or end_reason(result.judge) in ("timeout", "memory"):
        return TestOutcome(0, total, "timeout", "the judge did not finish")
    return TestOutcome(0, total, program_reason or "crash", f"the judge ended with {result.judge.end.value}")
