"""A run whose reward hangs, crashes, exits and returns infinities keeps finite weights and learns all the same."""

from __future__ import annotations

from pathlib import Path

import reward_zoo as zoo
import torch
from harness import build
from tiny import tiny_model


def test_an_abusive_reward_neither_ends_nor_poisons_a_run(tmp_path: Path) -> None:
    trainer, record = build(
        True,
        tmp_path,
        model=tiny_model(),
        rows=[{"prompt": f"Count from {number}"} for number in range(8)],
        reward=zoo.digits_or_disaster,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=1,
        num_generations=8,
        max_completion_length=6,
        max_steps=30,
        optim="adamw_torch",
        learning_rate=2e-2,
        max_grad_norm=1.0,
        reward_isolation="always",
        reward_timeout_s=0.3,
        reward_max_failure_rate=0.8,
    )
    trainer.train()
    steps = [logs for logs in record.logs if "reward" in logs]
    assert len(steps) == 30
    assert all(torch.isfinite(weights).all() for weights in record.weights.values())
    failed = [logs["rewards/digits_or_disaster/failed"] for logs in steps]
    assert sum(value > 0 for value in failed) > 8
    rewards = [logs["reward"] for logs in steps]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2, rewards
