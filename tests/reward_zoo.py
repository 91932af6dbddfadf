"""Reward functions that do what goes wrong in public reports; imported by workers, so it imports next to nothing.

A completion is a word and what to do about it, such as ``"7 hang"``; its right reward is the number.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from trl_grpo_ext.rewards.verifier import Verdict, verifier


def act(completion: str) -> Any:
    """Return the reward of a completion, unless it asks for something else."""
    number, _, deed = completion.partition(" ")
    if deed == "hang":
        while True:
            pass
    if deed == "stubborn":
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGHUP):
            signal.signal(name, signal.SIG_IGN)
        while True:
            time.sleep(0.01)
    if deed == "power":
        return 7 ** (7**9)  # a single call into C that takes for ever
    if deed == "raise":
        raise ValueError(f"cannot judge {number}")
    if deed == "interrupt":
        raise KeyboardInterrupt
    if deed == "sys.exit":
        sys.exit(0)
    if deed == "exit":
        os._exit(0)
    if deed == "segfault":
        ctypes.string_at(0)
    if deed == "abort":
        os.abort()
    if deed == "scribble":
        for descriptor in range(3, 30):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"\xff" * 64)
    if deed == "hang up":
        os.closerange(3, 64)
        time.sleep(60)
    if deed == "orphan":
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(300)  # reward-zoo orphan"], start_new_session=True
        )
        os._exit(3)
    if deed == "slow":
        time.sleep(0.05)
    special = {
        "text": "1.0",
        "tuple": (1.0, "why"),
        "nan": float("nan"),
        "inf": float("inf"),
        "large": 1e39,
        "none": None,
    }
    return special.get(deed, float(number))


def whole(completions: Sequence[str], **kwargs: Any) -> list[Any]:
    """Score the batch in one go, as most rewards do."""
    return [act(completion) for completion in completions]


def single(completions: Sequence[str], **kwargs: Any) -> list[Any]:
    """Score samples that do not depend on each other."""
    return [act(completion) for completion in completions]


single.per_sample = True  # type: ignore[attr-defined]


async def waiting(completions: Sequence[str], **kwargs: Any) -> list[Any]:
    """Score after waiting for somebody else."""
    await asyncio.sleep(0.01)
    if any(completion.endswith("give up") for completion in completions):
        raise TimeoutError("the judge did not answer")
    if any(completion.endswith("await") for completion in completions):
        await asyncio.sleep(3600)
    return [act(completion) for completion in completions]


@verifier(name="acting", columns=("answer",))
def acting(text: str, reference: Any) -> Verdict:
    """Judge by acting."""
    score = act(text)
    return Verdict(score, "acted" if score is not None else "gold_unusable", text)


def rank(completions: Sequence[str], **kwargs: Any) -> list[float]:
    """Compare the samples with each other: the score is the share of samples that are shorter."""
    return [sum(len(other) < len(one) for other in completions) / len(completions) for one in completions]


def slow_rank(completions: Sequence[str], **kwargs: Any) -> list[float]:
    """Compare the samples with each other, taking longer than the samples alone would."""
    time.sleep(1.2 if len(completions) > 1 else 0)
    return rank(completions)


def only_whole(completions: Sequence[str], **kwargs: Any) -> list[Any]:
    """Fail as a batch."""
    return [act(completion) for completion in completions]


only_whole.per_sample = False  # type: ignore[attr-defined]


def vandal(prompts: list[Any], completions: list[Any], answer: list[Any], **kwargs: Any) -> list[float]:
    """Edit everything it is given and seed the generators."""
    random.seed(0)
    for message in completions:
        message[0]["content"] = "vandalised"
    prompts.clear()
    answer[0] = "vandalised"
    return [1.0] * len(completions)


def contents(completions: list[Any], prompts: list[Any], answer: list[Any], **kwargs: Any) -> list[float]:
    """Return 1 where nobody vandalised anything."""
    unharmed = len(prompts) == len(completions) and "vandalised" not in answer
    return [float(unharmed and message[0]["content"] != "vandalised") for message in completions]


def dice(completions: Sequence[str], **kwargs: Any) -> list[float]:
    """Return random numbers."""
    return [random.random() for _ in completions]


def talkative(completions: Sequence[str], log_extra: Any, log_metric: Any, trainer_state: Any = None) -> list[float]:
    """Log a column and a metric, and read the trainer's state."""
    log_extra("length", [len(completion) for completion in completions])
    log_metric("step", trainer_state.global_step if trainer_state is not None else -1)
    return [act(completion) for completion in completions]


def kinds(kind: str, completions: Sequence[str], **kwargs: Any) -> Any:
    """Return something that is no list of rewards."""
    return {
        "one": [1.0],
        "empty": [],
        "long": [1.0] * 9,
        "none": None,
        "scalar": 1.0,
        "dict": dict.fromkeys(range(len(completions)), 1.0),
    }[kind]


def pid(completions: Sequence[str], **kwargs: Any) -> list[float]:
    """Return the number of the process that scores."""
    return [float(os.getpid())] * len(completions)


def digits_or_disaster(completions: Sequence[Any], completion_ids: Sequence[list[int]], **kwargs: Any) -> list[Any]:
    """Pay the share of digits; now and then, depending on the tokens, do what ends or poisons runs."""
    rewards: list[Any] = []
    for completion, ids in zip(completions, completion_ids, strict=True):
        number = sum(ids) % 100
        if number < 14:
            deed = ("raise", "hang", "sys.exit", "exit", "segfault", "text", "nan", "inf", "large", "tuple")[
                number % 10
            ]
            rewards.append(act(f"0 {deed}"))
        else:
            text = completion if isinstance(completion, str) else completion[0]["content"]
            rewards.append(sum(character.isdigit() for character in text) / max(1, len(text)))
    return rewards
