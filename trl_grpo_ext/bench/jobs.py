"""The built-in jobs: prompts, rewards and lengths. No torch here: reward workers import this file."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


@dataclass(frozen=True)
class Job:
    """One optimiser step's worth of work; TRL takes all of its rows in one forward pass.

    Attributes:
        about: What it stands for, in a few words.
        num_prompts: Prompts, that is groups, per step.
        prompt_words: Words per prompt, about a token each.
        num_generations: Completions per prompt.
        max_completion_length: Tokens; every completion has as many unless ``stop_share`` ends it.
        stop_share: Share of the vocabulary that ends a completion, 0 to 1, which spreads the lengths out.
        dead_share: Share of the groups whose rewards are all equal, 0 to 1.
        full: True trains every weight, False LoRA of rank 16 on all linear layers.
    """

    about: str
    num_prompts: int
    prompt_words: int
    num_generations: int
    max_completion_length: int
    stop_share: float = 0.0
    dead_share: float = 0.0
    full: bool = False

    @property
    def num_rows(self) -> int:
        """Completions per step."""
        return self.num_prompts * self.num_generations


JOBS: dict[str, Job] = {
    "A": Job("prompts of 150, groups of 8", 2, 150, 8, 64),
    "B": Job("prompts of 500, groups of 8", 1, 500, 8, 64),
    "C": Job("as A, half the groups dead", 2, 150, 8, 64, dead_share=0.5),
    "D": Job("groups of 16, lengths spread to 256", 1, 150, 16, 256, stop_share=0.01),
    "E": Job("full fine-tuning, prompts of 300", 1, 300, 8, 128, full=True),
    "A-long": Job("as A, completions 4 times as long", 2, 150, 8, 256),
    "A-many": Job("as A, 4 times as many prompts", 8, 150, 8, 64),
}


def prompt_rows(job: Job, num_steps: int) -> list[dict[str, Any]]:
    """Return the data set: prompts of random words, and whether the group is to be dead, spread evenly."""
    draw = random.Random(0)
    return [
        {
            # Slightly different lengths, as real prompts have: TRL pads them.
            "prompt": " ".join(draw.choices(_WORDS, k=job.prompt_words - index % 5)),
            "is_dead": int((index + 1) * job.dead_share) > int(index * job.dead_share),
        }
        for index in range(num_steps * job.num_prompts)
    ]


def reward_by_tokens(
    prompts: Sequence[Any], completion_ids: Sequence[Sequence[int]], is_dead: Sequence[bool], **_: Any
) -> list[float]:
    """Return a score from 0 to 1 that depends on the tokens alone, and 0.5 in groups that are to be dead."""
    return [
        0.5 if dead else zlib.crc32(repr(list(ids)).encode()) / 2**32
        for ids, dead in zip(completion_ids, is_dead, strict=True)
    ]


def scripted_completions(num_rows: int, max_length: int, vocab_size: int) -> list[list[int]]:
    """Return the same random tokens on every call: ragged rollouts on which two gradients can be compared.

    Args:
        num_rows: completions.
        max_length: tokens of the longest, the shortest having an eighth.
        vocab_size: ids are drawn from its middle, where no special tokens lie.
    """
    draw = random.Random(1)
    low, high = vocab_size // 8, vocab_size - vocab_size // 8
    lengths = [draw.randint(max(max_length // 8, 1), max_length) for _ in range(num_rows)]
    return [[draw.randrange(low, high) for _ in range(length)] for length in lengths]
