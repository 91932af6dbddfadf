"""How much failure a run tolerates (field case 5), what is logged of it, and which columns fit (field case 7)."""

from __future__ import annotations

from typing import Any

import pytest

from trl_grpo_ext.errors import ConfigurationError, DataError, RewardError
from trl_grpo_ext.rewards.columns import check_columns
from trl_grpo_ext.rewards.log_calls import deliver, merge_split_calls
from trl_grpo_ext.rewards.outcome import FailedSample, FailureBudget


def test_a_fifth_is_tolerated_and_more_is_not() -> None:
    FailureBudget(["a"]).check([20], [100])
    with pytest.raises(
        RewardError, match=r"Reward 'a' failed on 21 of 100 samples; reward_max_failure_rate=0.2 allows 20%"
    ):
        FailureBudget(["a"]).check([21], [100])


def test_each_function_has_its_own_share() -> None:
    with pytest.raises(RewardError, match="Reward 'b' failed on 64 of 64"):
        FailureBudget(["a", "b", "c", "d", "e", "f"]).check([0, 64, 0, 0, 0, 0], [64] * 6)


def test_small_steps_are_judged_together() -> None:
    budget = FailureBudget(["a"])
    for _ in range(3):
        budget.check([1], [4])  # 1 of 16, 2 of 16, 3 of 16
    with pytest.raises(RewardError, match="failed on 4 of 16"):
        budget.check([1], [4])
    with pytest.raises(RewardError, match="failed on 4 of 4"):
        FailureBudget(["a"]).check([4], [4])  # an outage is seen at once
    budget = FailureBudget(["a"])
    for number in range(40):  # one of four now and then never adds up
        budget.check([int(number % 2 == 0)], [4])


def test_the_ends_of_the_range() -> None:
    FailureBudget(["a"], 1.0).check([64], [64])
    with pytest.raises(RewardError):
        FailureBudget(["a"], 0.0).check([1], [1000])
    FailureBudget(["a"], 0.0).check([0], [0])
    with pytest.raises(ConfigurationError, match="reward_max_failure_rate=2"):
        FailureBudget(["a"], 2)


def test_the_commonest_failure_is_quoted() -> None:
    failures = [
        FailedSample("a", 0, "timeout", "took more than 1 s"),
        FailedSample("b", 1, "exception", "not this one"),
        FailedSample("a", 2, "exception", "ConnectionError: judge is down"),
        FailedSample("a", 3, "exception", "another"),
    ]
    with pytest.raises(RewardError) as caught:
        FailureBudget(["a", "b"]).check([4, 1], [8, 8], failures)
    assert "exception (2 of 3), for example sample 2:\nConnectionError: judge is down" in str(caught.value)
    with pytest.raises(RewardError, match="on another rank"):
        FailureBudget(["a"]).check([8], [8])


NEEDED = {"math": ("answer",), "format": ()}


def test_fitting_columns_pass() -> None:
    check_columns(["prompt", "answer", "level"], NEEDED)
    check_columns(None, NEEDED)  # a stream


@pytest.mark.parametrize(
    ("columns", "needed", "words"),
    [
        (["prompt", "completion"], NEEDED, ["does not pass it on", "rename_column('completion', 'answer')"]),
        (["prompt", "completion", "answer", "prompts"], NEEDED, ["'prompts', 'prompts_column'", "or remove it"]),
        (["prompt", "completion"], {"f": ("completion",)}, ["does not pass it on", "f: completion"]),
        (["prompt", "solution"], NEEDED, ["'math' needs the column 'answer'", "reference: solution", "format: none"]),
        (["prompt", "answers"], NEEDED, ["Did you mean 'answers'?"]),
        (["prompt", "answer", "prompts"], NEEDED, ["'prompts'", "name of an argument"]),
        (["prompt", "answer", "trainer_state"], NEEDED, ["'trainer_state'", "name of an argument"]),
        (["prompt", "completion_ids"], {"f": ("completion_ids",)}, ["'completion_ids'", "does not pass it on"]),
        (["prompt", "answer", "log_extra"], NEEDED, ["'log_extra'"]),
        (["prompt", "answer", "environments"], NEEDED, ["'environments'"]),
        (["prompt"], {"f": ("prompt",)}, ["arrives as 'prompts'"]),
    ],
)  # fmt: skip
def test_columns_that_cannot_arrive_are_refused(columns: list[str], needed: Any, words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        check_columns(columns, needed)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("column", ["completion", "completion_ids"])
def test_a_dropped_column_that_nobody_asks_for_is_a_warning(column: str, caplog: pytest.LogCaptureFixture) -> None:
    check_columns(["prompt", "answer", column], NEEDED)
    assert f"{column!r} does not reach any reward" in caplog.text


def test_split_log_calls_are_put_together() -> None:
    calls = {
        0: [["extra", "length", [3]], ["metric", "cost", 1.0], ["metric", "text", "x"]],
        2: [["metric", "cost", 2.0], ["extra", "length", [5]], ["extra", "wrong", [1, 2]]],
    }
    assert merge_split_calls(calls, 3) == [["extra", "length", [3, None, 5]], ["metric", "cost", 1.5]]


def test_two_rewards_may_log_the_same_column() -> None:
    columns: list[Any] = []
    metrics: list[Any] = []
    calls = {
        "a": [["extra", "x", [1]], ["extra", "x", [2]], ["metric", "m", 1.0]],
        "b": [["extra", "x", [3]], ["metric", "m", 2.0]],
    }
    deliver(calls, lambda *call: columns.append(call), lambda *call: metrics.append(call))
    assert columns == [("x", [2]), ("x/b", [3])]
    assert metrics == [("m", 1.0), ("m", 2.0)]
    deliver(calls, None, None)
