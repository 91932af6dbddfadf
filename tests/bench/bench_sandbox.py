"""Measure the sandbox: start, latency, throughput, the mixed batch, HumanEval, what is left over.

    python tests/bench/bench_sandbox.py            about two minutes on an idle machine with two processors
    python tests/bench/bench_sandbox.py --quick    a tenth of it
    python tests/bench/bench_sandbox.py --libraries    besides, own filter and ruleset against the libraries'

Prints Markdown for docs/sandbox.md. Wall times depend on what else runs; the load average is printed with them.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from trl_grpo_ext.data.code_tasks import generated_rows, humaneval_rows
from trl_grpo_ext.errors import MissingDependencyError, SandboxError
from trl_grpo_ext.rewards.sandbox import SandboxLimits, SandboxPool
from trl_grpo_ext.rewards.verifiers.code import CodeReward

BACKENDS = ("namespaces+landlock+seccomp", "landlock+seccomp", "seccomp-noopen", "unsafe")
MIXED = (
    [("while True: pass", "")] * 8
    + [("x = ' ' * (2 << 30)", "")] * 8
    + [("while True: print('y' * 1000)", "")] * 8
    + [("import os; os._exit(3)", "")] * 8
    + [("1 / 0", "")] * 24
)


def small_programs(count: int) -> list[tuple[str, str]]:
    """Return programs of the size that models write: a function, a loop, some output."""
    source = "def f(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n"
    source += "print(f(int(input())))"
    return [(source, str(index % 90)) for index in range(count)]


def percentile(values: list[float], share: float) -> float:
    """Return the value below which the share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def plain_subprocess(count: int) -> float:
    """Return programs per second as unprotected fresh processes, two at a time."""
    begin = time.perf_counter()
    running: list[subprocess.Popen[bytes]] = []
    for source, given in small_programs(count):
        if len(running) == 2:
            running.pop(0).communicate()
        process = subprocess.Popen([sys.executable, "-I", "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(given.encode())
        process.stdin.close()
        process.stdin = None
        running.append(process)
    for process in running:
        process.communicate()
    return count / (time.perf_counter() - begin)


def measure_backend(backend: str, scale: float) -> None:
    """Print one row of the table of speeds."""
    starts = []
    for _ in range(5):
        with SandboxPool(backend=backend, workers=2) as pool:
            begin = time.perf_counter()
            try:
                pool.run_program("print(1)")
            except SandboxError as error:
                print(f"| {backend} | not to be had here: {str(error)[:90]} | | | | | |")
                return
            starts.append(1000 * (time.perf_counter() - begin))
            ready = 1000 * pool.report.start_s
    with SandboxPool(backend=backend, workers=4) as pool:
        count = int(1500 * scale)
        pool.run_programs(small_programs(100))
        begin = time.perf_counter()
        results = pool.run_programs(small_programs(count))
        rate = count / (time.perf_counter() - begin)
        assert all(result.reason == "ok" for result in results), Counter(result.reason for result in results)
        cpu_ms = 1000 * statistics.mean(result.process.cpu_s for result in results)
        serial = []
        for source, given in small_programs(int(400 * scale) + 20):
            begin = time.perf_counter()
            pool.run_program(source, given)
            serial.append(1000 * (time.perf_counter() - begin))
        server_kib = rss_kib(pool._servers[0].process_id)
    first = statistics.median(starts)
    print(
        f"| {backend} | {first:.0f} ({ready:.0f}) | {rate:.0f} | {statistics.median(serial):.1f} | "
        f"{percentile(serial, 0.95):.1f} | {cpu_ms:.1f} | {server_kib / 1024:.0f} |"
    )


def rss_kib(process: int) -> int:
    """Return the resident memory of a process."""
    text = Path(f"/proc/{process}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0])


def mixed_batch() -> None:
    """Print the times of 256 mixed programs."""
    programs = list(MIXED)
    programs += [(f"print(sorted(range({index})))", "") for index in range(256 - len(programs))]
    random.Random(0).shuffle(programs)
    print("\n256 programs: 8 endless, 8 wanting 2 GiB, 8 flooding, 8 leaving by _exit, 24 failing, 200 ordinary\n")
    print(
        "| CPU limit s | at a time | seconds | floor: endless ones alone | reasons |\n| --- | --- | --- | --- | --- |"
    )
    processors = len(os.sched_getaffinity(0))
    for cpu_s in (0.5, 1.0, 2.0):
        for workers in (4, 8):
            with SandboxPool(SandboxLimits(cpu_s=cpu_s), workers=workers) as pool:
                pool.run_program("pass")
                begin = time.perf_counter()
                results = pool.run_programs(programs)
                seconds = time.perf_counter() - begin
            reasons = dict(Counter(result.reason for result in results).most_common())
            print(f"| {cpu_s} | {workers} | {seconds:.1f} | {8 * cpu_s / processors:.1f} | {reasons} |")


def judged() -> None:
    """Print the results of HumanEval and of the generated tasks through the reward."""
    print("\n| tasks | program | passed | seconds |\n| --- | --- | --- | --- |")
    reward = CodeReward(cpu_s=5.0)
    reward.warm_up()
    try:
        rows = humaneval_rows()
    except MissingDependencyError:
        rows = []
    names = ("tests", "entry_point", "prompt_code")
    bodies = {
        "reference": None,
        "empty body": "    pass\n",
        "return 1": "    return 1\n",
        "return None": "    return None\n",
    }
    for name, body in bodies.items() if rows else ():
        texts = [f"```python\n{row['prompt_code']}{body or row['canonical_solution']}\n```" for row in rows]
        begin = time.perf_counter()
        scores = reward(completions=texts, **{key: [row[key] for row in rows] for key in names})
        print(f"| HumanEval | {name} | {sum(map(bool, scores))} of {len(rows)} | {time.perf_counter() - begin:.1f} |")
    tasks = generated_rows(256)
    texts = [f"```python\n{row['solution']}```" for row in tasks]
    begin = time.perf_counter()
    scores = reward(completions=texts, tests=[row["tests"] for row in tasks])
    print(f"| generated | reference | {sum(map(bool, scores))} of 256 | {time.perf_counter() - begin:.1f} |")


def left_over(count: int) -> None:
    """Print what many programs leave behind."""
    kinds = ["print(1)", "1/0", "import os; os._exit(1)", "print('x' * 10**7)", "x = bytearray(10**10)"]
    kinds.append("import os; os.fork()")
    with SandboxPool(SandboxLimits(cpu_s=1.0), workers=4) as pool:
        pool.run_programs([(kind, "") for kind in kinds * 20])

        def state() -> tuple[int, int, int, int, int]:
            mine = _descendants()
            shared = len(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else 0
            files = len(list(Path(tempfile.gettempdir()).glob(f"trl-grpo-sandbox-{os.getpid()}-*")))
            return mine, len(os.listdir("/proc/self/fd")), files, shared, rss_kib(pool._servers[0].process_id)

        before, begin = state(), time.perf_counter()
        for start in range(0, count, 60):
            pool.run_programs([(kinds[index % len(kinds)], "") for index in range(start, min(start + 60, count))])
        seconds, after = time.perf_counter() - begin, state()
        print(f"\n{count} mixed programs in {seconds:.0f} s; faults {pool.counters['faults']}\n")
        print("| | processes | descriptors | files | shared memory | server KiB | own peak MiB |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print("| before | " + " | ".join(map(str, before)) + " | |")
        print("| after | " + " | ".join(map(str, after)) + f" | {peak} |")


def _descendants() -> int:
    found, frontier = 0, [os.getpid()]
    while frontier:
        process = frontier.pop()
        for task in Path(f"/proc/{process}/task").glob("*/children"):
            children = [int(word) for word in task.read_text().split()]
            found += len(children)
            frontier += children
    return found


def libraries() -> None:
    """Print what own code and the libraries cost to make a filter and a ruleset, each in a fresh interpreter."""
    root = Path(__file__).parents[2] / "trl_grpo_ext" / "rewards" / "sandbox"
    own = f"import sys; sys.path.insert(0, {str(root)!r}); from guest import seccomp, syscalls, landlock"
    seccomp_own = "t = seccomp.Template(syscalls.this_machine(), paths=True, scratch=False)"
    # The same calls, and as many conditions on arguments.
    seccomp_lib = (
        f"import sys, os, tempfile; sys.path.insert(0, {str(root)!r}); from guest import syscalls as t\n"
        "f = s.SyscallFilter(s.ERRNO(1))\n"
        "names = [n for n in (*t.ALWAYS, *t.PATH_READING) if t.number(n, t.this_machine()) is not None]\n"
        "for n in names: f.add_rule(s.ALLOW, n)\n"
        "for n in ('kill', 'tkill', 'tgkill', 'prlimit64'): f.add_rule(s.ALLOW, n, s.Arg(0, s.EQ, os.getpid()))\n"
        "for c in (0, 1, 2, 3, 1030): f.add_rule(s.ALLOW, 'fcntl', s.Arg(1, s.EQ, c))\n"
        "for c in range(0x5401, 0x5407): f.add_rule(s.ALLOW, 'ioctl', s.Arg(1, s.EQ, c))\n"
        "f.add_rule(s.ALLOW, 'clone', s.Arg(0, s.MASKED_EQ, 0x10000, 0x10000))\n"
        "f.add_rule(s.ALLOW, 'openat', s.Arg(2, s.MASKED_EQ, 0o3, 0))\n"
        "f.export_bpf(tempfile.TemporaryFile())"
    )
    landlock_own = "r = landlock.Ruleset(['/usr/lib'] * 200)"
    landlock_lib = "r = Landlock(strict=False)\nfor i in range(200): r.allow_read('/usr/lib')"
    cases = [
        ("seccomp, own code", own, seccomp_own),
        ("seccomp, pyseccomp with libseccomp", "import pyseccomp as s", seccomp_lib),
        ("Landlock, own code (200 rules)", own, landlock_own),
        ("Landlock, py-landlock (200 rules)", "from py_landlock import Landlock", landlock_lib),
    ]
    print("\n| | import ms | build ms |\n| --- | --- | --- |")
    for name, imports, build in cases:
        code = (
            f"import time; a = time.perf_counter()\n{imports}\nb = time.perf_counter()\n{build}\n"
            "c = time.perf_counter(); print(f'{1000 * (b - a):.1f} | {1000 * (c - b):.1f}')"
        )
        runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(5)]
        good = sorted(run.stdout.strip() for run in runs if run.returncode == 0)
        print(f"| {name} | {good[len(good) // 2] if good else 'not installed | ' + runs[0].stderr.strip()[-60:]} |")


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--libraries", action="store_true")
    options = parser.parse_args()
    logging.getLogger("trl_grpo_ext").setLevel(logging.ERROR)  # "unsafe" is measured too, and says so loudly
    scale = 0.1 if options.quick else 1.0
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    machine = f"{len(os.sched_getaffinity(0))} processors, Linux {platform.release()}"
    print(f"{machine}, Python {platform.python_version()}, load {load}\n")
    print(
        "First program: from nothing to its result, server start and canary included (in brackets: the server alone)."
    )
    print("Warm: four at a time. Latency: one after another.\n")
    print("| backend | first program ms | programs/s | median ms | p95 ms | CPU ms each | server MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for backend in BACKENDS:
        measure_backend(backend, scale)
    print(f"| plain subprocess, unprotected | | {plain_subprocess(int(200 * scale) + 10):.0f} | | | | |")
    mixed_batch()
    judged()
    left_over(int(10_000 * scale))
    if options.libraries:
        libraries()


if __name__ == "__main__":
    main()
