"""Scripts of both eras run two updates with only their imports changed; they lie in ``scripts/``."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import subprocess
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


def command_line(name: str, tmp_path: Path, rows: list[dict[str, Any]], extra: str) -> list[str]:
    """Return the arguments of a v2 script that makes two updates on tiny models written to ``tmp_path``."""
    policy = save_tiny(tmp_path / "policy", vocab_size=len(tiny_tokenizer()))
    reward_model(vocab_size=len(tiny_tokenizer())).save_pretrained(tmp_path / "reward")
    line = (
        f"{name} --dataset_name {write_rows(tmp_path / 'data', rows)} --dataset_train_split train "
        f"--output_dir {tmp_path / 'out'} --model_name_or_path {policy} --sft_model_path {policy} "
        f"--reward_model_path {tmp_path / 'reward'} --per_device_train_batch_size 4 --gradient_accumulation_steps 2 "
        f"--total_episodes 16 --num_ppo_epochs 2 --num_mini_batches 2 --response_length 6 --learning_rate 1e-3 "
        f"--use_cpu --bf16 False --report_to none --save_strategy no --missing_eos_penalty 1.0 {extra}"
    )
    return line.split()


def run_v2(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], extra: str) -> Any:
    monkeypatch.setattr(sys, "argv", command_line(name, tmp_path, rows, extra))
    return runpy.run_path(str(SCRIPTS / name), run_name="__main__")["trainer"]


def moved(tmp_path: Path, policy: str = "policy") -> bool:
    """Return whether the weights in ``out`` differ from those that the run started from."""
    before, after = load_file(tmp_path / policy / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    return any(not torch.equal(before[name], after[name]) for name in before)


TEXTS = [{"prompt": f"What is {i} + {i}?"} for i in range(12)]
MESSAGES = [
    {"messages": [{"role": "user", "content": f"sum {i}"}, {"role": "assistant", "content": "x"}]} for i in range(8)
]


def test_ppo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = run_v2("ppo.py", tmp_path, monkeypatch, TEXTS, "--num_sample_generations 1 --eval_strategy steps")
    assert trainer.state.global_step == 2 * 2 * 2
    assert moved(tmp_path)
    assert capsys.readouterr().out.count("model response") == 2


def test_ppo_with_lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = "--num_sample_generations 0 --use_peft --lora_r 2 --lora_target_modules q_proj v_proj"
    trainer = run_v2("ppo.py", tmp_path, monkeypatch, TEXTS, extra)
    assert trainer.ref_model is None
    assert (tmp_path / "out" / "adapter_config.json").is_file()


def test_ppo_tldr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = run_v2("ppo_tldr.py", tmp_path, monkeypatch, MESSAGES, "--stop_token eos --warmup_ratio 0.1")
    assert trainer.state.global_step == 2 * 2 * 2
    assert moved(tmp_path)
    assert "<|im_start|>assistant" in trainer.train_dataset[0]["prompt"], "the template was applied once, by the script"


def sentiment_paths(tmp_path: Path) -> dict[str, str]:
    """Return the environment of the sentiment script, with tiny models and a data set written to ``tmp_path``."""
    model = save_tiny(tmp_path / "gpt2", kind="gpt2", n_embd=32, n_layer=2, n_head=4)
    config = tiny_config("llama", num_labels=2)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "classifier")
    tiny_tokenizer().save_pretrained(tmp_path / "classifier")
    data = write_rows(tmp_path / "data", [{"text": f"review {i} " * 4, "label": i % 2} for i in range(32)])
    return {
        "MODEL": model,
        "DATASET": data,
        "CLASSIFIER": str(tmp_path / "classifier"),
        "OUTPUT": str(tmp_path / "out"),
        "ACCELERATE_USE_CPU": "true",
    }


def test_gpt2_sentiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in sentiment_paths(tmp_path).items():
        monkeypatch.setenv(name, value)
    ran = runpy.run_path(str(SCRIPTS / "gpt2_sentiment.py"), run_name="__main__")
    trainer, history = ran["ppo_trainer"], ran["history"]
    assert (len(history), trainer.state.global_step) == (2, 2), "32 responses in steps of 16"
    assert len(history[0]["ppo/policy/ratio"]) == 4 * 2, "four epochs over two mini-batches"
    assert all(math.isfinite(stats["ppo/loss/total"]) for stats in history)
    assert len(set(ran["batch"]["query"])) == 2, "two prompts x 8 responses"
    assert moved(tmp_path, "gpt2")
    assert not [name for name in load_file(tmp_path / "out/model.safetensors") if "v_head" in name]


# Helpers that the scripts imported from TRL until 1.11 or so; 1.12 has the trainer, but no longer these.
GONE_IN_1_12 = "SIMPLE_CHAT_TEMPLATE, get_kbit_device_map = None, lambda: None\n"


@pytest.mark.skipif(not os.environ.get("TRL_PPO_PYTHON"), reason="TRL_PPO_PYTHON names no environment with TRL 1.12")
@pytest.mark.parametrize(("name", "rows"), [("ppo.py", TEXTS), ("ppo_tldr.py", MESSAGES)])
def test_the_scripts_are_old_scripts(name: str, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """With TRL's import in place of ours they run on TRL 1.12: nothing but the import was changed for us."""
    text, changed = re.subn(
        r"from trl_grpo_ext\.compat\.ppo import .*\n",
        f"from trl.experimental.ppo import PPOConfig, PPOTrainer\n{GONE_IN_1_12}",
        (SCRIPTS / name).read_text(),
    )
    assert changed == 1
    assert "trl_grpo_ext" not in text
    (tmp_path / name).write_text(text)
    line = command_line(name, tmp_path, rows, "--num_sample_generations 0 --stop_token eos")
    subprocess.run(
        [os.environ["TRL_PPO_PYTHON"], *line], cwd=tmp_path, check=True, timeout=170, capture_output=True, text=True
    )
    assert moved(tmp_path)


@pytest.mark.skipif(
    not os.environ.get("TRL_CLASSIC_PYTHON"), reason="TRL_CLASSIC_PYTHON names no environment with TRL 0.11.4"
)
def test_the_sentiment_script_is_an_old_script(tmp_path: Path) -> None:
    """With TRL's imports in place of ours it runs on TRL 0.11.4: nothing but the import was changed for us."""
    block = re.compile(r"from trl_grpo_ext\.compat\.ppo import \((.*?)\)\n", re.DOTALL)
    text = (SCRIPTS / "gpt2_sentiment.py").read_text()
    names = [name.strip() for name in block.search(text)[1].split(",") if name.strip()]
    old = f"from trl import {', '.join(n for n in names if n != 'LengthSampler')}\nfrom trl.core import LengthSampler\n"
    path = tmp_path / "gpt2_sentiment.py"
    path.write_text(block.sub(old, text))
    environment = {**os.environ, **sentiment_paths(tmp_path)}
    for config in tmp_path.glob("*/tokenizer_config.json"):  # written by transformers 5, read by 4.46
        fields = json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        fields["additional_special_tokens"] = fields.pop("extra_special_tokens")
        fields["model_input_names"] = ["input_ids", "attention_mask"]
        config.write_text(json.dumps(fields))
    subprocess.run(
        [os.environ["TRL_CLASSIC_PYTHON"], str(path)], cwd=tmp_path, env=environment, check=True, timeout=170,
        capture_output=True, text=True,
    )  # fmt: skip
    assert any("v_head" in name for name in load_file(tmp_path / "out/model.safetensors"))
