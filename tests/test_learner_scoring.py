"""Packed rows give the numbers of padded rows: log-probabilities, entropies and gradients, family by family."""

from __future__ import annotations

import copy

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from reference.packing_reference import (
    FAMILIES,
    gradients,
    ragged_batch,
    relative_error,
    score_padded,
    score_row_by_row,
    tiny_model,
)
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl.trainer.utils import add_fused_lm_head

from trl_grpo_ext.learner import attention, cpu_attention, packing, scoring
from trl_grpo_ext.learner.packing import IrregularRowsError
from trl_grpo_ext.learner.scoring import score_completions
from trl_grpo_ext.learner.support import why_unsupported

TEMPERATURE = 0.7


def _packed(model, batch, **options):
    return score_completions(
        model, *batch, **{"temperature": TEMPERATURE, "compute_entropy": True, "min_token_ratio": 1.0, **options}
    )


def _with_fused_head(model):
    add_fused_lm_head(model, temperature=TEMPERATURE, outputs=("log_probs", "entropy"))
    return model


def _with_lora(model):
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_float64_equals_every_row_on_its_own(family):
    model = tiny_model(family, dtype=torch.float64).train()
    batch = ragged_batch()
    logps, entropies = score_row_by_row(model, *batch, TEMPERATURE)
    expected = gradients(model, logps, entropies)
    packed = _packed(model, batch)
    assert packed.logps_BT.dtype == torch.float64
    # Eager attention, which soft-capping needs, takes its softmax in float32.
    tolerance = 1e-6 if family == "gemma2" else 1e-10
    assert (packed.logps_BT - logps).abs().max() < tolerance
    assert (packed.entropies_BT - entropies).abs().max() < tolerance
    # transformers' RMS norms compute in float32 whatever the model's type; LayerNorm does not.
    gradient_tolerance = 1e-12 if family in ("gpt2", "starcoder2") else 2e-7
    assert relative_error(gradients(model, *packed), expected) < gradient_tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_equals_the_padded_path_of_trl(family):
    model = _with_fused_head(tiny_model(family)).train()
    batch = ragged_batch()
    logps, entropies = score_padded(model, *batch)
    expected = gradients(model, logps, entropies)
    packed = _packed(model, batch)
    # Absolute rounding grows with the size of a log-probability; these models reach -30 and beyond.
    assert ((packed.logps_BT - logps).abs() / logps.abs().clamp(min=1)).max() < 5e-6
    assert ((packed.entropies_BT - entropies).abs() / entropies.abs().clamp(min=1)).max() < 5e-6
    assert relative_error(gradients(model, *packed), expected) < 1e-5
    assert (packed.logps_BT[batch[1][:, -batch[2] :] == 0] == 0).all()


def _kept(batch):
    return batch[1][:, -batch[2] :].bool()


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral_sliding", "gemma2", "gpt2"])
def test_bfloat16_stays_within_twice_the_noise_of_removing_padding(family):
    model = _with_fused_head(tiny_model(family, dtype=torch.bfloat16, scale=1.0)).train()
    exact = tiny_model(family, dtype=torch.bfloat16, scale=1.0).double()
    batch = ragged_batch()
    kept = _kept(batch)
    truth = score_row_by_row(exact, *batch, TEMPERATURE)
    padded = score_padded(model, *batch)
    packed = _packed(model, batch)
    true_gradients, padded_gradients, packed_gradients = (
        gradients(m, *scores) for m, scores in ((exact, truth), (model, padded), (model, packed))
    )
    # No further from the truth than padding is.
    assert (packed.logps_BT - truth[0]).abs()[kept].mean() <= 1.25 * (padded[0] - truth[0]).abs()[kept].mean()
    assert relative_error(packed_gradients, true_gradients) <= 1.35 * relative_error(padded_gradients, true_gradients)
    if family == "gpt2":
        return  # a row without padding has other positions there
    unpadded = score_row_by_row(model, *batch, TEMPERATURE, positions_from_zero=True)
    kept &= batch[1][:, :1] == 0  # only rows with padding have noise of removing it
    noise = (padded[0] - unpadded[0]).abs()[kept]
    difference = (packed.logps_BT - padded[0]).abs()[kept]
    assert difference.max() <= 2 * noise.max()
    assert difference.mean() <= 2 * noise.mean()
    gradient_noise = relative_error(gradients(model, *unpadded), padded_gradients)
    assert relative_error(packed_gradients, padded_gradients) <= 2 * gradient_noise


def test_autocast_is_no_further_from_the_truth_than_the_padded_path():
    model = _with_fused_head(tiny_model("llama", scale=1.0)).train()
    batch = ragged_batch()
    kept = _kept(batch)

    def autocast():
        return torch.autocast("cpu", torch.bfloat16)

    truth = score_row_by_row(tiny_model("llama", scale=1.0).double(), *batch, TEMPERATURE)
    with autocast():
        padded = score_padded(model, *batch)
    packed = _packed(model, batch, autocast=autocast)
    assert packed.logps_BT.dtype == torch.float32
    error = (packed.logps_BT - truth[0]).abs()[kept].mean()
    assert 0 < error <= 1.25 * (padded[0] - truth[0]).abs()[kept].mean()


