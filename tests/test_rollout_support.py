"""Every reason to use ``model.generate`` instead, one test each, and the settings that are no reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer
from transformers import GenerationConfig
from trl import GRPOConfig

from trl_grpo_ext.rollout.engine import SamplingParams
from trl_grpo_ext.rollout.support import FAMILIES, merged_generation_settings, unsupported_setting
from trl_grpo_ext.rollout.transformers_engine import TransformersRolloutEngine

PARAMS = SamplingParams(max_new_tokens=8)


def trl_config(**generation_kwargs: Any) -> GenerationConfig:
    """Return the generation config that ``GRPOTrainer.__init__`` builds from default arguments."""
    args = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none")
    return GenerationConfig(
        **{
            "max_new_tokens": args.max_completion_length,
            "do_sample": True,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": [2],
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": args.top_k,
            "min_p": args.min_p,
            "repetition_penalty": args.repetition_penalty,
            "cache_implementation": args.cache_implementation,
            **generation_kwargs,
        },
        disable_compile=True,
    )


def reason_for(model: Any, **generation_kwargs: Any) -> str | None:
    settings = merged_generation_settings(model, trl_config(**generation_kwargs))
    return TransformersRolloutEngine().why_unsupported(model, PARAMS, settings)


def test_trl_defaults_are_supported_and_read_as_they_are() -> None:
    model = tiny_model("llama")
    settings = merged_generation_settings(model, trl_config())
    assert TransformersRolloutEngine().why_unsupported(model, PARAMS, settings) is None
    params = SamplingParams.from_generation_settings(settings)
    assert params == SamplingParams(max_new_tokens=512, eos_token_ids=(2,), pad_token_id=0)


def test_the_models_own_generation_config_fills_what_is_not_set() -> None:
    model = tiny_model("llama")
    model.generation_config.no_repeat_ngram_size = 3
    model.generation_config.min_new_tokens = 2
    model.generation_config.temperature = 0.3
    config = trl_config(top_k=None)
    settings = merged_generation_settings(model, config)
    assert settings["min_new_tokens"] == 2
    assert settings["temperature"] == 1.0  # TRL's value wins
    assert settings["top_k"] == 50  # transformers' default for a setting nobody made
    reason = TransformersRolloutEngine().why_unsupported(model, PARAMS, settings)
    assert reason == "generation setting no_repeat_ngram_size=3"
    prepared, _ = model._prepare_generation_config(config)
    for name in ("min_new_tokens", "temperature", "top_k", "top_p", "no_repeat_ngram_size", "do_sample", "num_beams"):
        assert settings.get(name) == getattr(prepared, name), name


@pytest.mark.parametrize(
    "setting",
    [
        {"num_beams": 4},
        {"num_return_sequences": 2, "num_beams": 1},
        {"typical_p": 0.9},
        {"epsilon_cutoff": 0.01},
        {"eta_cutoff": 0.01},
        {"top_h": 0.4},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5]]},
        {"min_length": 3},
        {"max_time": 5.0},
        {"forced_eos_token_id": 2},
        {"forced_bos_token_id": 1},
        {"begin_suppress_tokens": [1]},
        {"sequence_bias": {(5,): 1.0}},
        {"exponential_decay_length_penalty": (3, 1.1)},
        {"guidance_scale": 1.5},
        {"renormalize_logits": True},
        {"remove_invalid_values": True},
        {"cache_implementation": "quantized"},
        {"prompt_lookup_num_tokens": 3},
        {"penalty_alpha": 0.6},
        {"some_setting_of_tomorrow": 7},
    ],
    ids=str,
)
def test_settings_that_change_the_text_are_a_reason(setting: dict[str, Any]) -> None:
    name, value = next(iter(setting.items()))
    reason = unsupported_setting({"max_new_tokens": 8, **setting})
    assert reason is not None
    assert name in reason
    if name in ("no_repeat_ngram_size", "bad_words_ids", "num_beams", "some_setting_of_tomorrow"):
        assert name in str(reason_for(tiny_model("llama"), **{name: value}))


@pytest.mark.parametrize(
    "setting",
    [
        {"suppress_tokens": [3]},
        {"min_new_tokens": 2},
        {"top_p": 0.9},
        {"repetition_penalty": 1.1},
        {"cache_implementation": "static"},
        {"num_beams": 1},
        {"typical_p": 1.0},
        {"use_cache": True},
    ],
    ids=str,
)
def test_settings_that_are_honoured_or_neutral_are_not(setting: dict[str, Any]) -> None:
    assert reason_for(tiny_model("llama"), **setting) is None


def test_stop_strings_need_a_tokenizer() -> None:
    model, params = tiny_model("llama"), SamplingParams(max_new_tokens=8, stop_strings=("###",))
    assert TransformersRolloutEngine().why_unsupported(model, params) == "stop strings need a tokenizer"
    assert TransformersRolloutEngine(tiny_tokenizer()).why_unsupported(model, params) is None


def test_families_that_are_not_proven_are_a_reason() -> None:
    assert "opt" not in FAMILIES
    model = tiny_model("opt", ffn_dim=32, word_embed_proj_dim=32)
    assert "model type 'opt'" in str(reason_for(model))


def test_a_class_of_somebody_else_is_a_reason() -> None:
    model = tiny_model("llama")
    model.__class__ = type("MyLlama", (type(model),), {"__module__": "my_project.models"})
    assert "MyLlama" in str(reason_for(model))


def test_active_dropout_is_a_reason_and_idle_dropout_is_none() -> None:
    model = tiny_model("gpt2")
    assert reason_for(model.eval()) is None
    assert "dropout p=0.1" in str(reason_for(model.train()))
    model = tiny_model("llama", attention_dropout=0.2)
    assert reason_for(model.eval()) is None
    assert "attention_dropout=0.2" in str(reason_for(model.train()))


def test_adapters() -> None:
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    lora = get_peft_model(tiny_model("llama"), LoraConfig(r=2, task_type="CAUSAL_LM"))
    assert reason_for(lora.train()) is None
    dropped = get_peft_model(tiny_model("llama"), LoraConfig(r=2, lora_dropout=0.1, task_type="CAUSAL_LM"))
    assert "lora_dropout" in str(reason_for(dropped.train()))
    assert reason_for(dropped.eval()) is None
    prompt = get_peft_model(tiny_model("llama"), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    assert "virtual tokens" in str(reason_for(prompt))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_embeddings_that_depend_on_the_batch_are_a_reason(rope_type: str) -> None:
    model = tiny_model("llama")
    model.config.rope_parameters = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    assert f"rotary embedding '{rope_type}'" in str(reason_for(model))


def test_sharded_parameters_are_a_reason() -> None:
    model = tiny_model("llama")
    model.model.layers[0].mlp.up_proj.weight.data = torch.empty(0)
    assert "layers.0.mlp.up_proj.weight is sharded" in str(reason_for(model))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("add_cross_attention", True, "cross-attention"),
        ("use_bidirectional_attention", True, "bidirectional"),
    ],
)
def test_other_attention_is_a_reason(field: str, value: Any, words: str) -> None:
    model = tiny_model("llama")
    setattr(model.config, field, value)
    assert words in str(reason_for(model))


def test_gpt2_upcast_attention_is_a_reason_under_eager_only() -> None:
    model = tiny_model("gpt2", reorder_and_upcast_attn=True)
    assert reason_for(model) is None
    model.config._attn_implementation = "eager"
    assert "reorder_and_upcast_attn" in str(reason_for(model))


def test_something_that_is_no_model_is_a_reason() -> None:
    assert "model type None" in str(TransformersRolloutEngine().why_unsupported(SimpleNamespace(), PARAMS))
