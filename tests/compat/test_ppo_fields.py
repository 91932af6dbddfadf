"""Every setting that a PPO script of either era may name is known, and does what the table says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments
from trl import ModelConfig, ScriptArguments

from trl_grpo_ext.compat.config import PPOConfig
from trl_grpo_ext.compat.fields import (
    CLASSIC_FIELDS,
    CLASSIC_ONLY,
    OUTPUT_ONLY,
    REMOVED_ARGUMENTS,
    TRANSLATED_ARGUMENTS,
    V2_FIELDS,
    Era,
    disposition,
)
from trl_grpo_ext.compat.translate import translate
from trl_grpo_ext.errors import ConfigurationError

GOLDEN = Path(__file__).parent / "golden"
V2_NAMES = json.loads((GOLDEN / "ppo_1_12.json").read_text())["fields"]
# era -> release -> the fields of its PPOConfig (or PPOv2Config), as golden/make_fields.py read them from the wheels.
RELEASES = json.loads((GOLDEN / "fields_by_release.json").read_text())
CURRENT = {f.name for f in dataclasses.fields(TrainingArguments)}
OURS = {f.name: f for f in dataclasses.fields(PPOConfig)}


def config(**fields: Any) -> PPOConfig:
    return PPOConfig(**{"use_cpu": True, "bf16": False, **fields})


@pytest.mark.parametrize(("era", "release"), [(era, release) for era in RELEASES for release in RELEASES[era]])
def test_every_field_of_every_release_has_a_disposition(era: Era, release: str) -> None:
    names = RELEASES[era][release]
    assert [name for name in names if not (disposition(name, era) or name in CURRENT)] == []
    assert [name for name in names if name not in OURS and name not in OUTPUT_ONLY] == []


def test_the_arguments_that_trl_1_12_inherited_are_known_too() -> None:
    assert {*RELEASES["v2"]["1.12.0"]} <= {*V2_NAMES}
    assert [name for name in V2_NAMES if not (disposition(name, "v2") or name in CURRENT)] == []
    assert [name for name in V2_NAMES if name not in OURS and name not in OUTPUT_ONLY] == []


def other_value(name: str) -> Any:
    """Return a legal value of a field that is not its default."""
    default = OURS[name].default
    special = {"kl_penalty": "abs", "kl_estimator": "k3", "total_episodes": 80, "stop_token_id": 5, "batch_size": 16}
    if name in special:
        return special[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default * 2
    return {"score_clip": 2.0, "missing_eos_penalty": 1.0, "forward_batch_size": 4, "mini_batch_size": 4}.get(name, "x")


def trained_with(era: Era, **fields: Any) -> Any:
    """Return everything of a translation that reaches the trainer, and its ``ignored``."""
    sizes = {"batch_size": 8, "mini_batch_size": 8} if era == "classic" else {"response_length": 10}
    made = config(output_dir="o", **{**sizes, **fields})
    made.settle(era)
    result = translate(made, num_rows=32)
    return (result.args.to_dict(), result.settings, result.plan, result.notes), result.ignored


@pytest.mark.parametrize("era", ["v2", "classic"])
def test_fields_without_effect_change_nothing_and_the_critics_are_named(era: Era) -> None:
    """All of them at once: the settings that train are those of a call without any."""
    named = {name: disposition(name, era) for name in OURS if name not in CURRENT}
    quiet = [name for name, kind in named.items() if kind == "quiet" and name not in REMOVED_ARGUMENTS]
    critic = [name for name, kind in named.items() if kind == "critic"]
    assert "whiten_rewards" in quiet
    assert len(critic) == 4
    values = {name: other_value(name) for name in [*quiet, *critic] if not name.endswith("_kwargs")}
    values.pop("stop_token", None)  # excludes stop_token_id
    trained, ignored = trained_with(era, **values)
    assert trained == trained_with(era)[0]
    assert {text.split("=")[0] for text in ignored} == {*critic}


# Read by the script or by the loop, not by the translation; stop_token="eos" is what sampling does anyway.
READ_ELSEWHERE = {
    "exp_name", "dataset_num_proc", "sft_model_path", "reward_model_path", "base_model", "stop_token", "task_name",
    "model_name", "query_dataset", "reward_model", "push_to_hub_if_best_kwargs", "steps", "early_stopping", "target_kl",
    "compare_steps", "ratio_threshold", "use_score_scaling", "use_score_norm", "score_clip", "forward_batch_size",
    "tracker_kwargs", "accelerator_kwargs", "project_kwargs", "log_with", "remove_unused_columns",
}  # fmt: skip


@pytest.mark.parametrize(
    ("era", "name"),
    [(era, n) for era in ("v2", "classic") for n in OURS if disposition(n, era) in ("same", "translate")
     and n not in READ_ELSEWHERE and n not in CURRENT and n not in REMOVED_ARGUMENTS],
)  # fmt: skip
def test_a_field_with_an_effect_reaches_the_trainer(era: Era, name: str) -> None:
    assert trained_with(era, **{name: other_value(name)})[0] != trained_with(era)[0]


def test_no_field_of_ours_lacks_a_disposition() -> None:
    new = {"num_generations", "kl_in", "ungrouped", "grpo_kwargs"}
    for name in OURS:
        assert name in new or name in CURRENT or disposition(name, "v2") or disposition(name, "classic"), name


def test_the_table_holds_no_name_that_is_not_a_field() -> None:
    assert {*V2_FIELDS, *CLASSIC_FIELDS} - OURS.keys() == OUTPUT_ONLY
    assert TRANSLATED_ARGUMENTS.keys() <= CURRENT
    assert REMOVED_ARGUMENTS.keys() <= OURS.keys()
    assert not REMOVED_ARGUMENTS.keys() & CURRENT, "transformers has it (again); take it out of the table"
    assert {new for new in REMOVED_ARGUMENTS.values() if new} <= CURRENT


def test_what_an_era_did_not_know_is_quiet_and_what_none_knew_is_unknown() -> None:
    assert disposition("num_ppo_epochs", "classic") == "quiet"
    assert disposition("ppo_epochs", "v2") == "quiet"
    assert disposition("num_ppo_epoch", "v2") is None
    assert disposition("non_eos_penalty", "classic") == "refuse"


def test_every_field_can_be_set_and_read_back() -> None:
    values: dict[str, Any] = {}
    for name in [*V2_FIELDS, *CLASSIC_FIELDS]:
        if name in OURS and disposition(name, "v2") != "refuse" and name not in ("stop_token_id", "kl_in"):
            values[name] = OURS[name].default
    made = config(**{name: value for name, value in values.items() if value is not None})
    assert made.response_length == 53
    assert made.init_kl_coef == 0.2


@pytest.mark.parametrize("name", sorted(OUTPUT_ONLY))
def test_outputs_that_scripts_pass_in_are_dropped(name: str) -> None:
    assert getattr(config(**{name: 3}), name, None) == getattr(config(), name, None) != 3


def test_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"PPOConfig has no field 'num_ppo_epoch'\. Did you mean 'num_ppo_epochs'\?"):
        config(num_ppo_epoch=3)


@pytest.mark.parametrize(
    ("old", "value", "new", "expected"),
    [
        ("evaluation_strategy", "steps", "eval_strategy", "steps"),
        ("warmup_ratio", 0.1, "warmup_steps", 0.1),
        ("per_gpu_train_batch_size", 3, "per_device_train_batch_size", 3),
        ("per_gpu_eval_batch_size", 5, "per_device_eval_batch_size", 5),
        ("no_cuda", True, "use_cpu", True),
        ("adafactor", True, "optim", "adafactor"),
        ("push_to_hub_token", "abc", "hub_token", "abc"),
        ("push_to_hub_model_id", "a/b", "hub_model_id", "a/b"),
    ],
)
def test_arguments_that_transformers_dropped_still_set_what_they_set(
    old: str, value: Any, new: str, expected: Any
) -> None:
    fields = {old: value} if old == "no_cuda" else {old: value, "use_cpu": True}
    assert getattr(PPOConfig(bf16=False, **fields), new) == expected


@pytest.mark.parametrize("name", sorted(name for name, new in REMOVED_ARGUMENTS.items() if new is None))
def test_arguments_with_nothing_left_to_set_are_quiet(name: str) -> None:
    value = True if OURS[name].type in (bool, "bool") else "x"
    assert getattr(config(**{name: value}), name) == value


def test_a_launch_script_of_old_flags_parses() -> None:
    line = (
        "--dataset_name d --output_dir o --num_ppo_epochs 1 --num_mini_batches 1 --learning_rate 3e-6 "
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --total_episodes 100 "
        "--model_name_or_path m --sft_model_path s --reward_model_path r --local_rollout_forward_batch_size 1 "
        "--missing_eos_penalty 1.0 --stop_token eos --eval_strategy steps --eval_steps 100 --overwrite_output_dir "
        "--warmup_ratio 0.1 --use_cpu --no_cuda"
    )
    script, parsed, model = HfArgumentParser((ScriptArguments, PPOConfig, ModelConfig)).parse_args_into_dataclasses(
        line.split()
    )
    assert (parsed.total_episodes, parsed.missing_eos_penalty, parsed.stop_token) == (100, 1.0, "eos")
    assert (parsed.era, parsed.learning_rate, parsed.warmup_steps) == ("v2", 3e-6, 0.1)
    assert script.dataset_name == "d"
    assert model.model_name_or_path == "m"


def test_a_dataclass_on_top_of_the_config_works() -> None:
    @dataclasses.dataclass
    class Mine(PPOConfig):
        extra: int = 7

    made = Mine(use_cpu=True, bf16=False, extra=8, response_length=11)
    assert (made.extra, made.response_length, made.era) == (8, 11, "v2")


@pytest.mark.parametrize(
    ("fields", "era"),
    [
        ({}, None),
        ({"seed": 3, "learning_rate": 1e-5, "cliprange": 0.1}, None),
        ({"response_length": 5}, "v2"),
        ({"output_dir": "o", "batch_size": 1, "mini_batch_size": 1}, None),
        ({"batch_size": 16, "mini_batch_size": 4}, "classic"),
        ({"output_dir": "o", "ppo_epochs": 2}, "classic"),
        ({"model_name": "lvwerra/gpt2-imdb", "log_with": "wandb"}, "classic"),
    ],
)
def test_fields_tell_the_era_where_they_can(fields: dict[str, Any], era: str | None) -> None:
    assert config(**fields).era_hint == era


def test_defaults_follow_the_era_and_what_the_user_set_stays() -> None:
    made = PPOConfig(use_cpu=True, learning_rate=3e-6)
    assert (made.era, made.learning_rate, made.seed, made.batch_size, made.bf16) == ("v2", 3e-6, 42, None, True)
    made.settle("classic")
    assert (made.learning_rate, made.seed, made.batch_size, made.mini_batch_size) == (3e-6, 0, 128, 128)
    assert (made.bf16, made.gradient_checkpointing) == (False, False)
    assert made.total_ppo_epochs == 157  # 20000 / 128 rounded up
    later = PPOConfig(use_cpu=True)
    later.seed = 7
    later.settle("classic")
    assert later.seed == 7


def test_classic_forward_batch_size_is_the_mini_batch() -> None:
    assert config(batch_size=16, forward_batch_size=4).mini_batch_size == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop_token": "eos", "stop_token_id": 3}, "Both stop_token='eos' and stop_token_id=3 are set. Keep one."),
        ({"stop_token": "end"}, "stop_token='end' is unknown. Use 'eos' or None"),
        ({"kl_estimator": "k2"}, "kl_estimator='k2' is not one of 'k1', 'k3'"),
        ({"kl_penalty": "ful"}, "kl_penalty='ful' is not one of 'kl', 'abs', 'mse', 'full'. Did you mean 'full'?"),
        ({"missing_eos_penalty": -1.0}, "missing_eos_penalty=-1.0 must not be negative"),
        ({"non_eos_penalty": True}, "Use missing_eos_penalty"),
        ({"penalty_reward_value": -1.0}, "Use missing_eos_penalty"),
        ({"warmup_ratio": 2.0}, "warmup_ratio=2.0 must be in [0, 1)"),
        ({"kl_in": "los"}, "kl_in='los' is not one of 'reward', 'loss'. Did you mean 'loss'?"),
    ],
)
def test_refused_settings_name_the_replacement(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        config(**fields)
    assert message in str(error.value)


def test_classic_only_names_are_really_only_classic() -> None:
    assert {"ppo_epochs", "init_kl_coef", "steps", "adap_kl_ctrl", "model_name"} <= CLASSIC_ONLY
    assert not CLASSIC_ONLY & {*V2_NAMES}
