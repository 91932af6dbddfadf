"""Worker processes that can be killed: whatever a call does, the caller goes on, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest

from trl_grpo_ext.errors import SandboxError
from trl_grpo_ext.rewards.killable import KillableWorkers

HERE = os.path.dirname(__file__)


# Functions for the workers, called by their path.
def add(a, b):
    return a + b


def spin():
    while True:
        pass


def spin_in_c():
    return 9 ** (9**9)


def ignore_signals_and_sleep():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(3600)


def leave():
    os._exit(0)


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def exhaust():
    return len(bytearray(20 * 2**30))


def fail():
    raise ValueError("no such thing")


def not_json():
    return {1, 2}


def own_pid():
    return os.getpid()


def path(function):
    return f"{__name__}:{function.__name__}"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setattr(sys, "path", [HERE, *sys.path])


@pytest.fixture
def workers():
    pool = KillableWorkers(num_workers=2, preload=(__name__,), memory_gib=1.0)
    yield pool
    pool.close()


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids, within_s=10.0):
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def test_a_call_returns_the_value(workers):
    assert workers.call(path(add), [2, 3], 60.0) == ("ok", 5)


@pytest.mark.parametrize(
    ("function", "status"),
    [
        (spin, "timeout"),
        (spin_in_c, "timeout"),
        (ignore_signals_and_sleep, "timeout"),
        (leave, "crash"),
        (crash, "crash"),
        (exhaust, "error"),
        (fail, "error"),
        (not_json, "error"),
    ],
)
def test_a_bad_call_is_named_and_the_next_one_works(workers, function, status):
    workers.warm_up()
    assert workers.call(path(function), [], 0.5).status == status
    assert workers.call(path(add), [1, 1], 60.0) == ("ok", 2)


def test_the_deadline_is_kept_and_the_killed_process_is_gone(workers):
    pid = workers.call(path(own_pid), [], 60.0).value
    started = time.monotonic()
    assert workers.call(path(spin), [], 0.3).status == "timeout"
    assert time.monotonic() - started < 3.0
    assert gone([pid])
    assert workers.num_killed == 1


def test_fifty_hangs_leave_the_pool_as_it_was(workers):
    workers.warm_up()
    for _ in range(50):
        assert workers.call(path(spin), [], 0.02).status == "timeout"
    assert workers.call(path(add), [1, 2], 60.0) == ("ok", 3)
    template, *idle = workers.pids()
    with open(f"/proc/{template}/task/{template}/children") as file:
        assert {int(pid) for pid in file.read().split()} == set(idle)


def test_many_threads_share_the_workers(workers):
    results: dict[int, list] = {}

    def run(number):
        results[number] = [workers.call(path(add), [number, index], 60.0).value for index in range(25)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [number + index for index in range(25)] for number in range(8)}
    assert len(workers.pids()) <= 3


def test_a_worker_started_by_a_short_lived_thread_outlives_it(workers):
    thread = threading.Thread(target=workers.warm_up)
    thread.start()
    thread.join()
    time.sleep(0.1)
    assert workers.call(path(add), [1, 2], 60.0) == ("ok", 3)
    assert workers.num_killed == 0


def test_an_event_loop_can_call(workers):
    async def both():
        return workers.call(path(add), [1, 2], 60.0), await asyncio.to_thread(workers.call, path(add), [3, 4], 60.0)

    assert asyncio.run(both()) == (("ok", 3), ("ok", 7))


def test_a_worker_that_died_while_idle_is_replaced_unnoticed(workers):
    pid = workers.call(path(own_pid), [], 60.0).value
    os.kill(pid, signal.SIGKILL)
    assert gone([pid])
    assert workers.call(path(add), [1, 2], 60.0) == ("ok", 3)


def test_a_template_that_died_is_replaced_unnoticed(workers):
    workers.warm_up()
    template, *idle = workers.pids()
    os.kill(template, signal.SIGKILL)
    assert gone([template, *idle])
    assert workers.call(path(add), [1, 2], 60.0) == ("ok", 3)


def test_a_forked_child_gets_workers_of_its_own_and_the_parent_keeps_its_own(workers):
    workers.warm_up()
    before = workers.pids()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            outcome = workers.call(path(add), [20, 22], 60.0)
            os.write(write, json.dumps([outcome.value, workers.pids()]).encode())
            workers.close()
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    value, pids = json.loads(os.read(read, 10_000))
    assert os.waitpid(pid, 0)[1] == 0
    assert value == 42
    assert not set(pids) & set(before)
    assert gone(pids)
    assert workers.call(path(add), [1, 2], 60.0) == ("ok", 3)
    assert workers.pids() == before


def test_a_spawned_process_can_call_a_pickled_pool(workers):
    copy = pickle.loads(pickle.dumps(workers))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert tuple(pool.apply(copy.call, (path(add), [1, 2], 60.0))) == ("ok", 3)


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_nothing_outlives_the_process_that_called(how):
    code = (
        f"import sys, time; sys.path.insert(0, {HERE!r});"
        "from trl_grpo_ext.rewards.killable import KillableWorkers;"
        "workers = KillableWorkers(); workers.call('test_killable:add', [1, 2], 60.0);"
        "print(*workers.pids(), flush=True);" + ("" if how == "exit" else "time.sleep(60)")
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2
    if how == "kill":
        process.kill()
    process.wait(20)
    assert gone(pids)


def test_a_killed_caller_takes_a_busy_worker_with_it():
    code = (
        f"import sys; sys.path.insert(0, {HERE!r}); from trl_grpo_ext.rewards.killable import KillableWorkers;"
        "workers = KillableWorkers(); pid = workers.call('test_killable:own_pid', [], 60.0).value;"
        "print(pid, flush=True); workers.call('test_killable:spin_in_c', [], 600.0)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    time.sleep(0.3)
    process.kill()
    process.wait(20)
    assert gone([pid])


def sleep_long():
    time.sleep(600)


def test_a_template_that_takes_too_long_is_ended_and_named():
    pool = KillableWorkers(preload=(path(sleep_long),), start_timeout_s=0.5)
    with pytest.raises(SandboxError, match=r"not ready after 0.5 s"):
        pool.warm_up()
    assert pool.pids() == []


def test_a_template_that_dies_at_once_is_named():
    with pytest.raises(SandboxError, match="ended at once"):
        KillableWorkers(preload=(path(leave),)).warm_up()


def test_a_module_that_cannot_be_preloaded_is_named():
    with pytest.raises(SandboxError, match="no_such_module_here"):
        KillableWorkers(preload=("no_such_module_here",)).warm_up()
