"""Prefill and decode steps through the model's own ``forward``: every supported family, adapters and all.

Dimensions: S packed prompt tokens, M rows alive, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trl_grpo_ext.rollout import attention
from trl_grpo_ext.rollout.kv_cache import RolloutCache, Segment


def base_model(model: Any) -> Any:
    """Return the transformers model under a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextlib.contextmanager
def rollout_mode(model: Any) -> Iterator[None]:
    """Switch the model to rollout attention without gradient checkpointing; put everything back, also on an error.

    The training or evaluation mode is left as it is: TRL generates in whatever mode the model is in, and a model with
    active dropout is not supported anyway. Autocast's cache of casted weights is cleared at the end, since entries made
    without gradients would otherwise poison a surrounding autocast region.
    """
    attention.register()
    config = base_model(model).config
    implementation = config._attn_implementation
    checkpointed = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True]
    try:
        config._attn_implementation = attention.ATTENTION_NAME
        for module in checkpointed:
            module.gradient_checkpointing = False
        with torch.no_grad():
            yield
    finally:
        config._attn_implementation = implementation
        for module in checkpointed:
            module.gradient_checkpointing = True
        torch.clear_autocast_cache()


def prefill(
    model: Any, cache: RolloutCache, prompts: Sequence[Sequence[int]], segments: Sequence[Segment], device: torch.device
) -> torch.Tensor:
    """Run prompts packed into one row without padding; store their keys and values; return their last logits.

    Args:
        model: the model, in ``rollout_mode``.
        cache: receives keys, values and facts about the layers.
        prompts: token ids.
        segments: where each of them lies in the packed row and in the cache.
        device: of the model.

    Returns:
        (len(prompts), V) logits in the dtype the model returns.
    """
    ids = [token for prompt in prompts for token in prompt]
    positions = [position for prompt in prompts for position in range(len(prompt))]
    last = torch.tensor([segment.start + segment.length - 1 for segment in segments], device=device)
    cache.segments = list(segments)
    try:
        output = model(
            input_ids=torch.tensor([ids], device=device),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            rollout_cache=cache,
            logits_to_keep=last,
        )
    finally:
        cache.segments = []
    return output.logits[0]


class ModuleDecoder:
    """Feeds one token per row through ``model.forward``."""

    name = "modules"

    def __init__(self, model: Any, cache: RolloutCache) -> None:
        self._model = model
        self._cache = cache

    def step(self, token_ids_M: torch.Tensor, positions_M: torch.Tensor) -> torch.Tensor:
        """Return the next-token logits (M, V) after feeding ``token_ids_M`` at ``positions_M``."""
        output = self._model(
            input_ids=token_ids_M[:, None],
            position_ids=positions_M[:, None],
            use_cache=False,
            rollout_cache=self._cache,
            logits_to_keep=1,
        )
        return output.logits[:, -1]
