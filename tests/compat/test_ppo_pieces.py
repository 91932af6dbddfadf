"""The pure pieces of the PPO layer: KL, controllers, moments, advantages, prompts, paddings, messages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from tiny import tiny_tokenizer

from trl_grpo_ext.compat.batch import plan_classic, plan_v2
from trl_grpo_ext.compat.grouping import RunningMoments, advantages_by_prompt, describe_singles, prompt_key
from trl_grpo_ext.compat.kl import AdaptiveKLController, FixedKLController, summed_kl
from trl_grpo_ext.compat.loop_batch import build_batch, check_step_inputs, select_rows
from trl_grpo_ext.compat.prompts import prepare_prompts, strip_padding
from trl_grpo_ext.compat.report import compose_report
from trl_grpo_ext.compat.sampling import cut_after_first, left_padded, right_padded
from trl_grpo_ext.compat.tokens import largest_token_id, padding_tokenizer
from trl_grpo_ext.errors import ConfigurationError, DataError


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [0.5 - 1.0, 0.25]),
        ("abs", [1.5, 0.25]),
        ("k2", [0.125 + 0.5, 0.03125]),
        ("k3", [math.exp(-0.5) - 1 + 0.5 + math.exp(1.0) - 1 - 1.0, math.exp(-0.25) - 1 + 0.25]),
    ],
)
def test_kl_estimators_sum_over_unmasked_tokens(estimator: str, expected: list[float]) -> None:
    """Differences 0.5 and -1 in the first row, 0.25 and a masked 9 in the second."""
    ref = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    logps = ref + torch.tensor([[0.5, -1.0], [0.25, 9.0]])
    mask = torch.tensor([[1, 1], [1, 0]])
    assert torch.allclose(summed_kl(logps, ref, mask, estimator), torch.tensor(expected), atol=1e-6)


def test_a_masked_nan_does_not_reach_the_kl() -> None:
    logps = torch.tensor([[0.0, float("nan")]])
    assert summed_kl(logps, torch.zeros(1, 2), torch.tensor([[1, 0]]), "k3").item() == 0.0


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="'k4' is not one of k1, abs, k2, k3"):
        summed_kl(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), "k4")


def test_the_adaptive_weight_follows_the_target() -> None:
    """kl / target - 1 = 1 is clipped to 0.2; 0.2 * 100 / 1000 = 2 % more. Below target by half: 2 % less."""
    controller = AdaptiveKLController(0.5, target=6.0, horizon=1000)
    controller.update(12.0, 100)
    assert controller.value == pytest.approx(0.5 * 1.02)
    controller.update(3.0, 100)
    assert controller.value == pytest.approx(0.5 * 1.02 * 0.98)
    controller.update(6.3, 100)
    assert controller.value == pytest.approx(0.5 * 1.02 * 0.98 * 1.005)
    restored = AdaptiveKLController(1.0, 6.0, 1000)
    restored.load_state_dict(controller.state_dict())
    assert restored.value == controller.value
    fixed = FixedKLController(0.5)
    fixed.update(100.0, 1000)
    assert fixed.value == 0.5


def test_running_moments_are_those_of_everything_seen() -> None:
    draw = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 3 + 2
    moments = RunningMoments()
    for piece in draw.split([1, 9, 25, 15]):
        moments.update(piece)
    assert moments.mean == pytest.approx(draw.mean().item(), abs=1e-6)
    assert moments.std == pytest.approx(draw.std().item(), abs=1e-6)
    copied = RunningMoments()
    copied.load_state_dict(moments.state_dict())
    copied.update(draw)
    moments.update(draw)
    assert copied.std == moments.std


def test_advantages_compare_equal_prompts_wherever_they_stand() -> None:
    """Groups a: 1, 3 (mean 2), b: 5, 9 (mean 7); std of 1, 5, 3, 9 is sqrt(35 / 3)."""
    result = advantages_by_prompt(torch.tensor([1.0, 5.0, 3.0, 9.0]), [7, 8, 7, 8])
    scale = math.sqrt(35 / 3) + 1e-4
    assert torch.allclose(result.values, torch.tensor([-1.0, -2.0, 1.0, 2.0]) / scale)
    assert result.num_singles == 0


def test_a_prompt_that_occurs_once_is_compared_with_the_batch() -> None:
    rewards = torch.tensor([1.0, 3.0, 8.0])
    result = advantages_by_prompt(rewards, [1, 1, 2])
    scale = rewards.std() + 1e-4
    assert torch.allclose(result.values, torch.tensor([-1.0, 1.0, 4.0]) / scale)
    assert result.num_singles == 1


def test_a_running_baseline_uses_all_rewards_so_far() -> None:
    moments = RunningMoments()
    moments.update(torch.tensor([10.0, 10.0]))
    rewards = torch.tensor([1.0, 3.0])
    moments.update(rewards)
    result = advantages_by_prompt(rewards, [1, 2], ungrouped="running", running=moments)
    assert torch.allclose(result.values, (rewards - 6.0) / (rewards.std() + 1e-4))


def test_singles_can_be_forbidden_and_are_described() -> None:
    with pytest.raises(ConfigurationError, match="1 of 2 prompts occur once, and ungrouped='error' forbids that"):
        advantages_by_prompt(torch.tensor([1.0, 2.0, 3.0]), [1, 1, 2], ungrouped="error")
    keys = [*range(31), 40]
    assert describe_singles([*keys[:31], 30], "batch") == (
        "30 of 31 prompts occur once; using the batch mean as baseline. Iterate trainer.dataloader or repeat prompts "
        "for true groups (ungrouped='error' to forbid)."
    )


def test_equal_rewards_have_no_advantage() -> None:
    assert advantages_by_prompt(torch.full((4,), 1234.567), [1, 2, 3, 4]).values.tolist() == [0.0] * 4
    mixed = advantages_by_prompt(torch.tensor([1234.567] * 3 + [1.0, 2.0]), [1, 1, 1, 2, 2]).values
    assert mixed[:3].tolist() == [0.0] * 3
    assert mixed[4] > 0
    with pytest.raises(ValueError, match="got 1"):
        advantages_by_prompt(torch.tensor([1.0]), [1])


def test_prompt_keys_are_the_same_everywhere() -> None:
    assert prompt_key([1, 23]) == prompt_key([1, 23]) != prompt_key([12, 3])
    assert prompt_key([1, 2, 3]) == 8149998584550362645, "another value would tell the processes of a run apart"


def test_padding_is_stripped_by_mask_or_by_id() -> None:
    assert strip_padding([0, 0, 5, 6, 0], [0, 0, 1, 1, 0]) == [5, 6]
    assert strip_padding([0, 0, 5, 0, 6, 0], pad_token_id=0, eos_token_id=2) == [5, 0, 6]
    assert strip_padding([2, 2, 5, 6, 2], pad_token_id=2, eos_token_id=2) == [5, 6, 2]
    assert strip_padding(torch.tensor([[0, 5, 6]]), torch.tensor([[0, 1, 1]])) == [5, 6]
    assert strip_padding(np.array([5, 6])) == [5, 6]
    with pytest.raises(DataError, match="hold 2 sequences"):
        strip_padding([[1], [2]])


@pytest.mark.parametrize(
    "rows",
    [
        [{"input_ids": [0, 0, 40, 41], "attention_mask": [0, 0, 1, 1], "label": "a"}] * 3,
        [{"input_ids": torch.tensor([40, 41]), "label": "a"}] * 3,
        [{"input_ids": torch.tensor([[40, 41]]), "label": "a"}] * 3,
        Dataset.from_dict({"input_ids": [[40, 41]] * 3, "attention_mask": [[1, 1]] * 3, "label": ["a"] * 3}),
        Dataset.from_dict({"input_ids": [[40, 41]] * 3, "label": ["a"] * 3}).with_format("torch"),
        Dataset.from_dict({"input_ids": [[40, 41]] * 3, "query": ["text"] * 3, "label": ["a"] * 3}),
    ],
)
def test_ids_are_kept_whatever_holds_them(rows: Any) -> None:
    tokenizer = tiny_tokenizer()
    prepared = prepare_prompts(rows, tokenizer)
    assert isinstance(prepared, Dataset)
    assert prepared["input_ids"][:] == [[40, 41]] * 3
    assert prepared["label"][:] == ["a"] * 3
    assert "attention_mask" not in prepared.column_names
    has_text = isinstance(rows, Dataset) and "query" in rows.column_names
    assert prepared["prompt"][0] == ("text" if has_text else tokenizer.decode([40, 41]))


def test_texts_and_messages_pass_unchanged() -> None:
    tokenizer = tiny_tokenizer()
    messages = [{"prompt": [{"role": "user", "content": "x"}], "answer": "1"}] * 2
    assert prepare_prompts(messages, tokenizer)[0] == messages[0]
    assert prepare_prompts(["a", "b"], tokenizer)["prompt"][:] == ["a", "b"]
    given = Dataset.from_list(messages)
    assert prepare_prompts(given, tokenizer)[1] == messages[1]
    assert prepare_prompts([{"query": "q", "x": 1}], tokenizer)[0] == {"query": "q", "x": 1, "prompt": "q"}


def test_a_stream_of_ids_is_prepared_row_by_row() -> None:
    stream = IterableDataset.from_generator(lambda: iter([{"input_ids": [40, 41], "attention_mask": [0, 1]}]))
    assert next(iter(prepare_prompts(stream, tiny_tokenizer())))["input_ids"] == [41]


def test_data_without_a_usable_column_lists_what_it_has() -> None:
    with pytest.raises(DataError, match=r"needs a column prompt, query or input_ids; found \['label', 'text'\]"):
        prepare_prompts(Dataset.from_dict({"text": ["a"], "label": [1]}), tiny_tokenizer())
    with pytest.raises(DataError, match="A row of the data set is a int"):
        prepare_prompts([1, 2], tiny_tokenizer())


def test_a_pad_outside_the_embedding_becomes_eos_in_a_copy() -> None:
    tokenizer = tiny_tokenizer()
    assert padding_tokenizer(tokenizer, 384) is tokenizer
    rows = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    fixed = padding_tokenizer(tokenizer, rows)
    assert fixed.pad_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.pad_token == "[PAD]"
    assert largest_token_id(tokenizer) == rows - 1


def test_rows_are_padded_and_cut() -> None:
    ids, mask = left_padded([[1, 2, 3], [4]], 9, "cpu")
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    ids, mask = right_padded([[1, 2, 3], [4]], 9, "cpu")
    assert ids.tolist() == [[1, 2, 3], [4, 9, 9]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert cut_after_first([5, 2, 6, 2], [2]) == [5, 2]
    assert cut_after_first([5, 6], [2]) == [5, 6]


def test_step_takes_scores_in_every_form() -> None:
    queries, responses = [torch.tensor([1, 2]), torch.tensor([3])], [torch.tensor([4]), torch.tensor([5, 6])]
    for scores in (
        [1.0, 2.0],
        [torch.tensor(1.0), torch.tensor([2.0])],
        torch.tensor([1.0, 2.0]),
        np.array([1.0, 2.0]),
    ):
        rows = check_step_inputs(2, queries, responses, scores)
        assert (rows.queries, rows.responses, rows.scores) == ([[1, 2], [3]], [[4], [5, 6]], [1.0, 2.0])


@pytest.mark.parametrize(
    ("queries", "responses", "scores", "masks", "message"),
    [
        ([[1]] * 3, [[1]] * 2, [1.0] * 2, None, r"Batch size \(2\) does not match .* got 3 for: queries"),
        ([[1]] * 2, [[1]] * 2, [1.0] * 3, None, "got 3 for: scores"),
        ([[1]], [[1]], [1.0], None, "step got one sample; the batch size is 2. Repeat the query, or iterate trainer"),
        ([[1]] * 2, [[1], []], [1.0] * 2, None, r"responses\[1\] is empty"),
        ([[1]] * 2, [[1], [2, 3]], [1.0] * 2, [[1], [1]], r"response_masks\[1\] has 1 entries, responses\[1\] has 2"),
        ([[1]] * 2, [[1]] * 2, [torch.ones(2)] * 2, None, r"one number per sample, got a tensor of shape \(2,\)"),
        ([[1]] * 2, [[1]] * 2, torch.tensor(1.0), None, "scores must be a list of 2"),
        ([1, 2], [[1]] * 2, [1.0] * 2, None, "Elements of queries must be tensors or lists"),
    ],
)
def test_step_names_the_list_that_is_wrong(queries: Any, responses: Any, scores: Any, masks: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_step_inputs(2, queries, responses, scores, masks)


def test_rows_are_selected_at_their_own_width() -> None:
    rows = check_step_inputs(2, [[1, 2, 3], [4]], [[5, 6, 7], [8]], [0.0, 0.0], [[1, 0, 1], [1]])
    batch = build_batch(rows, 0, "cpu")
    assert batch["tool_mask"].tolist() == [[1, 0, 1], [1, 0, 0]]
    batch["advantages"] = torch.tensor([1.0, 2.0])
    batch["num_items_in_batch"] = torch.tensor(4)
    chosen = select_rows(batch, [1])
    assert chosen["completion_ids"].tolist() == [[8]]
    assert chosen["prompt_ids"].tolist() == [[4]]
    assert chosen["advantages"].tolist() == [2.0]
    assert chosen["num_items_in_batch"].item() == 4


def test_the_report_is_one_message() -> None:
    assert compose_report(
        "v2", plan_v2(8, 8, 1, 4), kl="KL 0.05 (k1) in the reward", ignored=("value_model", "vf_coef")
    ) == (
        "PPO settings translated: 64 responses per update as 8 prompts x 8; 4 passes x 1 mini-batch; KL 0.05 (k1) in "
        "the reward. There is no critic; these have no effect: value_model, vf_coef."
    )
    text = compose_report("v2", plan_v2(8, 4, 4, 1), kl="no KL penalty")
    assert "32 times" not in text
    assert "TRL <= 0.16 was 4 times larger: multiply gradient_accumulation_steps by 4" in text
    assert compose_report("classic", plan_classic(8, 8, 1, 1), world_size=2).startswith(
        "PPO settings translated: 8 responses per step on each of 2 processes as 1 prompt x 8; 1 pass x 1 mini-batch."
    )
    assert compose_report("v2", None, kl="no KL penalty") == "No KL penalty."
