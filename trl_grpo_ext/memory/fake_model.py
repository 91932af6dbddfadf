"""Build a policy as a run would hold it, without its weights: on the meta device first, then given storages.

PEFT cannot swap modules whose parameters are fake, and models take seconds to initialise for real, so both are built on
the meta device. Tensors of the CPU, fake or real, then take the place of the meta ones, ties kept.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from trl_grpo_ext.memory.mode import MemoryMode
from trl_grpo_ext.memory.stand_ins import Int8Linear, NF4Linear, quantise_linears

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LORA_DEFAULTS: dict[str, Any] = {"r": 16, "target_modules": "all-linear", "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}


def compute_dtype(mode: MemoryMode) -> torch.dtype:
    """Return the dtype of the products: the base's, bfloat16 for a quantised one."""
    return DTYPES.get(mode.base, torch.bfloat16)


def build_on_meta(
    config: Any,
    mode: MemoryMode,
    lora: Any = None,
    *,
    double_quantised: bool = True,
    adapter_dtype: torch.dtype | None = torch.float32,
    upcast_rest: bool = False,
) -> nn.Module:
    """Return the policy of ``config`` in a memory mode, on the meta device, in training mode.

    Args:
        config: of a transformers causal language model.
        mode: the levers.
        lora: ``LoraConfig`` or its keywords, for ``tuning="lora"``; None for rank 16 on every linear layer.
        double_quantised: whether the scales of a 4-bit base are quantised too.
        adapter_dtype: of the adapter.
        upcast_rest: True holds what is not quantised in float32, as ``prepare_model_for_kbit_training`` does.
    """
    from transformers import AutoModelForCausalLM

    dtype = compute_dtype(mode)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.use_cache = False
    if mode.quantised:
        quantise_linears(
            model,
            lambda plain: (
                NF4Linear(plain, dtype, double_quantised=double_quantised)
                if mode.base == "nf4"
                else Int8Linear(plain, dtype)
            ),
            skip=[model.get_output_embeddings()],
        )
    if upcast_rest:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.float()
    if mode.tuning == "lora":
        model = _add_adapter(model, lora, adapter_dtype)
    if mode.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def _add_adapter(model: nn.Module, lora: Any, adapter_dtype: torch.dtype | None) -> nn.Module:
    """Wrap ``model`` with an adapter; frozen parameters stay in their dtype."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(**{**LORA_DEFAULTS, **(lora or {})}) if lora is None or isinstance(lora, dict) else lora
    # A copy, as the caller's own must not learn of stand-ins.
    config = copy.copy(config)
    config._custom_modules = None
    config._register_custom_module({NF4Linear: _quantised_lora_class(True), Int8Linear: _quantised_lora_class(False)})
    wrapped: Any = get_peft_model(model, config, autocast_adapter_dtype=False)
    if adapter_dtype is not None:
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(adapter_dtype)
    return wrapped


@functools.cache
def _quantised_lora_class(copies_output: bool) -> type:
    """Return a LoRA layer that casts as PEFT's layers around quantised weights do.

    Args:
        copies_output: True for 4 bits, where PEFT copies the base's output before it adds to it.
    """
    from peft.tuners.lora.layer import Linear as LoraLinear

    class QuantisedLoraLinear(LoraLinear):
        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            result = self.base_layer(x)
            if copies_output:
                result = result.clone()
            dtype = result.dtype
            converts = not torch.is_autocast_enabled("cpu")
            for name in self.active_adapters:
                lora_A, lora_B = self.lora_A[name], self.lora_B[name]
                weight: Any = lora_A.weight
                if converts:
                    x = self._cast_input_dtype(x, weight.dtype)
                output = lora_B(lora_A(self.lora_dropout[name](x))) * self.scaling[name]
                result = result + (output.to(dtype) if converts else output)
            return result

    return QuantisedLoraLinear


def give_storage(
    model: nn.Module,
    *,
    fill: bool = False,
    around: Callable[[nn.Module], AbstractContextManager] = lambda module: nullcontext(),
) -> None:
    """Replace every meta parameter and buffer by a tensor of the CPU, fake inside a ``FakeTensorMode``, ties kept.

    Args:
        model: changed in place.
        fill: True writes zeros, so that real pages are touched.
        around: entered for each module while its own tensors are made.
    """
    made: dict[int, torch.Tensor] = {}

    def twin(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            new = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
            if fill:
                new.zero_()
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            made[id(tensor)] = new
            keep.append(tensor)  # an identity is only its own while the tensor lives
        return made[id(tensor)]

    keep: list[torch.Tensor] = []
    for module in model.modules():
        # Some models keep a copy of a buffer as an ordinary attribute, such as the rotary frequencies.
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        with around(module):
            for table in tables:
                for name, tensor in list(table.items()):
                    if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                        table[name] = twin(tensor)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are trained, each once."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
