"""Deterministic parts against TRL 1.12.0's PPOTrainer, whose numbers ``golden/make.py`` wrote down.

Set ``TRL_PPO_PYTHON`` to the interpreter of an environment with trl==1.12.0 to have them recomputed first.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from ppo_tools import EOS, Recorder, reward_model, v2_config
from tiny import tiny_model, tiny_tokenizer

from trl_grpo_ext.compat.ppo import PPOTrainer
from trl_grpo_ext.compat.token_rewards import MissingEosPenalty, score_token_ids
from trl_grpo_ext.compat.translate import translate

HERE = Path(__file__).parent / "golden"
# float32 on another machine; the quantities are sums over at most 13 tokens
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads((HERE / "ppo_1_12.json").read_text())


def cut(ids: list[int]) -> list[int]:
    return ids[: ids.index(EOS) + 1] if EOS in ids else ids


def test_scores_on_token_ids(golden: dict[str, Any]) -> None:
    tokenizer = tiny_tokenizer()
    prompts = [tokenizer(text)["input_ids"] for text in golden["prompts"]]
    for rows in (None, 1, 3):
        scores = score_token_ids(reward_model(3), prompts, golden["responses"], stop_token_id=EOS, rows_per_pass=rows)
        assert scores.tolist() == pytest.approx(golden["scores"], abs=TOLERANCE)
    uncut = score_token_ids(reward_model(3), prompts, golden["responses"])
    assert uncut.tolist()[1] == pytest.approx(golden["scores"][1], abs=TOLERANCE)
    assert abs(uncut[2].item() - golden["scores"][2]) > 100 * TOLERANCE


def test_a_missing_end_is_judged_by_eos_alone(golden: dict[str, Any]) -> None:
    assert MissingEosPenalty(EOS, 1.0)(golden["responses"]) == [0.0, -1.0, 0.0, 0.0]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_one_update_logs_the_same_objectives(tmp_path: Path, golden: dict[str, Any], estimator: str) -> None:
    """Same weights, prompts and responses: same KL, entropy, scores and shaped reward."""
    tokenizer, record = tiny_tokenizer(), Recorder()
    ids = [tokenizer(text)["input_ids"] for text in golden["prompts"]]
    # Each prompt twice, so that groups of two hold the same four prompts as the golden batch: all means are equal.
    trainer = PPOTrainer(
        args=v2_config(
            tmp_path,
            num_generations=2,
            total_episodes=8,
            temperature=golden["temperature"],
            missing_eos_penalty=1.0,
            stop_token="eos",
            kl_estimator=estimator,
        ),
        processing_class=tokenizer,
        model=tiny_model(seed=0),
        ref_model=tiny_model(seed=1),
        reward_model=reward_model(3),
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        callbacks=[record],
    )
    trainer._generate_single_turn = lambda prompts, *_: (
        [cut(golden["responses"][ids.index(p)]) for p in prompts],
        None,
    )
    trainer.train()
    for name, value in golden["updates"][estimator].items():
        if name != "val/num_eos_tokens":  # PPO also counted what came after the end
            assert record.logs[0][name] == pytest.approx(value, abs=TOLERANCE), name


def test_batch_fields_are_filled_in_alike(tmp_path: Path, golden: dict[str, Any]) -> None:
    for row in golden["batches"]:
        per_device, accumulation, mini_batches, epochs = row["given"]
        config = v2_config(
            tmp_path,
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=accumulation,
            num_mini_batches=mini_batches,
            num_ppo_epochs=epochs,
            total_episodes=40,
        )
        translate(config)
        assert {name: getattr(config, name) for name in row["filled"]} == row["filled"]


@pytest.mark.skipif(not os.environ.get("TRL_PPO_PYTHON"), reason="TRL_PPO_PYTHON names no environment with TRL 1.12")
def test_the_golden_numbers_are_those_of_trl_1_12(golden: dict[str, Any]) -> None:
    run = subprocess.run(
        [os.environ["TRL_PPO_PYTHON"], str(HERE / "make.py")], capture_output=True, text=True, check=True, timeout=280
    )
    fresh = json.loads(run.stdout)
    assert torch.allclose(torch.tensor(fresh["scores"]), torch.tensor(golden["scores"]), atol=TOLERANCE)
    for estimator, metrics in fresh["updates"].items():
        assert metrics == pytest.approx(golden["updates"][estimator], abs=TOLERANCE)
    assert fresh["batches"] == golden["batches"]
    assert fresh["fields"] == golden["fields"]
