"""Sampling's log-probabilities instead of TRL's extra forward pass: the same numbers, one pass less, and when not."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import build, prompt_rows
from peft import LoraConfig
from tiny import save_tiny, tiny_model

from trl_grpo_ext import GroupRelativeConfig, GroupRelativeTrainer, sampled_logps
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.learner.window_step import WindowStepMixin
from trl_grpo_ext.rollout.transformers_engine import TransformersRolloutEngine

LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
# Two passes over each rollout: the second learns from a policy that has moved, so TRL needs the old ones.
TWICE = {"num_iterations": 2, "rollout_engine": "auto", "max_steps": 4, "max_completion_length": 8, "temperature": 0.8}


class Watch:
    """What each rollout of a trainer held, how often rows were scored for it, and whether the engine was asked."""

    def __init__(self, trainer: GroupRelativeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rollouts: list[dict[str, Any]] = []
        self.passes: list[int] = []
        self.asked: list[bool] = []
        inside: list[bool] = []
        rollout = trainer._generate_and_score_completions
        score, generate = WindowStepMixin._get_per_token_logps_and_entropies, TransformersRolloutEngine.generate

        def watch(inputs: Any) -> Any:
            self.passes.append(0)
            inside.append(True)
            self.rollouts.append(rollout(inputs))
            inside.clear()
            return self.rollouts[-1]

        def count(*args: Any, **kwargs: Any) -> Any:
            if inside:
                self.passes[-1] += 1
            return score(*args, **kwargs)

        def ask(*args: Any, return_logprobs: bool = False, **kwargs: Any) -> Any:
            self.asked.append(return_logprobs)
            return generate(*args, return_logprobs=return_logprobs, **kwargs)

        monkeypatch.setattr(trainer, "_generate_and_score_completions", watch)
        monkeypatch.setattr(WindowStepMixin, "_get_per_token_logps_and_entropies", count)
        monkeypatch.setattr(TransformersRolloutEngine, "generate", ask)


def trained(directory: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> tuple[Watch, Any, Any]:
    """Train two rollouts, two passes each; return what was seen, the run's record and the trainer."""
    call = {"model": None, "rows": prompt_rows(8), **TWICE, **fields}
    call["model"] = call["model"] or tiny_model()
    trainer, record = build(True, directory, **call)
    with monkeypatch.context() as patch:
        watch = Watch(trainer, patch)
        trainer.train()
    return watch, record, trainer


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("filters", [{}, {"top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}])
def test_they_are_those_of_the_forward_pass(
    lora: bool, filters: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32, 1e-5; the reference of a LoRA run is the same model without its adapter, and still gets its own pass."""
    fields: dict[str, Any] = {"peft_config": LORA, "beta": 0.1} if lora else {}
    runs = []
    for on in (False, True):
        torch.manual_seed(3)  # of the adapter
        runs.append(trained(tmp_path, monkeypatch, old_logps_from_rollout=on, **filters, **fields))
    (theirs, their_record, _), (ours, our_record, _) = runs
    assert len(ours.rollouts) == len(theirs.rollouts) == 2
    for mine, other in zip(ours.rollouts, theirs.rollouts, strict=True):
        assert torch.equal(mine["completion_ids"], other["completion_ids"])
        mask = other["completion_mask"].bool()
        gap = (mine["old_per_token_logps"] - other["old_per_token_logps"]).abs()[mask].max()
        assert gap < 1e-5
        if lora:
            assert torch.allclose(mine["ref_per_token_logps"], other["ref_per_token_logps"], atol=1e-5)
            assert (other["ref_per_token_logps"] - other["old_per_token_logps"])[mask].abs().max() > 1e-3
    assert (mine["old_per_token_logps"] != other["old_per_token_logps"]).any(), "another way to the same numbers"
    for name, weight in their_record.weights.items():
        assert torch.allclose(our_record.weights[name], weight, atol=1e-5), name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("lora", "extra"), [(False, 0), (True, 1)])
def test_the_pass_is_saved_from_the_second_rollout_on(
    packed: bool, lora: bool, extra: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: dict[str, Any] = {"peft_config": LORA, "beta": 0.1} if lora else {}
    for on, expected in ((False, [1, 1]), (True, [1, 0])):
        watch, _, _ = trained(tmp_path, monkeypatch, old_logps_from_rollout=on, shared_prefix_forward=packed, **fields)
        assert watch.passes == [number + extra for number in expected]
        assert watch.asked == [on, on]


def test_nothing_is_asked_for_where_trl_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, _, _ = trained(tmp_path, monkeypatch, num_iterations=1, old_logps_from_rollout=True)
    assert watch.asked == [False] * 4
    assert "old_per_token_logps" not in watch.rollouts[0]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"generation_kwargs": {"temperature": 0.5}}, "are sampled at temperature 0.5 and scored at 0.8"),
        ({"generation_kwargs": {"do_sample": False}}, "are sampled greedily and scored at 0.8"),
        ({"kind": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4}, "transformer.wpe holds absolute positions"),
    ],
)
def test_where_they_are_something_else_the_forward_pass_stays(
    fields: dict[str, Any],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if "kind" in fields:
        fields = {"model": save_tiny(tmp_path / "gpt2", **fields), "disable_dropout": True}
    with caplog.at_level(logging.WARNING, logger="trl_grpo_ext.sampled_logps"):
        watch, _, _ = trained(tmp_path, monkeypatch, old_logps_from_rollout=True, **fields)
    assert watch.asked == [False, False]
    assert watch.passes == [1, 1]
    assert [reason in message for message in caplog.messages if "Old log-prob" in message] == [True]


def test_numbers_that_differ_by_more_than_rounding_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    padded = sampled_logps._padded
    monkeypatch.setattr(sampled_logps, "_padded", lambda *args: padded(*args) + 0.01)
    with caplog.at_level(logging.WARNING, logger="trl_grpo_ext.sampled_logps"):
        watch, _, trainer = trained(tmp_path, monkeypatch, old_logps_from_rollout=True)
    assert trainer._sampled_logps_agree is False
    assert watch.asked == [True, False]
    assert watch.passes == [1, 1]
    assert "differ from it by 0.01 per token on average, more than rounding does (0.001)" in caplog.text


def test_a_ppo_run_in_chunks_takes_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KL penalty of the reward is worked out from them as well."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "compat"))
    from ppo_tools import v2_trainer

    columns = []
    for on in (False, True):
        torch.manual_seed(1)
        trainer = v2_trainer(
            tmp_path, given=False, ref_model=tiny_model(seed=1), num_ppo_epochs=2, num_generations=2, kl_coef=0.5,
            local_rollout_forward_batch_size=4, grpo_kwargs={"old_logps_from_rollout": on},
        )  # fmt: skip
        trainer.train()
        assert trainer._sampled_logps_agree is (True if on else None)
        columns.append(trainer._rewards_per_func[:, 1])
    assert torch.allclose(*columns, atol=1e-4)
    assert columns[0].abs().max() > 0.01


def test_it_needs_the_engine(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match='old_logps_from_rollout=True needs rollout_engine="auto"'):
        GroupRelativeConfig(str(tmp_path), use_cpu=True, old_logps_from_rollout=True, rollout_engine="trl")
