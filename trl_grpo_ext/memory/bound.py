"""Tier 0: what a run cannot do without, from sizes alone. Milliseconds, no torch; it refuses the impossible."""

from __future__ import annotations

from trl_grpo_ext.memory.closed_forms import (
    CUDA_CONTEXT_BYTES,
    adamw_8bit_bytes,
    int8_bytes,
    kv_cache_bytes,
    nf4_bytes,
)
from trl_grpo_ext.memory.job import Job
from trl_grpo_ext.memory.mode import MemoryMode
from trl_grpo_ext.memory.shapes import ModelShape

_BASE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def weight_bytes(shape: ModelShape, mode: MemoryMode) -> int:
    """Return the bytes of the base weights as the mode stores them."""
    if not mode.quantised:
        return shape.parameters * _BASE_BYTES[mode.base]
    stored = nf4_bytes if mode.base == "nf4" else None
    per_layer = sum(
        nf4_bytes(rows * columns) if stored is not None else int8_bytes(rows, columns)
        for rows, columns in shape.linear_shapes
    )
    return shape.layers * per_layer + 2 * shape.other_parameters


def resident_bytes(shape: ModelShape, mode: MemoryMode, job: Job) -> dict[str, int]:
    """Return what stays on the card for the whole run, by category."""
    weights = weight_bytes(shape, mode)
    trained = shape.parameters if mode.tuning == "full" else shape.adapter_parameters(job.rank)
    width = _BASE_BYTES[mode.base] if mode.tuning == "full" else 4
    if mode.optim == "adamw_torch_fused":
        states = 2 * width * trained
    elif mode.optim == "adamw_8bit":
        states = adamw_8bit_bytes([trained])
    else:
        states = 0  # paged: the host may hold all of them
    resident = {"weights": weights, "optimizer": states}
    if mode.tuning == "lora":
        resident["adapter"] = width * trained
    elif job.has_kl:
        resident["reference"] = weights
    return resident


def lower_bound(shape: ModelShape, mode: MemoryMode, job: Job) -> dict[str, dict[str, int]]:
    """Return the least bytes of each phase, by category: nothing that is left out here can be negative.

    Training: gradients, and the inputs of the decoder layers for one row, which even checkpointing keeps, unless they
    are offloaded. Sampling: the keys and values of one row.
    """
    resident = {**resident_bytes(shape, mode, job), "context": CUDA_CONTEXT_BYTES}
    trained = shape.parameters if mode.tuning == "full" else shape.adapter_parameters(job.rank)
    width = _BASE_BYTES[mode.base] if mode.tuning == "full" else 4
    saved = 0 if mode.activation_offload else shape.layers * job.row_tokens * shape.hidden * 2
    cache = kv_cache_bytes(job.row_tokens, 1, shape.windows, shape.kv_heads, shape.head_dim, 2)
    return {
        "generate": {**resident, "kv cache": 0 if job.uses_vllm else cache},
        "train": {**resident, "gradients": width * trained, "activations": saved},
    }
