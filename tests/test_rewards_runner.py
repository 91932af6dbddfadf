"""The reward runner: whatever a reward does, all other scores are right, in order and in time (field cases 1 to 7)."""

from __future__ import annotations

import functools
import logging
import os
import random
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import reward_zoo as zoo

from trl_grpo_ext.errors import ConfigurationError, RewardError
from trl_grpo_ext.rewards.outcome import RewardOutcome
from trl_grpo_ext.rewards.runner import RewardRunner
from trl_grpo_ext.rewards.verifier import Verdict

DEADLINE_S = 1.0


@pytest.fixture
def make() -> Iterator[Callable[..., RewardRunner]]:
    runners: list[RewardRunner] = []

    def make_runner(*functions: Any, **settings: Any) -> RewardRunner:
        names = [f"r{number}" for number in range(len(functions))]
        runners.append(RewardRunner(functions, names, **{"timeout_s": DEADLINE_S, "num_workers": 2, **settings}))
        return runners[-1]

    yield make_runner
    for runner in runners:
        runner.close()


def score(runner: RewardRunner, completions: Sequence[Any], **columns: Any) -> RewardOutcome:
    size = len(completions)
    return runner.score(
        [f"p{n}" for n in range(size)], completions, [[1, 2]] * size, {"answer": ["x"] * size, **columns}
    )


def eight(**deeds: str) -> list[str]:
    """Return eight completions, some of which do something: eight(s5="hang")."""
    return [f"{number} {deeds.get(f's{number}', 'fine')}" for number in range(8)]


def expected(*failed: int) -> list[float | None]:
    return [None if number in failed else float(number) for number in range(8)]


FORMS = [zoo.whole, zoo.single, zoo.acting(), zoo.waiting]


@pytest.fixture(scope="module")
def every_form() -> Iterator[RewardRunner]:
    """A runner with every form that a reward can have; a test that broke it would break the next."""
    names = ["whole", "single", "verifier", "async"]
    with RewardRunner(FORMS, names, timeout_s=DEADLINE_S, num_workers=2, isolate="always", cache_entries=0) as runner:
        assert score(runner, eight()).rewards == [expected()] * 4
        yield runner


def test_healthy_scores_are_right_and_in_order(every_form: RewardRunner, make: Any) -> None:
    for runner in (every_form, make(*FORMS, isolate="never")):
        outcome = score(runner, eight())
        assert outcome.rewards == [expected()] * 4
        assert (outcome.failure_counts, outcome.call_counts) == ([0] * 4, [8] * 4)


@pytest.mark.parametrize(
    ("deed", "reason"),
    [
        ("raise", "exception"),
        ("sys.exit", "exit"),
        ("exit", "exit"),
        ("segfault", "crash"),
        ("abort", "crash"),
        ("interrupt", "exception"),
        ("scribble", "crash"),
        ("hang up", "crash"),
        ("text", "bad_value"),
        ("tuple", "bad_value"),
        ("nan", "non_finite"),
        ("inf", "non_finite"),
        ("large", "non_finite"),
    ],
)
def test_one_bad_sample_costs_one_score(every_form: RewardRunner, deed: str, reason: str) -> None:
    outcome = score(every_form, eight(s2=deed))
    assert outcome.rewards == [expected(2)] * 4
    assert [(failure.sample, failure.reason) for failure in outcome.failures] == [(2, reason)] * 4
    assert outcome.failure_counts == [1] * 4
    for name in every_form.names:
        assert outcome.metrics[f"rewards/{name}/failed"] == 1 / 8
        assert outcome.metrics[f"rewards/{name}/failed/{reason}"] == 1 / 8
    outcome = score(every_form, eight())  # the next batch is not affected
    assert outcome.rewards == [expected()] * 4
    assert outcome.metrics[f"rewards/whole/failed/{reason}"] == 0.0  # once seen, a metric stays


