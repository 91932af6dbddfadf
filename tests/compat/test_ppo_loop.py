"""The classic loop: generate, step, log_stats and the data loader."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from ppo_tools import EOS, classic_config, v2_trainer
from tiny import tiny_model, tiny_tokenizer
from transformers import TrainerCallback

from trl_grpo_ext import GroupRelativeTrainer
from trl_grpo_ext.compat.ppo import (
    AutoModelForCausalLMWithValueHead,
    LengthSampler,
    PPOConfig,
    PPOTrainer,
    create_reference_model,
    set_seed,
)
from trl_grpo_ext.errors import ConfigurationError, DataError

QUERIES = [torch.tensor([40, 41, 42]), torch.tensor([50, 51])]


def queries(group: int = 4) -> list[torch.Tensor]:
    return [q for q in QUERIES for _ in range(group)]


def responses(num: int = 8, length: int | None = None) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(3, 300, (length or 2 + i % 4,), generator=draw) for i in range(num)]


def scores(num: int = 8) -> list[torch.Tensor]:
    return [torch.tensor(float(i % 3)) for i in range(num)]


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def make(model: Any = None, ref_model: Any = None, dataset: Any = None, **fields: Any) -> PPOTrainer:
    names = ("optimizer", "lr_scheduler", "data_collator", "callbacks", "peft_config")
    call = {name: fields.pop(name) for name in names if name in fields}
    model = model if model is not None else AutoModelForCausalLMWithValueHead.from_pretrained(tiny_model())
    return PPOTrainer(classic_config(**fields), model, ref_model, tiny_tokenizer(), dataset=dataset, **call)


def hand_gradient(model: Any, advantages: torch.Tensor, rows: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    """Return the gradient of -mean over tokens of A * ratio at ratio 1, from plain logits of unpadded rows."""
    total, count = torch.zeros(()), 0
    for advantage, (query, response) in zip(advantages, rows, strict=True):
        logits = model(torch.tensor([[*query, *response]])).logits[0, len(query) - 1 : -1].float()
        logps = logits.log_softmax(-1).gather(1, torch.tensor(response).unsqueeze(1)).squeeze(1)
        total = total - (advantage * (logps - logps.detach()).exp()).sum()
        count += len(response)
    (total / count).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_one_step_is_the_gradient_of_the_group_relative_loss() -> None:
    """SGD, one pass, whole batch: the weights move by lr times the hand-made gradient."""
    model = tiny_model()
    trainer = make(
        AutoModelForCausalLMWithValueHead(model), optimizer=torch.optim.SGD(model.parameters(), lr=0.5), ppo_epochs=1
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.step(queries(), responses(), scores())
    rewards = torch.tensor([float(s) for s in scores()])
    advantages = torch.cat([r - r.mean() for r in rewards.split(4)]) / (rewards.std() + 1e-4)
    rows = [(q.tolist(), r.tolist()) for q, r in zip(queries(), responses(), strict=True)]
    gradient = hand_gradient(tiny_model(), advantages, rows)
    for name, p in model.named_parameters():
        assert torch.allclose(before[name] - p, 0.5 * gradient[name], atol=2e-6), name


def test_the_order_of_the_rows_does_not_matter() -> None:
    """Groups are equal queries, wherever they stand."""
    moved = []
    for order in (list(range(8)), [7, 0, 3, 4, 1, 6, 2, 5]):
        model = tiny_model()
        trainer = make(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), ppo_epochs=1)
        q, r, s = ([rows[i] for i in order] for rows in (queries(), responses(), scores()))
        trainer.step(q, r, s)
        moved.append(model.lm_head.weight.detach().clone())
    assert torch.allclose(*moved, atol=1e-6)


def test_the_kl_penalty_counts_inside_the_reward() -> None:
    reference = create_reference_model(AutoModelForCausalLMWithValueHead(tiny_model(seed=1)))
    trainer = make(ref_model=reference, init_kl_coef=0.5, adap_kl_ctrl=False)
    stats = trainer.step(queries(), responses(), [1.0] * 8)
    assert stats["ppo/mean_scores"] == 1.0
    per_token = stats["objective/kl"] * 8 / sum(map(len, responses()))
    assert stats["ppo/mean_non_score_reward"] == pytest.approx(-0.5 * per_token, abs=1e-6)
    assert abs(stats["objective/kl"]) > 1e-3
    assert abs(stats["ppo/policy/advantages"]).max() > 0.1, "equal scores, but the KL penalty tells them apart"
    flat = make(init_kl_coef=0.0).step(queries(), responses(), [1.0] * 8)
    assert (flat["ppo/policy/advantages"] == 0).all()


def test_the_adaptive_weight_moves_after_each_step() -> None:
    reference = create_reference_model(AutoModelForCausalLMWithValueHead(tiny_model(seed=1)))
    trainer = make(ref_model=reference, init_kl_coef=0.2, target=100.0, horizon=80)
    stats = trainer.step(queries(), responses(), scores())
    assert stats["objective/kl_coef"] == 0.2
    assert trainer.kl_ctl.value == pytest.approx(0.2 * (1 - 0.2 * 8 / 80))


@pytest.mark.parametrize(("mini", "accumulation", "epochs", "steps"), [(8, 1, 4, 4), (4, 1, 2, 4), (2, 2, 3, 6)])
def test_optimiser_steps_per_call(mini: int, accumulation: int, epochs: int, steps: int) -> None:
    trainer = make(mini_batch_size=mini, gradient_accumulation_steps=accumulation, ppo_epochs=epochs)
    count = []
    original = trainer.optimizer.step
    trainer.optimizer.step = lambda *a, **k: (count.append(1), original(*a, **k))
    stats = trainer.step(queries(), responses(), scores())
    assert len(count) == steps
    assert len(stats["ppo/policy/ratio"]) == steps * accumulation
    assert trainer.state.global_step == 1


def test_accumulation_gives_the_gradient_of_the_whole_batch() -> None:
    """Responses of one length: the mean of token means is the mean over all tokens."""
    moved = []
    for mini, accumulation in ((8, 1), (2, 4)):
        model = tiny_model()
        trainer = make(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            mini_batch_size=mini,
            gradient_accumulation_steps=accumulation,
            ppo_epochs=1,
        )
        trainer.step(queries(), responses(length=4), scores())
        moved.append(model.lm_head.weight.detach().clone())
    assert torch.allclose(*moved, atol=1e-6)


def test_the_statistics_have_every_old_name() -> None:
    trainer = make()
    stats = trainer.step(queries(), responses(), scores())
    critic = {name for name, value in stats.items() if isinstance(value, float) and math.isnan(value)}
    assert critic == {
        "ppo/loss/value", "ppo/returns/mean", "ppo/returns/var", "ppo/val/vpred", "ppo/val/error", "ppo/val/clipfrac",
        "ppo/val/mean", "ppo/val/var", "ppo/val/var_explained",
    }  # fmt: skip
    assert f"{stats['ppo/loss/value']:.3f}" == "nan"
    assert {
        "objective/kl", "objective/kl_dist", "objective/kl_coef", "objective/entropy", "objective/logprobs",
        "objective/ref_logprobs", "ppo/mean_scores", "ppo/std_scores", "ppo/mean_non_score_reward", "ppo/learning_rate",
        "ppo/loss/policy", "ppo/loss/total", "ppo/policy/entropy", "ppo/policy/approxkl", "ppo/policy/policykl",
        "ppo/policy/clipfrac", "ppo/policy/advantages", "ppo/policy/advantages_mean", "ppo/policy/ratio",
        "tokens/queries_len_mean", "tokens/queries_len_std", "tokens/queries_dist", "tokens/responses_len_mean",
        "tokens/responses_len_std", "tokens/responses_dist", "time/ppo/forward_pass", "time/ppo/optimize_step",
        "time/ppo/total",
    } <= stats.keys()  # fmt: skip
    assert stats["tokens/responses_len_mean"] == 3.5
    assert stats["ppo/learning_rate"] == 1e-3
    assert stats["objective/kl"] == pytest.approx(0.0, abs=1e-6)
    assert stats["ppo/policy/ratio"][0] == pytest.approx(1.0, abs=1e-5)


def test_early_stopping_ends_the_epochs() -> None:
    fields = {"ppo_epochs": 6, "learning_rate": 3e-2, "mini_batch_size": 8}
    assert len(make(**fields).step(queries(), responses(), scores())["ppo/policy/ratio"]) == 6
    stats = make(**fields, early_stopping=True, target_kl=1e-6).step(queries(), responses(), scores())
    assert 1 < len(stats["ppo/policy/ratio"]) < 6, "the first pass stands where it sampled, so it never stops there"


def test_a_mini_batch_beyond_the_ratio_threshold_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    trainer = make(model, ratio_threshold=0.5, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.lm_head.weight.detach().clone()
    with caplog.at_level(logging.WARNING):
        trainer.step(queries(), responses(), scores())
    assert torch.equal(before, model.lm_head.weight)
    assert "exceeds ratio_threshold=0.50. Skipping it" in caplog.text


def test_scores_are_clipped_and_scaled() -> None:
    big = [torch.tensor(100.0 * float(s)) for s in scores()]
    assert make(score_clip=1.0).step(queries(), responses(), big)["ppo/mean_scores"] == pytest.approx(
        sum(min(float(s), 1.0) for s in scores()) / 8
    )
    values = torch.stack(big)
    scaled = make(use_score_scaling=True, use_score_norm=True).step(queries(), responses(), big)
    assert scaled["ppo/mean_scores"] == pytest.approx(0.0, abs=1e-5)
    assert scaled["ppo/std_scores"] == pytest.approx(1.0, abs=1e-5)
    only = make(use_score_scaling=True).step(queries(), responses(), big)
    assert only["ppo/mean_scores"] == pytest.approx((values.mean() / values.std()).item(), abs=1e-5)


def test_masked_tokens_are_not_learnt() -> None:
    """Only the last token of each response counts; the rest may be anything."""
    masks = [torch.tensor([0] * (len(r) - 1) + [1]) for r in responses()]
    model = tiny_model()
    trainer = make(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), ppo_epochs=1)
    before = model.lm_head.weight.detach().clone()
    trainer.step(queries(), responses(), scores(), response_masks=masks)
    rewards = torch.tensor([float(s) for s in scores()])
    advantages = torch.cat([r - r.mean() for r in rewards.split(4)]) / (rewards.std() + 1e-4)
    rows = [([*q.tolist(), *r[:-1].tolist()], r[-1:].tolist()) for q, r in zip(queries(), responses(), strict=True)]
    gradient = hand_gradient(tiny_model(), advantages, rows)["lm_head.weight"]
    assert torch.allclose(before - model.lm_head.weight, 0.5 * gradient, atol=2e-6)


def test_prompts_that_occur_once_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    singles = [torch.tensor([40 + i]) for i in range(8)]
    trainer = make()
    with caplog.at_level(logging.WARNING, logger="trl_grpo_ext.compat.loop"):
        trainer.step(singles, responses(), scores())
        trainer.step(singles, responses(), scores())
    warned = [m for m in caplog.messages if "occur once" in m]
    assert warned == [
        "8 of 8 prompts occur once; using the batch mean as baseline. Iterate trainer.dataloader or repeat prompts for "
        "true groups (ungrouped='error' to forbid)."
    ]
    with pytest.raises(ConfigurationError, match="ungrouped='error' forbids that"):
        make(ungrouped="error").step(singles, responses(), scores())


def test_a_batch_of_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"batch_size=1 holds one.*iterate trainer\.dataloader"):
        make(batch_size=1, mini_batch_size=1)
    with pytest.raises(ConfigurationError, match=r"step got one sample; the batch size is 8\. Repeat the query"):
        make().step(queries()[:1], responses()[:1], scores()[:1])
    with pytest.raises(ConfigurationError, match="got 7 for: responses"):
        make().step(queries(), responses(7), scores())


def test_a_loss_that_is_not_finite_is_no_value_error() -> None:
    """Scripts catch ValueError around step and go on; this must not be swallowed."""
    with pytest.raises(RuntimeError, match="The loss is nan"):
        make().step(queries(), responses(), [float("nan")] + [1.0] * 7)


def test_train_belongs_to_the_other_era() -> None:
    with pytest.raises(ConfigurationError, match="no reward source"):
        make().train()


@pytest.mark.parametrize("as_list", [True, False])
@pytest.mark.parametrize("return_prompt", [True, False])
def test_generate_returns_what_it_returned(as_list: bool, return_prompt: bool) -> None:
    trainer = make()
    query = [*QUERIES, QUERIES[0]] if as_list else QUERIES[0]
    out = trainer.generate(query, return_prompt=return_prompt, batch_size=2, do_sample=True, max_new_tokens=5)
    if as_list:
        assert [row.ndim for row in out] == [1, 1, 1]
        rows, prompts = out, query
    else:
        assert out.shape[0] == 1
        rows, prompts = [out[0]], [query]
    for row, prompt in zip(rows, prompts, strict=True):
        assert torch.equal(row[: len(prompt)], prompt) is return_prompt
        body = row[len(prompt) :].tolist() if return_prompt else row.tolist()
        assert 1 <= len(body) <= 5
        assert EOS not in body[:-1]


def test_generate_cuts_after_the_end_and_draws_lengths() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[EOS] = 0.0
    trainer = make(model)
    set_seed(0)
    endless = trainer.generate([QUERIES[0]] * 64, return_prompt=False, batch_size=64, do_sample=True, top_k=0,
                               max_new_tokens=200, pad_token_id=EOS, eos_token_id=-1)  # fmt: skip
    assert all(row.tolist().count(EOS) <= 1 for row in endless)
    assert any(len(row) < 200 for row in endless), "cut after the first end although sampling went on"
    drawn = trainer.generate(
        [QUERIES[0]] * 30, LengthSampler(3, 6), batch_size=1, return_prompt=False, do_sample=True, eos_token_id=-1
    )
    assert {len(row) for row in drawn} == {3, 4, 5}


def test_generate_can_sample_from_the_reference() -> None:
    def greedy(seed: int) -> list[int]:
        return tiny_model(seed=seed).generate(
            QUERIES[0].unsqueeze(0), do_sample=False, max_new_tokens=6, pad_token_id=0
        )[0].tolist()  # fmt: skip

    trainer = make(ref_model=tiny_model(seed=1))
    ours, theirs = trainer.generate(QUERIES[0], generate_ref_response=True, do_sample=False, max_new_tokens=6)
    assert (ours[0].tolist(), theirs[0].tolist()) == (greedy(0), greedy(1))
    adapter = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft = make(tiny_model(), peft_config=adapter)
    with torch.no_grad():
        for name, p in peft.model.named_parameters():
            if "lora_B" in name:
                p.fill_(5.0)
    tuned, base = peft.generate([QUERIES[0]], generate_ref_response=True, do_sample=False, max_new_tokens=6)
    assert base[0].tolist() == greedy(0)
    assert tuned[0].tolist() != base[0].tolist()
    with pytest.raises(ConfigurationError, match="needs a reference model"):
        make(init_kl_coef=0.0).generate(QUERIES[0], generate_ref_response=True, max_new_tokens=1)


def rows(num: int = 8) -> Dataset:
    data = [{"query": f"q{i}", "input_ids": [40 + i, 41], "label": i, "junk": "x"} for i in range(num)]
    return Dataset.from_list(data).with_format("torch")


def test_the_loader_repeats_every_prompt_inside_a_batch() -> None:
    trainer = make(dataset=rows(), data_collator=columns)
    batches = list(trainer.dataloader)
    assert len(trainer.dataloader) == len(batches) == 8, "one prompt x 8 responses a batch"
    for batch in batches:
        assert len(batch["query"]) == 8
        assert len(set(batch["query"])) == 1
        assert set(batch) == {"query", "input_ids", "label"}, "columns that nothing needs are removed, as before"
    assert {batch["query"][0] for batch in batches} == {f"q{i}" for i in range(8)}, "one pass visits every prompt"
    again = [batch["query"][0] for batch in trainer.dataloader]
    assert again != [batch["query"][0] for batch in batches], "another order in the next pass"


def test_the_loader_keeps_columns_on_request_and_needs_enough_prompts() -> None:
    trainer = make(
        dataset=rows(), data_collator=columns, batch_size=12, mini_batch_size=12, remove_unused_columns=False
    )
    batch = next(iter(trainer.dataloader))
    assert "junk" in batch
    assert sorted(batch["query"].count(q) for q in set(batch["query"])) == [6, 6]
    with pytest.raises(DataError, match="has 1 prompts, but a batch of 12 needs 2 different ones, each 6 times"):
        make(dataset=rows(1), batch_size=12, mini_batch_size=12).dataloader  # noqa: B018


def test_a_whole_loop_raises_nothing_and_logs(caplog: pytest.LogCaptureFixture) -> None:
    logged: list[dict[str, Any]] = []

    class Keep(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            logged.append(dict(logs))

    trainer = make(dataset=rows(), data_collator=columns, callbacks=[Keep()])
    assert trainer.config.total_ppo_epochs == 2500
    with caplog.at_level(logging.WARNING, logger="trl_grpo_ext.compat.loop"):
        for batch in list(trainer.dataloader)[:2]:
            batch["response"] = trainer.generate(batch["input_ids"], return_prompt=False, max_new_tokens=4)
            rewards = [torch.tensor(float(len(r))) for r in batch["response"]]
            stats = trainer.step(batch["input_ids"], batch["response"], rewards)
            trainer.log_stats(stats, batch, rewards, columns_to_log=["query", "response"])
    assert not [m for m in caplog.messages if "occur once" in m]
    assert [log["env/reward_mean"] > 0 for log in logged] == [True, True]
    assert all(math.isfinite(value) for log in logged for value in log.values())
    assert trainer.state.episode == 16
    with pytest.raises(ConfigurationError, match=r"columns \['answer'\] are not in the batch"):
        trainer.log_stats(stats, batch, rewards, columns_to_log=["answer"])
    assert trainer.gather_stats({"a": torch.tensor([1.0, 3.0]), "b": 2})["a"].item() == 2.0


def test_a_schedule_is_stepped_once_per_call_and_a_given_optimiser_is_used() -> None:
    model = tiny_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    trainer = make(model, optimizer=optimizer, lr_scheduler=schedule)
    rates = [trainer.step(queries(), responses(), scores())["ppo/learning_rate"] for _ in range(3)]
    assert rates == pytest.approx([0.1, 0.05, 0.025])


def test_gradients_are_clipped_only_on_request() -> None:
    def moved(**fields: Any) -> float:
        model = tiny_model()
        trainer = make(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), ppo_epochs=1, **fields)
        before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        trainer.step(queries(), responses(), scores())
        return (torch.nn.utils.parameters_to_vector(model.parameters()) - before).norm().item()

    assert moved() > 0.2
    assert moved(max_grad_norm=0.1) == pytest.approx(0.1, rel=1e-3)


def test_the_best_model_is_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(push_to_hub_if_best_kwargs={"repo_id": "user/best"})
    pushed: list[dict[str, Any]] = []
    monkeypatch.setattr(PPOTrainer, "push_to_hub", lambda self, **kwargs: pushed.append(kwargs))
    for value in (1.0, 0.5, 2.0):
        trainer.step(queries(), responses(), [value + float(s) for s in scores()])
    assert pushed == [{"repo_id": "user/best"}] * 2


def test_the_wrapper_and_the_trainer_share_their_weights(tmp_path: Any) -> None:
    wrapper = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_model())
    trainer = make(wrapper)
    trainer.step(queries(), responses(), scores())
    wrapper.save_pretrained(str(tmp_path / "a"))
    trainer.save_pretrained(str(tmp_path / "b"))
    first, second = (
        AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path / name)).state_dict() for name in ("a", "b")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], tiny_model().lm_head.weight)


def test_a_v2_trainer_can_be_stepped_by_hand(tmp_path: Any) -> None:
    """Issue 3250: people build the v2 trainer and look for generate and step."""
    trainer = v2_trainer(tmp_path, reward_model=None)
    out = trainer.generate([QUERIES[0]] * 8, return_prompt=False, max_new_tokens=4)
    stats = trainer.step([QUERIES[0]] * 8, out, [float(i) for i in range(8)])
    assert math.isfinite(stats["ppo/loss/policy"])


def test_the_group_relative_trainer_takes_the_classic_call_too() -> None:
    config = PPOConfig(batch_size=8, mini_batch_size=8, use_cpu=True)
    trainer = GroupRelativeTrainer(config, tiny_model(), None, tiny_tokenizer())
    assert math.isfinite(trainer.step(queries(), responses(), scores())["ppo/loss/total"])