@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3_moe"])
def test_lora_with_and_without_gradient_checkpointing(family, use_reentrant):
    model = _with_lora(_with_fused_head(tiny_model(family))).train()
    batch = ragged_batch()
    expected = gradients(model, *score_padded(model, *batch))
    if use_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
    implementation = model.config._attn_implementation
    found = gradients(model, *_packed(model, batch))
    assert all("lora" in name for name in found)
    assert relative_error(found, expected) < 1e-5
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_on_four_bit_weights(tmp_path, checkpointing):
    pytest.importorskip("bitsandbytes")
    tiny_model("llama", hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(tmp_path)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, bnb_4bit_quant_type="nf4"
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantization, device_map="cpu")
    model = _with_lora(_with_fused_head(model)).train()
    assert type(model.get_base_model().model.layers[0].mlp.up_proj.base_layer).__name__ == "Linear4bit"
    assert why_unsupported(model) is None
    batch = ragged_batch()
    logps, entropies = score_padded(model, *batch)
    expected = gradients(model, logps, entropies)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    packed = _packed(model, batch)
    assert ((packed.logps_BT - logps).abs() / logps.abs().clamp(min=1)).max() < 5e-6
    assert relative_error(gradients(model, *packed), expected) < 1e-5


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_full_fine_tuning_with_gradient_checkpointing(use_reentrant):
    model = _with_fused_head(tiny_model("qwen2"))
    batch = ragged_batch()
    expected = gradients(model, *score_padded(model, *batch))
    model.train().gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert relative_error(gradients(model, *_packed(model, batch)), expected) < 1e-5


@pytest.mark.parametrize("budget", [1, 14, 25, 40, None])
@pytest.mark.parametrize("ratio", [1.0, 1.2, float("inf")])
def test_neither_the_budget_nor_the_sharing_matters(budget, ratio):
    model = tiny_model("gpt2", dtype=torch.float64)  # its norms are in float64 too
    batch = ragged_batch()
    expected = _packed(model, batch)
    expected_gradients = gradients(model, *expected)
    found = _packed(model, batch, max_packed_tokens=budget, min_token_ratio=ratio)
    assert (found.logps_BT - expected.logps_BT).abs().max() < 1e-12
    assert relative_error(gradients(model, *found), expected_gradients) < 1e-12


def test_the_order_of_rows_does_not_matter():
    model = tiny_model("llama", dtype=torch.float64)
    input_ids, mask, num_kept = ragged_batch()
    order = torch.randperm(len(input_ids), generator=torch.Generator().manual_seed(4))
    expected = _packed(model, (input_ids, mask, num_kept)).logps_BT[order]
    assert (_packed(model, (input_ids[order], mask[order], num_kept)).logps_BT - expected).abs().max() < 1e-12


def test_masking_out_a_completion_takes_only_its_own_scores():
    model = tiny_model("llama", dtype=torch.float64)
    input_ids, mask, num_kept = ragged_batch()
    expected = _packed(model, (input_ids, mask, num_kept)).logps_BT.clone()
    mask[3, -num_kept:] = 0
    expected[3] = 0
    assert (_packed(model, (input_ids, mask, num_kept)).logps_BT - expected).abs().max() < 1e-12


