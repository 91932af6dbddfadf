"""Scripts of both eras run two updates with only their imports changed; they lie in ``scripts/``."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ppo_tools import reward_model
from safetensors.torch import load_file
from tiny import save_tiny, tiny_config, tiny_tokenizer
from transformers import AutoModelForSequenceClassification

SCRIPTS = Path(__file__).parent / "scripts"


def write_rows(directory: Path, rows: list[dict[str, Any]]) -> str:
    directory.mkdir()
    (directory / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(directory)


def run_v2(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], extra: str) -> Any:
    policy = save_tiny(tmp_path / "policy", vocab_size=len(tiny_tokenizer()))
    reward_model(vocab_size=len(tiny_tokenizer())).save_pretrained(tmp_path / "reward")
    line = (
        f"{name} --dataset_name {write_rows(tmp_path / 'data', rows)} --dataset_train_split train "
        f"--output_dir {tmp_path / 'out'} --model_name_or_path {policy} --sft_model_path {policy} "
        f"--reward_model_path {tmp_path / 'reward'} --per_device_train_batch_size 4 --gradient_accumulation_steps 2 "
        f"--total_episodes 16 --num_ppo_epochs 2 --num_mini_batches 2 --response_length 6 --learning_rate 1e-3 "
        f"--use_cpu --bf16 False --report_to none --save_strategy no --missing_eos_penalty 1.0 {extra}"
    )
    monkeypatch.setattr(sys, "argv", line.split())
    return runpy.run_path(str(SCRIPTS / name), run_name="__main__")["trainer"]


def moved(tmp_path: Path) -> bool:
    before, after = load_file(tmp_path / "policy" / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    return any(not torch.equal(before[name], after[name]) for name in before)


def test_ppo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"What is {i} + {i}?"} for i in range(12)]
    trainer = run_v2("ppo.py", tmp_path, monkeypatch, rows, "--num_sample_generations 1 --eval_strategy steps")
    assert trainer.state.global_step == 2 * 2 * 2
    assert moved(tmp_path)
    assert capsys.readouterr().out.count("model response") == 2


def test_ppo_with_lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": f"What is {i} + {i}?"} for i in range(12)]
    extra = "--num_sample_generations 0 --use_peft --lora_r 2 --lora_target_modules q_proj v_proj"
    trainer = run_v2("ppo.py", tmp_path, monkeypatch, rows, extra)
    assert trainer.ref_model is None
    assert (tmp_path / "out" / "adapter_config.json").is_file()


def test_ppo_tldr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"sum {i}"}, {"role": "assistant", "content": "x"}]} for i in range(8)
    ]
    trainer = run_v2("ppo_tldr.py", tmp_path, monkeypatch, rows, "--stop_token eos --warmup_ratio 0.1")
    assert trainer.state.global_step == 2 * 2 * 2
    assert moved(tmp_path)
    assert "<|im_start|>assistant" in trainer.train_dataset[0]["prompt"], "the template was applied once, by the script"


def test_gpt2_sentiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny(tmp_path / "gpt2", kind="gpt2", n_embd=32, n_layer=2, n_head=4)
    config = tiny_config("llama", num_labels=2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "classifier")
    tiny_tokenizer().save_pretrained(tmp_path / "classifier")
    data = write_rows(tmp_path / "data", [{"text": f"review {i} " * 4, "label": i % 2} for i in range(12)])
    for name, value in {
        "MODEL": model,
        "DATASET": data,
        "CLASSIFIER": str(tmp_path / "classifier"),
        "OUTPUT": str(tmp_path / "out"),
        "ACCELERATE_USE_CPU": "true",
    }.items():
        monkeypatch.setenv(name, value)
    ran = runpy.run_path(str(SCRIPTS / "gpt2_sentiment.py"), run_name="__main__")
    trainer, history = ran["ppo_trainer"], ran["history"]
    assert (len(history), trainer.state.global_step) == (2, 2), "32 responses in steps of 16"
    assert len(history[0]["ppo/policy/ratio"]) == 4 * 2, "four epochs over two mini-batches"
    assert all(math.isfinite(stats["ppo/loss/total"]) for stats in history)
    assert len(set(ran["batch"]["query"])) == 2, "two prompts x 8 responses"
    before, after = load_file(tmp_path / "gpt2/model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert not [name for name in after if "v_head" in name]
