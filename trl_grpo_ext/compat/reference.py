"""The frozen model that PPO measures the KL penalty against: given, copied, or the base under an adapter."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from trl.models import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import add_fused_lm_head, create_model_from_path, disable_dropout_in_model

from trl_grpo_ext.errors import ConfigurationError


def is_peft(model: Any) -> bool:
    """Return whether ``model`` carries PEFT adapters as a ``PeftModel``."""
    return hasattr(model, "peft_config") and hasattr(model, "disable_adapter")


def frozen_copy(model: nn.Module, num_shared_layers: int | None = None) -> nn.Module:
    """Return a frozen copy of the current weights of ``model``, in eval mode.

    Args:
        model: The policy, before anything is patched onto it.
        num_shared_layers: First layers that both share; they are frozen in the policy too, as in TRL.
    """
    from trl.experimental.utils import create_reference_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return create_reference_model(model, num_shared_layers=num_shared_layers)


def check_reference(reference: Any, model: Any) -> None:
    """Raise unless ``reference`` can stand beside the policy.

    Raises:
        ConfigurationError: if both are one object, or their vocabularies differ in width.
    """
    if reference is model:
        raise ConfigurationError(
            "`model` and `ref_model` cannot be the same object. If you want `ref_model` to be the same as `model`, you "
            "must make a copy of it, or pass `None` if you use peft."
        )
    ours, theirs = _vocabulary(model), _vocabulary(reference)
    if ours is not None and theirs is not None and ours != theirs:
        raise ConfigurationError(
            f"The reference model has a vocabulary of {theirs} rows, the policy of {ours}; both must score the same "
            "token ids. Resize one, or pass ref_model=None for a copy of the policy."
        )


def load_reference(path: str, like: Any, model_init_kwargs: dict[str, Any] | None) -> nn.Module:
    """Return the model at ``path``, in the dtype of ``like``."""
    kwargs = dict(model_init_kwargs or {})
    kwargs.setdefault("dtype", like.dtype)
    return create_model_from_path(path, **kwargs)


def install_reference(trainer: Any, reference: Any) -> Any:
    """Freeze ``reference``, give it TRL's fused head and place it beside the trainer's policy.

    A quantised or device-mapped model stays where it is.

    Args:
        trainer: A built trainer; its accelerator, temperature and settings are used.
        reference: The model.

    Returns:
        The model as the trainer's forward pass takes it.
    """
    reference.eval()
    for parameter in reference.parameters():
        parameter.requires_grad_(False)
    disable_dropout_in_model(reference)
    base = reference.get_base_model() if is_peft(reference) else reference
    if has_output_head(base):
        add_fused_lm_head(base, temperature=trainer.temperature, cast_lm_head_to_fp32=trainer.args.cast_lm_head_to_fp32)
    placed = getattr(reference, "hf_device_map", None) or getattr(reference, "quantization_method", None)
    if placed:
        return reference
    if trainer.is_deepspeed_enabled:
        return prepare_deepspeed(reference, trainer.accelerator)
    if trainer.is_fsdp_enabled:
        return prepare_fsdp(reference, trainer.accelerator)
    return trainer.accelerator.prepare_model(reference, evaluation_mode=True)


def has_output_head(model: Any) -> bool:
    """Return whether TRL's fused head can be put on ``model``."""
    getter = getattr(model, "get_output_embeddings", None)
    return callable(getter) and getattr(getter(), "weight", None) is not None and hasattr(model, "base_model")


@torch.no_grad()
def logps_from_logits(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    num_tokens: int,
    *,
    temperature: float,
    rows_per_pass: int,
) -> torch.Tensor:
    """Return the log-probability of each of the last ``num_tokens`` tokens, for a model without a patchable head.

    Args:
        model: Any module whose output has ``logits``.
        input_ids: (B, S).
        attention_mask: (B, S).
        num_tokens: T, at most S - 1.
        temperature: Divides the logits.
        rows_per_pass: Rows whose full logits exist at one time.

    Returns:
        (B, T) float32.
    """
    pieces = []
    for start in range(0, input_ids.size(0), rows_per_pass):
        ids, mask = input_ids[start : start + rows_per_pass], attention_mask[start : start + rows_per_pass]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        logits = logits[:, -num_tokens - 1 : -1].float() / temperature
        chosen = logits.gather(-1, ids[:, -num_tokens:].unsqueeze(-1)).squeeze(-1)
        pieces.append(chosen - logits.logsumexp(-1))
    return torch.cat(pieces)


def _vocabulary(model: Any) -> int | None:
    getter = getattr(model, "get_output_embeddings", None)
    weight = getattr(getter(), "weight", None) if callable(getter) else None
    return None if weight is None or weight.ndim != 2 else int(weight.shape[0])
