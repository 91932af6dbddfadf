"""What reward functions log: good values pass, bad ones are dropped with one warning each."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from trl_grpo_ext.monitor.user_logs import UserLogs


@pytest.mark.parametrize("values", [[1, 2.5, None], ["a", "b"], [None, None], np.ones(2), [[1], (2,)], [{"a": 1}]])
def test_columns_of_one_kind_pass(values: object) -> None:
    assert UserLogs().accepts_column("column", values)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([1, "a"], "mixes number, text"),
        ([True, 1], "mixes bool, number"),
        ("text", "got str"),
        (3, "got int"),
        ({"a": 1}, "got dict"),
    ],
)
def test_bad_columns_are_refused_once_aloud(values: object, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    logs = UserLogs()
    with caplog.at_level(logging.WARNING):
        assert not logs.accepts_column("column", values)
        assert not logs.accepts_column("column", values)
    assert [reason in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("value", [1, 2.5, np.float32(3), torch.tensor(4.0), True])
def test_numbers_are_metrics(value: object) -> None:
    assert UserLogs().accepts_metric("metric", value)


@pytest.mark.parametrize("value", ["1.0", None, [1, 2], float("nan"), float("inf"), torch.ones(2), object()])
def test_anything_else_is_not(value: object, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not UserLogs().accepts_metric("metric", value)
    assert len(caplog.records) == 1


def test_columns_of_the_wrong_length_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    pending = {"short": [1], "right": [1, 2], "long": [1, 2, 3]}
    with caplog.at_level(logging.WARNING):
        UserLogs().drop_unusable_columns(pending, num_rows=2)
    assert pending == {"right": [1, 2]}
    assert "got 1 values for 2 completions" in caplog.text