def test_a_batch_without_a_completion_still_reaches_every_parameter():
    model = tiny_model("llama")
    input_ids, mask, num_kept = ragged_batch()
    mask[:, -num_kept:] = 0
    logps, entropies = _packed(model, (input_ids, mask, num_kept))
    assert logps.shape == (10, num_kept)
    (logps.sum() + entropies.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_no_grad_gives_the_same_numbers_without_a_graph():
    model = tiny_model("llama")
    batch = ragged_batch()
    expected = _packed(model, batch)
    with torch.no_grad():
        found = _packed(model, batch)
    assert torch.equal(found.logps_BT, expected.logps_BT)
    assert not found.logps_BT.requires_grad
    assert _packed(model, batch, compute_entropy=False).entropies_BT is None


def test_the_model_is_unchanged_for_everyone_else():
    model = tiny_model("llama").eval()
    prompt = torch.randint(3, 80, (2, 5))
    plain = model(prompt).logits
    generated = model.generate(prompt, max_new_tokens=4, do_sample=False)
    _packed(model, ragged_batch())
    assert torch.equal(model(prompt).logits, plain)
    assert torch.equal(model.generate(prompt, max_new_tokens=4, do_sample=False), generated)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("is_first", [False, True])
def test_a_forward_that_accelerate_wrapped_for_mixed_precision(is_first):
    AcceleratorState._reset_state()  # an earlier test may have chosen another precision for the process
    batch = ragged_batch()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    expected = _packed(tiny_model("llama"), batch, autocast=accelerator.autocast)
    model = tiny_model("llama")
    if is_first:
        scoring.enable_packed_forward(model)
    model = accelerator.prepare_model(model)
    found = _packed(model, batch, autocast=accelerator.autocast)
    assert torch.equal(found.logps_BT, expected.logps_BT)
    assert found.logps_BT.dtype == torch.float32
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    again = _packed(model, batch, autocast=accelerator.autocast)
    assert torch.equal(again.logps_BT, expected.logps_BT)


def test_a_copy_of_the_model_runs_itself():
    model = tiny_model("llama")
    batch = ragged_batch()
    before = _packed(model, batch).logps_BT
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert torch.equal(_packed(other, batch).logps_BT, before)
    assert torch.equal(other(batch[0]).logits, copy.deepcopy(other)(batch[0]).logits)
    assert not torch.equal(other(batch[0]).logits, model(batch[0]).logits)


def test_cast_lm_head_to_float32():
    model = tiny_model("llama", dtype=torch.bfloat16)
    model.lm_head.float()
    add_fused_lm_head(model, temperature=TEMPERATURE, cast_lm_head_to_fp32=True, outputs=("log_probs", "entropy"))
    batch = ragged_batch()
    padded = score_padded(model, *batch)
    with torch.autocast("cpu", torch.bfloat16):
        packed = _packed(model, batch, cast_lm_head_to_fp32=True)
    assert (packed.logps_BT - padded[0]).abs().mean() < 0.05
    # In float32 no two of the 47 log-probabilities are rounded to the same value; the zeros are padding.
    assert packed.logps_BT.unique().numel() == int(_kept(batch).sum()) + 1


def test_holes_in_a_mask_are_refused():
    input_ids, mask, num_kept = ragged_batch()
    mask[0, -num_kept + 2] = 0
    with pytest.raises(IrregularRowsError, match="completion of row 0"):
        _packed(tiny_model("llama"), (input_ids, mask, num_kept))


def test_an_attention_that_ignores_the_layout_is_caught(monkeypatch):
    model = tiny_model("llama")
    watch = scoring.watch_attention
    monkeypatch.setattr(scoring, "watch_attention", lambda model: watch(model) + 1)
    with pytest.raises(RuntimeError, match="2 times for 3"):
        _packed(model, ragged_batch())
    # And one that never learns of packing cannot mistake the empty mask for a mask.
    monkeypatch.setattr(scoring, "watch_attention", lambda model: 2)
    with pytest.raises(RuntimeError, match="must match"):
        _packed(tiny_model("llama"), ragged_batch())


# Negative controls: each mistake must show, or the tolerances above prove nothing.


def _error_with(monkeypatch_target, name, replacement, monkeypatch):
    model = _with_fused_head(tiny_model("llama")).train()
    batch = ragged_batch()
    logps, entropies = score_padded(model, *batch)
    expected = gradients(model, logps, entropies)
    monkeypatch.setattr(monkeypatch_target, name, replacement)
    packed = _packed(model, batch)
    return float((packed.logps_BT - logps).detach().abs().max()), relative_error(gradients(model, *packed), expected)


def test_control_a_leaked_row_fails(monkeypatch):
    original = packing._lay_out

    def leak(units, *rest):
        rows = original(units, *rest)
        segments = list(rows.segments)
        last = max(i for i, segment in enumerate(segments) if segment.prefix >= 0)
        # The last completion takes the one before it for its prompt.
        segments[last] = segments[last]._replace(prefix=last - 1)
        home = segments[last - 1]
        segments[last - 1] = home._replace(prefix=-1)
        return rows._replace(segments=tuple(segments))

    error, gradient_error = _error_with(packing, "_lay_out", leak, monkeypatch)
    assert error > 100 * 5e-6
    assert gradient_error > 100 * 1e-5


def test_control_a_shifted_position_fails(monkeypatch):
    original = packing._lay_out

    def shift(units, *rest):
        rows = original(units, *rest)
        positions = rows.position_ids_S.copy()
        positions[rows.segments[-1].start + 1 :] += 1
        return rows._replace(position_ids_S=positions)

    error, gradient_error = _error_with(packing, "_lay_out", shift, monkeypatch)
    assert error > 100 * 5e-6
    assert gradient_error > 100 * 1e-5


def test_control_a_dropped_mask_fails(monkeypatch):
    def everything(self, bucket, window, device):
        length = bucket.length + (bucket.prefix[2] if bucket.prefix else 0)
        return torch.ones(bucket.length, length, dtype=torch.bool)

    monkeypatch.setattr(cpu_attention, "can_run", lambda *_: False)
    error, gradient_error = _error_with(attention.AttentionLayout, "mask", everything, monkeypatch)
    assert error > 100 * 5e-6
    assert gradient_error > 100 * 1e-5


def test_control_a_dropped_mask_of_tiles_fails(monkeypatch):
    def everything(self, tile, queries, keys, scale):
        return (scale * queries @ keys[: len(queries), : tile.num_keys].transpose(1, 2)).softmax(-1)

    error, gradient_error = _error_with(cpu_attention._Workspace, "weights", everything, monkeypatch)
    assert error > 100 * 5e-6
    assert gradient_error > 100 * 1e-5