@pytest.mark.parametrize("deed", ["raise", "sys.exit", "interrupt", "text", "nan"])
def test_one_bad_sample_inside_costs_one_score(make: Any, deed: str) -> None:
    if deed == "interrupt":  # Ctrl-C belongs to the user
        with pytest.raises(KeyboardInterrupt):
            score(make(zoo.whole, isolate="never"), eight(s2=deed))
        return
    assert score(make(*FORMS, isolate="never"), eight(s2=deed)).rewards == [expected(2)] * 4


@pytest.mark.parametrize("reward", [zoo.whole, zoo.single, zoo.acting()], ids=lambda reward: reward.__name__)
@pytest.mark.parametrize("deed", ["hang", "power", "stubborn"])
def test_a_sample_that_never_returns_costs_the_deadline_and_its_own_score(make: Any, reward: Any, deed: str) -> None:
    runner = make(reward, timeout_s=0.5)
    score(runner, eight())
    started = time.monotonic()
    outcome = score(runner, eight(s5=deed))
    assert time.monotonic() - started < 0.5 + 1.0
    assert outcome.rewards == [expected(5)]
    assert outcome.failures[0].reason == "timeout"
    assert len(runner.worker_pids()) == 2
    assert score(runner, eight()).rewards == [expected()]


def test_async_rewards_that_wait_for_ever(make: Any) -> None:
    runner = make(zoo.waiting)
    started = time.monotonic()
    outcome = score(runner, eight(s5="await"))
    assert outcome.rewards == [expected(5)]
    assert [failure.reason for failure in outcome.failures] == ["timeout"]
    assert time.monotonic() - started < DEADLINE_S + 1.5


@pytest.mark.parametrize("isolate", ["always", "never"])
def test_a_client_that_gives_up_is_no_time_out_of_ours(make: Any, isolate: str) -> None:
    outcome = score(make(zoo.waiting, isolate=isolate), eight(s5="give up"))
    assert outcome.rewards == [expected(5)]
    assert [failure.reason for failure in outcome.failures] == ["exception"]
    assert "the judge did not answer" in outcome.failures[0].detail


def test_async_rewards_inside_that_wait_for_ever(make: Any) -> None:
    runner = make(zoo.waiting, isolate="never", timeout_s=0.3, batch_timeout_s=1.0)
    started = time.monotonic()
    outcome = score(runner, eight(s5="await"))
    assert outcome.rewards == [expected(5)]
    assert [failure.reason for failure in outcome.failures] == ["timeout"]
    assert time.monotonic() - started < 2.0


def test_a_closed_runner_starts_again(make: Any) -> None:
    runner = make(zoo.whole)
    runner.close()
    assert score(runner, eight()).rewards == [expected()]


def test_fifty_hangs_leave_the_pool_full_and_nobody_behind(make: Any) -> None:
    runner = make(zoo.acting(), timeout_s=0.3)
    score(runner, eight())
    for number in range(50):
        deed = ("hang", "stubborn", "power", "exit", "orphan")[number % 5]
        assert score(runner, eight(s5=deed)).rewards == [expected(5)]
    assert score(runner, eight()).rewards == [expected()]
    pids = runner.worker_pids()
    assert len(pids) == 2
    time.sleep(0.2)
    family = psutil.Process(pids[0]).parent().children(recursive=True)  # type: ignore[union-attr]
    assert sorted(child.pid for child in family) == sorted(pids)
    assert not [process for process in psutil.process_iter(["cmdline"]) if _is_orphan(process)]


def _is_orphan(process: psutil.Process) -> bool:
    return any("reward-zoo orphan" in word for word in process.info["cmdline"] or [])


