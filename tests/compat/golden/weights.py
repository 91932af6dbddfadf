"""Weights that depend on nothing but a seed and their own names, so that every transformers version has the same."""

from __future__ import annotations

import zlib
from typing import Any

import torch


def fill(model: Any, seed: int) -> Any:
    """Return ``model`` with every weight drawn anew: deviation 0.2, around 1 for norms; nothing else is touched."""
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            draw = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            centre = 1.0 if "norm" in name else 0.0
            weight.copy_(centre + 0.2 * torch.randn(weight.shape, generator=draw))
    return model.eval()
