"""What counts as a reward (field cases 1, 2 and 4)."""

from __future__ import annotations

import itertools
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from trl_grpo_ext.rewards.coerce import BadValue, ShapeError, coerce_reward, coerce_rewards
from trl_grpo_ext.rewards.verifier import Verdict


@pytest.mark.parametrize(
    "output",
    [
        [1.0, 0.0, 2.5],
        (1.0, 0.0, 2.5),
        np.array([1.0, 0.0, 2.5]),
        np.array([[1.0], [0.0], [2.5]]),
        torch.tensor([1.0, 0.0, 2.5], requires_grad=True),
        torch.tensor([[1.0], [0.0], [2.5]]),
        (value for value in (1.0, 0.0, 2.5)),
        [True, False, 2.5],
        [Fraction(1), Fraction(0), Fraction(5, 2)],
        [Decimal(1), Decimal("0"), Decimal("2.5")],
        [np.float32(1), np.int64(0), np.array([2.5])],
        [torch.tensor(1.0), torch.tensor([0]), torch.tensor(2.5, requires_grad=True)],
        [Verdict(1.0, "equal"), Verdict(0.0, "different"), 2.5],
    ],
)
def test_usual_containers_and_numbers_are_accepted(output: Any) -> None:
    rewards = coerce_rewards(output, 3)
    assert rewards == [1.0, 0.0, 2.5]
    assert all(type(reward) is float for reward in rewards)


def test_none_stays_none() -> None:
    assert coerce_rewards([None, 1, Verdict(None, "gold_unusable")], 3) == [None, 1.0, None]


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ([1.0], "returned 1 rewards, but 4 were expected"),
        ([], "returned 0 rewards, but 4 were expected"),
        ([1.0] * 5, "returned 5 rewards, but 4 were expected"),
        (itertools.count(), "returned more than 4 rewards"),
        (np.zeros(3), "returned 3 rewards"),
        (np.zeros((4, 2)), r"shape \(4, 2\)"),
        (np.zeros((1, 4)), r"shape \(1, 4\)"),
        (torch.tensor(1.0), r"shape \(\)"),
        (None, "returned None.*is a return statement missing"),
        (1.0, "single float"),
        ("1.01", "returned a str"),
        ({0: 1.0, 1: 0.0, 2: 0.0, 3: 0.0}, "returned a dict"),
        ({1.0, 2.0, 3.0, 4.0}, "returned a set"),
    ],
)
def test_a_value_of_the_wrong_shape_is_refused(output: Any, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        coerce_rewards(output, 4)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("1.0", "bad_value"),
        ((1.0, "because"), "bad_value"),
        ([1.0], "bad_value"),
        ({"score": 1.0}, "bad_value"),
        (1 + 2j, "bad_value"),
        (object(), "bad_value"),
        (np.array([1.0, 2.0]), "bad_value"),
        (np.str_("1"), "bad_value"),
        (float("nan"), "non_finite"),
        (float("inf"), "non_finite"),
        (float("-inf"), "non_finite"),
        (1e39, "non_finite"),
        (-1e39, "non_finite"),
        (10**400, "non_finite"),
        (Fraction(10**400), "non_finite"),
        (Decimal("NaN"), "non_finite"),
        (Decimal("1e400"), "non_finite"),
        (Decimal("sNaN"), "non_finite"),
        (np.float64("inf"), "non_finite"),
        (torch.tensor(float("nan")), "non_finite"),
    ],
)
def test_a_bad_value_spoils_its_own_sample_only(value: Any, reason: str) -> None:
    rewards = coerce_rewards([0.5, value, None], 3)
    bad = rewards[1]
    assert isinstance(bad, BadValue)
    assert bad.reason == reason
    assert (rewards[0], rewards[2]) == (0.5, None)


def test_the_complaint_names_value_type_and_remedy() -> None:
    bad = coerce_reward((1.0, "because"))
    assert isinstance(bad, BadValue)
    assert "(1.0, 'because') (tuple)" in bad.detail
    assert "log_extra" in bad.detail


def test_the_largest_float32_is_a_reward_and_the_next_float64_is_not() -> None:
    largest = float(np.finfo(np.float32).max)
    assert coerce_reward(largest) == largest
    assert isinstance(coerce_reward(np.nextafter(largest, np.inf)), BadValue)
