"""What would save memory next, cheapest first, given what is switched on already."""

from __future__ import annotations

from typing import NamedTuple


class Levers(NamedTuple):
    """What a run has pulled already.

    Attributes:
        gradient_checkpointing: activations are computed again in the backward pass.
        eight_bit_optimizer: the optimiser's states are in 8 bits, or there is no more than a gradient to keep.
        has_adapter: an adapter is trained, not every weight.
        is_quantised: the base is in 4 or 8 bits.
        uses_vllm: a second copy of the weights generates in this process.
        expandable_segments: the allocator may grow its segments, so that varying lengths do not fragment it.
    """

    gradient_checkpointing: bool = False
    eight_bit_optimizer: bool = False
    has_adapter: bool = False
    is_quantised: bool = False
    uses_vllm: bool = False
    expandable_segments: bool = True


def cheapest_levers(phase: str, levers: Levers) -> list[str]:
    """Return up to three changes that lower the peak of ``phase``, in the order to try them.

    First what leaves the result as it is, then near neutral ones, then those that change what is trained. Shorter
    completions come last: they change the task.

    Args:
        phase: "train", "generate", "score" or "optimizer"; another one is taken like "train".
        levers: what is on already.
    """
    found: list[str] = []
    if not levers.expandable_segments:
        found.append("PYTORCH_ALLOC_CONF=expandable_segments:True")
    if phase in ("generate", "score"):
        found += [
            *(["a lower vllm_gpu_memory_utilization, or vllm_enable_sleep_mode"] if levers.uses_vllm else []),
            f"a lower max_tokens_per_{'generation' if phase == 'generate' else 'micro'}_batch",
        ]
    elif phase != "optimizer":
        if not levers.gradient_checkpointing:
            found.append("gradient_checkpointing")
        if levers.uses_vllm:
            found.append("vllm_enable_sleep_mode")
    if not levers.has_adapter:
        if not levers.eight_bit_optimizer:
            found.append("optim: adamw_8bit")
        found.append("an adapter (memory: lora)")
    elif not levers.is_quantised:
        found.append("a 4-bit base (memory: qlora)")
    found.append("a shorter max_completion_length")
    return found[:3]


def advice(phase: str, levers: Levers) -> str:
    """Return ``cheapest_levers`` as a sentence."""
    return f"Cheapest first, what lowers it: {'; '.join(cheapest_levers(phase, levers))}."
