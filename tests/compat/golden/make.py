"""Write the golden numbers of TRL 1.12.0's PPOTrainer, the last release that had one.

    python -m venv VENV
    VENV/bin/pip install torch==2.13.0 trl==1.12.0 'transformers==5.24.*' peft accelerate datasets
    VENV/bin/python tests/compat/golden/make.py > tests/compat/golden/ppo_1_12.json

Needs neither a GPU nor this package, only ``tests/tiny.py``. Models are random with fixed seeds; the responses are
given, so that every number is a function of weights and ids alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.update({"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"})

import torch
from datasets import Dataset
from tiny import tiny_config, tiny_model, tiny_tokenizer
from transformers import AutoModelForSequenceClassification
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer
from trl.experimental.utils import get_reward

EOS = 2
PROMPTS = ["What is 1 + 1?", "long What is 2 + 2?", "long long What is 3 + 3?", "What is 4 + 4?"]
# One that ends at once, one cut off, one with a second EOS behind the first, one that ends at the last token.
RESPONSES = [[17, EOS, 0, 0, 0, 0], [33, 34, 35, 36, 37, 38], [51, 52, EOS, 53, EOS, 54], [71, 72, 73, 74, 75, EOS]]
TEMPERATURE = 0.7
BATCHES = [
    (8, 1, 1, 1),
    (8, 1, 2, 1),
    (4, 4, 2, 1),
    (4, 4, 4, 1),
    (2, 4, 4, 1),
    (4, 2, 4, 1),
    (1, 16, 1, 1),
    (3, 3, 3, 1),
]


def classifier(seed: int) -> Any:
    """Return a random sequence classifier with one label."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForSequenceClassification.from_config(tiny_config("llama", num_labels=1)).eval()


def config(directory: str, **fields: Any) -> PPOConfig:
    """Return the settings of one update on CPU."""
    values: dict[str, Any] = {
        "output_dir": directory,
        "per_device_train_batch_size": 4,
        "num_ppo_epochs": 1,
        "total_episodes": 4,
        "response_length": 6,
        "stop_token": "eos",
        "temperature": TEMPERATURE,
        "missing_eos_penalty": 1.0,
        "num_sample_generations": 0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return PPOConfig(**{**values, **fields})


def trainer(directory: str, **fields: Any) -> PPOTrainer:
    """Return PPO's trainer on four models with different weights."""
    tokenizer = tiny_tokenizer()
    return PPOTrainer(
        args=config(directory, **fields),
        processing_class=tokenizer,
        model=tiny_model(seed=0),
        ref_model=tiny_model(seed=1),
        reward_model=classifier(3),
        value_model=classifier(4),
        train_dataset=Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"] for text in PROMPTS * 8]}),
    )


def given_responses(model: Any, queries: Any, rows: int, pad: int, generation_config: Any) -> Any:
    """Stand in for ``batch_generation``: the responses above, and the policy's logits for them."""
    del rows, generation_config
    # The loader shuffles, so a response belongs to the prompt that it was written for.
    tokenizer = tiny_tokenizer()
    order = [PROMPTS.index(text) for text in tokenizer.batch_decode(queries, skip_special_tokens=True)]
    responses = torch.tensor([RESPONSES[i] for i in order])
    rows_ids = torch.cat([queries, responses], dim=1)
    logits = ppo_trainer.forward(model, rows_ids, pad).logits[:, queries.size(1) - 1 : -1]
    return rows_ids, logits / TEMPERATURE


def one_update(**fields: Any) -> dict[str, float]:
    """Return the metrics of one update."""
    ppo_trainer.batch_generation = given_responses
    with tempfile.TemporaryDirectory() as directory:
        built = trainer(directory, **fields)
        # A shuffled loader may draw one prompt twice; without it the four come in order.
        built.dataloader = torch.utils.data.DataLoader(
            built.train_dataset, batch_size=4, collate_fn=built.data_collator, drop_last=True
        )
        logged: dict[str, float] = {}
        built.log = lambda logs, *_: logged.update(logs)
        built.train()
    kept = ("objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward")
    return {name: logged[name] for name in (*kept, "objective/scores", "val/num_eos_tokens")}


def scores() -> list[float]:
    """Return the reward of each response, cut after its first EOS, as PPO read it."""
    tokenizer = tiny_tokenizer()
    batch = tokenizer.pad({"input_ids": [tokenizer(t)["input_ids"] for t in PROMPTS]}, return_tensors="pt")
    cut = ppo_trainer.truncate_response(EOS, tokenizer.pad_token_id, torch.tensor(RESPONSES))
    queries = batch["input_ids"]
    with torch.no_grad():
        _, values, _ = get_reward(
            classifier(3), torch.cat([queries, cut], dim=1), tokenizer.pad_token_id, queries.size(1)
        )
    return values.tolist()


def batch_fields() -> list[dict[str, Any]]:
    """Return what the trainer writes into its settings for each batch."""
    names = ("batch_size", "mini_batch_size", "local_batch_size", "local_mini_batch_size", "micro_batch_size")
    rows = []
    for per_device, accumulation, mini_batches, epochs in BATCHES:
        with tempfile.TemporaryDirectory() as directory:
            built = trainer(
                directory,
                per_device_train_batch_size=per_device,
                gradient_accumulation_steps=accumulation,
                num_mini_batches=mini_batches,
                num_ppo_epochs=epochs,
                total_episodes=40,
            )
            filled = {name: getattr(built.args, name) for name in (*names, "num_total_batches")}
        rows.append({"given": [per_device, accumulation, mini_batches, epochs], "filled": filled})
    return rows


def main() -> None:
    """Print everything as JSON."""
    with contextlib.redirect_stdout(sys.stderr):  # the trainer prints
        golden = everything()
    print(json.dumps(golden, indent=1))


def everything() -> dict[str, Any]:
    """Return all golden numbers."""
    return {
        "command": "VENV/bin/python tests/compat/golden/make.py > tests/compat/golden/ppo_1_12.json",
        "trl": "1.12.0",
        "fields": [f.name for f in dataclasses.fields(PPOConfig)],
        "prompts": PROMPTS,
        "responses": RESPONSES,
        "temperature": TEMPERATURE,
        "scores": scores(),
        "updates": {name: one_update(kl_estimator=name) for name in ("k1", "k3")},
        "batches": batch_fields(),
    }


if __name__ == "__main__":
    main()
