"""Both eras raise a rule reward as a GRPO call with the same settings does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tiny import tiny_model, tiny_tokenizer

from trl_grpo_ext import GroupRelativeTrainer
from trl_grpo_ext.compat.ppo import PPOConfig, PPOTrainer, set_seed
from trl_grpo_ext.compat.translate import translate

UPDATES, COMPLETIONS, TOKENS = 40, 32, 8
PROMPTS = [{"input_ids": [40 + i, 41]} for i in range(16)]


def share_of_small_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the share of tokens with an id below 150; a random model has about 0.39."""
    return [sum(token < 150 for token in ids) / len(ids) for ids in completion_ids]


def settings(directory: Path) -> PPOConfig:
    return PPOConfig(
        output_dir=str(directory),
        per_device_train_batch_size=COMPLETIONS,
        num_ppo_epochs=2,
        total_episodes=UPDATES * COMPLETIONS,
        response_length=TOKENS,
        temperature=1.0,
        kl_coef=0.01,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=1,
        grpo_kwargs={"reward_isolation": "off"},
    )


class Curve:
    """Keep the mean reward of every batch that is scored."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.__name__ = "share"

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        rewards = share_of_small_ids(completion_ids)
        self.values.append(sum(rewards) / len(rewards))
        return rewards

    @property
    def gain(self) -> float:
        return sum(self.values[-3:]) / 3 - sum(self.values[:3]) / 3


def grpo(directory: Path) -> Curve:
    curve = Curve()
    tokenizer = tiny_tokenizer()
    rows = [{"prompt": tokenizer.decode(row["input_ids"])} for row in PROMPTS]
    GroupRelativeTrainer(
        tiny_model(), curve, translate(settings(directory)).args, Dataset.from_list(rows), processing_class=tokenizer
    ).train()
    return curve


def v2(directory: Path) -> Curve:
    curve = Curve()
    PPOTrainer(
        args=settings(directory),
        model=tiny_model(),
        ref_model=None,
        reward_funcs=curve,
        train_dataset=PROMPTS,
        processing_class=tiny_tokenizer(),
    ).train()
    return curve


def classic(directory: Path) -> Curve:
    curve = Curve()
    config = PPOConfig(
        output_dir=str(directory),
        batch_size=COMPLETIONS,
        mini_batch_size=COMPLETIONS,
        ppo_epochs=2,
        steps=UPDATES * COMPLETIONS,
        learning_rate=5e-3,
        init_kl_coef=0.01,
        seed=1,
        use_cpu=True,
    )
    set_seed(1)
    data = Dataset.from_list(PROMPTS).with_format("torch")

    def collate(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
        return {"q": [row["input_ids"] for row in rows]}

    trainer = PPOTrainer(config, tiny_model(), None, tiny_tokenizer(), dataset=data, data_collator=collate)
    done = 0
    while done < config.total_ppo_epochs:
        for batch in trainer.dataloader:
            responses = trainer.generate(batch["q"], return_prompt=False, batch_size=64, do_sample=True, top_k=0,
                                         max_new_tokens=TOKENS)  # fmt: skip
            trainer.step(batch["q"], responses, [torch.tensor(s) for s in curve([r.tolist() for r in responses])])
            done += 1
            if done == config.total_ppo_epochs:
                break
    return curve


@pytest.mark.slow
def test_both_eras_learn_as_much_as_the_grpo_call(tmp_path: Path) -> None:
    gains = {}
    for run in (grpo, v2, classic):
        curve = run(tmp_path)
        assert len(curve.values) == UPDATES
        assert curve.values[0] < 0.55, "a random model"
        gains[run.__name__] = curve.gain
    print(gains)
    assert gains["grpo"] > 0.3
    assert gains["v2"] > 0.8 * gains["grpo"]
    assert gains["classic"] > 0.8 * gains["grpo"]
