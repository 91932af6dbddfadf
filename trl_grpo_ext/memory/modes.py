"""What a memory mode means for one run: the settings it changes, the dtype and the quantisation of the base.

Everything here is given flat values and returns flat values; ``policy/setup.py`` reads them from the configuration and
puts them there. The rule throughout: what the user wrote wins over what a mode merely suggests, and where both were
asked for, a contradiction is an error that names both.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from trl_grpo_ext.errors import ConfigurationError, MissingDependencyError, install_command
from trl_grpo_ext.memory.mode import MemoryMode

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig

# Fields of a mode that are fields of the configuration too, under the same name.
_LEVERS = ("optim", "gradient_checkpointing", "max_tokens_per_micro_batch", "max_tokens_per_generation_batch")
_VLLM_LEVERS = ("vllm_gpu_memory_utilization", "vllm_enable_sleep_mode")
LEVERS = (*_LEVERS, *_VLLM_LEVERS)


def config_changes(
    mode: MemoryMode, asked: Collection[str], written: Mapping[str, Any], *, vllm_colocates: bool
) -> dict[str, Any]:
    """Return the settings that ``mode`` changes, by name; those that the user wrote are left out.

    Args:
        mode: The levers.
        asked: Fields of ``mode`` that the user asked for one by one, from ``asked_fields``.
        written: Settings that the user wrote, with their values.
        vllm_colocates: Whether vLLM shares the card with the trainer; its levers mean nothing elsewhere.

    Raises:
        ConfigurationError: if a field asked for contradicts a setting, or vLLM's levers are asked for without vLLM.
    """
    changes: dict[str, Any] = {}
    for name in LEVERS:
        value = getattr(mode, name)
        if name in _VLLM_LEVERS and not vllm_colocates:
            if name in asked and value:
                raise ConfigurationError(
                    f"memory: {name}={value!r} needs vLLM beside the trainer; set use_vllm=True and "
                    f'vllm_mode="colocate", or leave {name} out of the memory mode.'
                )
            continue
        if value is None:
            continue
        if name not in written:
            changes[name] = value
        elif name in asked and written[name] != value:
            raise _contradiction(f"memory: {name}={value!r}", f"{name}={_plain(written[name])!r}")
    return changes


def check_tuning(mode: MemoryMode, *, memory: Any, adapter_source: str | None) -> None:
    """Raise if full tuning is asked for and an adapter is given.

    Args:
        mode: The levers.
        memory: What the user wrote, for the message.
        adapter_source: What brings the adapter in (``"peft_config"``, ``"adapter"``, ``"a PeftModel"``); None: nothing.
    """
    if mode.tuning == "full" and adapter_source is not None:
        raise ConfigurationError(
            f"memory={_shown(memory)} trains every weight, but {adapter_source} is given, which trains an adapter on "
            'frozen weights. Drop one of them, or use memory="lora".'
        )


def base_dtype(mode: MemoryMode, asked: Collection[str], *, fp16: bool, written: Any) -> str:
    """Return the name of the dtype to load the unquantised weights in.

    Args:
        mode: The levers.
        asked: Fields of ``mode`` that the user asked for one by one.
        fp16: Whether the run uses float16 mixed precision. Weights that are trained must then be float32: the gradient
            scaler unscales no other gradient. Frozen ones are float16, so that they are not converted in each step.
        written: ``model_init_kwargs["dtype"]``: a torch dtype or its name, None or "auto" where nothing was chosen.

    Raises:
        ConfigurationError: if the dtype contradicts the mode or ``fp16``.
    """
    full = mode.tuning == "full"
    if written is not None and written != "auto":
        chosen = str(written).removeprefix("torch.")
        if "base" in asked and not mode.quantised and chosen != mode.base:
            raise _contradiction(f"memory: base={mode.base!r}", f"model_init_kwargs dtype={chosen!r}")
        source = f"model_init_kwargs dtype={chosen!r}"
    elif mode.quantised or (mode.base == MemoryMode.base and "base" not in asked):
        chosen = ("float32" if full else "float16") if fp16 else "bfloat16"
        source = ""
    else:
        chosen, source = mode.base, f"memory: base={mode.base!r}"
    if full and fp16 and chosen != "float32":
        raise ConfigurationError(
            f"{source} cannot be trained in full with fp16=True, whose gradient scaler needs float32 weights. Use "
            "float32, or bf16=True instead of fp16=True."
        )
    return chosen


def quantization_of(mode: MemoryMode, dtype: str) -> BitsAndBytesConfig | None:
    """Return how bitsandbytes is to store the base, or None for a mode that does not quantise.

    ``"nf4"`` is the recipe of QLoRA (2305.14314): 4-bit NormalFloat, its scales quantised once more. Embeddings and
    head stay as they are.

    Args:
        mode: The levers.
        dtype: Name of the dtype of the unquantised weights, in which the products are computed too.

    Raises:
        MissingDependencyError: if bitsandbytes is not installed.
    """
    if not mode.quantised:
        return None
    _need_bitsandbytes(f"base={mode.base!r}")
    import torch
    from transformers import BitsAndBytesConfig

    if mode.base == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, dtype),
    )


def check_quantization(mode: MemoryMode, memory: Any, config: Any) -> None:
    """Raise if a quantisation that the user wrote is not the mode's.

    Args:
        mode: The levers.
        memory: What the user wrote for them, for the message.
        config: A quantisation configuration of transformers, or its mapping.
    """
    bits = quantised_bits(config)
    if bits != _BITS.get(mode.base):
        stored = f"stores the base in {bits} bits" if bits else "is of another kind"
        raise _contradiction(f"memory={_shown(memory)} (base={mode.base!r})", f"quantization_config, which {stored}")


_BITS = {"nf4": 4, "int8": 8}


def quantised_bits(config: Any) -> int | None:
    """Return 4 or 8 for a bitsandbytes configuration (or its mapping), None for anything else."""
    get = config.get if isinstance(config, Mapping) else lambda name, default: getattr(config, name, default)
    return 4 if get("load_in_4bit", False) else 8 if get("load_in_8bit", False) else None


def check_loaded(mode: MemoryMode, memory: Any, *, bits: int | None) -> None:
    """Raise if a model that was loaded by the user is not stored as the mode says.

    Args:
        mode: The levers.
        memory: What the user wrote for them, for the message.
        bits: Bits of a quantised model's weights; None: not quantised.
    """
    if _BITS.get(mode.base) == bits:
        return
    stored = f"is stored in {bits} bits" if bits else "is loaded already and not quantised"
    raise ConfigurationError(
        f"memory={_shown(memory)} (base={mode.base!r}) contradicts the model, which {stored}. Give the model's name "
        "instead of the model, so that it is loaded as the mode says, or choose the mode that fits it."
    )


def check_optimiser(optim: str) -> None:
    """Raise MissingDependencyError if the optimiser needs bitsandbytes and it is not installed."""
    if "8bit" in optim:
        _need_bitsandbytes(f"optim={optim!r}")


def _need_bitsandbytes(what: str) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingDependencyError(
            f"memory: {what} needs bitsandbytes, which is not installed; run: {install_command('trl-grpo-ext[qlora]')}"
        )


def _contradiction(one: str, other: str) -> ConfigurationError:
    return ConfigurationError(f"{one} contradicts {other}. Remove one of them.")


def _shown(memory: Any) -> str:
    return repr(memory)


def _plain(value: Any) -> Any:
    """Return the value of an enumeration's member, anything else as it is."""
    return getattr(value, "value", value)
