"""QLoRA that moves: field case 17, and the fast paths on quantised bases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ScriptedRollouts
from runs import adapter_state, make, trainable_dtypes
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from trl_grpo_ext.memory.quantised import keep_differentiable

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}


SMALL_STEPS: dict[str, Any] = {"learning_rate": 1e-6, "max_steps": 20, "optim": "adamw_torch", "max_grad_norm": 1.0}


def moved_share(trainer: Any) -> float:
    """Train and return the share of the adapter's entries that are not what they were."""
    before = adapter_state(trainer.model)
    trainer.train()
    after = adapter_state(trainer.model)
    moved = sum(int((before[name] != after[name]).sum()) for name in before)
    return moved / sum(value.numel() for value in before.values())


def quantised_peft_model(base: str, adapter: str) -> Any:
    from peft import PeftModel

    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=BitsAndBytesConfig(**NF4), dtype=torch.bfloat16
    )
    return PeftModel.from_pretrained(model, adapter, is_trainable=True)


@pytest.mark.parametrize("memory", ["qlora", "qlora-8bit"])
def test_an_existing_adapter_moves_at_a_tiny_learning_rate(
    memory: str, base: str, adapter: str, tmp_path: Path
) -> None:
    trainer = make(tmp_path, base, memory=memory, adapter=adapter, **SMALL_STEPS)
    assert moved_share(trainer) > 0.95
    assert trainer.state.log_history[-2]["update/moved_entries"] > 0.95


def test_without_a_mode_it_moves_too_unless_switched_off(base: str, adapter: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, quantised_peft_model(base, adapter), **SMALL_STEPS)
    assert trainable_dtypes(trainer) == {torch.float32}
    assert moved_share(trainer) > 0.95
    as_trl = make(tmp_path, quantised_peft_model(base, adapter), float32_adapters=False, **SMALL_STEPS)
    assert trainable_dtypes(as_trl) == {torch.bfloat16}


