"""The tests of a data-set row, in the forms that data sets use.

    list of strings, or JSON of one         MBPP's ``test_list``: a statement per test
    source with ``def check(candidate)``    HumanEval's ``test``; needs the entry point
    other source                            one test per top-level assert if there is nothing else, otherwise one test
    {"inputs": [...], "outputs": [...]}     APPS, TACO: standard input and output, or calls if there is a "fn_name"
    [{"input": ..., "output": ...}, ...]    LiveCodeBench, open-r1: likewise, by "testtype" or "type" and "fn_name"
    [{"args": [...], "expected": ...}]      our own: calls of the entry point; "kwargs" is optional

Everything may be given as JSON text. The data set is trusted with being parsed; its code runs in the judge only.
"""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from trl_grpo_ext.errors import DataError
from trl_grpo_ext.rewards.sandbox.grading import Calls, Case, InputOutput, Statements, Tests

_INPUT_KEYS = ("input", "stdin", "inputs")
_OUTPUT_KEYS = ("output", "stdout", "expected_output", "outputs")


def interpret(
    reference: Any,
    *,
    entry_point: str | None = None,
    setup: str | Sequence[str] | None = None,
    prompt_code: str | None = None,
    output: str = "lines",
    tolerance: float = 0.0,
    max_tests: int | None = None,
    budget_s: float = 20.0,
) -> Tests:
    """Return a row's tests.

    Args:
        reference: the tests in one of the forms above.
        entry_point: function, or "Class.method", that is judged.
        setup: code that runs before the tests (MBPP's ``test_setup_code``).
        prompt_code: HumanEval's prompt, for the helper functions that its tests use.
        output: comparison of standard output.
        tolerance: for floats, relative and absolute.
        max_tests: use the first so many.
        budget_s: see ``grading.InputOutput``.

    Raises:
        DataError: if the tests have none of these forms, or there are none.
    """
    value = _from_json(reference)
    if isinstance(value, Mapping) and isinstance(value.get("test_cases"), (str, list)):
        entry_point = entry_point or value.get("fn_name")
        value = _from_json(value["test_cases"])
    if isinstance(value, str):
        tests: Tests = _from_source(value, entry_point, _sources(setup), prompt_code)
    elif isinstance(value, Mapping):
        tests = _from_columns(value, entry_point, output, tolerance, budget_s)
    elif isinstance(value, Sequence) and value and all(isinstance(item, str) for item in value):
        tests = Statements(tuple(value), _sources(setup), None)
    elif isinstance(value, Sequence) and value and all(isinstance(item, Mapping) for item in value):
        tests = _from_cases(value, entry_point, output, tolerance, budget_s)
    else:
        raise DataError(
            f"the tests of a row are {_short(reference)}; docs/sandbox.md lists the forms that are understood"
        )
    return _first(tests, max_tests)


