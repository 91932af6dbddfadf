"""Every reason to leave the packed forward alone, and the check on a few tokens."""

from __future__ import annotations

import pytest
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from reference.packing_reference import FAMILIES, tiny_model
from torch import nn
from trl.trainer.utils import add_fused_lm_head

from trl_grpo_ext.learner import scoring
from trl_grpo_ext.learner.support import find_disagreement, why_unsupported

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def _build(model_type, **changes):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**TINY, **changes})
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_proven_families_are_supported(family):
    assert why_unsupported(tiny_model(family)) is None


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: nn.Linear(2, 2), "Linear is not a transformers model"),
        (lambda: tiny_model("gemma3_text", use_bidirectional_attention=True), "not causal"),
        (lambda: _build("mamba2", num_heads=4, head_dim=16, n_groups=1, state_size=8), "AttentionInterface"),
        (lambda: _build("bloom"), "AttentionInterface"),
        (lambda: _build("lfm2", layer_types=["conv", "full_attention"]), "conv layers"),
        (lambda: _build("gpt_oss", num_local_experts=2, num_experts_per_tok=1), "sinks"),
        (lambda: _build("opt", word_embed_proj_dim=32, ffn_dim=48, dropout=0.0), "absolute positions"),
        (lambda: tiny_model("llama", attention_dropout=0.1), "dropout 0.1"),
        (lambda: _build("mixtral", num_local_experts=2, router_jitter_noise=0.1), "jittered"),
        (
            lambda: get_peft_model(tiny_model("llama"), LoraConfig(lora_dropout=0.05)),
            "lora_dropout.default has dropout",
        ),
        (lambda: get_peft_model(tiny_model("llama"), LoraConfig(target_modules=["lm_head"])), "LM head is a Linear"),
        (lambda: get_peft_model(tiny_model("llama"), LoraConfig(modules_to_save=["lm_head"])), "LM head is a Modules"),
        (
            lambda: get_peft_model(tiny_model("llama"), PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=2)),
            "learned tokens",
        ),
        (
            lambda: get_peft_model(tiny_model("llama"), LoraConfig(alora_invocation_tokens=[5, 6])),
            "starts at a token of each row",
        ),
    ],
)
def test_a_model_that_packing_would_change_is_named(build, reason):
    assert reason in why_unsupported(build())


def test_dropout_of_gpt2_counts_until_trl_disables_it():
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4))
    assert "transformer.drop has dropout 0.1" in why_unsupported(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0
    assert why_unsupported(model) is None


def test_vision_models_are_left_alone():
    model = tiny_model("llama")
    model.config.vision_config = transformers.PretrainedConfig()
    assert "images" in why_unsupported(model)


def test_an_encoder_is_named():
    model = tiny_model("gpt2")
    model.config.add_cross_attention = True
    assert "encoder" in why_unsupported(model)


def test_tensor_parallelism_is_named():
    model = tiny_model("llama")
    model._tp_size = 2
    assert "tensor parallelism" in why_unsupported(model)


def test_compiled_models_are_named():
    assert "torch.compile" in why_unsupported(torch.compile(tiny_model("llama")))
    model = tiny_model("llama")
    model.model.layers[0].compile()
    assert "torch.compile" in why_unsupported(model)


def test_a_head_of_integers_is_named():
    model = tiny_model("llama")
    model.lm_head.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    assert "matrix of numbers" in why_unsupported(model)


def test_a_router_loss_is_named():
    assert "load-balancing" in why_unsupported(tiny_model("qwen3_moe"), wants_router_loss=True)


def test_positions_that_a_backbone_does_not_take_are_named(monkeypatch):
    model = tiny_model("llama")

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        raise AssertionError

    monkeypatch.setattr(type(model.model), "forward", forward)
    assert "takes no position_ids" in why_unsupported(model)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_change_with_length(kind):
    parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
    if kind == "longrope":
        parameters |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = tiny_model("llama", rope_parameters=parameters)
    assert kind in why_unsupported(model)
    assert kind in why_unsupported(model, max_length=33)
    assert why_unsupported(model, max_length=32) is None


def test_a_window_that_only_the_mask_knows(monkeypatch):
    model = tiny_model("mistral_sliding")
    assert why_unsupported(model) is None

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **kwargs):
        raise AssertionError

    monkeypatch.setattr(type(model.model.layers[0].self_attn), "forward", forward)
    assert "window of 5 tokens" in why_unsupported(model)
    assert why_unsupported(model, max_length=5) is None


def test_a_softcap_that_the_attention_function_never_sees(monkeypatch):
    model = tiny_model("llama")
    model.config.attn_logit_softcapping = 50.0
    assert "soft-capped" in why_unsupported(model)


def test_the_number_of_attention_modules_is_checked():
    model = tiny_model("llama")
    model.config.num_hidden_layers = 3
    assert "2 attention modules of the usual form for 3 layers" in why_unsupported(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_few_tokens_agree(family, dtype):
    model = tiny_model(family, dtype=dtype, scale=1.0).train()
    add_fused_lm_head(model, temperature=0.7)
    assert find_disagreement(model, temperature=0.7) is None
    assert model.training


def test_a_few_tokens_catch_a_wrong_temperature():
    model = tiny_model("llama")
    add_fused_lm_head(model, temperature=0.7)
    assert "differ by" in find_disagreement(model, temperature=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_few_tokens_catch_positions_that_follow_the_mask(dtype, monkeypatch):
    model = tiny_model("llama", dtype=dtype)
    add_fused_lm_head(model)
    original = scoring.pack_batch

    def shifted(*arguments, **options):
        return [
            chunk._replace(position_ids_S=chunk.position_ids_S[::-1].copy())
            for chunk in original(*arguments, **options)
        ]

    monkeypatch.setattr(scoring, "pack_batch", shifted)
    message = find_disagreement(model)
    assert "differ by" in message


def test_a_few_tokens_catch_a_forward_that_fails(monkeypatch):
    model = tiny_model("llama")
    add_fused_lm_head(model)
    monkeypatch.setattr(scoring, "watch_attention", lambda model: 2)
    assert "failed on a few test tokens (RuntimeError" in find_disagreement(model)
