"""Score a model on held-out rows: greedy or sampled, strict and lenient, with a confidence interval."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class Completion(NamedTuple):
    """One generated text.

    Attributes:
        text: without special tokens.
        token_ids: tokens generated, the end token included.
        truncated: True if no end token came within the limit.
    """

    text: str
    token_ids: tuple[int, ...]
    truncated: bool


@dataclass(frozen=True)
class Rate:
    """A share with its 95 % Wilson interval.

    Attributes:
        right: right answers; a fraction where several samples per prompt were drawn.
        total: prompts.
        low: lower end of the interval.
        high: upper end of the interval.
    """

    right: float
    total: int
    low: float
    high: float

    @property
    def share(self) -> float:
        """Right answers per prompt, 0 where there were none to judge."""
        return self.right / self.total if self.total else 0.0

    def __str__(self) -> str:
        return f"{100 * self.share:.1f} % [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass(frozen=True)
class Example:
    """One judged completion, for the table."""

    prompt: str
    answer: str
    completion: str
    strict: bool
    lenient: bool


@dataclass(frozen=True)
class EvalResult:
    """What an evaluation found.

    Attributes:
        strict: rate of completions that are the answer and nothing else.
        lenient: rate of completions in which the right answer was found.
        pass_any: share of prompts with at least one strictly right sample; equals ``strict`` for one sample.
        num_samples: completions per prompt.
        greedy: True for the most likely tokens, False for sampling.
        mean_tokens: mean completion length.
        truncated: share of completions without an end token.
        unscored: completions that a verifier could not judge (they count as wrong).
        seconds: wall time.
        examples: the first sample of each row.
    """

    strict: Rate
    lenient: Rate
    pass_any: float
    num_samples: int
    greedy: bool
    mean_tokens: float
    truncated: float
    unscored: int
    seconds: float
    examples: tuple[Example, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, examples left out."""
        values = asdict(self)
        del values["examples"]
        for name in ("strict", "lenient"):
            values[name]["share"] = getattr(self, name).share
        return values


def wilson_interval(right: float, total: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Return the Wilson score interval of a share, (0, 1) for nothing counted.

    (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n), with p = right/n   Wilson 1927

    Args:
        right: successes, 0 <= right <= total; may be fractional.
        total: trials n.
        z: normal quantile; the default gives 95 %.
    """
    if not 0 <= right <= total:
        raise ValueError(f"right={right} must lie between 0 and total={total}")
    if total == 0:
        return 0.0, 1.0
    share = right / total
    centre = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    # At the ends the formula gives exactly 0 and 1, rounding does not.
    low = 0.0 if right == 0 else max(0.0, (centre - spread) / scale)
    return low, 1.0 if right == total else min(1.0, (centre + spread) / scale)


def rate(right: float, total: int) -> Rate:
    """Return the share with its interval."""
    return Rate(right, total, *wilson_interval(right, total))


def evaluate(
    generate: Callable[[list[Any]], list[Completion]],
    rows: Sequence[dict[str, Any]],
    strict: Any,
    lenient: Any,
    *,
    num_samples: int = 1,
    greedy: bool = True,
) -> EvalResult:
    """Generate for every row and judge.

    Args:
        generate: takes prompts, returns one completion each, in order.
        rows: held-out rows with ``prompt`` and the columns the verifiers read.
        strict: reward function with TRL's signature; a score of 1 is right.
        lenient: likewise.
        num_samples: completions per prompt. The intervals count prompts, not samples, because samples of one prompt
            are not independent; for more than one sample they are therefore a little too wide.
        greedy: noted in the result; ``generate`` decides.
    """
    started = time.monotonic()
    repeated = [row for row in rows for _ in range(num_samples)]
    completions = generate([row["prompt"] for row in repeated])
    scores = {name: judge(function, repeated, completions) for name, function in (("s", strict), ("l", lenient))}
    right = {name: [score is not None and score >= 1 for score in values] for name, values in scores.items()}
    groups = [right["s"][start : start + num_samples] for start in range(0, len(repeated), num_samples)]
    examples = tuple(
        Example(
            prompt=_last_turn(row["prompt"]),
            answer=str(row.get("answer", "")),
            completion=completions[index * num_samples].text,
            strict=right["s"][index * num_samples],
            lenient=right["l"][index * num_samples],
        )
        for index, row in enumerate(rows)
    )
    total = max(1, len(completions))
    return EvalResult(
        strict=rate(sum(right["s"]) / num_samples, len(rows)),
        lenient=rate(sum(right["l"]) / num_samples, len(rows)),
        pass_any=sum(any(group) for group in groups) / max(1, len(rows)),
        num_samples=num_samples,
        greedy=greedy,
        mean_tokens=sum(len(completion.token_ids) for completion in completions) / total,
        truncated=sum(completion.truncated for completion in completions) / total,
        unscored=sum(score is None for score in scores["s"]),
        seconds=time.monotonic() - started,
        examples=examples,
    )


def judge(function: Any, rows: Sequence[dict[str, Any]], completions: Sequence[Completion]) -> list[float | None]:
    """Return one score per completion from a reward function called as TRL calls it."""
    if not rows:
        return []
    names = [name for name in rows[0] if name != "prompt"]
    conversational = not isinstance(rows[0]["prompt"], str)
    texts: list[Any] = [
        [{"role": "assistant", "content": completion.text}] if conversational else completion.text
        for completion in completions
    ]
    return list(
        function(
            prompts=[row["prompt"] for row in rows],
            completions=texts,
            completion_ids=[list(completion.token_ids) for completion in completions],
            **{name: [row.get(name) for row in rows] for name in names},
        )
    )


def _last_turn(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