def _gone(pids: Sequence[int], within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(psutil.pid_exists(pid) for pid in pids)


def test_workers_die_with_a_trainer_that_is_killed() -> None:
    code = (
        "import os, sys, threading, time; sys.path.insert(0, 'tests'); import reward_zoo as zoo\n"
        "from trl_grpo_ext.rewards.runner import RewardRunner\n"
        "runner = RewardRunner([zoo.whole, zoo.acting()], ['a', 'b'], num_workers=2)\n"
        "runner.score(['p'], ['1'], None, {'answer': ['x']})\n"
        "print(*runner.worker_pids(), flush=True)\n"
        "batch = (['p'] * 2, ['1 hang', '2 stubborn'], None, {'answer': 'xy'})\n"
        "threading.Thread(target=runner.score, args=batch).start()\n"
        "time.sleep(0.5)\n"
        "child = os.fork()\n"  # a child that inherits the connections must not keep the workers alive
        "if child == 0: time.sleep(20); os._exit(0)\n"
        "print(child, flush=True); os.kill(os.getpid(), 9)\n"
    )
    root = Path(__file__).parents[1]
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root)
    assert trainer.stdout is not None
    pids = [int(word) for word in trainer.stdout.readline().split()]
    child = int(trainer.stdout.readline())
    try:
        assert trainer.wait(timeout=30) == -9
        assert len(pids) == 2
        assert _gone(pids)
    finally:
        os.kill(child, 9)
        trainer.stdout.close()


def test_the_thread_that_made_the_runner_may_end(make: Any) -> None:
    runners: list[RewardRunner] = []
    thread = threading.Thread(target=lambda: runners.append(make(zoo.whole)))
    thread.start()
    thread.join()
    score(runners[0], eight())
    pids = runners[0].worker_pids()
    thread = threading.Thread(target=lambda: score(runners[0], eight()))
    thread.start()
    thread.join()
    time.sleep(0.1)
    assert score(runners[0], eight()).rewards == [expected()]
    assert runners[0].worker_pids() == pids


def test_a_forked_trainer_has_workers_of_its_own(make: Any) -> None:
    runner = make(zoo.pid)
    before = score(runner, ["x"]).rewards[0]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, b"own" if score(runner, ["x"]).rewards[0] not in (before, [None]) else b"shared")
            runner.close()
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    assert os.read(read, 10) == b"own"
    os.close(read)
    assert score(runner, ["x"]).failure_counts == [0]


def test_closing_ends_every_process(make: Any) -> None:
    runner = make(zoo.whole)
    score(runner, eight())
    pids = runner.worker_pids()
    runner.close()
    runner.close()
    assert _gone(pids)


def test_the_pool_recovers_when_its_server_or_a_worker_is_killed_from_outside(make: Any) -> None:
    runner = make(zoo.acting())
    score(runner, eight())
    server = psutil.Process(runner.worker_pids()[0]).ppid()
    psutil.Process(server).kill()
    assert score(runner, eight()).rewards == [expected()]
    psutil.Process(runner.worker_pids()[0]).kill()
    time.sleep(0.05)
    assert score(runner, eight()).rewards == [expected()]
    assert len(runner.worker_pids()) == 2


def test_independent_rewards_overlap(make: Any) -> None:
    def one(completions: Any, **kwargs: Any) -> list[float]:
        time.sleep(0.4)
        return [1.0] * len(completions)

    def two(completions: Any, **kwargs: Any) -> list[float]:
        time.sleep(0.4)
        return [2.0] * len(completions)

    two.isolated = False  # type: ignore[attr-defined]
    runner = make(one, one, two)
    score(runner, ["x"])
    started = time.monotonic()
    assert score(runner, ["x"] * 4).rewards == [[1.0] * 4, [1.0] * 4, [2.0] * 4]
    assert time.monotonic() - started < 0.8


def test_rewards_that_compare_samples_see_the_whole_batch(make: Any) -> None:
    completions = ["a", "bb", "ccc", "dddd"]
    outcome = score(make(zoo.rank), completions)
    assert outcome.rewards == [[0.0, 0.25, 0.5, 0.75]]


