"""Settle how the policy is held before TRL's constructor runs: memory mode, adapter, precision, reference.

The decisions are in ``memory/``; this file reads them from the configuration and writes them back.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from trl.trainer import grpo_trainer
from trl.trainer.utils import create_model_from_path

from trl_grpo_ext.config import setting
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.memory import adapter as adapters
from trl_grpo_ext.memory import modes
from trl_grpo_ext.memory.allocator import request_expandable_segments
from trl_grpo_ext.memory.auto import choose_mode
from trl_grpo_ext.memory.mode import AUTO, MemoryMode, asked_fields, named_mode
from trl_grpo_ext.memory.quantised import bits_of
from trl_grpo_ext.policy.card import planner_for_card
from trl_grpo_ext.written import written_settings

logger = logging.getLogger(__name__)


class Policy(NamedTuple):
    """What goes into TRL's constructor.

    Attributes:
        model: A name, a model, or a model with the adapter on it.
        quantization_config: How to load a name; None for a model.
        peft_config: A new adapter to put on it, or None.
        mode: The memory mode, or None where none was asked for.
        float32: Keeps adapters in float32 through the constructor.
    """

    model: Any
    quantization_config: Any
    peft_config: Any
    mode: MemoryMode | None
    float32: adapters.Float32Adapters | None = None


def prepare_policy(
    model: Any,
    args: Any,
    *,
    quantization_config: Any,
    peft_config: Any,
    memory: Any = None,
    adapter: str | None = None,
    reward_funcs: Any = None,
    train_dataset: Any = None,
    processing_class: Any = None,
) -> Policy:
    """Return the policy's arguments after memory mode and adapter were applied.

    Args:
        model: A name, an adapter's directory, or a model, as given to the trainer.
        args: The configuration; a mode's settings are written into it.
        quantization_config: As given to the trainer.
        peft_config: As given to the trainer.
        memory: The trainer's keyword, which must agree with the configuration's field; a ``MemoryPlan`` stands for its
            mode.
        adapter: The trainer's keyword, likewise.
        reward_funcs: As given to the trainer; TRL loads one that is a name with ``model_init_kwargs`` too.
        train_dataset: As given to the trainer; ``memory="auto"`` looks for its longest prompt.
        processing_class: As given to the trainer; it counts that prompt's tokens.

    Raises:
        ConfigurationError: for arguments that contradict each other; both are named.
    """
    _undo_mode(args)
    memory = _one_of("memory", _mode_of(memory), setting(args, "memory"))
    adapter = _one_of("adapter", adapter, setting(args, "adapter"))
    if isinstance(model, str) and adapters.find_adapter(model) and not (Path(model) / "config.json").is_file():
        adapter = _one_of("adapter", adapter, model)
        model = adapters.base_of_adapter(model)
    _check_adapter_sources(model, peft_config, adapter)
    policy = Policy(model, quantization_config, peft_config, None)
    if memory is not None:
        plan = None
        if memory == AUTO:
            lora = adapters.config_of(model, peft_config, adapter)
            plan = planner_for_card(model, args, lora, train_dataset, processing_class)
        policy = _apply_mode(policy, args, memory, adapter, plan)
    if adapter is not None:
        policy = _with_adapter(policy, args, adapter)
        functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        if not any(isinstance(function, str) for function in functions):
            _write_changes(args, {"model_init_kwargs": None})  # they are used up; TRL would warn of ignoring them
    if adapters.is_peft_model(policy.model):
        if args.beta != 0.0 and list(policy.model.active_adapters) != [adapters.REFERENCE]:
            adapters.check_reference_name(policy.model)
        adapters.adopt_adapter(policy.model)
    given = None if isinstance(policy.model, str) else policy.model
    return policy._replace(float32=adapters.Float32Adapters(given if adapters.is_peft_model(given) else None))


def _mode_of(memory: Any) -> Any:
    """Return the mode of a ``MemoryPlan``, anything else as it is."""
    return memory.mode if isinstance(getattr(memory, "mode", None), MemoryMode) else memory


def _one_of(name: str, keyword: Any, field: Any) -> Any:
    """Return whichever of a keyword and a setting is given; raise if both are and differ."""
    if keyword is not None and field is not None and keyword != field:
        raise ConfigurationError(f"{name}={keyword!r} contradicts {name}={field!r} of the configuration. Keep one.")
    return field if keyword is None else keyword


def _check_adapter_sources(model: Any, peft_config: Any, adapter: str | None) -> None:
    if adapter is None:
        return
    if peft_config is not None:
        raise ConfigurationError(
            f"adapter={adapter!r} brings its own configuration; peft_config, which makes a new adapter, contradicts "
            "it. Drop one of them."
        )
    if adapters.is_peft_model(model):
        raise ConfigurationError(
            f"adapter={adapter!r} is given for a model that has an adapter already. Give the base model, or drop "
            "adapter=."
        )


def _apply_mode(policy: Policy, args: Any, memory: Any, adapter: str | None, plan: Any) -> Policy:
    model = policy.model
    source = "peft_config" if policy.peft_config is not None else "adapter" if adapter is not None else None
    if adapters.is_peft_model(model):
        source = "a PeftModel"
    if memory == AUTO:
        mode, reason = choose_mode(has_adapter=source is not None, plan=plan)
        logger.warning('memory="auto" is %s.', reason)
    else:
        mode = named_mode(memory)
    asked = asked_fields(memory)
    modes.check_tuning(mode, memory=memory, adapter_source=source)
    vllm_colocates = bool(args.use_vllm) and args.vllm_mode == "colocate"
    written = written_settings(args, modes.LEVERS)
    changes = modes.config_changes(mode, asked, written, vllm_colocates=vllm_colocates)
    if isinstance(model, str):
        kwargs = dict(args.model_init_kwargs or {})
        dtype = modes.base_dtype(mode, asked, fp16=bool(args.fp16), written=kwargs.get("dtype"))
        changes["model_init_kwargs"] = {**kwargs, "dtype": dtype}
        policy = policy._replace(quantization_config=_quantization(mode, memory, policy, kwargs, dtype))
    else:
        modes.check_loaded(mode, memory, bits=bits_of(model))
    if mode.activation_offload and args.device.type == "cpu":
        raise ConfigurationError(
            "memory: activation_offload=True moves activations to host memory, where they are already on a CPU. Leave "
            "it out."
        )
    _write_changes(args, changes)
    modes.check_optimiser(str(getattr(args.optim, "value", args.optim)))
    if mode.expandable_segments and args.device.type == "cuda":
        _expand_segments(sleeps=vllm_colocates and args.vllm_enable_sleep_mode)
    if mode.tuning == "lora" and source is None:
        policy = policy._replace(peft_config=adapters.default_lora())
    logger.info("Memory mode %r: %s", memory, mode)
    return policy._replace(mode=mode)


def _quantization(mode: MemoryMode, memory: Any, policy: Policy, kwargs: dict[str, Any], dtype: str) -> Any:
    """Return the quantisation to load with: the user's own where it is of the mode's kind, else the mode's."""
    written = policy.quantization_config or kwargs.get("quantization_config")
    if written is not None:
        modes.check_quantization(mode, memory, written)
        return policy.quantization_config
    return modes.quantization_of(mode, dtype)


