"""GroupRelativeConfig: bad budgets are named, evaluation holds whole groups, the best model is not the loss's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser
from trl import GRPOConfig
from trl.trainer import grpo_trainer

from trl_grpo_ext import GroupRelativeConfig
from trl_grpo_ext.choices import TRL_CHOICES
from trl_grpo_ext.config import AUTO_TOKENS_PER_MICRO_BATCH, EngineSettings
from trl_grpo_ext.errors import ConfigurationError


def config(tmp_path: Path, **fields: Any) -> GroupRelativeConfig:
    return GroupRelativeConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **fields)


def test_it_is_a_grpo_config_with_the_same_defaults(tmp_path: Path) -> None:
    ours, theirs = config(tmp_path), GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    assert isinstance(ours, GRPOConfig)
    shared = {name: value for name, value in theirs.to_dict().items() if name != "logging_dir"}
    assert {name: ours.to_dict()[name] for name in shared} == shared


def test_a_negative_budget_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="max_tokens_per_micro_batch=-1 is not a number of tokens"):
        config(tmp_path, max_tokens_per_micro_batch=-1)


def test_eval_batch_is_rounded_to_whole_groups(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    odd = config(tmp_path, num_generations=4, per_device_eval_batch_size=6, eval_strategy="steps", eval_steps=1)
    assert odd.per_device_eval_batch_size == 4
    assert "Any multiple of 4 is legal" in caplog.text
    assert config(tmp_path, num_generations=4, per_device_eval_batch_size=3).per_device_eval_batch_size == 4
    single = config(tmp_path, num_generations=4, num_generations_eval=1, per_device_eval_batch_size=7)
    assert single.per_device_eval_batch_size == 7


def test_only_an_eval_batch_that_somebody_wrote_is_worth_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TRL's default of 8 is rounded in silence, an 8 of the user's own is not; nor is a number given to a parser."""
    threes = {"num_generations": 3, "per_device_train_batch_size": 6}
    assert config(tmp_path, **threes).per_device_eval_batch_size == 6
    assert "whole groups" not in caplog.text
    assert config(tmp_path, **threes, per_device_eval_batch_size=8).per_device_eval_batch_size == 6
    assert caplog.text.count("whole groups") == 1
    parser = HfArgumentParser(GroupRelativeConfig)
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--num_generations", "3"]
    words += ["--per_device_train_batch_size", "6"]
    parser.parse_args_into_dataclasses(words)
    assert caplog.text.count("whole groups") == 1
    parser.parse_args_into_dataclasses([*words, "--per_device_eval_batch_size", "7"])
    assert caplog.text.count("whole groups") == 2


def test_best_model_is_chosen_by_reward_unless_told_otherwise(tmp_path: Path) -> None:
    fields = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    ours = config(tmp_path, **fields)
    assert (ours.metric_for_best_model, ours.greater_is_better) == ("reward", True)
    told = config(tmp_path, metric_for_best_model="loss", greater_is_better=False, **fields)
    assert (told.metric_for_best_model, told.greater_is_better) == ("loss", False)


def test_a_plain_trl_config_gets_our_defaults(tmp_path: Path) -> None:
    plain = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    settings = EngineSettings.of(plain)
    assert settings.max_tokens_per_micro_batch == AUTO_TOKENS_PER_MICRO_BATCH
    assert settings.skip_dead_groups
    assert EngineSettings.of(config(tmp_path, max_tokens_per_micro_batch=0)).max_tokens_per_micro_batch == 0


def test_words_of_trl_are_those_of_its_source() -> None:
    """Every word that TRL compares the setting with is allowed, and no other."""
    source = Path(grpo_trainer.__file__).read_text(encoding="utf-8")
    for name, allowed in TRL_CHOICES.items():
        compared = re.findall(rf"self\.{name} (?:==|!=|in|not in) (\[[^\]]*\]|\"\w+\")", source)
        words = {word for text in compared for word in re.findall(r'"(\w+)"', text)}
        assert words == {word for word in allowed if isinstance(word, str)}, name


@pytest.mark.parametrize(("value", "word"), [(True, "group"), (False, "none"), ("batch", "batch")])
def test_scale_rewards_takes_the_older_booleans(tmp_path: Path, value: object, word: str) -> None:
    assert config(tmp_path, scale_rewards=value).scale_rewards == word


def test_an_unknown_loss_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"loss_type='dr_grp' is not allowed.*Did you mean 'dr_grpo'"):
        config(tmp_path, loss_type="dr_grp")
