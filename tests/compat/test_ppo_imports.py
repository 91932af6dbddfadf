"""What scripts import beside the trainer, and putting it back under ``trl``."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tiny import save_tiny, tiny_model, tiny_tokenizer

from trl_grpo_ext.compat import ppo
from trl_grpo_ext.compat.ppo import (
    SIMPLE_CHAT_TEMPLATE,
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    LengthSampler,
    PPOConfig,
    PPOTrainer,
    create_reference_model,
    install,
    set_seed,
)
from trl_grpo_ext.errors import ConfigurationError

LORA = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")


def test_the_wrapper_is_the_model_it_holds() -> None:
    model = tiny_model()
    wrapper = AutoModelForCausalLMWithValueHead.from_pretrained(model, v_head_init_strategy="normal")
    assert wrapper.pretrained_model is model
    assert wrapper.config is model.config
    assert wrapper.is_peft_model is False
    assert wrapper.device == model.device
    assert {id(p) for p in wrapper.parameters()} == {id(p) for p in model.parameters()}
    ids = torch.tensor([[5, 6, 7]])
    logits, loss, values = wrapper(ids, labels=ids)
    assert torch.equal(logits, model(ids).logits)
    assert loss.item() == pytest.approx(model(ids, labels=ids).loss.item())
    assert values is None
    assert wrapper.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 5)
    assert wrapper.state_dict().keys() == model.state_dict().keys()
    assert not hasattr(wrapper, "v_head")
    with pytest.raises(AttributeError):
        wrapper.no_such_thing  # noqa: B018


def test_an_old_checkpoint_loads_without_its_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_tiny(tmp_path / "old")
    weights = load_file(tmp_path / "old" / "model.safetensors")
    head = {"v_head.summary.weight": torch.zeros(1, 32), "v_head.summary.bias": torch.zeros(1)}
    save_file(weights | head, tmp_path / "old" / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING, logger="trl_grpo_ext.compat"):
        wrapper = AutoModelForCausalLMWithValueHead.from_pretrained(path)
    assert "holds weights of a value head; they are left out" in caplog.text
    assert torch.equal(wrapper.lm_head.weight, tiny_model().lm_head.weight)
    wrapper.load_state_dict(weights | head)
    wrapper.save_pretrained(str(tmp_path / "new"))
    assert not [name for name in load_file(tmp_path / "new" / "model.safetensors") if "v_head" in name]


def test_an_old_pickled_checkpoint_loads_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "old"
    tiny_model().config.save_pretrained(path)
    weights = dict(tiny_model(seed=4).state_dict())
    torch.save(weights | {"v_head.summary.weight": torch.zeros(1, 32)}, path / "pytorch_model.bin")
    with caplog.at_level(logging.WARNING, logger="trl_grpo_ext.compat"):
        wrapper = AutoModelForCausalLMWithValueHead.from_pretrained(str(path))
    assert "value head" in caplog.text
    assert torch.equal(wrapper.lm_head.weight, tiny_model(seed=4).lm_head.weight)


def test_adapters_are_added_and_loaded(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "base")
    wrapper = AutoModelForCausalLMWithValueHead.from_pretrained(path, peft_config=LORA)
    assert wrapper.is_peft_model
    with torch.no_grad():
        for name, p in wrapper.named_parameters():
            if "lora_B" in name:
                p.fill_(0.5)
    wrapper.save_pretrained(str(tmp_path / "adapter"))
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path / "adapter"))
    assert loaded.is_peft_model
    assert any(p.requires_grad for p in loaded.parameters())
    ids = torch.tensor([[5, 6]])
    assert torch.allclose(loaded(ids)[0], wrapper(ids)[0], atol=1e-6)


@pytest.mark.parametrize(("given", "dtype"), [({}, torch.float32), ({"torch_dtype": torch.bfloat16}, torch.bfloat16)])
def test_the_dtype_is_float32_unless_asked(tmp_path: Path, given: dict[str, Any], dtype: torch.dtype) -> None:
    path = save_tiny(tmp_path / "half", dtype=torch.bfloat16)
    assert AutoModelForCausalLMWithValueHead.from_pretrained(path, **given).dtype == dtype


def test_old_loading_arguments_are_translated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def fake(path: str, *args: Any, **kwargs: Any) -> Any:
        seen.update(kwargs)
        return tiny_model()

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fake)
    AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path), load_in_8bit=True, use_auth_token="t")
    assert seen["quantization_config"].load_in_8bit is True
    assert seen["token"] == "t"
    assert "load_in_8bit" not in seen


def test_what_cannot_be_kept_says_so() -> None:
    with pytest.raises(ConfigurationError, match="load the adapter as its own sequence classifier"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tiny_model(), reward_adapter="x")
    wrapper = AutoModelForCausalLMWithValueHead(tiny_model())
    with pytest.raises(ConfigurationError, match="Reward adapters are not supported"):
        wrapper.compute_reward_score(torch.tensor([[1]]))
    for build in (AutoModelForSeq2SeqLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead.from_pretrained):
        with pytest.raises(ConfigurationError, match=r"the last TRL with seq2seq PPO is 1\.12"):
            build("t5-small")
    encoder = tiny_model()
    encoder.config.is_encoder_decoder = True
    with pytest.raises(ConfigurationError, match="Only causal language models"):
        AutoModelForCausalLMWithValueHead(encoder)
    with pytest.raises(ConfigurationError, match="Only causal language models"):
        PPOTrainer(PPOConfig(batch_size=8, mini_batch_size=8, use_cpu=True), encoder, None, tiny_tokenizer())


def test_a_reference_is_a_frozen_copy_of_its_kind() -> None:
    model = tiny_model()
    plain, wrapped = create_reference_model(model), create_reference_model(AutoModelForCausalLMWithValueHead(model))
    assert isinstance(wrapped, AutoModelForCausalLMWithValueHead)
    for copied in (plain, wrapped):
        assert not any(p.requires_grad for p in copied.parameters())
        assert not copied.training
        assert torch.equal(copied.lm_head.weight, model.lm_head.weight)
        assert copied.lm_head.weight.data_ptr() != model.lm_head.weight.data_ptr()
    shared = create_reference_model(model, num_shared_layers=1)
    assert shared.model.layers[0].mlp.up_proj.weight.data_ptr() == model.model.layers[0].mlp.up_proj.weight.data_ptr()


def test_small_helpers() -> None:
    set_seed(3)
    sampler = LengthSampler(2, 5)
    first = [sampler() for _ in range(50)]
    assert set(first) == {2, 3, 4}
    set_seed(3)
    assert [sampler() for _ in range(50)] == first
    model = tiny_model()
    sampled = ppo.respond_to_batch(model, torch.tensor([[5, 6], [7, 8]]), txt_len=30, top_k=1)
    assert sampled.shape == (2, 30)
    greedy = model.generate(
        torch.tensor([[5, 6]]), max_new_tokens=30, min_new_tokens=30, do_sample=False, pad_token_id=0
    )
    assert torch.equal(sampled[0], greedy[0, 2:])
    assert ppo.get_kbit_device_map() is None or torch.cuda.is_available()
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = SIMPLE_CHAT_TEMPLATE
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "User: hi\n\n"
    with_prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert with_prompt == "User: hi\n\nAssistant:"
    with pytest.raises(AttributeError, match="has no attribute 'PPOTrainr'"):
        ppo.PPOTrainr  # noqa: B018


OLD_IMPORTS = """
from trl import PPOTrainer, PPOConfig, AutoModelForCausalLMWithValueHead, create_reference_model, set_seed
from trl import PPOv2Trainer, PPOv2Config, AutoModelForSeq2SeqLMWithValueHead
from trl.core import LengthSampler, respond_to_batch
from trl import get_kbit_device_map
from trl.trainer.ppo_trainer import PPOTrainer as A
from trl.trainer.ppo_config import PPOConfig as B
from trl.trainer.ppov2_trainer import PPOv2Trainer as C
from trl.experimental.ppo import PPOTrainer as D, PPOConfig as E
from trl.models import AutoModelForCausalLMWithValueHead as F
from trl.trainer.utils import SIMPLE_CHAT_TEMPLATE
import trl
assert trl.PPOTrainer is PPOTrainer is A is C is D
"""


def test_install_puts_the_names_back_and_takes_them_away() -> None:
    import trl

    assert not hasattr(trl, "PPOTrainer"), "importing compat.ppo must not touch trl"
    uninstall = install()
    try:
        exec(OLD_IMPORTS, {})
    finally:
        uninstall()
    assert not hasattr(trl, "PPOTrainer")
    assert "trl.core" not in sys.modules
    with pytest.raises(ImportError):
        exec("from trl import PPOTrainer", {})
    with pytest.raises(ImportError):
        exec("from trl.experimental.ppo import PPOTrainer", {})
