"""Prompts as the model sees them: one BOS, a limit that keeps the chat whole, an end token that exists."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from harness import settings
from test_preflight import adds_bos
from tiny import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

from trl_grpo_ext import GroupRelativeConfig, GroupRelativeTrainer
from trl_grpo_ext.cli.generate import render_prompt
from trl_grpo_ext.data.prompt_tokens import drop_doubled_bos, shorten_prompt
from trl_grpo_ext.errors import ConfigurationError, DataError

WITH_BOS = "{{ bos_token }}" + CHAT_TEMPLATE.replace("<|im_start|>", "§")


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [float(index % 4) for index in range(len(completions))]


def make(
    directory: Path, prompts: Any, *, tokenizer: Any = None, model: Any = None, **fields: Any
) -> GroupRelativeTrainer:
    rows = Dataset.from_list([{"prompt": prompt} for prompt in prompts]) if isinstance(prompts, list) else prompts
    return GroupRelativeTrainer(
        model or tiny_model(),
        reward,
        GroupRelativeConfig(output_dir=str(directory), reward_isolation="never", **settings(**fields)),
        rows,
        processing_class=tokenizer or tiny_tokenizer(),
    )


def chat(text: str, system: str = "Reply briefly.") -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def test_bos_exactly_once_whatever_the_prompts_are(tmp_path: Path) -> None:
    """Field case 9: messages, raw strings, strings rendered before; TRL gives the last two BOS."""
    tokenizer = adds_bos(WITH_BOS)
    bos = tokenizer.bos_token_id
    rendered = tokenizer.apply_chat_template(chat("2 + 3?"), tokenize=False, add_generation_prompt=True)
    assert tokenizer(rendered)["input_ids"][:2] == [bos, bos], "the case doubles nothing"
    for prompt in (chat("2 + 3?"), "2 + 3?", rendered):
        trainer = make(tmp_path, [prompt] * 4, tokenizer=tokenizer)
        ids = trainer._tokenize_prompts([prompt])[0][0]
        assert ids.count(bos) == 1
        assert ids[0] == bos
        assert render_prompt(tokenizer, prompt) == ids


def test_drop_doubled_bos() -> None:
    assert drop_doubled_bos([1, 1, 1, 5, 1, 1], 1) == [1, 5, 1, 1]
    assert drop_doubled_bos([5, 1, 1], 1) == [5, 1, 1]
    assert drop_doubled_bos([1], 1) == [1]
    assert drop_doubled_bos([0, 0], None) == [0, 0]


LONG = "long " * 200 + "What is 2 + 3?"


def test_long_prompts_are_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Field case 11: one row in a hundred is ten times as long, the limit is 256."""
    prompts = [chat(LONG) if n == 50 else chat(f"{n} + 1?") for n in range(100)]
    with caplog.at_level(logging.WARNING, logger="trl_grpo_ext.prompt_step"):
        trainer = make(tmp_path, prompts, max_prompt_length=256)
    assert [record.message for record in caplog.records if record.name == "trl_grpo_ext.prompt_step"] == [
        "Dropped 1 of 100 training rows: their prompts are longer than max_prompt_length=256 tokens."
    ]
    assert len(trainer.train_dataset) == 99
    assert all(row[1]["content"] != LONG for row in trainer.train_dataset["prompt"])
    with pytest.raises(DataError, match="0 prompts, but one step needs 2"):
        make(tmp_path, [chat(LONG)] * 4, max_prompt_length=256)


def test_a_stream_drops_long_prompts_on_the_way(tmp_path: Path) -> None:
    stream = IterableDataset.from_generator(lambda: ({"prompt": LONG if n % 2 else f"{n} + 1?"} for n in range(16)))
    trainer = make(tmp_path, stream, max_prompt_length=100)
    assert [row["prompt"] for row in trainer.train_dataset] == [f"{n} + 1?" for n in range(0, 16, 2)]


