"""Verifiers and the decorator that lifts them to batch rewards."""

from __future__ import annotations

import logging
import pickle
from typing import Any, Literal

import cloudpickle
import pytest

from trl_grpo_ext.errors import ConfigurationError, RewardError
from trl_grpo_ext.rewards.verifier import Verdict, VerifierReward, completion_text, verifier


@verifier(name="same", columns=("answer", "level"), optional_columns=("hint",), version="3")
def same(
    text: str,
    reference: Any,
    *,
    level: int,
    hint: str | None = None,
    prompt: Any = None,
    ignore_case: bool = False,
    mode: Literal["strict", "loose"] = "strict",
    bonus: float = 0.0,
    limit: int | None = None,
) -> Verdict:
    """Return 1 for the same text."""
    if text == "boom":
        raise ValueError("boom")
    if ignore_case:
        text, reference = text.lower(), reference.lower()
    return Verdict(float(text == reference) + bonus, "judged", f"{level}/{hint}/{prompt}/{mode}/{limit}")


@verifier(name="long", reference=None)
def long(text: str, reference: None, *, minimum: int = 3) -> Verdict:
    return Verdict(float(len(text) >= minimum), "length")


def test_a_batch_gets_one_score_per_completion() -> None:
    reward = same()
    scores = reward(prompts=["p", "q"], completions=["a", "b"], completion_ids=None, answer=["a", "a"], level=[1, 2])
    assert scores == [1.0, 0.0]
    assert (reward.__name__, reward.columns, reward.reference) == ("same", ("answer", "level"), "answer")
    assert (reward.deterministic, reward.version, reward.per_sample) == (True, "3", True)


def test_one_text_can_be_judged_alone() -> None:
    assert same(ignore_case=True, limit=2).judge("A", "a", level=7, hint="h", prompt="p", other=1) == Verdict(
        1.0, "judged", "7/h/p/strict/2"
    )
    assert long().judge("abcd").score == 1.0
    with pytest.raises(ValueError, match="boom"):
        same().judge("boom", "a", level=1)


def test_a_missing_reference_cannot_be_judged() -> None:
    assert same().judge("a", None, level=1) == Verdict(None, "no_reference")
    assert same()(completions=["a", "b"], answer=[None, "b"], level=[1, 1]) == [None, 1.0]


def said(content: Any, role: str = "assistant") -> dict[str, Any]:
    return {"role": role, "content": content}


BLOCKS = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("plain", "plain"),
        ([said("said")], "said"),
        ([said("first"), said("x", "tool")], "first"),
        ([said("call"), said("x", "tool"), said("end")], "end"),
        ([said(BLOCKS)], "ab"),
        ([said(None)], ""),
        ([said("x", "tool")], ""),
        ([], ""),
    ],
)
def test_the_text_of_plain_and_conversational_completions(completion: Any, text: str) -> None:
    assert completion_text(completion) == text


@pytest.mark.parametrize("completion", [3, None, [3], [{"role": "assistant", "content": 3}]])
def test_anything_else_is_no_completion(completion: Any) -> None:
    with pytest.raises(RewardError, match="must be text or a list"):
        completion_text(completion)


def test_columns_can_have_other_names() -> None:
    reward = same(reference="solution", columns={"level": "grade"})
    assert reward.columns == ("solution", "grade")
    assert reward(completions=["a"], solution=["a"], grade=[5], level=[9]) == [1.0]
    assert reward.judge_row("p", "a", None, {"solution": "a", "grade": 5}).extracted == "5/None/p/strict/None"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ignore_cse": True}, "no option 'ignore_cse'.*Did you mean 'ignore_case'"),
        ({"ignore_case": 1}, r"ignore_case=1 \(int\) is not allowed; it must be bool"),
        ({"mode": "lose"}, "must be one of 'strict', 'loose'"),
        ({"mode": ["loose"]}, "must be one of 'strict', 'loose'"),
        ({"bonus": "1"}, "must be float"),
        ({"bonus": True}, "must be float"),
        ({"limit": 1.5}, "must be int or None"),
        ({"columns": {"lvel": "x"}}, "reads no column 'lvel'.*Did you mean 'level'"),
        ({"prompts": [], "completions": []}, r"is a class of rewards; call it first, for example same\(\)"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        same(**options)


def test_integers_are_floats_and_none_is_optional() -> None:
    assert same(bonus=1, limit=None).options == {"ignore_case": False, "mode": "strict", "bonus": 1, "limit": None}


def test_a_reference_for_a_verifier_without_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="compares with no reference"):
        long(reference="answer")
    assert long().columns == ()


def test_rewards_pickle_by_reference_and_by_value() -> None:
    reward = same(reference="gold", ignore_case=True, name="mine")
    for copy in (pickle.loads(pickle.dumps(reward)), cloudpickle.loads(cloudpickle.dumps(reward))):
        assert (copy.__name__, copy.columns, copy.options) == ("mine", ("gold", "level"), reward.options)
        assert copy(completions=["A"], gold=["a"], level=[1]) == [1.0]

    @verifier(name="local", reference=None)
    def local(text: str, reference: None) -> Verdict:
        return Verdict(1.0, "ok")

    assert cloudpickle.loads(cloudpickle.dumps(local()))(completions=["x"]) == [1.0]


def test_a_sample_that_raises_is_none_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    reward = same(name="said once")
    with caplog.at_level(logging.WARNING):
        assert reward(completions=["a", "boom", "boom"], answer=["a"] * 3, level=[1] * 3) == [1.0, None, None]
        reward(completions=["boom"], answer=["a"], level=[1])
    assert len(caplog.records) == 1


def test_a_missing_column_is_named() -> None:
    with pytest.raises(RewardError, match=r"'same' needs the column 'answer'.*Did you mean 'answers'"):
        same()(completions=["a"], answers=["a"], level=[1])


def test_a_verifier_must_return_a_verdict() -> None:
    @verifier(name="wrong", reference=None)
    def wrong(text: str, reference: None) -> Verdict:
        return 1.0  # type: ignore[return-value]

    with pytest.raises(RewardError, match="'wrong' returned float; it must return a Verdict"):
        wrong().judge("x")


def test_the_decorator_checks_its_own_arguments() -> None:
    with pytest.raises(ConfigurationError, match="must be one of columns"):
        verifier(name="x", columns=("gold",), reference="answer")
    with pytest.raises(ConfigurationError, match="'weight' must be a declared column, or an option"):

        @verifier(name="x")
        def clash(text: str, reference: Any, *, weight: float = 1.0) -> Verdict:
            return Verdict(1.0, "ok")

    with pytest.raises(ConfigurationError, match="'level' must be a declared column"):

        @verifier(name="x")
        def undeclared(text: str, reference: Any, *, level: int) -> Verdict:
            return Verdict(1.0, "ok")


def test_options_are_validated_together_and_warm_up_is_called() -> None:
    calls: list[str] = []

    def validate(options: Any) -> None:
        if options["low"] > options["high"]:
            raise ConfigurationError("low must not be above high")

    @verifier(name="range", reference=None, validate=validate, warm_up=lambda: calls.append("warm"))
    def in_range(text: str, reference: None, *, low: int = 0, high: int = 1) -> Verdict:
        return Verdict(1.0, "ok")

    assert issubclass(in_range, VerifierReward)
    in_range(low=0).warm_up()
    assert calls == ["warm"]
    with pytest.raises(ConfigurationError, match="low must not be above high"):
        in_range(low=2)
