"""Cheats get nothing, and no cheat gets itself taken out of the batch either."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cheats import CHEATS, ESCAPES, GRADERS, PAIRS, STDIN_CHEATS, TESTS, Cheat

from trl_grpo_ext.rewards.sandbox import SandboxLimits, SandboxPool
from trl_grpo_ext.rewards.sandbox.grading import Calls, Case, InputOutput, Statements, Tests, grade

HONEST = "def add(a, b): return a + b"
HONEST_STDIN = "import sys\nfor line in sys.stdin:\n    print(sum(map(int, line.split())))"
CALLS = Calls("add", (Case((1, 2), 3), Case((-5, 5), 0), Case((20, 22), 42)))


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    with SandboxPool(SandboxLimits(cpu_s=1.0, memory_mib=256), workers=2) as pool:
        yield pool


def outcomes(pool: SandboxPool, sources: list[str], tests: Tests) -> list[tuple[int, str, bool]]:
    found = pool.drive([grade(source, tests, stop_early=False) for source in sources])
    return [(one.passed, one.reason, one.fault) for one in found]


def test_honest_programs_pass(pool: SandboxPool) -> None:
    assert outcomes(pool, [HONEST], Statements(TESTS)) == [(3, "passed", False)]
    assert outcomes(pool, [HONEST], CALLS) == [(3, "passed", False)]
    assert outcomes(pool, [HONEST_STDIN], InputOutput(PAIRS)) == [(2, "passed", False)]


def test_there_are_enough() -> None:
    assert len(CHEATS) + len(STDIN_CHEATS) >= 25
    assert len({cheat.name for cheat in [*CHEATS, *STDIN_CHEATS]}) == len(CHEATS) + len(STDIN_CHEATS)


@pytest.mark.parametrize("tests", [Statements(TESTS), CALLS], ids=["statements", "calls"])
def test_no_cheat_gets_anything(pool: SandboxPool, tests: Tests) -> None:
    found = outcomes(pool, [cheat.source for cheat in CHEATS], tests)
    wrong = {cheat.name: outcome for cheat, outcome in zip(CHEATS, found, strict=True) if outcome[0] != 0 or outcome[2]}
    assert wrong == {}


def test_no_cheat_on_standard_input_passes(pool: SandboxPool) -> None:
    found = outcomes(pool, [cheat.source for cheat in STDIN_CHEATS], InputOutput(PAIRS))
    assert [(passed, fault) for passed, _, fault in found] == [(0, False)] * len(STDIN_CHEATS)


@pytest.mark.parametrize("tests", [Statements(TESTS), CALLS], ids=["statements", "calls"])
def test_nobody_escapes_a_score(pool: SandboxPool, tests: Tests) -> None:
    found = dict(zip(ESCAPES, outcomes(pool, list(ESCAPES.values()), tests), strict=True))
    assert {name: outcome for name, outcome in found.items() if outcome[0] != 0 or outcome[2]} == {}
    assert found["a syntax error"][1] == found["a null byte"][1] == "syntax_error"
    assert found["an endless loop"][1] == found["an endless loop in the call"][1] == "timeout"
    assert found["memory"][1] == "memory"
    assert found["no function at all"][1] == found["another name"][1] == "missing_function"
    assert found["SIGSEGV to itself"][1] == "crash"
    assert found["a forbidden call"][1] == "forbidden"
    assert pool.counters["faults"] == 0


@pytest.mark.parametrize("cheat", [*CHEATS, *STDIN_CHEATS], ids=lambda cheat: cheat.name)
def test_positive_control(cheat: Cheat) -> None:
    """The cheat works on a grader that is in use elsewhere, so that stopping it means something."""
    assert GRADERS[cheat.grader](cheat.source)


# Reads all memory near its own objects and its heap; an address that is not mapped makes write() fail, nothing more.
_SCAN = """
import ctypes, gc, os
libc = ctypes.CDLL(None, use_errno=True)
libc.sbrk.restype = ctypes.c_void_p
own = bytes(bytearray(b"own-") + bytearray(b"marker-of-the-scan"))
wanted = bytes(bytearray(b"marker-") + bytearray(b"of-the-expected-value"))
kept = [own[:]]
top = libc.sbrk(0) or 0
pages, bases = set(range(top - (16 << 20) & ~4095, top, 4096)), set()
for thing in gc.get_objects():
    for address in (id(thing), id(getattr(thing, "__doc__", None) or 0)):
        base = address & ~((1 << 20) - 1)
        bases.update((base - (1 << 20), base, base + (1 << 20)))
for address in (id(own), id(wanted), id(kept[0])):
    bases.add(address & ~((1 << 20) - 1))
for base in bases: pages.update(range(base, base + (1 << 20), 4096))
r, w = os.pipe()
counts = [0, 0]
tail = b""
for page in sorted(pages):
    if libc.write(w, ctypes.c_void_p(page), 4096) == 4096:
        block = tail + os.read(r, 4096)
        counts[0] += block.count(own)
        counts[1] += block.count(wanted)
        tail = block[-40:]
del own
print(counts[0] > 0, counts[1])
"""


def test_the_tests_leave_nothing_in_the_memory_of_later_programs(pool: SandboxPool) -> None:
    """The server forks every program from its own memory, so nothing of a judge's task may ever have been there."""
    word = "marker-of-the-expected-value"
    tests = Statements((f"assert f() == {word!r}",))
    for _ in range(5):
        assert outcomes(pool, [f"def f(): return {word!r}"], tests)[0][0] == 1
    result = pool.run_program(_SCAN)
    found_own, found_wanted = result.stdout.split()
    assert found_own == "True", result.stderr  # positive control: the scan finds what is there
    # The program's own copies of the word it looks for: the bytes object, and nothing else.
    assert int(found_wanted) <= 2
    # With the word put where a careless server would have it, there are more.
    planted = pool.run_program(f"kept = [({word[:3]!r} + {word[3:]!r}).encode() * 1 for _ in range(50)]\n" + _SCAN)
    assert int(planted.stdout.split()[1]) > 2