@pytest.mark.parametrize("limit", [256, 60, 61, 62])
def test_long_prompts_are_cut_and_stay_whole_chats(limit: int, tmp_path: Path) -> None:
    trainer = make(tmp_path, [chat(LONG)] * 4, max_prompt_length=limit, overlong_prompts="truncate")
    (long_ids, short_ids), *_ = trainer._tokenize_prompts([chat(LONG), chat("1 + 1?")])
    assert limit - 8 < len(long_ids) <= limit
    text = trainer._tokenizer.decode(long_ids)
    assert text.startswith("<|im_start|>system\nReply briefly.<|im_end|>\n<|im_start|>user\n")
    assert text.endswith("What is 2 + 3?<|im_end|>\n<|im_start|>assistant\n")
    assert short_ids == render_prompt(trainer._tokenizer, chat("1 + 1?"))
    trainer.train()
    assert trainer.state.global_step == 2


def test_what_cannot_be_cut_is_an_error(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()

    def render(prompt: Any) -> list[int]:
        return render_prompt(tokenizer, prompt)

    with pytest.raises(DataError, match="max_prompt_length=10 is less than a prompt needs"):
        shorten_prompt(chat("2 + 3?", system="word " * 50), 10, render, tokenizer)
    assert tokenizer.decode(render(shorten_prompt("abc " * 50 + "end", 6, render, tokenizer))).endswith("end")
    with pytest.raises(ConfigurationError, match="max_prompt_length=0"):
        make(tmp_path, ["a"] * 4, max_prompt_length=0)
    with pytest.raises(ConfigurationError, match="overlong_prompts='cut' is not allowed"):
        make(tmp_path, ["a"] * 4, overlong_prompts="cut")


def test_duplicate_prompts_stay_separate_groups(tmp_path: Path) -> None:
    """Field case 12: groups go by row. The four equal prompts of a step make four groups of four."""
    trainer = make(tmp_path, ["2 + 3?"] * 8, per_device_train_batch_size=16, gradient_accumulation_steps=1, max_steps=1)
    seen: list[list[int]] = []
    mark = trainer._mark_groups

    def marking(output: dict[str, Any]) -> None:
        mark(output)
        seen.append(output["group_index"].tolist())

    trainer._mark_groups = marking  # type: ignore[method-assign]
    trainer.train()
    assert seen == [[0] * 4 + [1] * 4 + [2] * 4 + [3] * 4]


def ending_in(token: int, eos_token_id: Any) -> Any:
    """Return a model that draws nothing but ``token``."""
    model = tiny_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight[token] = 0.0
    model.lm_head.register_forward_hook(lambda _m, _i, logits: logits.index_fill(-1, torch.tensor([token]), 40.0))
    model.generation_config.eos_token_id = eos_token_id
    return model


@pytest.mark.parametrize("case", ["second of two ends", "pad is end", "no pad"])
def test_ends(case: str, tmp_path: Path) -> None:
    """Field case 13: whatever ends the text, it is not counted as cut off."""
    tokenizer = tiny_tokenizer(pad_is_eos=case == "pad is end")
    if case == "no pad":
        tokenizer.pad_token = None
    token, ends = (7, [2, 7]) if case == "second of two ends" else (2, 2)
    trainer = make(tmp_path, ["2 + 3?"] * 8, tokenizer=tokenizer, model=ending_in(token, ends), max_steps=1)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["completions/clipped_ratio"] == 0
    assert log["completions/mean_length"] == 1


def test_no_end_at_all_is_an_error(tmp_path: Path) -> None:
    """Field case 13; TRL dies later with a TypeError about something else."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigurationError, match="Neither the tokenizer nor the model's generation_config has an end"):
        make(tmp_path, ["2 + 3?"] * 8, tokenizer=tokenizer, model=ending_in(2, None))
    trainer = make(tmp_path, ["2 + 3?"] * 8, tokenizer=tokenizer, model=ending_in(2, 2), max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["completions/clipped_ratio"] == 0
