"""What a configuration says about memory: the mode that the trainer will run, and the levers that its user wrote."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from trl_grpo_ext.memory.job import Job
from trl_grpo_ext.memory.mode import AUTO, MemoryMode, asked_fields, named_mode
from trl_grpo_ext.memory.modes import LEVERS
from trl_grpo_ext.written import written_settings

# Other names of optimisers whose states have the same size.
_SAME_STATES = {"adamw_torch": "adamw_torch_fused", "adamw_bnb_8bit": "adamw_8bit"}
_COUNTED_OPTIMISERS = ("adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit")
_DTYPES = ("bfloat16", "float16", "float32")


class Configured(NamedTuple):
    """A mode as configured.

    Attributes:
        mode: the levers; what nobody wrote is at the trainer's default.
        fixed: fields that the user wrote, which a search leaves as they are.
        doubts: settings that cannot be counted.
    """

    mode: MemoryMode
    fixed: frozenset[str]
    doubts: tuple[str, ...] = ()


def is_automatic(config: Any) -> bool:
    """Return whether the trainer lets the planner choose the mode."""
    return getattr(config, "memory", None) == AUTO


def read_mode(config: Any, peft: Any, job: Job, *, exact: bool = False) -> Configured:
    """Return the mode that a configuration describes.

    Args:
        config: ours or TRL's; anything with its fields will do.
        peft: the adapter, or None.
        job: the sizes in that configuration.
        exact: True also fills in what a search would choose, as the trainer does without one.
    """
    memory: Any = getattr(config, "memory", None)
    is_named = memory is not None and memory != AUTO
    if is_named:
        mode, fixed = named_mode(memory), asked_fields(memory) - {"tuning", "base"}
    else:
        has_adapter = peft is not None or getattr(config, "adapter", None) is not None
        mode, fixed = MemoryMode(tuning="lora" if has_adapter else "full"), frozenset()
    levers = _written_levers(config, job)
    doubts: tuple[str, ...] = ()
    if "optim" in levers:
        optim = _SAME_STATES.get(levers["optim"], levers["optim"])
        if optim not in _COUNTED_OPTIMISERS:
            doubts = (f"the states of optim={optim!r} are not counted, but those of AdamW",)
            optim = MemoryMode.optim
        levers["optim"] = optim
    dtype = str((getattr(config, "model_init_kwargs", None) or {}).get("dtype")).removeprefix("torch.")
    if dtype in _DTYPES and not mode.quantised:
        levers["base"] = dtype
    mode = dataclasses.replace(mode, **levers)
    if exact:
        if job.uses_vllm and mode.vllm_gpu_memory_utilization is None:
            mode = dataclasses.replace(mode, vllm_gpu_memory_utilization=job.vllm_share)
        # Only a memory mode asks PyTorch for segments that grow.
        mode = dataclasses.replace(mode, expandable_segments=mode.expandable_segments and is_named)
    return Configured(mode, fixed | (levers.keys() - {"base"}), doubts)


def _written_levers(config: Any, job: Job) -> dict[str, Any]:
    """Return the levers that the user set, by name; vLLM's only where it samples."""
    if dataclasses.is_dataclass(config):
        written = written_settings(config, LEVERS)
    else:
        written = {name: getattr(config, name, None) for name in LEVERS}
    return {
        name: getattr(value, "value", value)
        for name, value in written.items()
        if value is not None and (job.uses_vllm or not name.startswith("vllm_"))
    }
