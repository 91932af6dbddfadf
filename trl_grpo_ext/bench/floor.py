"""The floor: the time of the matrix products that no exact method can avoid, at the rate this machine reaches."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch


class TokenCounts(NamedTuple):
    """Tokens of one optimiser step, padding left out.

    Attributes:
        num_prompt: Tokens of the distinct prompts.
        num_completion: Tokens of all completions.
        num_rows: Completions.
        scored_share: Share of the completion tokens that have a gradient at all.
    """

    num_prompt: int
    num_completion: int
    num_rows: int
    scored_share: float = 1.0


class FloorSeconds(NamedTuple):
    """Seconds, attention scores and everything but matrix products left out."""

    rollout: float
    training: float


def floor_seconds(model: Any, counts: TokenCounts) -> FloorSeconds:
    """Return 2 FLOPs per weight, token and pass over the measured rate of the model's own MLP product.

    Sampling feeds each distinct prompt once, then each completion token, at the rate of a product with one row per
    completion. Training feeds the same tokens once more, forward and backward: 2 passes where the weights are frozen,
    3 where they train, 1 more with gradient checkpointing; the head sees completion tokens only. A mixture of experts
    counts all experts and so has no floor here.
    """
    head = model.get_output_embeddings().weight
    body = sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.dim() == 2 and "lora_" not in name and "embed" not in name
    )
    if not model.config.tie_word_embeddings:
        body -= head.numel()
    trains_weights = any(p.requires_grad for n, p in model.named_parameters() if p.dim() == 2 and "lora_" not in n)
    body_passes = (3 if trains_weights else 2) + int(bool(getattr(model, "is_gradient_checkpointing", False)))
    head_passes = 3 if trains_weights else 2
    wide, narrow = matmul_rate(model, 1024), matmul_rate(model, counts.num_rows)
    rollout = 2 * body * counts.num_prompt / wide + 2 * (body + head.numel()) * counts.num_completion / narrow
    fed = (counts.num_prompt + counts.num_completion) * counts.scored_share
    scored = counts.num_completion * counts.scored_share
    return FloorSeconds(rollout, 2 * (fed * body * body_passes + scored * head.numel() * head_passes) / wide)


def matmul_rate(model: Any, num_rows: int) -> float:
    """Return FLOP/s of ``num_rows`` tokens times a weight of the shape of this model's MLP, the best of 20 tries."""
    config = model.config
    weight = next(p for p in model.parameters() if p.dim() == 2)
    x = torch.randn(num_rows, config.hidden_size, dtype=weight.dtype, device=weight.device)
    w = torch.randn(getattr(config, "intermediate_size", 4 * config.hidden_size), config.hidden_size).to(x)
    best = float("inf")
    for _ in range(20):
        _wait(x)
        started = time.perf_counter()
        torch.nn.functional.linear(x, w)
        _wait(x)
        best = min(best, time.perf_counter() - started)
    return 2 * num_rows * w.numel() / best


def _wait(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
