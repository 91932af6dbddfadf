"""What tests can ask of a program through the channel, and what the outcome says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from trl_grpo_ext.rewards.sandbox import SandboxLimits, SandboxPool, TestOutcome
from trl_grpo_ext.rewards.sandbox.grading import Calls, Case, InputOutput, Statements, Tests, grade
from trl_grpo_ext.rewards.sandbox.guest.judge import equal, free_names


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    with SandboxPool(SandboxLimits(cpu_s=1.0), workers=2) as pool:
        yield pool


def judge(pool: SandboxPool, source: str, tests: Tests, stop_early: bool = False) -> TestOutcome:
    return pool.drive([grade(source, tests, stop_early=stop_early)])[0]


NODE = """
class Node:
    def __init__(self, value, next=None):
        self.value, self.next = value, next
    def __len__(self): return 1 + (len(self.next) if self.next else 0)
    def __iter__(self):
        node = self
        while node: yield node.value; node = node.next
    def __getitem__(self, index): return list(self)[index]
    def __contains__(self, item): return item in list(self)
    def __add__(self, other): return self.value + other.value
    def __repr__(self): return f'Node({self.value})'
def build(values):
    node = None
    for value in reversed(values): node = Node(value, node)
    return node
class Stack:
    limit = 3
    def __init__(self): self.items = []
    def push(self, item):
        if len(self.items) >= self.limit: raise OverflowError('full')
        self.items.append(item); return self
    def pop(self): return self.items.pop()
def count():
    n = 0
    while True: yield n; n += 1
