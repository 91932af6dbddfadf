"""Compare the ``math`` verifier with TRL's ``accuracy_reward`` and with math-verify on the same pairs.

    python tests/bench/bench_math.py

Every grader runs warm, in the main thread of a process of its own (so that math-verify's alarm works), each call with
a hard limit of 20 s. Rows that are matters of taste (``[policy]``) and rows with options are left out; rows whose gold
is unusable count only for "no verdict". Times are wall times of one call; the machine's load is printed with them.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from trl_grpo_ext.rewards.killable import KillableWorkers

HERE = Path(__file__).resolve().parent
CASES = HERE.parent / "cases"
FILES = ("math_cases.jsonl", "math_pairs.jsonl")
LIMIT_S = 20.0


# -- graders, called in their worker process ---------------------------------------------------------------------------
def ours(gold: str, answer: str) -> float | None:
    """Return the score of the ``math`` verifier."""
    from trl_grpo_ext.rewards.verifiers.math import math

    return math().judge(answer, gold).score


def trl_accuracy(gold: str, answer: str) -> float | None:
    """Return the score of TRL's accuracy_reward, gold as it is."""
    from trl.rewards import accuracy_reward

    return accuracy_reward([[{"content": answer}]], [gold])[0]


def trl_accuracy_wrapped(gold: str, answer: str) -> float | None:
    """Return the score of TRL's accuracy_reward, gold between dollar signs."""
    return trl_accuracy(f"${gold}$", answer)