def test_trls_bfloat16_adapters_stand_still(
    base: str, adapter: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Negative control: the same run with TRL's rounding, and the alarm that says so."""
    trainer = make(tmp_path, base, memory="qlora", adapter=adapter, float32_adapters=False, **SMALL_STEPS)
    assert moved_share(trainer) < 0.1
    assert "The weights hardly move" in caplog.text
    assert "most are bfloat16" in caplog.text
    theirs = make(tmp_path, quantised_peft_model(base, adapter), ours=False, **SMALL_STEPS)
    assert moved_share(theirs) < 0.1


def test_the_adapter_keeps_its_digits_and_kl_starts_at_zero(base: str, adapter: str, tmp_path: Path) -> None:
    """TRL's rounding of the trained copy alone would put it away from the frozen one."""
    from safetensors.torch import load_file

    trainer = make(tmp_path, base, memory="qlora", adapter=adapter, beta=0.1, max_steps=1)
    saved = load_file(f"{adapter}/adapter_model.safetensors")
    for name, value in adapter_state(trainer.model).items():
        assert torch.equal(value, saved[name]), name
    trainer.train()
    assert trainer.state.log_history[0]["kl"] == 0.0


def gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of one training step."""
    found: dict[str, torch.Tensor] = {}

    def keep(args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        found.update({n: p.grad.detach().float().clone() for n, p in model.named_parameters() if p.requires_grad})

    from transformers import TrainerCallback

    trainer.add_callback(type("Keep", (TrainerCallback,), {"on_pre_optimizer_step": staticmethod(keep)})())
    trainer.train()
    return found


def test_gradients_reach_every_layer_after_a_rollout(base: str, adapter: str, tmp_path: Path) -> None:
    """bitsandbytes' layout for AVX512-BF16, taken on at the first rollout, ends the gradient at the last layer."""
    trainer = make(tmp_path, base, memory="qlora", adapter=adapter, rollouts=False, max_steps=1)
    found = gradients(trainer)
    assert all(value.abs().max() > 0 for value in found.values()), [n for n, v in found.items() if not v.any()]


def test_a_layer_that_was_rearranged_before_is_put_back(base: str, adapter: str) -> None:
    model = quantised_peft_model(base, adapter).eval()
    ids = torch.arange(3, 12).unsqueeze(0)
    with torch.no_grad():
        fast = model(ids).logits  # may rearrange
    assert keep_differentiable(model) == 14
    states = [m.weight.quant_state for m in model.modules() if hasattr(m, "support_avx512bf16_for_cpu")]
    assert not any(getattr(state, "packing_format_for_cpu", False) for state in states)
    with torch.no_grad():
        again = model(ids).logits
    assert not any(getattr(state, "packing_format_for_cpu", False) for state in states)
    assert (fast - again).abs().max() < 0.05 * fast.abs().max()


@pytest.mark.parametrize("memory", ["qlora", "qlora-8bit"])
def test_the_packed_forward_agrees_with_trls_on_a_quantised_base(
    memory: str, base: str, adapter: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Same rows both ways: log-probabilities and gradients within the noise of bfloat16 (8-bit rounds inputs too)."""
    fields: dict[str, Any] = {"memory": memory, "adapter": adapter, "max_steps": 1, "optim": "sgd"}
    packed = make(tmp_path, base, shared_prefix_forward=True, **fields)
    padded = make(tmp_path, base, shared_prefix_forward=False, **fields)
    ours, theirs = gradients(packed), gradients(padded)
    assert "padded path" not in caplog.text  # the packed forward was not given up
    scale = max(float(value.abs().max()) for value in theirs.values())
    worst = max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
    assert scale > 0
    assert worst < 0.05 * scale
    assert packed.state.log_history[0]["entropy"] == pytest.approx(padded.state.log_history[0]["entropy"], rel=1e-2)


@pytest.mark.parametrize("memory", ["qlora", "qlora-8bit"])
def test_the_rollout_engine_samples_what_generate_does(
    memory: str, base: str, adapter: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nearly greedy, so that the two draw alike wherever rounding does not decide."""
    fields: dict[str, Any] = {"memory": memory, "adapter": adapter, "max_steps": 1, "temperature": 1e-3}
    completions: dict[str, list[list[int]]] = {}
    for engine in ("auto", "trl"):

        def reward(prompts: Any, completion_ids: list[list[int]], engine: str = engine, **_: Any) -> list[float]:
            completions[engine] = completion_ids
            return [float(len(ids)) + index % 4 for index, ids in enumerate(completion_ids)]

        trainer = make(tmp_path, base, rollouts=False, reward=reward, rollout_engine=engine, **fields)
        trainer.train()
        log = trainer.state.log_history[0]
        assert ("rollout/seconds" in log) is (engine == "auto"), caplog.text
    pairs = list(zip(completions["auto"], completions["trl"], strict=True))
    same = sum(a == b for one, other in pairs for a, b in zip(one, other, strict=False))
    total = sum(max(len(one), len(other)) for one, other in pairs)
    assert same / total > 0.8


def test_a_resumed_run_ends_where_the_whole_one_does(base: str, adapter: str, tmp_path: Path) -> None:
    """The adapter comes back in float32, with every digit."""
    fields: dict[str, Any] = {"memory": "qlora", "adapter": adapter, "max_steps": 4, "optim": "adamw_torch"}
    whole = make(tmp_path, base, save_strategy="steps", save_steps=2, **fields)
    whole.train()
    rollouts = ScriptedRollouts()
    rollouts.num_rows = 16  # where the first run stood
    rest = make(tmp_path / "rest", base, rollouts=rollouts, **fields)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trainable_dtypes(rest) == {torch.float32}
    theirs = adapter_state(whole.model)
    for name, value in adapter_state(rest.model).items():
        assert (value - theirs[name]).abs().max() < 1e-6, name


def test_a_ppo_call_takes_a_memory_mode(base: str, tmp_path: Path) -> None:
    from datasets import Dataset
    from tiny import tiny_prompts, tiny_tokenizer

    from trl_grpo_ext.compat.ppo import PPOConfig, PPOTrainer

    trainer = PPOTrainer(
        PPOConfig(output_dir=str(tmp_path), per_device_train_batch_size=4, use_cpu=True, bf16=False, report_to="none"),
        tiny_tokenizer(),
        base,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list(tiny_prompts(8)),
        memory="lora",
    )
    assert trainable_dtypes(trainer) == {torch.float32}
    assert list(trainer.model.peft_config) == ["default"]