def _expand_segments(*, sleeps: bool) -> None:
    if sleeps:
        # vLLM's sleep mode manages the card's memory with an allocator of its own, which refuses growing segments.
        logger.info("Expandable segments stay off: vLLM's sleep mode does not go with them.")
        return
    advice = request_expandable_segments(
        os.environ,
        older_name=Version(torch.__version__).release < (2, 9),
        cuda_started=torch.cuda.is_initialized(),
        set_now=getattr(torch._C, "_accelerator_setAllocatorSettings", None),
    )
    if advice is not None:
        logger.warning(advice)


def _write_changes(args: Any, changes: dict[str, Any]) -> None:
    """Write a mode's settings into the configuration, which remembers what they were."""
    before = args.__dict__.setdefault("_before_mode", {})
    for name in changes:
        before.setdefault(name, getattr(args, name))
    for name, value in changes.items():
        setattr(args, name, value)
        if name == "gradient_checkpointing" and hasattr(args, "activation_checkpointing"):
            args.activation_checkpointing = value  # its newer name in transformers, which the training loop reads


def _undo_mode(args: Any) -> None:
    """Take back what a mode wrote for an earlier trainer, so that it is not mistaken for the user's own settings."""
    changes = args.__dict__.pop("_before_mode", {})
    _write_changes(args, changes)
    args.__dict__.pop("_before_mode", None)


def _with_adapter(policy: Policy, args: Any, adapter: str) -> Policy:
    """Return the policy with its base loaded, as TRL would load it, and the adapter on it."""
    model = policy.model
    if isinstance(model, str):
        kwargs = dict(args.model_init_kwargs or {})
        if policy.quantization_config is not None:
            kwargs["quantization_config"] = policy.quantization_config
        if args.distributed_state.distributed_type in ["MULTI_GPU", "DEEPSPEED"]:
            kwargs["device_map"] = None
        kwargs.setdefault("trust_remote_code", args.trust_remote_code)
        model = create_model_from_path(model, **kwargs)
    return policy._replace(model=adapters.load_adapter(model, adapter), quantization_config=None)


@contextlib.contextmanager
def own_reference(policy: Policy, args: Any) -> Iterator[None]:
    """Let TRL's constructor take a frozen copy of a loaded model as its reference, instead of re-reading its name.

    A model that was merged, edited or never saved is not what its ``name_or_path`` says, so that the KL term would
    start above zero and pull towards another model. Nothing changes for a model given by name, for adapters, without a
    KL term, and with ``kl_reference="base"``.
    """
    model = policy.model
    plugin = getattr(args, "deepspeed_plugin", None)
    if (
        isinstance(model, str)
        or policy.peft_config is not None
        or adapters.is_peft_model(model)
        or args.beta == 0.0
        or setting(args, "kl_reference") == "base"
        or (plugin is not None and plugin.zero_stage == 3)  # each process holds a shard; there is nothing to copy
    ):
        yield
        return

    def frozen_copy(_name: str, **_: Any) -> Any:
        return copy.deepcopy(model).requires_grad_(False).eval()

    # TRL's constructor calls this for the reference only, the policy being loaded already (see seams.py).
    module: Any = grpo_trainer
    original, module.create_model_from_path = module.create_model_from_path, frozen_copy
    try:
        yield
    finally:
        module.create_model_from_path = original


def settle_kl_reference(model: Any, args: Any, *, adapter_is_new: bool) -> str | None:
    """Give a policy with an adapter the reference that was asked for; return its name, or None without a KL term.

    Args:
        model: The policy as TRL's constructor left it: with a copy of the adapter for one that was given, without for a
            new one, whose reference is the model without adapter.
        args: The configuration.
        adapter_is_new: Whether the constructor made the adapter.
    """
    wanted = setting(args, "kl_reference")
    if args.beta == 0.0:
        return None
    if not adapters.is_peft_model(model):
        return wanted or "start"
    has_copy = adapters.REFERENCE in model.peft_config
    if wanted is None:
        wanted = "base" if adapter_is_new else "start"
    if wanted == "base" and has_copy:
        model.delete_adapter(adapters.REFERENCE)
    elif wanted == "start" and not has_copy:
        adapters.copy_as_reference(model)
    return wanted
