"""What bitsandbytes needs from us so that a quantised base can be trained through."""

from __future__ import annotations

from typing import Any

from torch import nn


def is_quantised(model: Any) -> bool:
    """Return whether the weights of a transformers model (or of an adapter's base) are stored in 4 or 8 bits."""
    return bits_of(model) is not None


def bits_of(model: Any) -> int | None:
    """Return 4 or 8 for a model quantised by bitsandbytes, None for any other."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return next((bits for bits in (4, 8) if getattr(base, f"is_loaded_in_{bits}bit", False)), None)


def keep_differentiable(model: nn.Module) -> int:
    """Keep 4-bit layers on a CPU in the layout whose product has a gradient; return how many layers are concerned.

    On CPUs with AVX512-BF16, bitsandbytes (0.50) rearranges a layer's weights for good at its first forward pass
    without gradient, and the product in that layout has no backward formula: after one rollout, gradients stop at the
    last layer and training goes on without an error.
    """
    layers = [module for module in model.modules() if hasattr(module, "support_avx512bf16_for_cpu")]
    for layer in layers:
        weight: Any = layer.weight
        if getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False):
            from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse

            weight.data, weight.quant_state = _convert_weight_packed_for_cpu_inverse(weight.data, weight.quant_state)
        layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    return len(layers)