def _from_json(value: Any) -> Any:
    """Return the value of JSON text that holds a list or an object; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text[:120]}{'…' if len(text) > 120 else ''}"


def _sources(setup: str | Sequence[str] | None) -> tuple[str, ...]:
    if not setup:
        return ()
    return (setup,) if isinstance(setup, str) else tuple(str(part) for part in setup)


def _from_source(source: str, entry_point: str | None, setup: tuple[str, ...], prompt_code: str | None) -> Statements:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise DataError(f"the tests of a row are no Python: {error}; they begin with {source[:80]!r}") from error
    prompt = (prompt_code,) if prompt_code else ()
    if any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
        if not entry_point:
            raise DataError("tests with 'def check(candidate)' need the column 'entry_point', which this row lacks")
        return Statements((f"check({entry_point})",), (*setup, *prompt, source), entry_point)
    if tree.body and all(isinstance(node, ast.Assert) for node in tree.body):
        return Statements(tuple(ast.unparse(node) for node in tree.body), (*setup, *prompt), entry_point)
    if not tree.body:
        raise DataError("the tests of a row are empty")
    return Statements((source,), (*setup, *prompt), entry_point)


def _from_columns(
    value: Mapping[str, Any], entry_point: str | None, output: str, tolerance: float, budget_s: float
) -> Tests:
    given = next((value[key] for key in _INPUT_KEYS if key in value), None)
    wanted = next((value[key] for key in _OUTPUT_KEYS if key in value), None)
    if not isinstance(given, Sequence) or not isinstance(wanted, Sequence) or isinstance(given, str):
        raise DataError(f"tests given as an object need lists 'inputs' and 'outputs'; got the keys {sorted(value)}")
    if len(given) != len(wanted) or not given:
        raise DataError(
            f"tests have {len(given)} inputs and {len(wanted)} outputs; these must be as many, and not none"
        )
    name = value.get("fn_name") or value.get("entry_point")
    cases = [{"input": one, "output": other} for one, other in zip(given, wanted, strict=True)]
    if name:
        calls = tuple(Case(tuple(_arguments(case["input"])), _result(case["output"])) for case in cases)
        return Calls(str(name), calls, rel_tol=tolerance, abs_tol=tolerance)
    return _from_cases(cases, entry_point, output, tolerance, budget_s)


def _from_cases(
    cases: Sequence[Mapping[str, Any]], entry_point: str | None, output: str, tolerance: float, budget_s: float
) -> Tests:
    first = cases[0]
    kind = str(first.get("testtype") or first.get("type") or "")
    name = entry_point or first.get("fn_name") or first.get("entry_point")
    if "args" in first or kind in ("functional", "function_call"):
        if not name:
            raise DataError("tests that are calls need the column 'entry_point' or a key 'fn_name'")
        return Calls(str(name), tuple(_call(case) for case in cases), rel_tol=tolerance, abs_tol=tolerance)
    pairs = []
    for case in cases:
        given = next((case[key] for key in _INPUT_KEYS if key in case), None)
        wanted = next((case[key] for key in _OUTPUT_KEYS if key in case), None)
        if given is None or wanted is None:
            raise DataError(
                f"a test has the keys {sorted(case)}; it needs 'input' and 'output', or 'args' and 'expected'"
            )
        pairs.append((_text(given), _text(wanted)))
    return InputOutput(tuple(pairs), output, tolerance, tolerance, budget_s)


def _call(case: Mapping[str, Any]) -> Case:
    if "args" in case:
        if "expected" not in case or not isinstance(case["args"], Sequence) or isinstance(case["args"], str):
            raise DataError(f"a test that is a call needs a list 'args' and 'expected'; it has {sorted(case)}")
        kwargs = tuple((str(key), item) for key, item in (case.get("kwargs") or {}).items())
        return Case(tuple(case["args"]), case["expected"], kwargs)
    given = next((case[key] for key in _INPUT_KEYS if key in case), None)
    wanted = next((case[key] for key in _OUTPUT_KEYS if key in case), None)
    return Case(tuple(_arguments(given)), _result(wanted))


def _arguments(given: Any) -> list[Any]:
    """Return a call's arguments: a list as it is, text as one JSON value (or Python literal) per line."""
    if not isinstance(given, str):
        return list(given) if isinstance(given, (list, tuple)) else [given]
    return [_value(line) for line in given.splitlines() if line.strip()]


def _result(wanted: Any) -> Any:
    return _value(wanted) if isinstance(wanted, str) else wanted


def _value(text: str) -> Any:
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text.strip())
        except (ValueError, SyntaxError):
            continue
    return text


def _text(value: Any) -> str:
    """Return an input or output as text; a list is one line per item, as APPS has it."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)):
        return "\n".join(_text(item) for item in value)
    return str(value)


def _first(tests: Tests, count: int | None) -> Tests:
    if count is None:
        return tests
    if isinstance(tests, Statements):
        return dataclasses.replace(tests, tests=tests.tests[:count])
    if isinstance(tests, Calls):
        return dataclasses.replace(tests, cases=tests.cases[:count])
    return dataclasses.replace(tests, cases=tests.cases[:count])
