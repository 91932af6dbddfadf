"""A v2 PPO script on the group-relative trainer: rewards, reference, ids, batches, messages."""

from __future__ import annotations

import gc
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from ppo_tools import EOS, GivenResponses, Recorder, id_rows, reward_model, v2_config, v2_trainer
from tiny import save_tiny, tiny_model, tiny_tokenizer
from torch import nn
from trl import GRPOTrainer

from trl_grpo_ext import GroupRelativeConfig, GroupRelativeTrainer
from trl_grpo_ext.compat.ppo import AutoModelForCausalLMWithValueHead, PPOTrainer
from trl_grpo_ext.compat.sampling import left_padded, right_padded
from trl_grpo_ext.compat.tokens import count_positions_from_mask
from trl_grpo_ext.errors import ConfigurationError

LORA = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")


def ones(prompts: list[Any], **_: Any) -> list[float]:
    return [1.0] * len(prompts)


def logps(model: Any, prompt: list[int], response: list[int], temperature: float = 0.7) -> float:
    """Return the summed log-probability of a response, from the plain logits of one unpadded row."""
    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        rows = (model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature).log_softmax(-1)
    return rows.gather(1, torch.tensor(response).unsqueeze(1)).sum().item()


def batch_of(trainer: Any, group: int = 8) -> list[dict[str, Any]]:
    """Return one generation batch, every prompt ``group`` times."""
    rows = [trainer.train_dataset[i] for i in range(trainer.args.generation_batch_size // group)]
    return [row for row in rows for _ in range(group)]


# --- rewards


@pytest.mark.parametrize("given", ["model", "path"])
def test_kl_and_missing_end_are_part_of_the_reward(tmp_path: Path, given: str) -> None:
    reference = tiny_model(seed=1)
    path = save_tiny(tmp_path / "ref", seed=1)
    trainer = v2_trainer(
        tmp_path, ref_model=path if given == "path" else reference, kl_coef=0.3, missing_eos_penalty=1.5
    )
    rows, responses = batch_of(trainer), GivenResponses()([[0]] * 8)
    trainer.model.train()
    output = trainer._generate_and_score_completions(rows)
    policy, plain = tiny_model(seed=0), tiny_model(seed=1)
    for i, response in enumerate(responses):
        prompt = rows[i]["input_ids"]
        kl = logps(policy, prompt, response) - logps(plain, prompt, response)
        assert trainer._rewards_per_func[i, 1].item() == (0.0 if EOS in response else -1.5)
        assert trainer._rewards_per_func[i, 2].item() == pytest.approx(-0.3 * kl, abs=1e-4)
    total = trainer._rewards_per_func.sum(dim=1)
    assert torch.allclose(output["advantages"], (total - total.mean()) / (total.std() + 1e-4), atol=1e-5)
    assert trainer.reward_func_names == ["reward_model", "missing_eos_penalty", "kl_penalty"]


def test_equal_scores_with_different_kl_are_no_dead_group(tmp_path: Path) -> None:
    for coefficient, dead in ((0.1, False), (0.0, True)):
        trainer = v2_trainer(tmp_path, ref_model=tiny_model(seed=1), reward_funcs=ones, kl_coef=coefficient)
        trainer.model.train()
        output = trainer._generate_and_score_completions(batch_of(trainer))
        assert output["is_dead"].all().item() is dead
        assert bool((output["advantages"] != 0).any()) is not dead
        assert (trainer.ref_model is None) is dead, "without a weight there is no reference pass"


def test_the_copy_of_the_policy_is_taken_before_training(tmp_path: Path) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.add_(0.1)  # not what is on any disk
    trainer = v2_trainer(tmp_path, model=model)
    before = {name: p.clone() for name, p in trainer.ref_model.named_parameters()}
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in trainer.ref_model.named_parameters())
    assert not any(p.requires_grad for p in trainer.ref_model.parameters())
    assert any(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())


def test_the_classifier_reads_ids_up_to_the_end(tmp_path: Path) -> None:
    """What the reward model sees is prompt and response without padding, EOS included."""
    trainer = v2_trainer(tmp_path, kl_coef=0.0)
    trainer.model.train()
    rows, responses = batch_of(trainer), GivenResponses()([[0]] * 8)
    trainer._generate_and_score_completions(rows)
    classifier = reward_model()
    for i, response in enumerate(responses):
        ids = torch.tensor([[*rows[i]["input_ids"], *response]])
        with torch.no_grad():
            score = classifier.score(classifier.model(ids).last_hidden_state)[0, -1, 0].item()
        assert trainer._rewards_per_func[i, 0].item() == pytest.approx(score, abs=1e-5)


class PlainReward(nn.Module):
    """The old contract and nothing more: no config, no embedding getter."""

    base_model_prefix = "body"

    def __init__(self) -> None:
        super().__init__()
        inner = reward_model()
        self.body, self.score = inner.model, inner.score


@pytest.mark.parametrize("form", ["path", "module", "function", "list"])
def test_rewards_come_in_every_form(tmp_path: Path, form: str) -> None:
    classifier = reward_model()
    classifier.save_pretrained(tmp_path / "rm")
    reward = {
        "path": str(tmp_path / "rm"),
        "module": PlainReward(),
        "function": ones,
        "list": [ones, reward_model()],
    }[form]
    trainer = v2_trainer(tmp_path, reward_model=reward, kl_coef=0.0)
    trainer.model.train()
    trainer._generate_and_score_completions(batch_of(trainer))
    reference = v2_trainer(tmp_path, kl_coef=0.0)
    reference.model.train()
    reference._generate_and_score_completions(batch_of(reference))
    if form in ("path", "module"):
        assert torch.allclose(trainer._rewards_per_func, reference._rewards_per_func, atol=1e-6)
    else:
        assert (trainer._rewards_per_func[:, 0] == 1.0).all()
    if form == "list":
        assert torch.allclose(trainer._rewards_per_func[:, 1:], reference._rewards_per_func, atol=1e-6)


def test_with_a_processing_class_the_reward_model_reads_text(tmp_path: Path) -> None:
    trainer = PPOTrainer(
        args=v2_config(tmp_path, kl_coef=0.0),
        model=tiny_model(),
        reward_model=reward_model(),
        train_dataset=id_rows(),
        processing_class=tiny_tokenizer(),
        reward_processing_classes=tiny_tokenizer(),
    )
    assert isinstance(trainer.reward_funcs[0], nn.Module)
    assert not trainer._ppo.token_rewards
    trainer.train()
    assert trainer.state.global_step == 2


class NoScore(nn.Module):
    base_model_prefix = "model"

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_model": NoScore()}, "NoScore has no attribute 'score'.*or pass a function as reward_funcs"),
        ({"reward_model": nn.Linear(1, 1)}, "Linear has no attribute 'base_model_prefix'"),
        (
            {"reward_model": reward_model(vocab_size=100)},
            r"embedding of 100 rows, but the largest token id .* is 3\d\d",
        ),
        ({"ref_model": tiny_model(vocab_size=400)}, "vocabulary of 400 rows, the policy of 384"),
        ({"train_dataset": None}, "`train_dataset` is required"),
        ({"model": None}, "No model: pass the policy as model"),
        ({"per_device_train_batch_size": 1}, r"the update holds B=1 sample \(1 x 1 x 1\)"),
        ({"num_mini_batches": 3}, "num_mini_batches=3 does not cut"),
        ({"num_generations": 3}, "num_generations=3 does not divide the 8 completions"),
        ({"train_dataset": Dataset.from_dict({"text": ["a"]})}, r"needs a column prompt, query or input_ids; found"),
    ],
)
def test_set_up_errors_teach(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        v2_trainer(tmp_path, **changes)


def test_a_classifier_with_two_labels_is_refused(tmp_path: Path) -> None:
    two = reward_model()
    two.score = nn.Linear(32, 2, bias=False)
    with pytest.raises(ConfigurationError, match="expects one score, got 2 labels; load with num_labels=1"):
        v2_trainer(tmp_path, reward_model=two)


def test_the_reference_may_not_be_the_policy(tmp_path: Path) -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="`model` and `ref_model` cannot be the same object"):
        v2_trainer(tmp_path, model=model, ref_model=model)


