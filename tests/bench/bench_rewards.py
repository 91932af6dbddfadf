"""Abuse the reward runner and measure it: `python tests/bench/bench_rewards.py [--calls 10000] [--json FILE]`.

Part 1, abuse: of all calls 5 % raise, 2 % hang, 1 % exit, 1 % segfault, 1 % return garbage, 0.5 % return NaN or
infinity, in random places; once as a verifier (one sample per call) and once as an ordinary batch reward. Every healthy
score must be right, every bad sample None with its reason, no process left over, the pool full, memory flat.

Part 2, overhead: what a healthy call costs more than in the training process, over a batch of 256.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import psutil

from trl_grpo_ext.rewards.runner import RewardRunner
from trl_grpo_ext.rewards.verifier import Verdict, verifier

BATCH = 256
TIMEOUT_S = 0.5
SHARES = {"raise": 0.05, "hang": 0.02, "exit": 0.01, "segfault": 0.01, "garbage": 0.01, "non_finite": 0.005}
REASONS = {
    "raise": "exception",
    "hang": "timeout",
    "exit": "exit",
    "segfault": "crash",
    "garbage": "bad_value",
    "non_finite": "non_finite",
}


def act(completion: str) -> Any:
    """Return the number in the completion, or do what it asks for."""
    number, _, deed = completion.partition(" ")
    if deed == "raise":
        raise ValueError(number)
    if deed == "hang":
        while True:
            pass
    if deed == "exit":
        sys.exit(0) if int(number) % 2 else os._exit(0)
    if deed == "segfault":
        ctypes.string_at(0)
    if deed == "garbage":
        return ("text", {"a": 1}, [1.0], object())[int(number) % 4]
    if deed == "non_finite":
        return (float("nan"), float("inf"), 1e39)[int(number) % 3]
    return float(number)


def batch_reward(completions: Sequence[str], **kwargs: Any) -> list[Any]:
    """Score a batch as most rewards do."""
    return [act(completion) for completion in completions]


@verifier(name="verifier_reward", columns=("answer",), deterministic=False)
def verifier_reward(text: str, reference: Any) -> Verdict:
    """Score one completion."""
    return Verdict(act(text), "acted")


def light(completions: Sequence[str], answer: Sequence[str], **kwargs: Any) -> list[float]:
    """Compare two texts: next to nothing, so that what is measured is the way there and back."""
    return [float(text.strip() == gold.strip()) for text, gold in zip(completions, answer, strict=True)]


@verifier(name="light_verifier", deterministic=False)
def light_verifier(text: str, reference: str) -> Verdict:
    """Compare two texts."""
    same = text.strip() == reference.strip()
    return Verdict(float(same), "equal" if same else "different", text[:20])


def make_calls(num_calls: int, seed: int) -> list[str]:
    """Return completions, a given share of which does something bad, in random order."""
    deeds = [deed for deed, share in SHARES.items() for _ in range(round(num_calls * share))]
    deeds += [""] * (num_calls - len(deeds))
    random.Random(seed).shuffle(deeds)
    return [f"{number} {deed}".strip() for number, deed in enumerate(deeds)]


def abuse(name: str, function: Any, num_calls: int, num_workers: int) -> dict[str, Any]:
    """Run the calls in batches and check every score; return the figures."""
    calls = make_calls(num_calls, seed=1)
    tally: Counter[str] = Counter()
    wrong = 0
    runner = RewardRunner([function], [name], timeout_s=TIMEOUT_S, batch_timeout_s=600, num_workers=num_workers)
    warm = ["1"] * 8
    runner.score(warm, warm, None, {"answer": warm})
    own = psutil.Process()
    rss, batch_s = [], []
    started = time.monotonic()
    for start in range(0, num_calls, BATCH):
        batch = calls[start : start + BATCH]
        began = time.monotonic()
        outcome = runner.score(["p"] * len(batch), batch, None, {"answer": ["a"] * len(batch)})
        batch_s.append(time.monotonic() - began)
        for completion, reward, reason in zip(batch, outcome.rewards[0], outcome.reasons[0], strict=True):
            number, _, deed = completion.partition(" ")
            right = (reward is None and reason == REASONS[deed]) if deed else reward == float(number)
            wrong += not right
            tally[deed or "healthy"] += 1
        gc.collect()
        rss.append(own.memory_info().rss / 2**20)
    total_s = time.monotonic() - started
    pids = runner.worker_pids()
    time.sleep(0.3)
    family = psutil.Process(pids[0]).parent().children(recursive=True)  # type: ignore[union-attr]
    descriptors = own.num_fds()
    runner.close()
    time.sleep(0.3)
    return {
        "form": name,
        "calls": num_calls,
        "tally": dict(tally),
        "wrong_scores": wrong,
        "seconds": round(total_s, 1),
        "hang_seconds_at_least": round(tally["hang"] * TIMEOUT_S / num_workers, 1),
        "slowest_batch_s": round(max(batch_s), 2),
        "pool_size": len(pids),
        "processes_besides_the_pool": len(family) - len(pids),
        "processes_after_close": sum(psutil.pid_exists(pid) for pid in pids),
        "rss_mib_first_and_last_quarter": [
            round(statistics.mean(rss[: len(rss) // 4]), 1),
            round(statistics.mean(rss[-(len(rss) // 4) :]), 1),
        ],
        "open_descriptors": descriptors,
    }


def overhead(num_workers: int, repeats: int) -> dict[str, Any]:
    """Return what a healthy call costs in milliseconds, through the workers and in the training process."""
    completions = [f"The answer is {number}. " + "word " * 200 for number in range(BATCH)]
    conversational = [[{"role": "assistant", "content": text}] for text in completions]
    prompts = [[{"role": "user", "content": "Add two numbers. " * 20}]] * BATCH
    ids = [list(range(400)) for _ in range(BATCH)]
    columns = {"answer": completions}
    result: dict[str, Any] = {"batch": BATCH, "repeats": repeats}
    for name, function in (("batch", light), ("verifier", light_verifier())):
        for form, given in (("plain", completions), ("conversational", conversational)):
            if name == "batch" and form == "conversational":
                continue
            direct = _median_ms(lambda f=function, g=given: f(prompts=prompts, completions=g, **columns), repeats)
            with RewardRunner([function], [name], num_workers=num_workers) as runner:
                score = lambda r=runner, g=given: r.score(prompts, g, ids, columns)  # noqa: E731
                score()
                through = _median_ms(score, repeats)
            result[f"{name}, {form}"] = {
                "in process, ms per call": round(direct / BATCH, 4),
                "through the runner, ms per call": round(through / BATCH, 4),
                "overhead, ms per call": round((through - direct) / BATCH, 4),
            }
    return result


def _median_ms(function: Any, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append((time.perf_counter() - started) * 1000)
    return statistics.median(times)


def main() -> None:
    """Run both parts and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000, help="calls per form (default %(default)s)")
    parser.add_argument("--workers", type=int, default=4, help="worker processes (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=30, help="batches timed for the overhead (default %(default)s)")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    logging.getLogger("trl_grpo_ext").setLevel(logging.ERROR)
    figures = {
        "machine": {"cores": os.cpu_count(), "load": [round(load, 1) for load in os.getloadavg()]},
        "overhead": overhead(options.workers, options.repeats),
        "abuse": [
            abuse("verifier", verifier_reward(), options.calls, options.workers),
            abuse("batch", batch_reward, options.calls, options.workers),
        ],
    }
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json:
        with open(options.json, "w") as file:
            file.write(text + "\n")
    if any(run["wrong_scores"] or run["processes_besides_the_pool"] for run in figures["abuse"]):
        sys.exit("the abuse run found wrong scores or processes left over")


if __name__ == "__main__":
    main()