def math_verify_boxed(gold: str, answer: str) -> float | None:
    """Return math-verify's verdict on a boxed gold with its LaTeX, expression and letter extractors."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, StringExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig(), StringExtractionConfig()]
    read_gold = parse(f"\\boxed{{{gold}}}", extraction_config=config)
    if not read_gold:
        return None
    return float(verify(read_gold, parse(answer, extraction_config=config)))


def timed(name: str, gold: str, answer: str) -> list[Any]:
    """Return [score, seconds] of one grader on one row."""
    grader = {"ours": ours, "trl": trl_accuracy, "trl_wrapped": trl_accuracy_wrapped, "math_verify": math_verify_boxed}[
        name
    ]
    if name == "ours":
        _start_symbolic_worker(os.getpid())
    started = time.perf_counter()
    try:
        score = grader(gold, answer)
    except Exception:
        score = -1.0
    return [score, time.perf_counter() - started]


@functools.cache
def _start_symbolic_worker(_pid: int) -> None:
    """Start the process of the symbolic stage, once; a training run pays for it once, too."""
    from trl_grpo_ext.rewards.verifiers.math import symbolic

    symbolic.warm_up()


def preload() -> None:
    """Import all graders, and use each once whose first use loads more."""
    import logging

    logging.disable(logging.ERROR)
    for name in ("trl", "trl_wrapped", "math_verify"):
        for answer in ("\\boxed{\\frac{1}{2}}", "The answer is $\\sqrt{8}$.", "\\boxed{(1,2)}", "#### 7"):
            timed(name, "\\frac{1}{2}", answer)


LABELS = {
    "ours": "`math` (this package)",
    "trl": "TRL `accuracy_reward`",
    "trl_wrapped": "TRL `accuracy_reward`, gold in `$…$`",
    "math_verify": "math-verify, boxed gold",
}


COLUMNS = (
    "grader", "right", "false negatives", "false positives", "no verdict", "failed or killed", "median ms", "p95 ms",
    "worst ms",
)  # fmt: skip


def load(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a case file that have one right verdict under the defaults."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if "[policy]" not in row["note"] and not row.get("options")]


def run(rows: list[dict[str, Any]], grader: str) -> str:
    """Return one row of the Markdown table."""
    workers = KillableWorkers(preload=(f"{Path(__file__).stem}:preload",), memory_gib=4.0, start_timeout_s=600.0)
    workers.call(f"{Path(__file__).stem}:timed", [grader, "1", "\\boxed{1}"], 600.0)  # starts everything
    false_negative = false_positive = no_verdict = failed = right = 0
    times: list[float] = []
    for row in rows:
        outcome = workers.call(f"{Path(__file__).stem}:timed", [grader, row["gold"], row["answer"]], LIMIT_S)
        score, seconds = outcome.value if outcome.status == "ok" else (-1.0, LIMIT_S)
        times.append(seconds)
        expected = row["expected"]
        if score is not None and score < 0:
            failed += 1
        elif score is None and expected is not None:
            no_verdict += 1
        elif expected is not None and score is not None and (score > 0.5) != expected:
            false_negative += bool(expected)
            false_positive += not expected
        else:
            right += 1
    workers.close()
    times.sort()
    median, p95 = times[len(times) // 2], times[int(len(times) * 0.95)]
    cells = [LABELS[grader], f"{right} of {len(rows)}", false_negative, false_positive, no_verdict, failed]
    cells += [f"{median * 1e3:.2f}", f"{p95 * 1e3:.1f}", f"{times[-1] * 1e3:.0f}"]
    return "| " + " | ".join(map(str, cells)) + " |"


SYMBOLIC = (
    ("\\frac{1}{2}", "\\int_0^1 x\\,dx"),
    ("\\frac{1}{3}", "\\int_0^1 x^2\\,dx"),
    ("55", "\\sum_{k=1}^{10} k"),
    ("56", "\\sum_{k=1}^{10} k"),
    ("385", "\\sum_{k=1}^{10} k^2"),
    ("1", "\\lim_{x\\to 0}\\frac{\\sin x}{x}"),
    ("-2", "\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}"),
    ("2x", "\\frac{d}{dx} x^2"),
    ("3x^2", "\\frac{d}{dx} x^3"),
    ("24", "\\prod_{k=1}^{4} k"),
)


def stages(rows: list[dict[str, Any]]) -> None:
    """Print the median time of a verdict by the stage that decides, everything warm (second call of each row)."""
    from trl_grpo_ext.rewards.verifiers.math import math, symbolic
    from trl_grpo_ext.rewards.verifiers.math.extract import extract
    from trl_grpo_ext.rewards.verifiers.math.grading import grade, read_gold
    from trl_grpo_ext.rewards.verifiers.math.quantities import Policy
    from trl_grpo_ext.rewards.verifiers.math.text import fold_unicode

    symbolic.warm_up()
    reward, policy = math(timeout_s=LIMIT_S), Policy()
    pairs = [(row["gold"], row["answer"]) for row in rows] + [
        (gold, f"\\boxed{{{answer}}}") for gold, answer in SYMBOLIC
    ]
    times: dict[str, list[float]] = {}
    for gold, answer in pairs:
        found = extract(fold_unicode(answer)).text
        stage = "no answer"
        if found is not None:
            stage = grade(
                read_gold(gold, False, policy),
                found,
                policy=policy,
                decimal_comma=False,
                symbolic=True,
                timeout_s=LIMIT_S,
            ).stage
        reward.judge(answer, gold)
        started = time.perf_counter()
        reward.judge(answer, gold)
        times.setdefault(stage, []).append(time.perf_counter() - started)
    print("| decided by | rows | median ms | p95 ms | worst ms |\n| --- | --- | --- | --- | --- |")
    for stage, found_times in times.items():
        found_times.sort()
        median, p95 = found_times[len(found_times) // 2], found_times[int(len(found_times) * 0.95)]
        print(f"| {stage} | {len(found_times)} | {median * 1e3:.2f} | {p95 * 1e3:.2f} | {found_times[-1] * 1e3:.1f} |")
    cpu = []
    for gold, answer in SYMBOLIC:
        symbolic.decide(gold, answer)
        started = time.process_time()
        symbolic.decide(gold, answer)
        cpu.append(time.process_time() - started)
    cpu.sort()
    print(
        f"\nmath-verify itself, warm, CPU time: median {cpu[len(cpu) // 2] * 1e3:.1f} ms, worst {cpu[-1] * 1e3:.1f} ms"
    )


def main() -> None:
    """Print one table per case file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graders", nargs="*", default=list(LABELS), choices=list(LABELS))
    parser.add_argument("--stages", action="store_true", help="time this package's stages instead of comparing graders")
    chosen = parser.parse_args()
    sys.path.insert(0, str(HERE))
    if chosen.stages:
        print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
        stages([row for name in FILES for row in load(CASES / name)])
        return
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    for name in FILES:
        rows = load(CASES / name)
        print(f"{name}, {len(rows)} rows\n")
        print("| " + " | ".join(COLUMNS) + " |")
        print("| --- " * len(COLUMNS) + "|")
        for grader in chosen.graders:
            print(run(rows, grader), flush=True)
        print()


if __name__ == "__main__":
    main()
