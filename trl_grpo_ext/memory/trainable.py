"""How many parameters a run would train, found on the shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from trl_grpo_ext.errors import ConfigurationError


class ParameterCount(NamedTuple):
    """Parameters that get a gradient, and all of them, the adapter's included."""

    trainable: int
    total: int


def lora_config(values: Mapping[str, Any]) -> Any:
    """Return peft's ``LoraConfig`` with these keywords.

    Raises:
        ConfigurationError: for values that it refuses.
    """
    from peft import LoraConfig

    try:
        return LoraConfig(**values)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"peft: {error}") from error


def count_trainable(config: Any, peft_config: Any = None) -> ParameterCount:
    """Return the parameter counts of a model that is built without memory for its weights.

    Args:
        config: of a transformers model.
        peft_config: of the adapter; None trains every weight.

    Raises:
        ConfigurationError: if the adapter finds no module to sit on; it names some that are there.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    if peft_config is not None:
        from peft import get_peft_model

        linear = sorted({name.split(".")[-1] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)})
        try:
            model = get_peft_model(model, peft_config, low_cpu_mem_usage=True)
        except ValueError as error:
            raise ConfigurationError(
                f"peft: {error}. Its linear layers are called {', '.join(linear)}; target_modules: all-linear takes "
                "them all but the head"
            ) from error
    parameters = list(model.parameters())
    return ParameterCount(
        sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        sum(parameter.numel() for parameter in parameters),
    )
