"""Frames between trainer and workers, and the mechanics of the pool."""

from __future__ import annotations

import json
import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import reward_zoo as zoo

from trl_grpo_ext.rewards import wire
from trl_grpo_ext.rewards.outcome import Failure, Score
from trl_grpo_ext.rewards.pool import WorkerPool, death_of
from trl_grpo_ext.rewards.scorings import read_record
from trl_grpo_ext.rewards.wire import BrokenFrameError, FrameReader, frame, parse_json


def test_frames_survive_any_cut() -> None:
    payloads = [b"", b"a", b"bc" * 100]
    stream = b"".join(frame(payload) for payload in payloads)
    for step in (1, 3, 7, len(stream)):
        reader, received = FrameReader(), []
        for start in range(0, len(stream), step):
            received += reader.feed(stream[start : start + step])
        assert received == payloads


def test_a_frame_may_not_announce_more_than_is_allowed() -> None:
    with pytest.raises(BrokenFrameError, match="announces 11 bytes; at most 10"):
        FrameReader(max_bytes=10).feed(frame(b"x" * 11))


@pytest.mark.parametrize("payload", [b"", b"\xff\xff", b"[1]", b'{"a": NaN}', b'{"a": Infinity}', b"[" * 100_000])
def test_a_reply_that_is_no_object_is_refused(payload: bytes) -> None:
    with pytest.raises(BrokenFrameError):
        parse_json(payload)


def test_messages_travel_both_ways() -> None:
    ours, theirs = socket.socketpair()
    big = {"text": "ü" * 500_000}
    thread = threading.Thread(target=wire.send_pickle, args=(ours, big))
    thread.start()
    assert wire.receive_pickle(theirs) == big
    thread.join()
    wire.send_json(theirs, {"score": [0.1, None, "\ud800"]})
    assert parse_json(FrameReader().feed(ours.recv(1000))[0]) == {"score": [0.1, None, "\ud800"]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        wire.send_json(theirs, {"score": float("inf")})
    ours.close()
    with pytest.raises(EOFError):
        wire.receive_pickle(theirs)
    theirs.close()


@pytest.mark.parametrize(
    ("message", "record"),
    [
        ({"score": [0.5, "equal", "7", None]}, Score(0.5, "equal", "7")),
        ({"score": [None, None, None, None]}, Score(None)),
        ({"score": [None, None, "inf", "non_finite"]}, Failure("non_finite", "inf")),
        ({"score": [1e999, None, None, None]}, Failure("non_finite", "inf")),
        ({"failure": ["exit", "x"]}, Failure("exit", "x")),
    ],
)
def test_replies_are_read(message: Any, record: Any) -> None:
    assert read_record(message) == record


@pytest.mark.parametrize(
    "message", [{}, {"score": 1.0}, {"score": [1]}, {"score": ["1", None, None, None]}, {"failure": 3}]
)
def test_forged_replies_are_failures(message: Any) -> None:
    assert isinstance(read_record(message), Failure)


def test_deaths_have_names() -> None:
    assert death_of(0) == Failure("exit", "ended its process with exit code 0")
    assert death_of(-11) == Failure("crash", "its process was ended by SIGSEGV")
    assert "memory" in death_of(-9).detail


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool([cloudpickle.dumps(zoo.whole), pickle.dumps(zoo.acting())], 2)
    pool.ensure_ready()
    yield pool
    pool.close()


def job(*completions: str, **changes: Any) -> dict[str, Any]:
    return {
        "function": 0,
        "mode": "each",
        "is_verifier": False,
        "is_async": False,
        "num_samples": len(completions),
        "timeout_s": 1.0,
        "seed": 0,
        "call": {"completions": list(completions)},
        "columns": {},
        "log_names": [],
        **changes,
    }


def collect(pool: WorkerPool, seconds: float = 5.0) -> list[Any]:
    """Return what happens until a job ends or a worker dies."""
    events: list[Any] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        events += pool.wait(0.1)
        if any(event.kind == "died" or "end" in (event.message or {}) for event in events):
            return events
    raise AssertionError(f"nothing ended: {events}")


def test_a_reply_is_sent_as_soon_as_its_sample_is_done(pool: WorkerPool) -> None:
    worker = pool.idle()[0]
    assert pool.submit(worker, "token", job("1", "2", "3 exit", "4"))
    events = collect(pool)
    replies = [json.dumps(event.message) for event in events if event.kind == "reply"]
    assert [reply for reply in replies if "sample" in reply] == [
        '{"sample": 0, "score": [1.0, null, null, null]}',
        '{"sample": 1, "score": [2.0, null, null, null]}',
    ]
    assert events[-1].kind == "died"
    assert events[-1].worker.job == "token"
    assert events[-1].failure == Failure("exit", "ended its process with exit code 0")
    pool.fill()
    assert len(pool.pids()) == 2
    assert pool.num_replaced == 1


def test_extra_workers_retire(pool: WorkerPool) -> None:
    pool.fill(extra=2)
    assert len(pool.pids()) == 4
    pool.fill()
    assert len(pool.pids()) == 2


def test_a_killed_worker_is_replaced_from_the_warm_server(pool: WorkerPool) -> None:
    worker = pool.idle()[0]
    pool.submit(worker, "token", job("1 stubborn"))
    time.sleep(0.1)
    pid = worker.pid
    pool.kill(worker)
    pool.fill()
    assert pid not in pool.pids()
    assert len(pool.pids()) == 2
    pool.submit(pool.idle()[0], "token", job("5", function=1, is_verifier=True, columns={"answer": ["x"]}))
    assert collect(pool)[-1].message["score"] == [5.0, "acted", "5", None]


def test_a_function_that_leaves_threads_is_loaded_by_the_workers_themselves() -> None:
    class Threaded:
        def __reduce__(self) -> Any:
            return _with_thread, ()

    pool = WorkerPool([cloudpickle.dumps(Threaded()), cloudpickle.dumps(zoo.whole)], 1)
    try:
        pool.ensure_ready()
        assert pool.load_errors == {}
        pool.submit(pool.idle()[0], "token", job("1"))
        assert collect(pool)[-1].message["score"] == [41.0, None, None, None]
    finally:
        pool.close()


def _with_thread() -> Any:
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    return lambda completions: [41.0] * len(completions)


def test_a_worker_has_a_memory_limit_if_asked() -> None:
    def greedy(completions: Any) -> list[float]:
        return [float(len(bytearray(3 * 2**30)) > 0)]

    pool = WorkerPool([cloudpickle.dumps(greedy)], 1, memory_gib=1.0)
    try:
        pool.ensure_ready()
        pool.submit(pool.idle()[0], "token", job("1"))
        assert "MemoryError" in collect(pool)[-1].message["failure"][1]
    finally:
        pool.close()


def test_workers_are_the_first_to_go_when_memory_runs_out(pool: WorkerPool) -> None:
    if not os.path.exists("/proc/self/oom_score_adj"):
        pytest.skip("needs Linux")
    pids = pool.pids()
    time.sleep(0.1)
    with open(f"/proc/{pids[0]}/oom_score_adj") as file:
        assert file.read().strip() == "1000"
