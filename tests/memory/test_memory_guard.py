"""The guard counts what moves, warns when hardly anything does, and ends a run in which nothing did with an error."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import make
from tiny import tiny_model
from torch import nn

from trl_grpo_ext.errors import NothingTrainedError
from trl_grpo_ext.memory.moved import SampledEntries
from trl_grpo_ext.memory.offload import HostOffload
from trl_grpo_ext.memory.update_guard import METRIC, UpdateGuard


def test_movement_is_counted_by_hand() -> None:
    """Two tensors, 6 + 4 entries: three change, five have a gradient, one of them -0.0, which is no gradient."""
    first, second = nn.Parameter(torch.arange(6.0).view(2, 3)), nn.Parameter(torch.ones(4))
    sample = SampledEntries([first, second])
    sample.take()
    with torch.no_grad():
        first[0, 1] += 1.0
        second[:2] *= 2.0
    first.grad = torch.tensor([[0.0, 1.0, -0.0], [2.0, 0.0, 0.0]])
    second.grad = torch.tensor([1.0, 1.0, 1.0, 0.0])
    movement = sample.compare()
    assert sample.is_exact
    assert movement == (10, 3, 5)
    assert movement.moved_share == pytest.approx(0.3)


def test_a_large_tensor_is_sampled_evenly_and_small_ones_whole() -> None:
    large, small = nn.Parameter(torch.zeros(512, 512)), nn.Parameter(torch.zeros(100))
    sample = SampledEntries([large, small], max_entries=4096)
    sample.take()
    with torch.no_grad():
        large[:, ::2] = 1.0  # every other column
    movement = sample.compare()
    assert not sample.is_exact
    assert 2000 < movement.entries < 4300
    assert 0.45 < movement.moved / (movement.entries - 100) < 0.55
    # every row of columns is visited: a stride of even length would see only one kind
    with torch.no_grad():
        large[:, 1::2] = 1.0
    assert sample.compare().moved == movement.entries - 100


def test_a_tensor_without_entries_is_left_out() -> None:
    """ZeRO-3 leaves such shells."""
    sample = SampledEntries([nn.Parameter(torch.empty(0))])
    sample.take()
    assert sample.compare() == (0, 0, 0)


class Runs:
    """Drive the guard through optimiser steps without a trainer."""

    def __init__(self, dtype: torch.dtype = torch.float32, skipped: bool = False, resumed_at: int = 0) -> None:
        self.model = nn.Linear(64, 64, bias=False, dtype=dtype)
        self.logged: list[float] = []
        self.guard = UpdateGuard(lambda name, value: self.logged.append(value), lambda: skipped)
        self.guard.on_train_begin(None, SimpleNamespace(global_step=resumed_at), None)

    def step(self, update: float, gradient: float = 1.0, rate: float = 1e-3, live: int = 1) -> None:
        self.guard.saw_groups(live)
        self.guard.on_step_begin(None, None, None, model=self.model)
        with torch.no_grad():
            self.model.weight.add_(update)
        self.model.weight.grad = torch.full_like(self.model.weight, gradient)
        optimizer = SimpleNamespace(param_groups=[{"lr": rate}])
        self.guard.on_optimizer_step(None, None, None, model=self.model, optimizer=optimizer)


def test_the_alarm_comes_once_after_three_still_steps(caplog: pytest.LogCaptureFixture) -> None:
    runs = Runs(torch.bfloat16)
    nn.init.constant_(runs.model.weight, 1.0)
    for _ in range(2):
        runs.step(1e-6)
    runs.step(0.5)  # a step that moves begins the count anew
    for _ in range(2):
        runs.step(1e-6)
    assert caplog.text == ""
    for _ in range(3):
        runs.step(1e-6, rate=1e-6)
    assert caplog.text.count("The weights hardly move") == 1
    assert "most are bfloat16, in which a value keeps its old digits unless the update exceeds 1/512" in caplog.text
    assert "learning_rate=1e-06" in caplog.text
    assert runs.logged == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("how", [{"gradient": 0.0}, {"rate": 0.0}])
def test_no_alarm_without_a_gradient_or_a_learning_rate(
    how: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    runs = Runs()
    for _ in range(4):
        runs.step(0.0, **how)
    assert caplog.text == ""


def test_a_run_that_moved_nothing_is_an_error_that_says_why() -> None:
    runs = Runs(torch.bfloat16)
    nn.init.constant_(runs.model.weight, 1.0)
    runs.step(1e-6)
    with pytest.raises(NothingTrainedError, match=r"not one entry changed in 1 steps: every update was rounded away"):
        runs.guard.finish(runs.model)
    detached = Runs()
    detached.step(0.0, gradient=0.0)
    with pytest.raises(NothingTrainedError, match="every gradient was 0"):
        detached.guard.finish(detached.model)
    overflowing = Runs(skipped=True)
    overflowing.step(0.0)
    with pytest.raises(NothingTrainedError, match="the gradient scaler skipped every step"):
        overflowing.guard.finish(overflowing.model)
    assert overflowing.logged == []


def test_a_run_of_dead_groups_is_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    runs = Runs()
    runs.step(0.0, gradient=0.0, live=0)
    with caplog.at_level(logging.WARNING):
        runs.guard.finish(runs.model)
    assert "in all 1 steps those of every group were equal" in caplog.text
    caplog.clear()
    runs.step(0.1, live=1)
    runs.guard.finish(runs.model)
    assert caplog.text == ""


def test_no_verdict_where_the_learning_rate_was_zero_or_no_step_was_made(caplog: pytest.LogCaptureFixture) -> None:
    Runs().guard.finish(nn.Linear(2, 2))
    runs = Runs()
    runs.step(0.0, rate=0.0)
    runs.guard.finish(runs.model)
    assert caplog.text == ""


def test_a_resumed_run_is_not_judged_by_its_last_part(caplog: pytest.LogCaptureFixture) -> None:
    for live in (0, 1):
        runs = Runs(resumed_at=7)
        runs.step(0.0, live=live)
        runs.guard.finish(runs.model)
    assert caplog.text == ""


def equal_rewards(prompts: list[Any], **_: Any) -> list[float]:
    return [1.0] * len(prompts)


def test_in_a_trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    learning = make(tmp_path, tiny_model())
    learning.train()
    assert all(entry[METRIC] > 0.5 for entry in learning.state.log_history if METRIC in entry)
    assert sum(METRIC in entry for entry in learning.state.log_history) == 2
    dead = make(tmp_path, tiny_model(), reward=equal_rewards)
    dead.train()
    assert "in all 2 steps those of every group were equal" in caplog.text
    still = make(tmp_path, tiny_model(dtype=torch.bfloat16), learning_rate=1e-12)
    with pytest.raises(NothingTrainedError, match="every update was rounded away: most are bfloat16"):
        still.train()
    off = make(tmp_path, tiny_model(dtype=torch.bfloat16), learning_rate=1e-12, watch_updates=False)
    off.train()
    assert not any(METRIC in entry for entry in off.state.log_history)


def test_offloaded_activations_give_the_same_gradient() -> None:
    """On a CPU the copies lie beside the originals; weights and small tensors are left alone."""
    model = tiny_model()
    ids = torch.arange(3, 99).view(2, 48)
    model(ids).logits.float().logsumexp(-1).sum().backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    offload = HostOffload(model, "cpu", min_bytes=4096)
    for _ in range(2):  # one context serves every step
        moved = offload.num_moved_bytes
        model.zero_grad()
        with offload:
            loss = model(ids).logits.float().logsumexp(-1).sum()
        loss.backward()
        assert offload.num_moved_bytes - moved > 100_000
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, plain[name]), name


def test_offload_leaves_weights_where_they_are() -> None:
    layer = nn.Linear(512, 512, bias=False)
    offload = HostOffload(layer, "cpu", min_bytes=1)
    with offload:
        layer(torch.ones(1, 512)).sum().backward()
    assert 0 < offload.num_moved_bytes < 4 * 512 * 512