def test_a_slow_call_is_not_taken_for_a_hang(make: Any) -> None:
    runner = make(zoo.slow_rank, batch_timeout_s=10)
    for _ in range(2):  # the first is tried sample by sample beside the call; the second is known to be slow
        assert score(runner, ["a", "bb", "ccc", "dddd"]).rewards == [[0.0, 0.25, 0.5, 0.75]]
    assert runner.plans[0].usual_s > 1


def test_a_reward_that_must_not_be_split_fails_as_a_batch(make: Any) -> None:
    runner = make(zoo.only_whole)
    assert score(runner, eight(s2="raise")).rewards == [[None] * 8]
    started = time.monotonic()
    outcome = score(runner, eight(s2="hang"))
    assert {failure.reason for failure in outcome.failures} == {"timeout"}
    assert time.monotonic() - started < DEADLINE_S + 1


def test_the_batch_has_a_deadline_too(make: Any) -> None:
    runner = make(zoo.acting(), timeout_s=1.0, batch_timeout_s=1.5)
    score(runner, eight())
    started = time.monotonic()
    outcome = score(runner, [f"{n} hang" for n in range(16)] + ["16 fine"])
    assert time.monotonic() - started < 2.5
    reasons = {failure.reason for failure in outcome.failures}
    assert reasons == {"timeout", "batch_timeout"}


@pytest.mark.parametrize("isolate", ["always", "never"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("one", "returned 1 rewards, but 4 were expected"),
        ("empty", "returned 0 rewards"),
        ("long", "returned 9 rewards"),
        ("none", "returned None"),
        ("scalar", "single float"),
        ("dict", "returned a dict"),
    ],
)
def test_a_wrong_return_value_fails_the_batch_by_name(make: Any, kind: str, words: str, isolate: str) -> None:
    runner = make(zoo.whole, functools.partial(zoo.kinds, kind), isolate=isolate)
    outcome = score(runner, ["1", "2", "3", "4"])
    assert outcome.rewards == [[1.0, 2.0, 3.0, 4.0], [None] * 4]
    with pytest.raises(RewardError, match=f"Reward 'r1' failed on 4 of 4 samples(.|\n)*{words}"):
        runner.budget.check(outcome.failure_counts, outcome.call_counts, outcome.failures)


