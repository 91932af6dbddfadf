"""``combine``: the rules on numbers worked out by hand, and the promise that a bonus never outvotes correctness."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_grpo_ext.errors import ConfigurationError, RewardError
from trl_grpo_ext.rewards.registry import build_rewards
from trl_grpo_ext.rewards.verifiers.combine import Combination

TWO = [{"math": {"weight": 1.0}}, {"format": {"weight": 0.5}}]
RIGHT = "<think>a</think><answer>7</answer>"
WRONG = "<think>a</think><answer>8</answer>"
BARE = "\\boxed{7}"


def combined(parts, scores, length=0, **options):
    return Combination(parts, **options).combine(scores, length)


def test_through_a_recipe_with_every_part_logged():
    (reward,) = build_rewards(
        [{"combine": {"how": "gate", "gates": ["format"], "parts": ["math", "format"]}}]
    ).functions
    columns, metrics = {}, {}
    scores = reward(
        prompts=["Q"] * 3,
        completions=[RIGHT, WRONG, BARE],
        completion_ids=[[1]] * 3,
        answer=["7"] * 3,
        log_extra=columns.__setitem__,
        log_metric=metrics.__setitem__,
    )
    assert scores == [1.0, 0.0, 0.0]
    assert columns == {"combine/math": [1.0, 0.0, 1.0], "combine/format": [1.0, 1.0, 0.0]}
    assert metrics["combine/math"] == pytest.approx(2 / 3)
    assert metrics["combine/math_missing"] == 0.0
    assert reward.columns == ("answer",)
    assert reward.per_sample
    assert reward.deterministic


@pytest.mark.parametrize(
    ("options", "scores", "value"),
    [
        ({}, {"math": 1.0, "format": 1.0}, 1.5),
        ({}, {"math": 0.0, "format": 1.0}, 0.5),
        ({"clip": [0.0, 1.2]}, {"math": 1.0, "format": 1.0}, 1.2),
        ({"clip": [0.0, 1.2], "scale": 2.0}, {"math": 1.0, "format": 1.0}, 2.4),
        ({"missing": "skip"}, {"math": 1.0, "format": None}, 1.5),
        ({"missing": "skip"}, {"math": None, "format": 1.0}, 1.5),
        ({"missing": "zero"}, {"math": 1.0, "format": None}, 1.0),
        ({"missing": "abstain"}, {"math": 1.0, "format": None}, None),
        ({}, {"math": None, "format": None}, None),
        ({"how": "best_of"}, {"math": 0.3, "format": 1.0}, 0.5),
        ({"how": "best_of"}, {"math": None, "format": 1.0}, 0.5),
        ({"how": "best_of", "missing": "abstain"}, {"math": None, "format": 1.0}, None),
        ({"how": "gate", "gates": ["format"]}, {"math": 0.8, "format": 1.0}, 0.8),
        ({"how": "gate", "gates": ["format"]}, {"math": 0.8, "format": 0.9}, 0.0),
        ({"how": "gate", "gates": ["format"], "threshold": 0.9}, {"math": 0.8, "format": 0.9}, 0.8),
        ({"how": "gate", "gates": ["format"], "closed": -1.0}, {"math": 0.8, "format": 0.0}, -1.0),
        ({"how": "gate", "gates": ["format"]}, {"math": 0.8, "format": None}, None),
        ({"how": "gate", "gates": ["format"]}, {"math": None, "format": 0.0}, 0.0),
        ({"how": "bonus", "main": "math"}, {"math": 1.0, "format": 1.0}, 1.2),
        ({"how": "bonus", "main": "math"}, {"math": 1.0, "format": 0.1}, 1.05),
        ({"how": "bonus", "main": "math"}, {"math": 0.0, "format": 1.0}, 0.0),
        ({"how": "bonus", "main": "math"}, {"math": 0.0, "format": -1.0}, -0.2),
        ({"how": "bonus", "main": "math", "bonus_for_wrong": True}, {"math": 0.0, "format": 1.0}, 0.2),
        ({"how": "bonus", "main": "math"}, {"math": None, "format": 1.0}, None),
        ({"how": "bonus", "main": "math"}, {"math": 1.0, "format": None}, 1.0),
    ],
)
def test_rules(options, scores, value):
    got = combined(TWO, scores, **options)
    assert got == (None if value is None else pytest.approx(value, abs=1e-12))


def test_product():
    parts = ["math", "format"]
    assert combined(parts, {"math": 0.5, "format": 0.5}, how="product") == 0.25
    assert combined(parts, {"math": 0.5, "format": 0.0}, how="product") == 0.0
    assert combined(parts, {"math": 0.5, "format": None}, how="product") is None


@pytest.mark.parametrize(
    ("score", "count", "value"),
    [
        (1.0, 0, 1.0),
        (1.0, 50, 0.75),
        (1.0, 100, 0.5),
        (1.0, 900, 0.5),
        (0.0, 0, -1.0),
        (0.0, 100, -0.5),
        (None, 5, None),
    ],
)
def test_cosine_goes_from_short_to_long(score, count, value):
    got = combined(["math"], {"math": score}, count, how="cosine", main="math", max_length=100)
    assert got == (None if value is None else pytest.approx(value, abs=1e-12))


def test_cosine_equals_trl():
    from trl.rewards import get_cosine_scaled_reward

    ours = Combination(["math"], how="cosine", main="math", max_length=100)
    theirs = get_cosine_scaled_reward(max_len=100)
    completions = [[{"role": "assistant", "content": f"\\boxed{{{number}}}"}] for number in (7, 8, 7, 8)]
    ids = [[1] * count for count in (10, 10, 70, 130)]
    assert ours(completions=completions, completion_ids=ids, answer=["7"] * 4) == pytest.approx(
        theirs(completions, ["$7$"] * 4, ids)
    )


@given(st.floats(-100, 100), st.floats(-100, 100), st.floats(0.01, 0.49))
def test_no_bonus_lifts_a_wrong_answer_to_a_right_one(for_right, for_wrong, limit):
    reward = Combination(TWO, how="bonus", main="math", bonus_limit=limit, bonus_for_wrong=True)
    right, wrong = (
        reward.combine({"math": main, "format": bonus}) for main, bonus in ((1.0, for_right), (0.0, for_wrong))
    )
    assert right > wrong


def test_a_part_that_is_not_finite_counts_as_missing():
    def broken(completions, **_):
        return [float("inf")] * len(completions)

    reward = Combination([broken, "format"])
    assert reward(completions=[RIGHT]) == [2.0]


def test_a_part_that_takes_few_arguments_gets_only_those():
    def short(completions):
        return [float(len(text) < 50) for text in completions]

    assert Combination([short])(completions=[RIGHT], answer=["7"], prompts=["Q"]) == [1.0]


def test_a_part_that_returns_a_wrong_number_of_scores_is_named():
    def one(completions, **_):
        return [1.0]

    with pytest.raises(RewardError, match="'one' returned 1 scores for 2"):
        Combination([one])(completions=["a", "b"])


def test_it_pickles():
    reward = pickle.loads(pickle.dumps(Combination(TWO, how="bonus", main="math")))
    assert reward(completions=[RIGHT, WRONG, BARE], answer=["7"] * 3) == [1.2, 0.0, 1.0]


def test_it_runs_in_the_reward_runner():
    pytest.importorskip("trl_grpo_ext.rewards.runner")
    from trl_grpo_ext.rewards.placing import plan_reward

    plan = plan_reward(Combination(TWO, how="bonus", main="math"), "combine", "always")
    assert plan.pickled is not None
    assert plan.per_sample


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"how": "gate"}, "needs 'gates'"),
        ({"gates": ["format"]}, "needs 'gates'"),
        ({"how": "gate", "gates": ["fromat"]}, "Did you mean 'format'"),
        ({"how": "gate", "gates": ["math", "format"]}, "nothing is left"),
        ({"how": "bonus"}, "need 'main'"),
        ({"how": "bonus", "main": "format"}, "weight 1"),
        ({"how": "bonus", "main": "math", "bonus_limit": 0.5}, "below 0.5"),
        ({"how": "product"}, "weights"),
        ({"how": "cosine", "main": "math", "max_length": 10}, "exactly one part"),
        ({"how": "avarage"}, "must be one of"),
        ({"missing": "drop"}, "must be one of"),
        ({"clip": [1.0, 0.0]}, "clip"),
    ],
)
def test_bad_options(options, part):
    with pytest.raises(ConfigurationError, match=part):
        Combination(TWO, **options)


def test_a_reward_model_or_coroutine_cannot_be_a_part():
    async def later(completions, **_):
        return [0.0] * len(completions)

    with pytest.raises(ConfigurationError, match="a reward model"):
        Combination([{"model": {"model": "org/model"}}, "math"])
    with pytest.raises(ConfigurationError, match="asynchronous"):
        Combination([later])
    with pytest.raises(ConfigurationError, match="'parts'"):
        build_rewards([{"combine": {"how": "sum"}}])
