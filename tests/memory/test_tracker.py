"""The tracker counts each storage once, from its first use to its last reference. Sizes below are counted by hand."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from trl_grpo_ext.memory.hollow import HollowMode
from trl_grpo_ext.memory.trace import Event, Trace
from trl_grpo_ext.memory.tracker import StorageTracker

KIB = 1024


@pytest.fixture(params=[False, True], ids=["real", "hollow"])
def mode(request: pytest.FixtureRequest):
    return HollowMode() if request.param else torch.no_grad()


def test_allocation_and_release(mode) -> None:
    tracker = StorageTracker()
    with mode, tracker:
        a = torch.empty(256, dtype=torch.float32)
        b = torch.empty(512, dtype=torch.bfloat16)
        assert tracker.num_bytes == 2 * KIB
        del a
        assert tracker.num_bytes == KIB
        del b
        assert tracker.num_bytes == 0
    assert tracker.trace.peak_bytes() == 2 * KIB
    assert [event.num_bytes for event in tracker.trace.events] == [KIB, KIB, -KIB, -KIB]


def test_views_and_in_place_cost_nothing(mode) -> None:
    tracker = StorageTracker()
    with mode, tracker:
        a = torch.ones(256)
        view = a.view(16, 16).t()[2:4]
        a.add_(1).mul_(2)
        same = a.detach()
        assert tracker.num_bytes == KIB
        del a, same
        assert tracker.num_bytes == KIB, "the view keeps the whole storage"
        del view
        assert tracker.num_bytes == 0


def test_resize_and_set(mode) -> None:
    tracker = StorageTracker()
    with mode, tracker:
        a = torch.empty(256)
        a.resize_(1024)
        assert tracker.num_bytes == 4 * KIB
        b = torch.empty(2)
        b.set_(a)
        assert tracker.num_bytes == 4 * KIB, "b's own storage is gone"
        del a, b
        assert tracker.num_bytes == 0


def test_out_argument_and_arrays(mode) -> None:
    tracker = StorageTracker()
    with mode, tracker:
        target = torch.empty(256)
        torch.add(torch.ones(256), 1, out=target)
        assert tracker.num_bytes == KIB
        index = torch.from_numpy(np.arange(128))
        chosen = target.index_select(0, index)
        assert tracker.num_bytes == KIB + 128 * 8 + 512
        del index, chosen, target
    gc.collect()
    assert tracker.num_bytes == 0


def test_autograd_keeps_and_frees() -> None:
    """A product keeps its input; after the backward only gradients are left, and without them the parameters."""
    layer = torch.nn.Sequential(torch.nn.Linear(8, 32, bias=False), torch.nn.GELU(), torch.nn.Linear(32, 4, bias=False))
    parameters = sum(p.numel() * 4 for p in layer.parameters())
    tracker = StorageTracker()
    with tracker:
        tracker.track(layer.parameters(), "weights")
        baseline = tracker.num_bytes
        assert baseline == parameters
        x = torch.ones(16, 8)
        loss = layer(x).sum()
        kept = 16 * 8 * 4 + 2 * 16 * 32 * 4 + 4  # x, the GELU's input and output; the loss
        assert tracker.num_bytes == baseline + kept
        loss.backward()
        tracker.track((p.grad for p in layer.parameters()), "gradients")
        del loss, x
        assert tracker.num_bytes == 2 * parameters
        for p in layer.parameters():
            p.grad = None
        assert tracker.num_bytes == baseline
    # At the peak both copies of the first gradient chain exist; whatever it was, it is all accounted for.
    breakdown = tracker.trace.breakdowns()["start"]
    assert sum(breakdown.values()) == tracker.trace.peak_bytes() > baseline + kept
    assert breakdown["weights"] == parameters


def test_ties_are_counted_once() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    tracker = StorageTracker()
    with tracker:
        tracker.track([weight, weight.t(), weight.data], "weights")
    assert tracker.num_bytes == 64


def test_closed_tracker_records_nothing() -> None:
    tracker = StorageTracker()
    with tracker:
        a = torch.empty(4)
        tracker.close()
        b = torch.empty(4)
    del a, b
    assert tracker.num_bytes == 16
    assert len(tracker.trace.events) == 1


def test_trace_reads() -> None:
    events = [Event(0, 10, "load"), Event(1, 5, "forward"), Event(2, 7, "forward"), Event(1, -5, "backward")]
    events += [Event(2, -7, "backward"), Event(3, 4, "step")]
    trace = Trace(events, {0: "weights", 3: "optimizer"}, {2: "mm"})
    assert trace.peak_bytes() == 22
    assert trace.final_bytes == 14
    # The backward found 22 bytes, the step found 10 and added 4.
    assert trace.peaks() == {"load": 10, "forward": 22, "backward": 22, "step": 14}
    assert trace.breakdowns() == {
        "load": {"weights": 10},
        "forward": {"weights": 10, "activations": 12},
        "backward": {"weights": 10, "activations": 12},
        "step": {"weights": 10, "optimizer": 4},
    }
    assert trace.largest_at_peak(2) == [(10, "weights", ""), (7, "activations", "mm")]
