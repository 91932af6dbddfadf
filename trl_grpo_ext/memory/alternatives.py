"""What would make a run fit that does not: the three cheapest changes, each estimated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trl_grpo_ext.memory.closed_forms import GIB
from trl_grpo_ext.memory.estimate import Estimator
from trl_grpo_ext.memory.search import Limits, find_mode

_CARDS_GIB = (16, 24, 32, 40, 48, 80, 96, 141)


def cheapest_changes(estimator: Estimator, request: Any, limits: Limits, count: int = 3) -> list[Any]:
    """Return up to ``count`` changes that make the run fit, in the order of what they cost the result.

    First what keeps the task as it is (the sampling engine, the tuning), then a larger card, then shorter completions,
    which are proposed and never made.

    Args:
        estimator: of the run as it is.
        request: the arguments of ``plan_memory``, read.
        limits: what fits.
        count: how many.
    """
    from trl_grpo_ext.memory.plan import Alternative

    found: list[Any] = []
    allowed = set(request.allow)
    for word, title in (("lora", "an adapter"), ("qlora-8bit", "an 8-bit base"), ("qlora", "a 4-bit base")):
        if len(found) == count:
            return found
        if word in allowed or not _is_a_change(request.start, word):
            continue
        result = find_mode(estimator, request.start, [word], limits, request.fixed)
        if result.fits:
            change = f"allow {title}: allow=[{word!r}], or trainer.memory: {word}"
            found.append(Alternative(change, result.estimate.process / GIB, True))
    if len(found) < count:
        smallest = find_mode(estimator, request.start, request.allow, limits, request.fixed).estimate.process
        cards = [size for size in _CARDS_GIB if size * GIB * (1 - request.headroom) >= smallest]
        if cards:
            found.append(Alternative(f"a card of {cards[0]} GiB", smallest / GIB, True))
    tokens = request.job.completion_tokens
    while len(found) < count and tokens >= 128:
        tokens //= 2
        job = replace(request.job, completion_tokens=tokens)
        result = find_mode(estimator.for_job(job), request.start, request.allow, limits, request.fixed)
        if result.fits:
            found.append(Alternative(f"max_completion_length: {tokens}", result.estimate.process / GIB, True))
            break
    return found


def _is_a_change(start: Any, word: str) -> bool:
    if word == "lora":
        return start.tuning == "full"
    return start.base not in ("int8", "nf4")
