"""``format``: the tag grammar, field case 23 and its neighbours."""

from __future__ import annotations

import time

import pytest

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.rewards.verifiers.format import format


@pytest.mark.parametrize(
    ("text", "score", "reason"),
    [
        ("<think>a</think><answer>b</answer>", 1.0, "well_formed"),
        ("<think>a</think>\n<answer>b</answer>", 1.0, "well_formed"),
        ("\n <think>a</think>\n\n<answer>b</answer>\n", 1.0, "well_formed"),
        ("<think>\nmany\nlines\n</think>\n<answer>\nb\n</answer>", 1.0, "well_formed"),
        ("<think>a</tool><answer>b</answer>", 0.0, "missing_tag"),
        ("<think>a<answer>b</answer>", 0.0, "missing_tag"),
        ("a</think><answer>b</answer>", 0.0, "missing_tag"),
        ("<think>a</think>b", 0.0, "missing_tag"),
        ("<think>a</think><answer>b", 0.0, "missing_tag"),
        ("<answer>b</answer><think>a</think>", 0.0, "wrong_order"),
        ("<think><answer>b</answer></think>", 0.0, "wrong_order"),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0, "repeated_tag"),
        ("<think>a</think></think><answer>b</answer>", 0.0, "repeated_tag"),
        ("so <think>a</think><answer>b</answer>", 0.0, "text_outside"),
        ("<think>a</think>so<answer>b</answer>", 0.0, "text_outside"),
        ("<think>a</think><answer>b</answer> so", 0.0, "text_outside"),
        ("<think> \n</think><answer>b</answer>", 0.0, "empty_block"),
        ("<think>a</think><answer></answer>", 0.0, "empty_block"),
        ("<Think>a</Think><Answer>b</Answer>", 0.0, "missing_tag"),
        ("", 0.0, "missing_tag"),
        ("I must not forget </think>.", 0.0, "missing_tag"),
    ],
)
def test_field_case_23(text, score, reason):
    verdict = format().judge(text)
    assert (verdict.score, verdict.reason) == (score, reason)


REST = "some reasoning</think>\n<answer>b</answer>"


def test_a_template_that_opened_the_block():
    assert format(opened_by_template="yes").judge(REST).score == 1.0
    assert format(opened_by_template="yes").judge("<think>" + REST).score == 0.0
    assert format(opened_by_template="no").judge(REST).score == 0.0
    assert format(opened_by_template="yes").judge("</think><answer>b</answer>").reason == "empty_block"
    assert format(opened_by_template="yes", empty="allow").judge("</think><answer>b</answer>").score == 1.0
    assert format(opened_by_template="yes").judge("It mentions </think> and no more").score == 0.0


@pytest.mark.parametrize(
    ("prompt", "score"),
    [
        ("Question?\n<think>\n", 1.0),
        ("Question?", 0.0),
        ("Use <think> and </think>.", 0.0),
        ([{"role": "user", "content": "Q"}, {"role": "assistant", "content": "<think>"}], 1.0),
        ([{"role": "user", "content": "<think>"}], 0.0),
        ([], 0.0),
        (None, 0.0),
    ],
)
def test_auto_looks_at_the_end_of_the_prompt(prompt, score):
    assert format().judge(REST, prompt=prompt).score == score


def test_empty_blocks_and_lengths():
    text = "<think>abc</think><answer>b</answer>"
    assert format(empty="allow").judge("<think></think><answer>b</answer>").score == 1.0
    assert format(min_chars={"think": 3}).judge(text).score == 1.0
    assert format(min_chars={"think": 4}).judge(text).reason == "block_too_short"
    assert format(max_chars={"answer": 1}).judge(text).score == 1.0
    assert format(max_chars={"think": 2}).judge(text).reason == "block_too_long"


def test_other_grammars():
    untagged = format(tags=["think", "answer"], last_tag="untagged")
    assert untagged.judge("<think>a</think> so it is b").score == 1.0
    assert untagged.judge("<think>a</think> ").reason == "empty_block"
    assert untagged.judge("so it is b").score == 0.0
    assert format(text_after="allow").judge("<think>a</think><answer>b</answer> bye").score == 1.0
    three = format(tags=["plan", "think", "answer"])
    assert three.judge("<plan>p</plan><think>a</think><answer>b</answer>").score == 1.0
    assert three.judge("<think>a</think><plan>p</plan><answer>b</answer>").reason == "wrong_order"
    assert format(tags="answer").judge("<answer>b</answer>").score == 1.0
    assert format(tags=["tool_call"]).judge("<tool_call>x</tool_call>").score == 1.0


def test_partial_credit_rises_with_the_tags_and_stays_below_the_full_score():
    reward = format(partial=True)
    scores = [
        reward.judge(text).score
        for text in (
            "",
            "<think>",
            "<think>a</think>",
            "<think>a</think><answer>",
            "<answer>b</answer><think>a</think>",
        )
    ]
    assert scores == [0.0, 0.25, 0.5, 0.75, 0.8]
    assert reward.judge("<think>" * 50).score == 0.0
    assert reward.judge("<think>a</think><answer>b</answer>").score == 1.0


def test_completions_as_text_and_as_messages():
    text = "<think>a</think><answer>b</answer>"
    assert format()(completions=[text]) == [1.0]
    assert format()(completions=[[{"role": "assistant", "content": text}]]) == [1.0]
    assert format()(prompts=["<think>"], completions=[REST]) == [1.0]


@pytest.mark.parametrize(
    "text", ["a" * 400_000, "<think>" + "a" * 400_000, "<" * 400_000, "<think>" * 60_000, "</" * 200_000]
)
def test_a_long_text_without_its_closing_tag_takes_no_time(text):
    started = time.process_time()
    assert format().judge(text).score == 0.0
    assert time.process_time() - started < 0.1


def test_tags_that_are_special_tokens_are_still_seen(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<eos>", "hello", "world"]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<eos>")
    tags = ["<think>", "</think>", "<answer>", "</answer>"]
    tokenizer.add_special_tokens({"additional_special_tokens": tags})
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer("<think> hello </think> <answer> world </answer> <eos>").input_ids
    as_decoded_by_trl = tokenizer.decode(ids, skip_special_tokens=True)
    assert "<think>" not in as_decoded_by_trl
    reward = format(tokenizer=str(tmp_path))
    assert reward(completions=[as_decoded_by_trl], completion_ids=[ids]) == [1.0]
    assert reward(completions=[as_decoded_by_trl], completion_ids=[ids[1:]]) == [0.0]
    assert format()(completions=[as_decoded_by_trl], completion_ids=[ids]) == [0.0]


@pytest.mark.parametrize(
    "options",
    [
        {"tags": []},
        {"tags": ["a", "a"]},
        {"tags": ["<a>"]},
        {"min_chars": {"tool": 1}},
        {"max_chars": {"think": -1}},
        {"empty": "maybe"},
    ],
)
def test_bad_options(options):
    with pytest.raises(ConfigurationError):
        format(**options)
