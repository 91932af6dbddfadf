"""What GroupRelativeTrainer adds on top of TRL, seen from a user's script."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from harness import ALL_EXTRAS, EXTRAS_OFF, Record, ScriptedRollouts, build, prompt_rows, scripted_reward, settings
from tiny import tiny_model, tiny_tokenizer
from trl import GRPOConfig, GRPOTrainer

from trl_grpo_ext import GroupRelativeConfig, GroupRelativeTrainer
from trl_grpo_ext.errors import DataError, RewardError
from trl_grpo_ext.rollout.attention import UnsupportedModelError
from trl_grpo_ext.rollout.transformers_engine import TransformersRolloutEngine


def ours(tmp_path: Path, **fields: Any) -> GroupRelativeConfig:
    """Return a config whose rewards run in this process: a worker would import this module, and torch with it."""
    return GroupRelativeConfig(output_dir=str(tmp_path), reward_isolation="never", **settings(**fields))


def make(tmp_path: Path, *, rows: list[dict[str, Any]] | None = None, **fields: Any) -> GroupRelativeTrainer:
    trainer, _ = build(True, tmp_path, model=tiny_model(), rows=rows or prompt_rows(8), **{**ALL_EXTRAS, **fields})
    return trainer


def test_a_trl_script_runs_with_one_import_changed(tmp_path: Path) -> None:
    """Positional arguments, a plain GRPOConfig, an iterable data set: as TRL takes them."""

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 7) for ids in completion_ids]

    stream = IterableDataset.from_generator(lambda: iter(prompt_rows(16)))
    trainer = GroupRelativeTrainer(
        tiny_model(),
        reward,
        GRPOConfig(output_dir=str(tmp_path), **settings()),
        stream,
        processing_class=tiny_tokenizer(),
    )
    assert isinstance(trainer, GRPOTrainer)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert trainer.state.global_step == 2
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_too_little_data_is_an_error_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 prompts, but one step needs 2 different ones"):
        GroupRelativeTrainer(
            "no/such-model",
            scripted_reward,
            ours(tmp_path),
            Dataset.from_list(prompt_rows(1)),
        )


def test_a_stream_that_runs_dry_before_the_first_step_is_an_error(tmp_path: Path) -> None:
    stream = IterableDataset.from_generator(lambda: iter(prompt_rows(1)))
    trainer = GroupRelativeTrainer(
        tiny_model(),
        scripted_reward,
        ours(tmp_path),
        stream,
        processing_class=tiny_tokenizer(),
    )
    with pytest.raises(DataError, match="without one optimiser step"):
        trainer.train()


def test_rewards_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    trainer, record = build(
        True,
        tmp_path,
        model=tiny_model(),
        rows=prompt_rows(8),
        rollouts=ScriptedRollouts(),
        reward=[lambda prompts, **_: [1.0] * len(prompts), lambda prompts, **_: [2.0] * len(prompts)],
        max_steps=1,
    )
    trainer.train()
    assert record.logs[0]["rewards/<lambda>/mean"] == 1.0
    assert record.logs[0]["rewards/<lambda>_2/mean"] == 2.0


def test_bad_logging_of_a_reward_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def reward(prompts: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        log_extra("short", [1])
        log_extra("mixed", [1, "a"] * (len(prompts) // 2))
        log_extra("good", list(range(len(prompts))))
        log_metric("text", "high")
        log_metric("good_metric", 0.25)
        return [float(i) for i in range(len(prompts))]

    trainer, record = build(
        True,
        tmp_path,
        model=tiny_model(),
        rows=prompt_rows(8),
        rollouts=ScriptedRollouts(),
        reward=reward,
        log_completions=True,
    )
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert list(trainer._logs["extra"]) == ["good"]
    assert record.logs[0]["good_metric"] == 0.25
    assert "text" not in record.logs[0]
    assert sum("log_metric('text')" in message for message in caplog.messages) == 1


def test_rows_per_generate_call_do_not_grow_with_accumulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_per_call: list[int] = []
    original = GRPOTrainer._generate_single_turn

    def spy(self: Any, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        rows_per_call.append(len(prompt_ids))
        return original(self, prompt_ids, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", spy)
    for accumulation in (1, 4):
        rows_per_call.clear()
        trainer = make(
            tmp_path,
            gradient_accumulation_steps=accumulation,
            max_tokens_per_generation_batch=130,
            rollout_engine="trl",
            max_steps=1,
        )
        trainer.train()
        assert max(rows_per_call) == 4  # one group of at most 24 + 8 tokens a row
        assert sum(rows_per_call) == 4 * accumulation


def test_generation_in_pieces_answers_every_prompt_in_order(tmp_path: Path) -> None:
    """Greedy decoding does not depend on the pieces."""
    texts = []
    for engine, budget in (("trl", 0), ("trl", 60), ("auto", 60)):
        greedy = {"generation_kwargs": {"do_sample": False}, "rollout_engine": engine}
        trainer = make(tmp_path, max_tokens_per_generation_batch=budget, **greedy)
        trainer.model.eval()
        ids = [tiny_tokenizer()(row["prompt"])["input_ids"] for row in prompt_rows(6) for _ in range(2)]
        texts.append(trainer._generate_single_turn(ids, None, {}, 2)[0])
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == 12


def test_evaluation_takes_any_batch_size_and_leaves_the_random_state(tmp_path: Path) -> None:
    args = ours(tmp_path, per_device_eval_batch_size=6, num_generations=4, max_steps=1)
    trainer = GroupRelativeTrainer(
        tiny_model(),
        scripted_reward,
        args,
        Dataset.from_list(prompt_rows(8)),
        eval_dataset=Dataset.from_list(prompt_rows(5)),
        processing_class=tiny_tokenizer(),
    )
    state = torch.get_rng_state()
    metrics = trainer.evaluate()
    assert torch.equal(state, torch.get_rng_state())
    assert 0.0 <= metrics["eval_reward"] <= 1.5


def test_a_subclass_with_its_own_loss_keeps_trls_micro_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    class OwnLoss(GroupRelativeTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
            calls.append(len(inputs["prompt_ids"]))
            return super()._compute_loss(model, inputs)

    with caplog.at_level(logging.WARNING):
        trainer = OwnLoss(
            tiny_model(),
            scripted_reward,
            ours(tmp_path, max_steps=1),
            Dataset.from_list(prompt_rows(8)),
            processing_class=tiny_tokenizer(),
        )
    trainer.train()
    assert "OwnLoss overrides _compute_loss" in caplog.text
    assert calls == [4, 4]


def test_async_rewards_and_callbacks_work(tmp_path: Path) -> None:
    async def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    steps: list[int] = []

    class Steps(Record):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            steps.append(state.global_step)

    trainer = make(tmp_path, reward=reward, rollouts=ScriptedRollouts())
    trainer.add_callback(Steps())
    trainer.train()
    assert steps == [1, 2]


def test_extras_off_leaves_trls_path(tmp_path: Path) -> None:
    trainer = make(tmp_path, **EXTRAS_OFF)
    trainer.train()
    assert not any(name.startswith(("window/", "dead_groups/")) for log in trainer.state.log_history for name in log)


def test_a_reward_that_abstains_is_not_compared_on_another_scale(tmp_path: Path) -> None:
    """Group of 4, rewards 1, 1, 0.5 and one abstention under a second reward that scores all alike: fill is 5/6."""

    def sometimes(prompts: list[str], **_: Any) -> list[float | None]:
        return [None, 1.0, 1.0, 0.5] * (len(prompts) // 4)

    def always(prompts: list[str], **_: Any) -> list[float]:
        return [2.0] * len(prompts)

    advantages = {}
    for mode in ("group_mean", "zero"):
        trainer, record = build(
            True,
            tmp_path,
            model=tiny_model(),
            rows=prompt_rows(8),
            rollouts=ScriptedRollouts(),
            reward=[sometimes, always],
            reward_abstention=mode,
            **ALL_EXTRAS,
            scale_rewards="none",
            max_steps=1,
        )
        trainer.train()
        advantages[mode] = list(trainer._logs["advantages"])[:4]
        assert record.logs[0]["rewards/sometimes/mean"] == pytest.approx(2.5 / 3)  # of what the function gave
    assert advantages["group_mean"] == pytest.approx([0.0, 1 / 6, 1 / 6, -1 / 3])
    assert advantages["zero"] == pytest.approx([-0.625, 0.375, 0.375, -0.125])  # as if it had been given 0


def test_a_failing_reward_costs_its_sample_and_too_many_failures_stop_the_run(tmp_path: Path) -> None:
    def fragile(prompts: list[str], completion_ids: list[list[int]], limit: float = 0.0, **_: Any) -> list[float]:
        return [1 / (len(ids) > 3) for ids in completion_ids]

    trainer, record = build(
        True,
        tmp_path,
        model=tiny_model(),
        rows=prompt_rows(8),
        rollouts=ScriptedRollouts(),
        reward=fragile,
        reward_max_failure_rate=1.0,
        **ALL_EXTRAS,
    )
    trainer.train()
    assert trainer.state.global_step == 2
    assert any(log.get("rewards/fragile/failed/exception", 0) > 0 for log in record.logs), record.logs[0]
    strict = make(tmp_path, rollouts=ScriptedRollouts(), reward=fragile, reward_max_failure_rate=0.0)
    with pytest.raises(RewardError, match="division by zero"):
        strict.train()


def test_one_infinite_reward_leaves_finite_weights(tmp_path: Path) -> None:
    def infinite(prompts: list[str], **_: Any) -> list[float]:
        return [float("inf"), 1.0, 0.0, 1.0] * (len(prompts) // 4)

    trainer = make(
        tmp_path,
        rollouts=ScriptedRollouts(),
        reward=infinite,
        reward_max_failure_rate=0.5,
        scale_rewards="none",
    )
    trainer.train()
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_an_attention_the_engine_does_not_know_falls_back_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise UnsupportedModelError("a keyword it does not compute")

    monkeypatch.setattr(TransformersRolloutEngine, "generate", unknown)
    trainer = make(tmp_path, rollout_engine="auto")
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.state.global_step == 2
    assert sum("a keyword it does not compute" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_on_packed_rows_leaves_the_fast_decoder_its_model(
    checkpointing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one room leaves on the model (hooks, a patched forward) must not make the other room step aside."""
    decoders = []
    generate = TransformersRolloutEngine.generate

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = generate(self, *args, **kwargs)
        decoders.append(batch.stats.decoder)
        return batch

    monkeypatch.setattr(TransformersRolloutEngine, "generate", watched)
    trainer = make(
        tmp_path, rollout_engine="auto", max_completion_length=20, max_steps=3, gradient_checkpointing=checkpointing
    )
    trainer.train()
    assert trainer._packed_forward_is_on, "packed rows were trained on"
    assert decoders == ["packed"] * 3
