"""A memory plan as sentences, as plain data, and as the settings that run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_grpo_ext.memory.plan import MemoryPlan

GIB = 2**30


def explain(plan: MemoryPlan) -> str:
    """Return verdict, mode, reasons and changes, one sentence each."""
    card = plan.budget / GIB
    verdicts = {
        "yes": f"Fits: {plan.process / GIB:.1f} of {card:.1f} GiB, and {plan.headroom:.0%} stay free.",
        "no": f"Does not fit: {plan.process / GIB:.1f} of {card:.1f} GiB, of which {plan.headroom:.0%} must stay free.",
        "uncertain": f"May fit: {plan.process / GIB:.1f} of {card:.1f} GiB by what could be counted.",
    }
    lines = [verdicts[plan.fits], f"Mode: {describe_mode(plan)}."]
    worst = max(plan.phases, key=lambda phase: sum(plan.phases[phase].values()))
    parts = sorted(plan.phases[worst].items(), key=lambda part: -part[1])[:3]
    largest = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts)
    lines.append(f"The fullest phase is {worst!r}: {largest} GiB.")
    if plan.host_ram:
        lines.append(f"Host memory: {plan.host_ram / GIB:.1f} GiB for what is kept off the card.")
    lines += [f"Turned down: {note}." for note in plan.notes]
    lines += [
        f"To make it fit: {change.change} (the run takes {change.process_gib:.1f} GiB)." for change in plan.alternatives
    ]
    return " ".join(lines)


def describe_mode(plan: MemoryPlan) -> str:
    """Return the levers in words."""
    mode = plan.mode
    words = ["every weight trained" if mode.tuning == "full" else "an adapter trained", f"base in {mode.base}"]
    words.append(mode.optim)
    words.append("checkpointing" if mode.gradient_checkpointing else "no checkpointing")
    if mode.activation_offload:
        words.append("activations offloaded")
    if mode.max_tokens_per_micro_batch:
        words.append(f"{mode.max_tokens_per_micro_batch} tokens a pass")
    if mode.max_tokens_per_generation_batch:
        words.append(f"{mode.max_tokens_per_generation_batch} tokens sampled at once")
    if mode.vllm_gpu_memory_utilization is not None:
        asleep = ", asleep while training" if mode.vllm_enable_sleep_mode else ""
        words.append(f"vLLM with {mode.vllm_gpu_memory_utilization:.0%} of the card{asleep}")
    return ", ".join(words)


def settings(plan: MemoryPlan) -> dict[str, Any]:
    """Return the fields of a ``GRPOConfig`` that run the plan."""
    mode, job = plan.mode, plan.job
    # The tuning is written out although an adapter is its default: an empty mapping would say nothing.
    fields: dict[str, Any] = {
        "memory": {"tuning": mode.tuning, **mode.differences()},
        "gradient_checkpointing": mode.gradient_checkpointing,
        "optim": mode.optim,
    }
    for name in ("max_tokens_per_micro_batch", "max_tokens_per_generation_batch"):
        if getattr(mode, name) is not None:
            fields[name] = getattr(mode, name)
    if job.uses_vllm:
        fields["use_vllm"] = mode.vllm_gpu_memory_utilization is not None
        if fields["use_vllm"]:
            fields["vllm_mode"] = "colocate"
            fields["vllm_gpu_memory_utilization"] = mode.vllm_gpu_memory_utilization
            fields["vllm_enable_sleep_mode"] = mode.vllm_enable_sleep_mode
    return fields


def to_yaml(plan: MemoryPlan, over: Mapping[str, Any] | None = None) -> str:
    """Return the ``model``, ``trainer`` and ``peft`` sections of a recipe.

    Every lever is written out, so that laid over a recipe the sections leave nothing of what it said before.

    Args:
        plan: what to write down.
        over: the recipe that they will be laid over, as written: the memory mode goes where that has it, and an adapter
            that it goes on training takes the place of a new one, since it refuses either twice.
    """
    import yaml

    said: Mapping[str, Any] = over or {}
    adapter = (said.get("trainer") or {}).get("adapter")
    trains_adapter = plan.mode.tuning == "lora"
    job, chosen = plan.job, settings(plan)
    trainer: dict[str, Any] = {
        "memory": chosen.pop("memory"),
        "max_completion_length": job.completion_tokens,
        "num_generations": job.num_generations,
        "per_device_train_batch_size": job.rows_per_pass,
        "gradient_accumulation_steps": job.num_completions // job.rows_per_pass,
        **chosen,
    }
    if job.autocast == "bfloat16":
        trainer["bf16"] = True
    dtype = "bfloat16" if plan.mode.quantised else plan.mode.base
    recipe: dict[str, Any] = {"model": {"name": plan.model, "dtype": dtype}}
    if said.get("memory") is not None:
        recipe["memory"] = trainer.pop("memory")
    if adapter is not None:
        trainer["adapter"] = adapter if trains_adapter else None
    recipe["trainer"] = trainer
    recipe["peft"] = {**(plan.peft or {}), "r": job.rank} if trains_adapter and adapter is None else None
    return yaml.safe_dump(recipe, sort_keys=False)


def to_json(plan: MemoryPlan, over: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return everything in the plan, sizes in bytes; ``over`` as for ``to_yaml``."""
    return {
        "model": plan.model,
        "fits": plan.fits,
        "tier": plan.tier,
        "mode": asdict(plan.mode),
        "budget": plan.budget,
        "headroom": plan.headroom,
        "peak": plan.peak,
        "reserved": plan.reserved,
        "process": plan.process,
        "margin": plan.margin,
        "host_ram": plan.host_ram,
        "phases": plan.phases,
        "assumptions": list(plan.assumptions),
        "alternatives": [asdict(change) for change in plan.alternatives],
        "notes": list(plan.notes),
        "job": asdict(plan.job),
        "settings": settings(plan),
        "yaml": to_yaml(plan, over),
        "seconds": round(plan.seconds, 2),
    }
