"""Tokenizers and positions, where scripts lean on what PPO did: pads outside the embedding, learned positions."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn


def padding_tokenizer(tokenizer: Any, num_rows: int | None) -> Any:
    """Return a tokenizer whose pad id the model's embedding has.

    ``tokenizer.add_special_tokens({"pad_token": "[PAD]"})`` without resizing the model was TRL's own recipe: PPO put id
    0 where the pads were. Masks make any id safe, so a copy pads with EOS; the user's tokenizer stays as it is.

    Args:
        tokenizer: The user's.
        num_rows: Rows of the model's input embedding, or None when unknown.

    Returns:
        ``tokenizer`` itself, or a copy that pads with EOS.
    """
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    pad, eos = inner.pad_token_id, inner.eos_token_id
    if pad is None or num_rows is None or pad < num_rows:
        return tokenizer
    fixed = copy.deepcopy(tokenizer)
    getattr(fixed, "tokenizer", fixed).pad_token_id = eos if eos is not None and eos < num_rows else 0
    return fixed


def largest_token_id(tokenizer: Any) -> int:
    """Return the largest id that ``tokenizer`` gives to text, its pad token left out."""
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    return max((i for i in inner.get_vocab().values() if i != inner.pad_token_id), default=0)


def count_positions_from_mask(model: nn.Module) -> None:
    """Make forward passes of the trainer number positions from each row's first real token.

    TRL's GRPO pads prompts on the left and passes no positions, so a model with learned positions (GPT-2) scores a
    shorter prompt at other positions than it was sampled at. PPO passed them.

    Args:
        model: The causal language model itself, not a PEFT or DDP wrapper.
    """
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return

    def add_positions(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mask = kwargs.get("attention_mask")
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
            return args, kwargs
        if kwargs.get("fused_lm_head") and kwargs.get("position_ids") is None:
            kwargs = {**kwargs, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        return args, kwargs

    model.register_forward_pre_hook(add_positions, with_kwargs=True)
