"""What runs in the judge's process: the data set's tests, with the program at the other end of a channel.

The tests and the expected values are here and nowhere else. The program gets arguments, and what comes back is plain
values or handles (:mod:`proxies`) that refuse to be compared.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import random
import sys
from collections.abc import Iterable
from typing import Any

from . import codec
from .candidate import fresh_streams
from .proxies import CandidateGone, OpaqueComparison, Peer, Unpassable

PROGRAM = 4  # descriptor of the channel to the program
VERDICT = 3  # descriptor of the channel to the client

# Modules that tests use without importing them, because the program usually does.
_USUAL_MODULES = (
    "math cmath re string random itertools functools collections heapq bisect operator copy json datetime decimal "
    "fractions statistics typing sys time inspect"
)


def free_names(sources: Iterable[str]) -> set[str]:
    """Return the names that the sources use but neither define nor find among the built-in ones.

    Raises:
        SyntaxError: if a source is not Python.
    """
    used: set[str] = set()
    bound: set[str] = set(dir(builtins)) | {"__name__", "__builtins__"}
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                bound.add(node.name)
            elif isinstance(node, ast.arg):
                bound.add(node.arg)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                bound.update((name.asname or name.name).split(".")[0] for name in node.names)
            elif isinstance(node, ast.ExceptHandler) and node.name:
                bound.add(node.name)
    return used - bound


def equal(expected: Any, got: Any, *, rel_tol: float, abs_tol: float, loose_sequences: bool) -> bool:
    """Return whether a result is the expected one.

    Args:
        expected: from the data set.
        got: decoded, hence of exact built-in types; a handle is never equal.
        rel_tol: relative tolerance for floats; 0 with ``abs_tol`` 0 compares exactly.
        abs_tol: absolute tolerance for floats.
        loose_sequences: a tuple equals a list of the same items, as JSON cannot tell them apart.
    """
    sequences = (list, tuple)
    options: Any = {"rel_tol": rel_tol, "abs_tol": abs_tol, "loose_sequences": loose_sequences}
    if isinstance(expected, (int, float)) and isinstance(got, (int, float)):
        if expected == got:
            return True
        if not (rel_tol or abs_tol) or (isinstance(expected, int) and isinstance(got, int)):
            return False
        return abs(expected - got) <= max(abs_tol, rel_tol * max(abs(expected), abs(got)))
    if isinstance(expected, sequences) and isinstance(got, sequences):
        if not loose_sequences and type(expected) is not type(got):
            return False
        return len(expected) == len(got) and all(
            equal(one, other, **options) for one, other in zip(expected, got, strict=True)
        )
    if isinstance(expected, dict) and isinstance(got, dict):
        return expected.keys() == got.keys() and all(equal(expected[key], got[key], **options) for key in expected)
    return type(expected) is type(got) and bool(expected == got)


def _passes(code: Any, namespace: dict[str, Any]) -> bool:
    exec(code, namespace)
    return True


def _outcome(error: BaseException) -> str:
    """Return the reason code for what a test raised."""
    if isinstance(error, CandidateGone):
        return "died"
    if isinstance(error, OpaqueComparison):
        return "opaque_result"
    remote = getattr(error, "remote_type", None)
    if remote is None and isinstance(error, (Unpassable, SyntaxError)):
        return "test_error"
    if remote is None:
        # The test's own statement failed on the value that it got: a wrong value, whatever the exception.
        return "wrong_answer"
    named = {
        "MemoryError": "memory",
        "PermissionError": "forbidden",
        "NameError": "missing_function" if getattr(error, "missing", False) else "runtime_error",
        "SystemExit": "exit",
        "AssertionError": "runtime_error",
    }
    return named.get(remote, "runtime_error")


class SetUpError(Exception):
    """The tests' definitions used the program, and it failed them."""

    def __init__(self, outcome: str, detail: str) -> None:
        super().__init__(detail)
        self.outcome = "wrong_answer" if outcome == "test_error" else outcome


