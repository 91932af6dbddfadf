"""Build trainers for the memory tests: tiny models, scripted rollouts, everything on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from harness import ScriptedRollouts, prompt_rows, scripted_reward, settings
from peft import LoraConfig, get_peft_model
from tiny import save_tiny, tiny_tokenizer
from trl import GRPOConfig, GRPOTrainer

from trl_grpo_ext import GroupRelativeConfig, GroupRelativeTrainer


def checkpoint(directory: Path, **kwargs: Any) -> str:
    """Write a tiny checkpoint whose layers are wide enough for bitsandbytes' blocks of 64; return its path."""
    return save_tiny(directory, hidden=64, **kwargs)


def fresh_lora(**fields: Any) -> LoraConfig:
    """Return a small adapter whose B is not zero, so that it changes the model."""
    values = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**values, **fields})


def save_adapter(base: str, directory: Path, name: str = "default", seed: int = 3) -> str:
    """Train-free stand-in for an adapter of an earlier run: write one with random entries of 0.05; return its path."""
    from transformers import AutoModelForCausalLM

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), fresh_lora(), adapter_name=name)
    draw = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name:
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=draw)
    model.save_pretrained(str(directory))
    return str(directory)


def make(
    directory: Path,
    model: Any,
    *,
    ours: bool = True,
    rollouts: Any = None,
    reward: Any = scripted_reward,
    peft_config: Any = None,
    quantization_config: Any = None,
    keywords: dict[str, Any] | None = None,
    callbacks: list[Any] | None = None,
    **fields: Any,
) -> Any:
    """Return a trainer on scripted rollouts; ``fields`` are of the configuration, ``keywords`` of the trainer."""
    config_class, trainer_class = (GroupRelativeConfig, GroupRelativeTrainer) if ours else (GRPOConfig, GRPOTrainer)
    if ours:
        fields.setdefault("reward_isolation", "never")
    chosen = settings(output_dir=str(directory), **fields)
    written = fields.keys() | {"output_dir"}
    if fields.get("memory") is not None and "optim" not in written:
        chosen.pop("optim")  # the harness's plain gradient descent would count as the user's choice
    return trainer_class(
        model=model,
        reward_funcs=reward,
        args=config_class(**chosen),
        train_dataset=_dataset(),
        processing_class=tiny_tokenizer(),
        rollout_func=ScriptedRollouts() if rollouts is None else rollouts or None,
        peft_config=peft_config,
        quantization_config=quantization_config,
        callbacks=callbacks,
        **(keywords or {}),
    )


def _dataset() -> Any:
    from datasets import Dataset

    return Dataset.from_list(prompt_rows(16))


def trainable_dtypes(trainer: Any) -> set[torch.dtype]:
    """Return the dtypes of everything that is trained."""
    return {parameter.dtype for parameter in trainer.model.parameters() if parameter.requires_grad}


def adapter_state(model: Any, name: str = "default") -> dict[str, torch.Tensor]:
    """Return a copy of the adapter's tensors."""
    from peft import get_peft_model_state_dict

    return {key: value.detach().clone() for key, value in get_peft_model_state_dict(model, adapter_name=name).items()}
