"""What a PPOConfig becomes: field by field, for both eras."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from trl_grpo_ext import GroupRelativeConfig
from trl_grpo_ext.compat.config import PPOConfig
from trl_grpo_ext.compat.translate import PPOSettings, translate
from trl_grpo_ext.errors import ConfigurationError


def v2(directory: Path, **fields: Any) -> PPOConfig:
    config = PPOConfig(output_dir=str(directory), use_cpu=True, bf16=False, **fields)
    config.settle("v2")
    return config


def classic(**fields: Any) -> PPOConfig:
    config = PPOConfig(use_cpu=True, **fields)
    config.settle("classic")
    return config


# PPO field, value -> field of GroupRelativeConfig, value. 8 completions per update, 4 epochs x 1 mini-batch.
V2_ROWS: list[tuple[dict[str, Any], str, Any]] = [
    ({"response_length": 17}, "max_completion_length", 17),
    ({"temperature": 0.9}, "temperature", 0.9),
    ({}, "temperature", 0.7),
    ({"num_ppo_epochs": 3}, "num_iterations", 3),
    ({"cliprange": 0.3}, "epsilon", 0.3),
    ({}, "beta", 0.0),
    ({"kl_in": "loss", "kl_coef": 0.07}, "beta", 0.07),
    ({}, "loss_type", "bnpo"),
    ({}, "scale_rewards", "batch"),
    ({}, "disable_dropout", True),
    ({}, "remove_unused_columns", False),
    ({}, "num_generations", 8),
    ({"num_generations": 4}, "num_generations", 4),
    ({"ds3_gather_for_generation": False}, "ds3_gather_for_generation", False),
    ({"total_episodes": 100}, "max_steps", 13 * 4),  # 100 / 8 rounded up, 4 optimiser steps each
    ({"total_episodes": 100, "num_mini_batches": 2}, "max_steps", 13 * 8),
    ({"max_steps": 7}, "max_steps", 7),
    ({"total_episodes": 100, "max_steps": 7}, "max_steps", 13 * 4),
    ({}, "max_steps", -1),
    ({}, "learning_rate", 3e-6),
    ({"learning_rate": 1e-4}, "learning_rate", 1e-4),
    ({}, "gradient_checkpointing", True),
    ({"gradient_checkpointing": False}, "gradient_checkpointing", False),
    ({}, "logging_steps", 4),  # PPO logged every update
    ({"logging_steps": 5}, "logging_steps", 20),
    ({"save_steps": 10}, "save_steps", 40),
    ({}, "save_steps", 2000),
    ({"save_steps": 0.25}, "save_steps", 0.25),
    ({"warmup_steps": 3}, "warmup_steps", 12),
    ({"warmup_ratio": 0.1}, "warmup_steps", 0.1),
    ({"eval_strategy": "steps", "eval_steps": 5}, "eval_strategy", "no"),
    ({"evaluation_strategy": "steps", "eval_steps": 5}, "eval_strategy", "no"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size", False),
    ({"load_best_model_at_end": True, "save_strategy": "no"}, "load_best_model_at_end", False),
    ({"max_grad_norm": 0.5}, "max_grad_norm", 0.5),
    ({}, "max_grad_norm", 1.0),
    ({"seed": 5}, "seed", 5),
    ({"run_name": "mine"}, "run_name", "mine"),
    ({"lr_scheduler_type": "cosine"}, "lr_scheduler_type", "cosine"),
    ({"adam_beta2": 0.95}, "adam_beta2", 0.95),
    ({"grpo_kwargs": {"loss_type": "dapo"}}, "loss_type", "dapo"),
]


@pytest.mark.parametrize(("fields", "name", "value"), V2_ROWS, ids=[f"{r[1]}-{r[0]}" for r in V2_ROWS])
def test_v2_fields(tmp_path: Path, fields: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(translate(v2(tmp_path, **fields)).args, name) == value


CLASSIC_ROWS: list[tuple[dict[str, Any], str, Any]] = [
    ({}, "per_device_train_batch_size", 8),
    ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps", 2),
    ({}, "steps_per_generation", 4),
    ({"ppo_epochs": 3}, "num_iterations", 3),
    ({}, "num_generations", 8),
    ({"cliprange": 0.1}, "epsilon", 0.1),
    ({}, "max_grad_norm", 0.0),
    ({"max_grad_norm": 0.5}, "max_grad_norm", 0.5),
    ({}, "learning_rate", 1.41e-5),
    ({}, "lr_scheduler_type", "constant"),
    ({}, "seed", 0),
    ({}, "temperature", 1.0),
    ({}, "beta", 0.0),
    ({}, "gradient_checkpointing", False),
    ({}, "bf16", False),
    ({}, "report_to", []),
    ({"log_with": "tensorboard"}, "report_to", ["tensorboard"]),
    ({"tracker_project_name": "p"}, "project", "p"),
    ({"tracker_kwargs": {"wandb": {"name": "run"}}}, "run_name", "run"),
    ({"optimize_cuda_cache": True}, "torch_empty_cache_steps", 1),
    ({"optimize_device_cache": True}, "torch_empty_cache_steps", 1),
    ({"accelerator_kwargs": {"mixed_precision": "bf16"}}, "bf16", True),
    ({"accelerator_kwargs": {"cpu": True}}, "use_cpu", True),
]


@pytest.mark.parametrize(("fields", "name", "value"), CLASSIC_ROWS, ids=[f"{r[1]}-{r[0]}" for r in CLASSIC_ROWS])
def test_classic_fields(fields: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(translate(classic(batch_size=32, mini_batch_size=8, **fields)).args, name) == value


def test_v2_settings_beyond_grpo(tmp_path: Path) -> None:
    fields = {
        "kl_coef": 0.1,
        "kl_estimator": "k3",
        "missing_eos_penalty": 1.0,
        "stop_token_id": 5,
        "local_rollout_forward_batch_size": 3,
        "num_sample_generations": 2,
        "ref_adapter_name": "old",
        "model_adapter_name": "new",
    }
    assert translate(v2(tmp_path, **fields)).settings == PPOSettings(
        kl_in_reward=True,
        kl_coef=0.1,
        kl_estimator="k3",
        missing_eos_penalty=1.0,
        stop_token_id=5,
        rollout_rows=3,
        num_sample_generations=2,
        ref_adapter_name="old",
        model_adapter_name="new",
    )


@pytest.mark.parametrize(("penalty", "estimator"), [("kl", "k1"), ("abs", "abs"), ("mse", "k2"), ("full", "k1")])
def test_classic_penalties(penalty: str, estimator: str) -> None:
    result = translate(classic(batch_size=8, mini_batch_size=8, kl_penalty=penalty, target=3.0, horizon=50))
    assert result.settings.kl_estimator == estimator
    assert (result.settings.kl_coef, result.settings.kl_target, result.settings.kl_horizon) == (0.2, 3.0, 50)
    assert any("kl_penalty='full'" in note for note in result.notes) is (penalty == "full")


def test_a_fixed_classic_weight_has_no_target() -> None:
    assert translate(classic(batch_size=8, mini_batch_size=8, adap_kl_ctrl=False)).settings.kl_target is None


def test_outputs_are_written_where_ppo_wrote_them(tmp_path: Path) -> None:
    config = v2(
        tmp_path,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        num_mini_batches=2,
        total_episodes=40,
        batch_size=1,  # an input of the other era: no effect
        mini_batch_size=1,
    )
    translate(config, world_size=2)
    assert (config.batch_size, config.mini_batch_size, config.micro_batch_size) == (32, 16, 8)
    assert (config.local_batch_size, config.local_mini_batch_size, config.num_total_batches) == (16, 8, 2)
    assert config.num_updates == 2
    old = classic(batch_size=16, mini_batch_size=4, gradient_accumulation_steps=2, steps=100)
    translate(old, world_size=2)
    assert (old.backward_batch_size, old.global_backward_batch_size, old.global_batch_size) == (8, 16, 32)
    assert old.total_ppo_epochs == 4


def test_the_translated_settings_answer_for_the_old_names(tmp_path: Path) -> None:
    config = v2(tmp_path, response_length=9)
    args = translate(config).args
    assert isinstance(args, GroupRelativeConfig)
    assert args.response_length == 9
    assert args.per_device_train_batch_size == 8
    assert args.ppo_args is config
    with pytest.raises(AttributeError):
        args.no_such_setting  # noqa: B018
    copied = pickle.loads(pickle.dumps(args))
    assert copied.response_length == 9
    assert "response_length" not in args.to_dict()


def test_without_total_episodes_the_report_says_what_an_epoch_costs(tmp_path: Path) -> None:
    note = " ".join(translate(v2(tmp_path), num_rows=100).notes)
    assert "100 prompts is visited 3 times with 8 responses each" in note
    assert "total_episodes=300 keeps PPO's number" in note


def test_assignments_after_construction_count(tmp_path: Path) -> None:
    config = v2(tmp_path)
    config.learning_rate = 5e-4
    config.adam_beta1 = 0.8
    config.gradient_checkpointing = False
    args = translate(config).args
    assert (args.learning_rate, args.adam_beta1, args.gradient_checkpointing) == (5e-4, 0.8, False)


def test_critic_settings_are_listed_when_changed(tmp_path: Path) -> None:
    assert translate(v2(tmp_path)).ignored == ()
    result = translate(v2(tmp_path, vf_coef=0.5, lam=0.9, gamma=0.99))
    assert result.ignored == ("vf_coef", "lam", "gamma=0.99 (rewards are not discounted)")


def test_unknown_extras_name_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"grpo_kwargs has 'epsilonn'.*Did you mean 'epsilon'"):
        translate(v2(tmp_path, grpo_kwargs={"epsilonn": 0.1}))
    with pytest.raises(ConfigurationError, match=r"accelerator_kwargs has 'mixed'; supported are mixed_precision"):
        translate(classic(batch_size=8, mini_batch_size=8, accelerator_kwargs={"mixed": "bf16"}))


def test_trackers_get_their_directory_and_project(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TENSORBOARD_LOGGING_DIR", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # so that it is taken back at the end
        monkeypatch.delenv(name)
    config = classic(
        batch_size=8, mini_batch_size=8, log_with="wandb", tracker_project_name="p", project_kwargs={"logging_dir": "l"}
    )
    translate(config)
    assert (os.environ["TENSORBOARD_LOGGING_DIR"], os.environ["WANDB_PROJECT"]) == ("l", "p")


def test_json_dictionaries_from_the_command_line(tmp_path: Path) -> None:
    assert translate(v2(tmp_path, grpo_kwargs='{"loss_type": "dapo"}')).args.loss_type == "dapo"
