"""The levers that decide how much memory a run needs, as one frozen record: chosen by name, planned, or written out.

Pure data: no torch, no TRL. ``modes.py`` makes a record a loaded model and a configuration, ``plan.py`` chooses one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from trl_grpo_ext.errors import ConfigurationError, nearest

Tuning = Literal["full", "lora"]
Base = Literal["bfloat16", "float16", "float32", "int8", "nf4"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "tuning": ("full", "lora"),
    "base": ("bfloat16", "float16", "float32", "int8", "nf4"),
    "optim": ("adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"),
}


@dataclass(frozen=True, kw_only=True)
class MemoryMode:
    """How the policy is held and trained.

    Attributes:
        tuning: ``"full"`` trains every weight, ``"lora"`` an adapter in float32 on a frozen base.
        base: What the base weights are stored in. ``"nf4"`` is 4-bit with double quantisation, ``"int8"`` LLM.int8();
            both need ``tuning="lora"`` and the extra ``[qlora]``.
        optim: The optimiser, by transformers' name. The 8-bit ones need the extra ``[qlora]``.
        gradient_checkpointing: Recompute activations in the backward pass.
        activation_offload: Keep saved activations in host memory.
        max_tokens_per_micro_batch: Tokens of one forward and backward; None: the configuration's own.
        max_tokens_per_generation_batch: Tokens held while sampling; None: the configuration's own.
        vllm_gpu_memory_utilization: vLLM's share of the card in colocate mode, from 0 to 1; None: no vLLM.
        vllm_enable_sleep_mode: vLLM gives its memory back between phases.
        expandable_segments: PyTorch's CUDA allocator grows its segments, which keeps them from fragmenting.
    """

    tuning: Tuning = "lora"
    base: Base = "bfloat16"
    optim: str = "adamw_torch_fused"
    gradient_checkpointing: bool = True
    activation_offload: bool = False
    max_tokens_per_micro_batch: int | None = None
    max_tokens_per_generation_batch: int | None = None
    vllm_gpu_memory_utilization: float | None = None
    vllm_enable_sleep_mode: bool = False
    expandable_segments: bool = True

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigurationError(
                    f"MemoryMode {name}={value!r} is none of {', '.join(choices)}.{nearest(value, choices)}"
                )
        if self.tuning == "full" and self.base in ("int8", "nf4"):
            raise ConfigurationError(
                f"MemoryMode base={self.base!r} cannot be trained in full: a quantised weight has no gradient. "
                'Use tuning="lora", or base="bfloat16".'
            )

    def differences(self) -> dict[str, Any]:
        """Return the fields that are not at their defaults: what ``MemoryMode(**fields)`` needs to be this one."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {field.name: values[field.name] for field in fields(self) if values[field.name] != field.default}

    @property
    def quantised(self) -> bool:
        """Whether the base weights are stored in 4 or 8 bits."""
        return self.base in ("int8", "nf4")


NAMED_MODES: dict[str, MemoryMode] = {
    "full": MemoryMode(tuning="full"),
    "lora": MemoryMode(),
    "qlora": MemoryMode(base="nf4"),
    "qlora-8bit": MemoryMode(base="int8"),
}


AUTO = "auto"


def asked_fields(memory: str | MemoryMode | dict[str, Any]) -> frozenset[str]:
    """Return the fields that ``memory`` asks for, as against those that a mode's name merely suggests.

    A name asks for what defines it (``tuning`` and, where it is quantised, ``base``), a mapping for its keys, a record
    for the fields that differ from their defaults.
    """
    if isinstance(memory, dict):
        return frozenset(memory)
    if isinstance(memory, MemoryMode):
        return frozenset(memory.differences())
    if memory == AUTO:
        return frozenset()
    return frozenset({"tuning", "base"} if named_mode(memory).quantised else {"tuning"})


def named_mode(name: str | MemoryMode | dict[str, Any]) -> MemoryMode:
    """Return the mode called ``name``; a record is returned as it is, a mapping of fields becomes one.

    Raises:
        ConfigurationError: if there is no such name or field. ``"auto"`` is the planner's to resolve, not a mode.
    """
    if isinstance(name, MemoryMode):
        return name
    if isinstance(name, dict):
        known = [field.name for field in fields(MemoryMode)]
        for key in name:
            if key not in known:
                raise ConfigurationError(f"memory: {key!r} is no field of MemoryMode.{nearest(key, known)}")
        return MemoryMode(**name)
    if name not in NAMED_MODES:
        names = [AUTO, *NAMED_MODES]
        raise ConfigurationError(f"memory={name!r} is none of {', '.join(names)}.{nearest(name, names)}")
    return NAMED_MODES[name]
