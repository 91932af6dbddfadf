"""When the engine may stand in for ``model.generate``: sampling settings and model properties it honours exactly.

Everything not on the lists here is a reason to fall back, so a new setting of transformers is never silently ignored.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trl_grpo_ext.rollout.engine import SamplingParams
from trl_grpo_ext.rollout.module_decoder import base_model

FAMILIES = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "gpt2", "mixtral", "olmo2"}
)
"""``config.model_type`` of the families whose greedy rollouts equal ``generate`` in tests/test_rollout_engine.py."""

_HONOURED = frozenset(
    {
        "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
        "min_new_tokens", "suppress_tokens", "eos_token_id", "pad_token_id", "bos_token_id", "stop_strings",
    }
)  # fmt: skip
_IRRELEVANT = frozenset(
    {
        "transformers_version", "disable_compile", "compile_config", "use_cache", "max_length", "early_stopping",
        "length_penalty", "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores",
        "output_logits", "decoder_start_token_id", "num_assistant_tokens", "num_assistant_tokens_schedule",
        "assistant_confidence_threshold", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind",
        "target_lookbehind", "prompt_lookup_num_tokens", "is_assistant", "prefill_chunk_size", "max_cache_len",
        "num_beam_groups", "diversity_penalty", "use_mtp", "token_healing", "low_memory",
        "renormalize_logits", "penalty_alpha", "assistant_ensemble_weight", "speculation_type",
    }
)  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "guidance_scale": (1, 1.0),
    "cache_implementation": ("dynamic", "hybrid", "static", "dynamic_full"),
}
"""Values that leave sampling as it is. Where the cache lives does not change what is drawn."""


def merged_generation_settings(model: Any, generation_config: Any) -> dict[str, Any]:
    """Return the settings ``model.generate(generation_config=...)`` would use: its own, the model's, then defaults.

    Mirrors ``GenerationMixin._prepare_generation_config``. Settings that stay None are left out.
    """
    model_config = base_model(model).generation_config
    merged = copy.deepcopy(generation_config)
    for source in (model_config.to_dict(), model_config._get_default_generation_params()):
        for name, value in source.items():
            if getattr(merged, name, None) is None:
                setattr(merged, name, value)
    return {name: value for name, value in merged.__dict__.items() if value is not None and not name.startswith("_")}


def unsupported_setting(settings: Mapping[str, Any]) -> str | None:
    """Return which generation setting the engine does not honour, or None."""
    for name, value in settings.items():
        if value is None or name in _HONOURED or name in _IRRELEVANT or value in _NEUTRAL.get(name, ()):
            continue
        if value is False or value == {} or value == []:
            continue
        return f"generation setting {name}={value!r}"
    for name in ("penalty_alpha", "prompt_lookup_num_tokens", "renormalize_logits", "token_healing", "use_mtp"):
        if settings.get(name):
            return f"generation setting {name}={settings[name]!r}"
    return None


def unsupported_model(model: Any) -> str | None:
    """Return why the model's own ``generate`` must be used, or None."""
    base = base_model(model)
    config = getattr(base, "config", None)
    family = getattr(config, "model_type", None)
    if family not in FAMILIES:
        return f"model type {family!r} is not one of {', '.join(sorted(FAMILIES))}"
    if not type(base).__module__.startswith("transformers."):
        return f"{type(base).__name__} is not transformers' own class"
    for peft_config in getattr(model, "peft_config", {}).values() if base is not model else ():
        if getattr(peft_config, "is_prompt_learning", False):
            return f"{peft_config.peft_type} puts virtual tokens before the prompt"
        if getattr(peft_config, "alora_invocation_tokens", None):
            return "activated LoRA depends on where the invocation tokens are"
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            return f"rotary embedding {parameters['rope_type']!r} depends on the longest sequence of the batch"
    if getattr(config, "add_cross_attention", False):
        return "the model has cross-attention"
    if getattr(config, "reorder_and_upcast_attn", False) and getattr(config, "_attn_implementation", None) == "eager":
        return "reorder_and_upcast_attn replaces the attention"
    if getattr(config, "use_bidirectional_attention", False):
        return "bidirectional attention"
    return _unsupported_modules(base)


def _unsupported_modules(base: nn.Module) -> str | None:
    for name, module in base.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0 and module.training:
            return f"dropout p={module.p} is active in {name}: rows of a group would share one mask on the prompt"
        dropout = getattr(module, "attention_dropout", 0.0)
        if isinstance(dropout, float) and dropout > 0 and module.training:
            return f"attention_dropout={dropout} is active in {name}"
    for name, parameter in base.named_parameters():
        if (
            parameter.numel() == 0
            or type(parameter).__name__ == "DTensor"
            or type(parameter.data).__name__ == "DTensor"
        ):
            return f"parameter {name} is sharded: ranks must step together, which generate does"
    return None


def unsupported_params(params: SamplingParams, tokenizer: Any) -> str | None:
    """Return why these parameters need ``generate``, or None."""
    if params.stop_strings and tokenizer is None:
        return "stop strings need a tokenizer"
    return None


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the embedding, where token ids must be."""
    return base_model(model).get_input_embeddings().weight.device
