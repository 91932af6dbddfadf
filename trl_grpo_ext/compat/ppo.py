"""What a PPO script imports: ``from trl_grpo_ext.compat.ppo import PPOConfig, PPOTrainer`` is the only line to change.

``install()`` puts the same names back under ``trl``, for scripts that nobody may edit. It is never done on import.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from trl_grpo_ext.compat.config import PPOConfig
from trl_grpo_ext.compat.install import install
from trl_grpo_ext.compat.ppo_trainer import PPOTrainer
from trl_grpo_ext.compat.value_head import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    create_reference_model,
)

PPOv2Trainer = PPOTrainer
PPOv2Config = PPOConfig

__all__ = [
    "SIMPLE_CHAT_TEMPLATE",
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "LengthSampler",
    "PPOConfig",
    "PPOTrainer",
    "PPOv2Config",
    "PPOv2Trainer",
    "create_reference_model",
    "get_kbit_device_map",
    "install",
    "respond_to_batch",
    "set_seed",
]

# Role name, colon, text; a line break pair between turns. TRL's PPO scripts gave it to tokenizers without a template.
SIMPLE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].capitalize() + ': ' + message['content'] + '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


class LengthSampler:
    """Draw a length from ``min_value`` to ``max_value`` - 1, all equally likely, at every call."""

    def __init__(self, min_value: int, max_value: int) -> None:
        self.values = list(range(min_value, max_value))

    def __call__(self) -> int:
        """Return a length."""
        return int(np.random.choice(self.values))


def set_seed(seed: int) -> None:
    """Seed Python, NumPy and torch on every device."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)


def get_kbit_device_map() -> dict[str, int] | None:
    """Return the device map that puts a quantised model on this process's GPU, or None without one."""
    if not torch.cuda.is_available():
        return None
    from accelerate import PartialState

    return {"": PartialState().local_process_index}


def respond_to_batch(
    model: Any, queries: torch.Tensor, txt_len: int = 20, top_k: int = 0, top_p: float = 1.0
) -> torch.Tensor:
    """Return (B, ``txt_len``) tokens sampled after ``queries`` (B, L), whatever they are: nothing ends a response.

    Args:
        model: A model or a value-head wrapper.
        queries: Token ids of one length, without padding.
        txt_len: Tokens to sample.
        top_k: Sample among that many; 0: all.
        top_p: Sample among the likeliest tokens of that mass.
    """
    output = model.generate(
        input_ids=queries,
        attention_mask=torch.ones_like(queries),
        do_sample=True,
        top_k=top_k,
        top_p=top_p,
        max_new_tokens=txt_len,
        min_new_tokens=txt_len,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[:, queries.size(1) :]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module 'trl_grpo_ext.compat.ppo' has no attribute {name!r}; it has {', '.join(__all__)}")