def adder(n): return lambda m: m + n
def bad(): raise KeyError('x')
class Own(ValueError): pass
def own(): raise Own('mine')
"""


@pytest.mark.parametrize(
    "test",
    [
        "assert build([1, 2]).value == 1",
        "assert build([1, 2]).next.value == 2 and build([1]).next is None",
        "assert list(build([1, 2, 3])) == [1, 2, 3]",
        "assert len(build([1, 2])) == 2 and 2 in build([1, 2]) and build([5, 6])[1] == 6",
        "assert build([1]) + build([2]) == 3 and repr(build([4])) == 'Node(4)' and str(build([4])) == 'Node(4)'",
        "n = build([1]); n.next = build([9]); assert list(n) == [1, 9]",
        "s = Stack(); s.push(1); s.push(2).push(3); assert s.pop() == 3 and s.items == [1, 2]",
        "s = Stack()\nfor i in range(3): s.push(i)\n"
        "try: s.push(3)\nexcept OverflowError as e: assert str(e) == 'full'\nelse: assert False",
        "import itertools; assert list(itertools.islice(count(), 4)) == [0, 1, 2, 3]",
        "c = count(); assert (next(c), next(c)) == (0, 1)",
        "assert adder(2)(3) == 5",
        "try: bad()\nexcept KeyError: pass\nelse: assert False",
        "try: own()\nexcept ValueError as e: assert str(e) == 'mine'\nelse: assert False",
        "assert Stack.limit == 3",
        "assert list(map(adder(1), [1, 2])) == [2, 3]",
        "assert build(range(3))[2] == 2 and build(list(map(int, '12')))[1] == 2",
        "assert math.isclose(adder(0.1)(0.2), 0.3)",
    ],
)
def test_objects_stay_with_the_program(pool: SandboxPool, test: str) -> None:
    outcome = judge(pool, NODE, Statements((test,)))
    assert (outcome.reason, outcome.passed) == ("passed", 1), outcome.detail


@pytest.mark.parametrize(
    "test",
    [
        "assert build([1]) == build([1])",
        "assert build([1])",
        "assert build([1]) != 5",
        "assert not (build([1]) == 5)",
        "assert {build([1])}",
        "assert build([1]) in [build([1])]",
    ],
)
def test_objects_are_not_compared(pool: SandboxPool, test: str) -> None:
    assert judge(pool, NODE, Statements((test,))).reason == "opaque_result"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def f(x): return x", "passed"),
        ("def f(x): return x + 1", "wrong_answer"),
        ("def f(x): return None", "wrong_answer"),
        ("def f(x): raise IndexError", "runtime_error"),
        ("def f(x): assert False", "runtime_error"),
        ("def f(): return 1", "runtime_error"),
        ("f = 3", "runtime_error"),
        ("def g(x): return x", "missing_function"),
        ("def f(x) return", "syntax_error"),
        ("import no_such_module\ndef f(x): return x", "runtime_error"),
        ("def f(x):\n    while True: pass", "timeout"),
        ("def f(x): return bytearray(10**10)", "memory"),
        ("def f(x): return open('/etc/passwd').read()", "runtime_error|forbidden"),
        ("def f(x):\n    import sys; sys.exit(1)", "exit"),
        ("def f(x):\n    import os; os._exit(1)", "exit"),
        ("import os; os._exit(1)", "exit"),
        ("raise SystemExit", "exit"),
        ("def f(x): return object()", "opaque_result|wrong_answer"),
        ("def f(x): return 'x' * 10**8", "opaque_result|memory"),
        ("if __name__ == '__main__': input()\ndef f(x): return x", "passed"),
        ("import random\ndef f(x): return x if random.random() == 0.8444218515250481 else 0", "passed"),
    ],
)
def test_reasons(pool: SandboxPool, source: str, reason: str) -> None:
    for tests in (Statements(("assert f(7) == 7",)), Calls("f", (Case((7,), 7),))):
        outcome = judge(pool, source, tests)
        assert outcome.reason in reason.split("|"), outcome
        assert outcome.passed == (outcome.reason == "passed")
        assert not outcome.fault


def test_share_and_stopping_early(pool: SandboxPool) -> None:
    source = "def f(x): return 1 if x < 2 else 1 / 0"
    tests = Statements(tuple(f"assert f({x}) == 1" for x in (0, 5, 1)))
    assert judge(pool, source, tests).passed == 2
    assert judge(pool, source, tests, stop_early=True).passed == 1
    dies = "import os\ndef f(x): return 1 if x < 2 else os._exit(0)"
    assert (judge(pool, dies, tests).passed, judge(pool, dies, tests).reason) == (1, "exit")
    loops = "def f(x):\n    while x > 2: pass\n    return 1"
    assert (judge(pool, loops, tests).passed, judge(pool, loops, tests).reason) == (1, "timeout")


@pytest.mark.parametrize(
    "tests",
    [
        Statements(("assert f(1) == 1",), ("1 / 0",)),
        Statements(("assert f(1) == 1",), ("def (",)),
        Statements(("assert 1 == 1",)),
        Statements(("assert f(object()) == 1",)),
        Calls("f", (Case((object(),), 1),)),
        Statements(("def broken(",)),
    ],
    ids=[
        "set-up raises",
        "set-up is no Python",
        "never asks",
        "argument cannot travel",
        "the same",
        "test is no Python",
    ],
)
def test_faults_of_the_tests_are_no_verdict(pool: SandboxPool, tests: Tests) -> None:
    outcome = judge(pool, "def f(x): return x", tests)
    assert (outcome.fault, outcome.reason) == (True, "test_error")


def test_set_up_that_uses_the_program_is_the_programs_fault(pool: SandboxPool) -> None:
    tests = Statements(("assert solver.go() == 1",), ("solver = Solver()",))
    good = "class Solver:\n    def go(self): return 1"
    assert judge(pool, good, tests).reason == "passed"
    for bad in (
        "class Solver:\n    def __init__(self): raise ValueError",
        "x = 1",
        "import os\nclass Solver:\n    def __init__(self): os._exit(0)",
    ):
        outcome = judge(pool, bad, tests)
        assert (outcome.passed, outcome.fault) == (0, False)


def test_changed_arguments_do_not_reach_the_test(pool: SandboxPool) -> None:
    """A program that empties its input would otherwise make ``f(x) == sorted(x)`` true."""
    tests = Statements(("x = [3, 1]\nassert f(x) == sorted(x)",))
    assert judge(pool, "def f(x): x.clear(); return x", tests).reason == "wrong_answer"
    assert judge(pool, "def f(x): return sorted(x)", tests).reason == "passed"


def test_a_method_of_a_fresh_instance(pool: SandboxPool) -> None:
    source = "class Solution:\n    def __init__(self): self.n = 0\n"
    source += "    def bump(self, by, times=1):\n        self.n += by * times\n        return self.n"
    cases = (Case((2,), 2), Case((2,), 2), Case((2,), 6, (("times", 3),)))
    assert judge(pool, source, Calls("Solution.bump", cases)).reason == "passed"


def test_the_prompts_helpers_are_the_tests_own(pool: SandboxPool) -> None:
    prompt = "def helper(x): return x * 2\n\ndef f(x):\n    '''Return half.'''\n"
    tests = Statements(("check(f)",), (prompt, "def check(candidate):\n    assert candidate(helper(4)) == 4"), "f")
    assert judge(pool, "def helper(x): return 0\ndef f(x): return x // 2", tests).reason == "passed"
    assert judge(pool, "def f(x): return 4 if x == 0 else 0", tests).reason == "wrong_answer"


def test_standard_input_budget(pool: SandboxPool) -> None:
    slow = "import time; time.sleep(0.4); print(1)"
    tests = InputOutput((("", "1"),) * 5, budget_s=0.7)
    outcome = judge(pool, slow, tests)
    assert outcome.reason == "timeout"
    assert outcome.passed < 5
    assert judge(pool, "print(1)", tests).reason == "passed"


@pytest.mark.parametrize(
    ("expected", "got", "exact", "tolerant"),
    [
        (1, 1, True, True),
        (1, 1.0, True, True),
        (True, 1, True, True),
        (0.3, 0.1 + 0.2, False, True),
        (1, 1.00000000001, False, True),
        (10**20, 10**20 + 1, False, False),
        ([1, [2.0]], (1, [2.0000000000001]), False, True),
        ({"a": 0.3}, {"a": 0.1 + 0.2}, False, True),
        ({"a": 1}, {"b": 1}, False, False),
        ([1], [1, 2], False, False),
        ("1", 1, False, False),
        (None, 0, False, False),
        ([], (), True, True),
        ({1}, {1}, True, True),
        ({1}, [1], False, False),
        (float("nan"), float("nan"), False, False),
        (float("inf"), float("inf"), True, True),
        (1.0, float("nan"), False, False),
    ],
)
def test_equality_of_results(expected: Any, got: Any, exact: bool, tolerant: bool) -> None:
    assert equal(expected, got, rel_tol=0.0, abs_tol=0.0, loose_sequences=True) is exact
    assert equal(expected, got, rel_tol=1e-9, abs_tol=1e-9, loose_sequences=True) is tolerant
    if isinstance(expected, list) and isinstance(got, tuple):
        assert not equal(expected, got, rel_tol=1e-9, abs_tol=1e-9, loose_sequences=False)


def test_names_that_belong_to_the_program() -> None:
    assert free_names(["assert f(x) == 1", "x = 2"]) == {"f"}
    assert free_names(["import math\ndef check(candidate):\n    assert candidate(math.pi) == g([y for y in z])"]) == {
        "g",
        "z",
    }
    assert free_names(["try: f()\nexcept ValueError as e: print(e)\nclass A(B): pass"]) == {"f", "B"}