def test_abstaining_is_no_failure(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    runner = make(zoo.whole, zoo.acting())
    with caplog.at_level(logging.WARNING):
        outcome = score(runner, eight(s1="none"))
        score(runner, eight(s1="none"))
    assert outcome.rewards == [expected(1), expected(1)]
    assert outcome.failure_counts == [0, 0]
    assert outcome.metrics["rewards/r1/abstained"] == 1 / 8
    assert outcome.reasons[1][1] == "gold_unusable"
    assert outcome.metrics["rewards/r1/verdict/acted"] == 7 / 8
    said = [record.message for record in caplog.records if "cannot judge" in record.message]
    assert len(said) == 1
    assert "its reference is 'x'" in said[0]


def test_the_first_traceback_is_logged_once(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    runner = make(zoo.whole)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            score(runner, eight(s2="raise", s6="raise"))
    tracebacks = [record.message for record in caplog.records if "Traceback" in record.message]
    assert len(tracebacks) == 1
    assert "ValueError: cannot judge 2" in tracebacks[0]
    assert "reward_zoo.py" in tracebacks[0]


def test_nobody_sees_what_a_reward_edits_or_seeds(make: Any) -> None:
    for isolate in ("always", "never"):
        runner = make(zoo.vandal, zoo.contents, isolate=isolate)
        completions = [[{"role": "assistant", "content": "good"}] for _ in range(4)]
        answers = ["a"] * 4
        state = random.getstate()
        outcome = runner.score(["p"] * 4, completions, None, {"answer": answers})
        assert outcome.rewards == [[1.0] * 4, [1.0] * 4]
        assert random.getstate() == state
        assert (completions[0][0]["content"], answers) == ("good", ["a"] * 4)


@pytest.mark.parametrize("isolate", ["always", "never"])
def test_random_rewards_change_from_step_to_step_and_repeat_from_run_to_run(make: Any, isolate: str) -> None:
    def two_steps() -> list[Any]:
        random.seed(5)
        runner = make(zoo.dice, isolate=isolate, seed=3)
        return [score(runner, ["x"] * 3).rewards for _ in range(2)]

    first, again = two_steps(), two_steps()
    assert first == again
    assert first[0] != first[1]


@pytest.mark.parametrize("isolate", ["always", "never"])
def test_log_calls_and_state_reach_both_sides(make: Any, isolate: str) -> None:
    state = types.SimpleNamespace(global_step=7, log_history=[{}] * 500, unpicklable=threading.Lock())
    columns: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    runner = make(zoo.talkative, isolate=isolate)
    log = {"log_extra": columns.__setitem__, "log_metric": metrics.__setitem__}
    outcome = runner.score(["p"] * 8, eight(), trainer_state=state, **log)
    assert (outcome.rewards, columns, metrics) == ([expected()], {"length": [6] * 8}, {"step": 7})
    # When the call for the batch fails, each sample logs for itself; sample 2 does so before it fails.
    outcome = runner.score(["p"] * 8, eight(s2="raise"), trainer_state=state, **log)
    assert (outcome.rewards, columns) == ([expected(2)], {"length": [6, 6, None, 6, 6, 6, 6, 6]})


def test_what_cannot_be_pickled_runs_inside_and_says_so(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    lock = threading.Lock()

    def guarded(completions: Any, **kwargs: Any) -> list[float]:
        with lock:
            return [float(os.getpid())] * len(completions)

    offset = float(random.randint(1, 9))
    with caplog.at_level(logging.WARNING):
        runner = make(guarded, zoo.pid, lambda completions, **kwargs: [offset] * len(completions))
        for _ in range(2):
            outcome = score(runner, ["x"])
    assert outcome.rewards[0] == [float(os.getpid())]
    assert outcome.rewards[1] != [float(os.getpid())]  # a function of a module
    assert outcome.rewards[2] == [offset]  # a closure goes by value
    assert [plan.pickled is None for plan in runner.plans] == [True, False, False]
    said = [record.message for record in caplog.records if "inside the training process" in record.message]
    assert len(said) == 1
    assert "'r0'" in said[0]
    assert "cannot pickle" in said[0]
    with pytest.raises(ConfigurationError, match="'r0' cannot run in a worker process"):
        make(guarded, isolate="always")


def test_a_reward_that_workers_cannot_load_runs_inside(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Loading:
        __name__ = "loading"

        def __init__(self, deed: str) -> None:
            self.deed = deed

        def __reduce__(self) -> Any:
            return _load, (self.deed,)

        def __call__(self, completions: Any, **kwargs: Any) -> list[float]:
            return [2.0] * len(completions)

    with caplog.at_level(logging.WARNING):
        runner = make(Loading("raise"), Loading("exit"), zoo.whole)
        outcome = score(runner, ["1", "2"])
    assert outcome.rewards == [[2.0, 2.0], [2.0, 2.0], [1.0, 2.0]]
    assert "no such thing" in caplog.text
    assert "ended the process" in caplog.text
    assert [plan.why_here is None for plan in runner.plans] == [False, False, True]


def _load(deed: str) -> Any:
    if deed == "exit":
        os._exit(1)
    raise ImportError("no such thing")


def test_columns_that_cannot_be_pickled_bring_the_reward_inside(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    runner = make(zoo.whole)
    with caplog.at_level(logging.WARNING):
        outcome = score(runner, eight(), handle=[threading.Lock()] * 8)
    assert outcome.rewards == [expected()]
    assert "a column it reads cannot be pickled" in caplog.text


def test_environments_are_for_rewards_inside(make: Any) -> None:
    class Environment:
        def __init__(self, value: float) -> None:
            self.value, self.lock = value, threading.Lock()

    def by_environment(environments: Any, **kwargs: Any) -> list[float]:
        return [environment.value for environment in environments]

    def by_keywords(completions: Any, **kwargs: Any) -> list[float]:
        return [environment.value + 1 for environment in kwargs["environments"]]

    runner = make(by_environment, by_keywords, zoo.acting())
    environments = [Environment(float(number)) for number in range(8)]
    outcome = runner.score(["p"] * 8, eight(), None, {"answer": ["x"] * 8}, environments=environments)
    assert outcome.rewards == [expected(), [number + 1.0 for number in range(8)], expected()]
    assert [plan.pickled is None for plan in runner.plans] == [True, True, False]


def test_inside_python_loops_are_interrupted(make: Any) -> None:
    runner = make(zoo.whole, isolate="never", timeout_s=0.3, batch_timeout_s=1.0)
    started = time.monotonic()
    outcome = score(runner, eight(s5="hang"))
    assert outcome.rewards == [expected(5)]
    assert outcome.failures[0].reason == "timeout"
    assert time.monotonic() - started < 2.0


def test_only_what_a_function_takes_is_passed(make: Any) -> None:
    def narrow(completions: Any, answer: Any) -> list[float]:
        return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]

    def only_prompts(prompts: Any) -> list[float]:
        return [float(len(prompt)) for prompt in prompts]

    outcome = make(narrow, only_prompts).score(["p", "pp"], ["a", "b"], None, {"answer": ["a", "a"], "other": [1, 2]})
    assert outcome.rewards == [[1.0, 0.0], [1.0, 2.0]]


def test_a_missing_column_is_named(make: Any) -> None:
    with pytest.raises(RewardError, match=r"reward 'r0' needs the column 'answer'; the batch has answers.*'answers'"):
        make(zoo.acting()).score(["p"], ["a"], None, {"answers": ["x"]})


def test_deterministic_rewards_are_scored_once(make: Any, tmp_path: Path) -> None:
    counter = tmp_path / "calls"

    def counted(completions: Any, answer: Any) -> list[float]:
        with counter.open("a") as file:
            file.write("x" * len(completions))
        return [float(text) for text in completions]

    counted.deterministic = True  # type: ignore[attr-defined]
    runner = make(counted, counted, cache_path=tmp_path / "scores.db")
    outcome = score(runner, ["1", "2", "1", "1"])
    assert outcome.rewards == [[1.0, 2.0, 1.0, 1.0]] * 2
    assert outcome.metrics["rewards/r0/cached"] == 0.5
    assert score(runner, ["2", "1", "3"]).metrics["rewards/r0/cached"] == 2 / 3
    assert score(runner, ["2"], answer=["another"]).rewards == [[2.0], [2.0]]
    calls = len(counter.read_text())
    runner.close()
    again = make(counted, counted, cache_path=tmp_path / "scores.db")
    assert score(again, ["1", "2", "3"]).rewards == [[1.0, 2.0, 3.0]] * 2
    assert len(counter.read_text()) == calls


def test_failures_are_not_cached(make: Any) -> None:
    runner = make(zoo.acting())
    for _ in range(2):
        outcome = score(runner, eight(s2="raise"))
        assert outcome.failures[0].sample == 2
    assert outcome.metrics["rewards/r0/cached"] == 7 / 8


def test_an_empty_batch_is_no_problem(make: Any) -> None:
    outcome = score(make(zoo.whole, zoo.acting()), [])
    assert outcome.rewards == [[], []]
    assert outcome.call_counts == [0, 0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"timeout_s": 0}, "reward_timeout_s=0"),
        ({"timeout_s": 2.0, "batch_timeout_s": 1.0}, "reward_batch_timeout_s=1.0"),
        ({"num_workers": 0}, "reward_num_workers=0"),
        ({"cache_entries": -1}, "reward_cache_entries=-1"),
        ({"isolate": "alway"}, "Did you mean 'always'"),
        ({"max_failure_rate": 1.5}, "reward_max_failure_rate=1.5"),
    ],
)
def test_settings_are_checked(make: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make(zoo.whole, **settings)


def test_names_must_be_distinct_and_functions_callable() -> None:
    with pytest.raises(ConfigurationError, match="distinct names"):
        RewardRunner([zoo.whole, zoo.whole], ["a", "a"])
    with pytest.raises(ConfigurationError, match="'a' is a int"):
        RewardRunner([3], ["a"])  # type: ignore[list-item]


def test_models_stay_with_trl() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ConfigurationError, match="reward models stay with TRL"):
        RewardRunner([torch.nn.Linear(1, 1)], ["a"])
    layer = torch.nn.Linear(1, 1)
    runner = RewardRunner([lambda completions, **kwargs: [float(layer.out_features)] * len(completions)], ["holds"])
    assert "holds a model" in str(runner.plans[0].why_here)
    runner.close()


def test_workers_do_not_import_torch(make: Any) -> None:
    def loaded(completions: Any, **kwargs: Any) -> list[float]:
        import sys

        return [float("torch" in sys.modules or "transformers" in sys.modules)] * len(completions)

    state = types.SimpleNamespace(global_step=1)
    assert make(loaded).score(["p"], ["x"], trainer_state=state).rewards == [[0.0]]


def test_a_verifier_with_its_own_isolation_judges_the_batch_at_once(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class BatchJudge(zoo.acting):  # type: ignore[misc,valid-type]
        warm = False

        def warm_up(self) -> None:
            type(self).warm = True

        def judge_batch(self, completions: Sequence[Any], columns: Any) -> list[Verdict]:
            assert len(columns["answer"]) == len(completions)
            if "raise" in completions[0]:
                raise OSError("sandbox gone")
            return [Verdict(float(text.split()[0]), "judged", text) for text in completions]

    with caplog.at_level(logging.WARNING):
        runner = make(BatchJudge(), zoo.whole)
    assert BatchJudge.warm
    assert not caplog.records
    outcome = score(runner, eight())
    assert outcome.rewards == [expected(), expected()]
    assert outcome.reasons[0] == ["judged"] * 8
    outcome = score(runner, ["0 raise", "9 fine"])
    assert outcome.rewards[0] == [None, None]
    assert "sandbox gone" in outcome.failures[0].detail


def test_state_between_batches_stays_in_one_worker_and_is_announced(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def counting() -> Any:
        step = 0

        def count(completions: Any, **kwargs: Any) -> list[float]:
            nonlocal step
            step += 1
            return [float(step)] * len(completions)

        return count

    inside = counting()
    inside.isolated = False
    with caplog.at_level(logging.WARNING):
        runner = make(zoo.acting(), counting(), counting(), inside)
    said = [record.message for record in caplog.records]
    assert len(said) == 2
    assert all("changes nonlocal step" in message for message in said)
    for step in range(1, 6):
        assert score(runner, eight()).rewards[1:] == [[float(step)] * 8] * 3


def test_equal_samples_share_their_log_calls(make: Any) -> None:
    def logged(completions: Any, log_extra: Any, log_metric: Any) -> list[float]:
        log_extra("text", list(completions))
        log_metric("number", float(completions[0]))
        return [float(text) for text in completions]

    logged.deterministic = True  # type: ignore[attr-defined]
    for isolate in ("always", "never"):
        columns: dict[str, Any] = {}
        metrics: dict[str, Any] = {}
        runner = make(logged, isolate=isolate)
        for _ in range(2):  # a score that came with log calls is not taken from the cache, or they would be lost
            log = {"log_extra": columns.__setitem__, "log_metric": metrics.__setitem__}
            assert runner.score(["p"] * 3, ["1", "4", "1"], **log).rewards == [[1.0, 4.0, 1.0]]
            assert (columns, metrics) == ({"text": ["1", "4", "1"]}, {"number": 2.0})
