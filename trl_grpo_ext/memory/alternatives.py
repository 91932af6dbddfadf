"""What would make a run fit that does not: the three cheapest changes, each estimated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trl_grpo_ext.memory.closed_forms import GIB
from trl_grpo_ext.memory.estimate import Estimate, Estimator
from trl_grpo_ext.memory.job import Job
from trl_grpo_ext.memory.mode import NAMED_MODES, MemoryMode
from trl_grpo_ext.memory.modes import LEVERS
from trl_grpo_ext.memory.search import Limits, find_mode

_CARDS_GIB = (4, 6, 8, 12, 16, 24, 32, 40, 48, 80, 96, 141)


def cheapest_changes(estimator: Estimator, request: Any, limits: Limits, count: int = 3) -> list[Any]:
    """Return up to ``count`` changes that make the run fit, in the order of what they cost the result.

    Other levers come first, and alone where they suffice. Then what keeps the task as it is (the tuning), then a larger
    card, then shorter completions, which are proposed and never made.

    Args:
        estimator: of the run as it is.
        request: the arguments of ``plan_memory``, read.
        limits: what fits.
        count: how many.
    """
    from trl_grpo_ext.memory.plan import Alternative

    found: list[Any] = []

    def add(words: str, estimate: Estimate, **settings: Any) -> None:
        settings |= changed_settings(request.start, estimate.mode, request.job)
        lines = ", ".join(f"trainer.{name}: {_as_yaml(value)}" for name, value in settings.items())
        found.append(Alternative(words + lines, estimate.process / GIB, True, settings))

    if request.is_given or request.fixed:
        result = find_mode(estimator, request.start, request.allow, limits)
        if result.fits:
            add("", result.estimate)
            return found
    allowed = set(request.allow)
    for word, title in (("lora", "an adapter"), ("qlora-8bit", "an 8-bit base"), ("qlora", "a 4-bit base")):
        if len(found) == count:
            return found
        if word in allowed or not _is_a_change(request.start, word):
            continue
        result = find_mode(estimator, request.start, [word], limits, request.fixed)
        if result.fits:
            add(f"{title}, ", result.estimate)
    if len(found) < count:
        if request.is_given:
            smallest = estimator.estimate(request.start).process
        else:
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
            add("", result.estimate, max_completion_length=tokens)
            break
    return found


def changed_settings(start: MemoryMode, mode: MemoryMode, job: Job) -> dict[str, Any]:
    """Return the trainer's settings that turn one mode into another; what comes to the same is left out."""
    settings: dict[str, Any] = {}
    if (start.tuning, start.base, start.activation_offload) != (mode.tuning, mode.base, mode.activation_offload):
        named = (name for name, other in NAMED_MODES.items() if (other.tuning, other.base) == (mode.tuning, mode.base))
        word = next(named, None)
        if word is None or mode.activation_offload:
            of_base = ("base", "activation_offload")
            fields = {name: value for name, value in mode.differences().items() if name in of_base}
            settings["memory"] = {"tuning": mode.tuning, **fields}
        else:
            settings["memory"] = word
    defaults = {
        "max_tokens_per_micro_batch": job.micro_batch_tokens,
        "max_tokens_per_generation_batch": job.generation_tokens,
    }
    for name in LEVERS:
        before, after = (defaults.get(name) if (v := getattr(m, name)) is None else v for m in (start, mode))
        if after != before:
            settings[name] = after
    if "vllm_gpu_memory_utilization" in settings and mode.vllm_gpu_memory_utilization is None:
        del settings["vllm_gpu_memory_utilization"]
        settings["use_vllm"] = False
    return settings


def _as_yaml(value: Any) -> str:
    """Return a value as a recipe writes it, on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_as_yaml(inner)}" for key, inner in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_a_change(start: Any, word: str) -> bool:
    if word == "lora":
        return start.tuning == "full"
    return start.base not in ("int8", "nf4")