def test_without_a_reward_only_train_complains(tmp_path: Path) -> None:
    trainer = v2_trainer(tmp_path, reward_model=None)
    with pytest.raises(ConfigurationError, match="no reward source: pass reward_model or reward_funcs, or call step"):
        trainer.train()


# --- reference and adapters


def test_an_adapter_is_measured_against_the_base_model(tmp_path: Path) -> None:
    model = get_peft_model(tiny_model(), LORA)
    with torch.no_grad():  # a trained adapter: GRPO would take a copy of it as reference
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.fill_(0.5)
    trainer = v2_trainer(tmp_path, model=model, kl_coef=1.0)
    trainer.model.train()
    rows, responses = batch_of(trainer), GivenResponses()([[0]] * 8)
    trainer._generate_and_score_completions(rows)
    base = tiny_model()
    with model.disable_adapter():
        assert torch.equal(model(torch.tensor([[5, 6]])).logits, base(torch.tensor([[5, 6]])).logits)
    for i in (0, 5):
        prompt = rows[i]["input_ids"]
        kl = logps(model.eval(), prompt, responses[i]) - logps(base, prompt, responses[i])
        assert abs(kl) > 0.01
        assert trainer._rewards_per_func[i, 1].item() == pytest.approx(-kl, abs=1e-4)
    assert trainer.ref_model is None


