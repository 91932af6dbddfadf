"""Load a policy outside the trainer as the trainer holds it: to evaluate it, or to merge its adapter."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from trl_grpo_ext.memory.mode import AUTO, asked_fields, named_mode
from trl_grpo_ext.memory.modes import base_dtype, quantization_of
from trl_grpo_ext.memory.quantised import is_quantised, keep_differentiable
from trl_grpo_ext.memory.record import PolicyRecord, loading_keywords


def load_base(
    name: str, kwargs: dict[str, Any], memory: Any = None, *, fp16: bool = False, record: PolicyRecord | None = None
) -> Any:
    """Return a causal language model, stored as a memory mode says, in evaluation mode, on the GPU if there is one.

    Args:
        name: A directory or a hub id.
        kwargs: For ``from_pretrained``; a dtype in it wins over the mode's.
        memory: What the run was given as ``memory``. ``"auto"`` changes nothing: it depends on the card.
        fp16: Whether the run uses float16 mixed precision.
        record: Of the run whose adapter comes on top. A quantisation in it wins over ``memory`` and the dtype: the
            adapter has learnt to correct those rounded weights and no others.
    """
    kwargs = dict(kwargs)
    hub = {key: kwargs[key] for key in ("revision", "trust_remote_code") if key in kwargs}
    recorded = loading_keywords(record, name, **hub) if record is not None else {}
    if recorded:
        kwargs |= recorded
    elif memory is not None and memory != AUTO:
        mode = named_mode(memory)
        dtype = base_dtype(mode, asked_fields(memory), fp16=fp16, written=kwargs.get("dtype"))
        kwargs["dtype"] = getattr(torch, dtype)
        kwargs["quantization_config"] = quantization_of(mode, dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if kwargs.get("quantization_config") is not None and device == "cuda":
        kwargs["device_map"] = {"": 0}  # quantised while it is loaded; it may not be moved afterwards
    model: Any = AutoModelForCausalLM.from_pretrained(name, **kwargs)
    if is_quantised(model):
        keep_differentiable(model)
        return model.eval()
    return model.to(device).eval()