class _Judgement:
    """One program against its tests."""

    def __init__(self, task: dict[str, Any], peer: Peer) -> None:
        self._task = task
        self._peer = peer
        self.outcomes: list[str] = []
        self.detail = ""

    def run(self) -> None:
        """Run every test; stop early if asked to, or once the program is gone."""
        try:
            steps = list(self._steps())
        except SetUpError as error:
            self.outcomes, self.detail = [error.outcome], str(error)
            return
        for number, step in enumerate(steps):
            random.seed(0)
            try:
                outcome = "passed" if step() else "wrong_answer"
            except BaseException as error:
                outcome = _outcome(error)
                self.detail = self.detail or f"test {number + 1}: {type(error).__name__}: {error}"[:300]
            self.outcomes.append(outcome)
            if outcome == "died" or (outcome != "passed" and self._task["stop_early"]):
                break

    def _steps(self) -> Any:
        return self._calls() if "cases" in self._task else self._statements()

    def _statements(self) -> Any:
        task = self._task
        namespace: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
        names = free_names([*task["setup"], *task["tests"]])
        if task["entry_point"]:
            names.add(task["entry_point"])
        for name in names & set(_USUAL_MODULES.split()):
            namespace[name] = importlib.import_module(name)
        remote = {name: self._peer.name(name) for name in names - namespace.keys()}
        namespace.update(remote)
        for source in task["setup"]:
            self._set_up(source, namespace)
        # The prompt may define the function to be judged, as a stub.
        if task["entry_point"]:
            namespace[task["entry_point"]] = self._peer.name(task["entry_point"])
        for source in task["tests"]:
            code = compile(source, "<test>", "exec", dont_inherit=True)
            yield functools.partial(_passes, code, namespace)

    def _set_up(self, source: str, namespace: dict[str, Any]) -> None:
        """Run the tests' own definitions. What fails before the program was asked anything is the tests' fault."""
        calls = self._peer.calls
        try:
            exec(compile(source, "<setup>", "exec", dont_inherit=True), namespace)
        except BaseException as error:
            if self._peer.calls == calls:
                raise
            raise SetUpError(_outcome(error), f"{type(error).__name__}: {error}"[:300]) from None

    def _calls(self) -> Any:
        task = self._task
        decoder = codec.Decoder(lambda *_: None)
        options: Any = {name: task[name] for name in ("rel_tol", "abs_tol", "loose_sequences")}
        for case in task["cases"]:
            arguments, keywords, expected = (decoder.decode(case[key]) for key in ("args", "kwargs", "expected"))

            def step(arguments: Any = arguments, keywords: Any = keywords, expected: Any = expected) -> bool:
                return equal(expected, self._peer.call(task["entry_point"], arguments, keywords), **options)

            yield step


def run(task: dict[str, Any]) -> None:
    """Judge the program behind :data:`PROGRAM` and send the outcome to :data:`VERDICT`.

    Args:
        task: ``entry_point``, ``stop_early``, and either ``setup`` and ``tests`` (sources) or ``cases`` (tagged
            ``args``, ``kwargs``, ``expected``) with the options of :func:`equal`.
    """
    fresh_streams()
    sys.modules.pop("__main__", None)
    peer = Peer(PROGRAM)
    result: dict[str, Any] = {"outcomes": [], "detail": "", "load_error": None, "calls": 0, "fault": ""}
    judgement = _Judgement(task, peer)
    try:
        result["load_error"] = peer.hello()
        if result["load_error"] is None:
            judgement.run()
    except CandidateGone:
        result["load_error"] = ["", "", "the program ended while it was being loaded", 0]
    except BaseException as error:  # the tests themselves cannot be run
        result["fault"] = f"{type(error).__name__}: {error}"[:300]
    result.update(outcomes=judgement.outcomes, detail=judgement.detail, calls=peer.calls)
    with contextlib.suppress(codec.ClosedError):
        codec.send(VERDICT, result)