def test_a_named_adapter_can_be_the_reference(tmp_path: Path) -> None:
    model = get_peft_model(tiny_model(), LORA)
    model.add_adapter("old", LORA)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B.old" in name:
                p.fill_(0.5)
    trainer = v2_trainer(tmp_path, model=model, kl_coef=1.0, ref_adapter_name="old", model_adapter_name="default")
    trainer.model.train()
    rows, responses = batch_of(trainer), GivenResponses()([[0]] * 8)
    trainer._generate_and_score_completions(rows)
    assert model.active_adapter == "default"
    prompt = rows[0]["input_ids"]
    policy = logps(model.eval(), prompt, responses[0])
    model.set_adapter("old")
    kl = policy - logps(model, prompt, responses[0])
    assert trainer._rewards_per_func[0, 1].item() == pytest.approx(-kl, abs=1e-4)


def test_peft_config_with_an_explicit_reference(tmp_path: Path) -> None:
    trainer = v2_trainer(tmp_path, peft_config=LORA, ref_model=tiny_model(seed=1))
    assert trainer.ref_model is not None, "an explicit reference wins over disabled adapters"
    trainer.train()
    assert trainer.state.global_step == 2


class NoHead(nn.Module):
    """A reference that TRL's fused head cannot be put on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model(seed=1)

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


def test_a_reference_without_a_patchable_head_is_scored_from_its_logits(tmp_path: Path) -> None:
    columns = []
    for reference in (tiny_model(seed=1), NoHead()):
        trainer = v2_trainer(tmp_path, ref_model=reference, local_rollout_forward_batch_size=3)
        trainer.model.train()
        trainer._generate_and_score_completions(batch_of(trainer))
        columns.append(trainer._rewards_per_func[:, 1])
    assert columns[0].abs().max() > 0.001
    assert torch.allclose(*columns, atol=1e-5)


def test_kl_in_the_loss_on_request(tmp_path: Path) -> None:
    record = Recorder()
    trainer = v2_trainer(tmp_path, ref_model=tiny_model(seed=1), kl_in="loss", kl_coef=0.2, callbacks=[record])
    assert (trainer.beta, trainer.args.beta) == (0.2, 0.2)
    assert trainer.reward_func_names == ["reward_model"]
    trainer.train()
    assert record.logs[0]["kl"] > 0.001


def test_an_explicit_reference_serves_a_grpo_configuration(tmp_path: Path) -> None:
    record = Recorder()
    args = GroupRelativeConfig(
        output_dir=str(tmp_path), beta=0.1, max_steps=1, num_generations=4, per_device_train_batch_size=4, use_cpu=True,
        bf16=False, report_to="none", max_completion_length=6, logging_steps=1, save_strategy="no",
        reward_isolation="off",
    )  # fmt: skip
    trainer = GroupRelativeTrainer(
        tiny_model(), ones, args, id_rows(), processing_class=tiny_tokenizer(), ref_model=tiny_model(seed=1),
        callbacks=[record],
    )  # fmt: skip
    assert isinstance(trainer, PPOTrainer)
    assert trainer.beta == 0.1
    trainer.train()
    assert record.logs[0]["kl"] > 0.001


def test_shared_layers_are_frozen_in_both(tmp_path: Path) -> None:
    trainer = PPOTrainer(
        args=v2_config(tmp_path),
        model=tiny_model(),
        reward_model=reward_model(),
        train_dataset=id_rows(),
        processing_class=tiny_tokenizer(),
        num_shared_layers=1,
    )
    ours, theirs = trainer.model.model.layers[0], trainer.ref_model.model.layers[0]
    assert ours.mlp.up_proj.weight.data_ptr() == theirs.mlp.up_proj.weight.data_ptr()
    assert not ours.mlp.up_proj.weight.requires_grad
    assert trainer.model.model.layers[1].mlp.up_proj.weight.requires_grad


# --- data, tokens, sampling


def test_ids_reach_the_model_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    original = GroupRelativeTrainer._generate_single_turn

    def spy(self: Any, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend(prompt_ids)
        return original(self, prompt_ids, *args, **kwargs)

    monkeypatch.setattr(GroupRelativeTrainer, "_generate_single_turn", spy)
    # Ids that no text gives: a special token in the middle, a piece that the tokenizer would merge.
    rows = [{"input_ids": [0, 0, 1, 70 + i, 72, 2], "attention_mask": [0, 0, 1, 1, 1, 1]} for i in range(4)]
    trainer = v2_trainer(tmp_path, given=False, train_dataset=rows, total_episodes=8)
    trainer.train()
    assert sorted({tuple(ids) for ids in seen}) == [(1, 70 + i, 72, 2) for i in sorted({ids[1] - 70 for ids in seen})]
    assert len(seen) == 8


def test_rows_per_call_of_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = GroupRelativeTrainer._generate_single_turn

    def spy(self: Any, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(prompt_ids))
        return original(self, prompt_ids, *args, **kwargs)

    monkeypatch.setattr(GroupRelativeTrainer, "_generate_single_turn", spy)
    trainer = v2_trainer(tmp_path, given=False, num_generations=2, local_rollout_forward_batch_size=5, total_episodes=8)
    trainer.train()
    assert sizes == [4, 4], "whole groups, at most five rows"
    sizes.clear()
    v2_trainer(tmp_path, given=False, num_generations=2, total_episodes=8).train()
    assert sizes == [8], "not set: the trainer's own budgets"


def test_a_pad_token_outside_the_embedding(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    trainer = v2_trainer(
        tmp_path,
        given=False,
        model=model,
        processing_class=tokenizer,
        reward_model=reward_model(vocab_size=len(tokenizer) - 1),
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert type(tokenizer).from_pretrained(tmp_path / "saved").pad_token == "[PAD]"
    assert trainer.tokenizer is tokenizer
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer) - 1


def test_a_custom_stop_token_ends_a_response(tmp_path: Path) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[77] = 0.0  # uniform: every id is equally likely, so 77 comes up
    trainer = v2_trainer(tmp_path, given=False, model=model, stop_token_id=77, response_length=400)
    assert trainer.eos_token_ids == [EOS, 77]
    assert model.generation_config.eos_token_id == EOS, "the user's generation settings are as before"
    ids, _ = trainer._generate_single_turn([[5, 6]] * 8, None, {}, 8)
    ended = [row for row in ids if 77 in row]
    assert ended
    assert all(row.index(77) == len(row) - 1 for row in ended)
    assert trainer.stop_token_id == 77


def test_positions_count_from_the_first_real_token() -> None:
    """GPT-2 has learned positions: a padded row must be scored as the same row without padding."""
    from trl.trainer.utils import add_fused_lm_head

    model = tiny_model("gpt2", n_embd=32, n_layer=2, n_head=4)
    prompts, responses = [[5, 6, 7, 8], [9]], [[11, 12], [13, 14]]
    expected = [logps(model, p, r, 1.0) for p, r in zip(prompts, responses, strict=True)]
    add_fused_lm_head(model)
    ids, mask = left_padded(prompts, 0, "cpu")
    more, more_mask = right_padded(responses, 0, "cpu")
    ids, mask = torch.cat([ids, more], 1), torch.cat([mask, more_mask], 1)
    labels = ids.masked_fill(mask == 0, -100)

    def scored() -> list[float]:
        with torch.no_grad():
            output = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        return output.log_probs[:, -2:].sum(1).tolist()

    assert abs(scored()[1] - expected[1]) > 0.01, "what TRL does by itself"
    count_positions_from_mask(model)
    assert scored() == pytest.approx(expected, abs=1e-5)


def test_messages_and_functions_work_as_in_grpo(tmp_path: Path) -> None:
    seen: list[Any] = []

    def reward(prompts: list[Any], completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        seen.append((prompts[0], completions[0], answer[0]))
        return [float(len(c[0]["content"])) for c in completions]

    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": str(i)} for i in range(4)]
    trainer = v2_trainer(tmp_path, train_dataset=rows, reward_funcs=reward, total_episodes=8)
    trainer.train()
    prompt, completion, answer = seen[0]
    assert prompt[0]["content"] == f"{answer}?"
    assert completion[0]["role"] == "assistant"


# --- batches


CONFIGURATIONS = [
    (8, 1, 1, 1), (8, 1, 2, 2), (4, 4, 2, 1), (4, 4, 4, 2), (2, 4, 4, 1), (4, 2, 4, 1), (1, 16, 1, 4), (3, 3, 3, 2),
    (11, 1, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("batch", CONFIGURATIONS)
def test_generations_completions_and_steps_are_as_the_arithmetic_says(
    tmp_path: Path, batch: tuple[int, int, int, int]
) -> None:
    per_device, accumulation, mini_batches, epochs = batch
    completions = per_device * accumulation
    record = Recorder()
    trainer = v2_trainer(
        tmp_path,
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        num_mini_batches=mini_batches,
        num_ppo_epochs=epochs,
        total_episodes=2 * completions - 1,  # two updates, as PPO rounds up
        kl_coef=0.0,
        callbacks=[record],
    )
    generated: list[int] = []
    given = GivenResponses()
    trainer._generate_single_turn = lambda ids, *_: (generated.append(len(ids)) or given(ids), None)
    steps = []
    trainer.add_callback(_counter(steps))
    trainer.train()
    assert generated == [completions, completions]
    assert len(steps) == trainer.state.global_step == 2 * epochs * mini_batches
    logs = [log for log in record.logs if "loss" in log]
    assert [log["episode"] for log in logs] == [completions, 2 * completions]


def _counter(steps: list[int]) -> Any:
    from transformers import TrainerCallback

    class Count(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            steps.append(state.global_step)

    return Count()


@pytest.mark.parametrize("batch", [(1, 1, 1, 1), (4, 3, 2, 1)])
def test_batches_that_cannot_work_are_refused(tmp_path: Path, batch: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigurationError):
        v2_trainer(
            tmp_path,
            per_device_train_batch_size=batch[0],
            gradient_accumulation_steps=batch[1],
            num_mini_batches=batch[2],
            num_ppo_epochs=batch[3],
        )


# --- what scripts see


def test_metrics_have_the_old_names(tmp_path: Path) -> None:
    record = Recorder()
    trainer = v2_trainer(tmp_path, num_ppo_epochs=2, callbacks=[record], ref_model=tiny_model(seed=1))
    trainer.train()
    log = record.logs[0]
    names = (
        "eps", "episode", "lr", "objective/kl", "objective/entropy", "objective/non_score_reward",
        "objective/rlhf_reward", "objective/scores", "policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg",
        "loss/policy_avg", "val/ratio", "val/ratio_var", "val/num_eos_tokens",
    )  # fmt: skip
    assert {name for name in names if log.get(name) is None} == set()
    assert not any(name.startswith(("loss/value", "val/clipfrac")) for name in log), "there is no critic to report on"
    assert log["objective/rlhf_reward"] == pytest.approx(log["objective/scores"] + log["objective/non_score_reward"])
    assert log["reward"] == pytest.approx(log["objective/rlhf_reward"], abs=1e-6)
    assert log["policy/clipfrac_avg"] == log["clip_ratio/region_mean"]
    assert log["val/num_eos_tokens"] == sum(EOS in ids for ids in GivenResponses()([[0]] * 8))
    assert log["policy/approxkl_avg"] > 0
    assert trainer.state.episode == 16


def test_one_warning_names_everything_without_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="trl_grpo_ext.compat"):
        trainer = v2_trainer(
            tmp_path,
            model=AutoModelForCausalLMWithValueHead.from_pretrained(tiny_model()),
            value_model=reward_model(),
            vf_coef=0.3,
            gamma=0.9,
        )
        trainer.train()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].endswith(
        "There is no critic; these have no effect: value_model, value head, vf_coef, gamma=0.9 (rewards are not "
        "discounted)."
    )


def test_the_value_model_is_not_kept_alive(tmp_path: Path) -> None:
    value = reward_model()
    gone = weakref.ref(value)
    trainer = v2_trainer(tmp_path, value_model=value)
    del value
    gc.collect()
    assert gone() is None
    assert trainer.value_model is None


def test_the_window_stays_in_use(tmp_path: Path) -> None:
    record = Recorder()
    trainer = v2_trainer(tmp_path, callbacks=[record])
    assert trainer._why_no_window is None
    trainer.train()
    assert record.logs[0]["window/micro_batches"] >= 1


def test_old_attributes_and_settings_answer(tmp_path: Path) -> None:
    trainer = v2_trainer(tmp_path)
    config = trainer.config
    assert trainer.args.response_length == config.response_length == 6
    assert trainer.ppo_args is config
    assert trainer.policy_model is trainer.model
    assert trainer.model.policy is trainer.model
    assert trainer.tokenizer is trainer.processing_class
    assert trainer.current_device == trainer.accelerator.device
    assert trainer.is_distributed is False
    assert len(trainer.dataset) == 16
    assert trainer.kl_ctl.value == 0.05
    assert trainer.stop_token_id is None


@pytest.mark.parametrize("tables", [0, 1, 2])
def test_sample_tables_are_printed_as_often_as_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tables: int
) -> None:
    trainer = v2_trainer(tmp_path, eval_dataset=id_rows(8), num_sample_generations=tables, total_episodes=32)
    state = torch.get_rng_state()
    trainer.generate_completions()
    assert torch.equal(state, torch.get_rng_state())
    assert capsys.readouterr().out.count("model response") == 1
    trainer.train()
    assert capsys.readouterr().out.count("model response") == tables


def test_both_forms_of_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = v2_trainer(tmp_path)
    trainer.save_pretrained(str(tmp_path / "old"))
    trainer.save_model(str(tmp_path / "new"))
    for name in ("old", "new"):
        assert (tmp_path / name / "model.safetensors").is_file()
        assert (tmp_path / name / "tokenizer.json").is_file()
    pushed: list[Any] = []
    monkeypatch.setattr(type(trainer.model), "push_to_hub", lambda self, name, **_: pushed.append(("model", name)))
    monkeypatch.setattr(type(trainer.tokenizer), "push_to_hub", lambda self, name, **_: pushed.append(("tok", name)))
    monkeypatch.setattr(GRPOTrainer, "push_to_hub", lambda self, *a, **k: pushed.append(("trainer", a, k)))
    trainer.push_to_hub("user/name")
    trainer.push_to_hub(repo_id="user/other")
    trainer.push_to_hub("End of training")
    trainer.push_to_hub(dataset_name="d")
    assert pushed == [
        ("tok", "user/name"), ("model", "user/name"), ("tok", "user/other"), ("model", "user/other"),
        ("trainer", ("End of training",), {}), ("trainer", (), {"dataset_name": "d"}),
    ]  # fmt: skip


# --- the one class


def test_the_group_relative_trainer_takes_the_call_itself(tmp_path: Path) -> None:
    trainer = GroupRelativeTrainer(
        v2_config(tmp_path), tiny_tokenizer(), tiny_model(), None, reward_model(), id_rows(), reward_model()
    )
    assert type(trainer) is PPOTrainer
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_subclass_with_a_signature_of_its_own_keeps_its_overrides(tmp_path: Path) -> None:
    class Mine(GroupRelativeTrainer):
        def __init__(self, directory: Path) -> None:
            super().__init__(
                args=v2_config(directory),
                model=tiny_model(),
                ref_model=None,
                reward_model=reward_model(),
                train_dataset=id_rows(),
                processing_class=tiny_tokenizer(),
            )

        def _calculate_rewards(self, *args: Any) -> torch.Tensor:
            self._rewards_per_func = super()._calculate_rewards(*args) * 0 + 3.0
            return self._rewards_per_func

    trainer = Mine(tmp_path)
    assert isinstance(trainer, Mine)
    assert isinstance(trainer, PPOTrainer)
    assert type(trainer).__name__ == "Mine"
    trainer.model.train()
    output = trainer._generate_and_score_completions(batch_of(trainer))
    assert (output["advantages"] == 0).all()


def test_overriding_what_is_never_called_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Mine overrides compute_rewards, loss, never called here. Override"):

        class Mine(PPOTrainer):
            def compute_rewards(self) -> None: ...

            def loss(self) -> None: ...


def test_python_lists_and_values_are_enough(tmp_path: Path) -> None:
    trainer = v2_trainer(tmp_path, train_dataset=[{"input_ids": [40 + i, 41]} for i in range(8)])
    trainer.train()
    assert trainer.state.global_step == 2
