"""Score edits against transformers' own processors, drawing against hand-worked cases and against statistics."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from tiny import tiny_model
from transformers import GenerationConfig, LogitsProcessorList

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.rollout.engine import SamplingParams
from trl_grpo_ext.rollout.sampling import choose, draw, edit_scores, filter_scores, seeded_uniforms

MASK64 = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """Return the SplitMix64 output for a state, in Python integers: the reference for the tensor version."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK64
    return state ^ (state >> 31)


def test_splitmix64_reference_gives_the_published_sequence() -> None:
    # First outputs for seed 1234567, as listed with the authors' C code.
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) & MASK64
        outputs.append(splitmix64(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 1234567])
def test_seeded_uniforms_equal_the_integer_reference(seed: int) -> None:
    steps = [0, 1, 2, 1000]
    got = seeded_uniforms(torch.full((4,), seed), torch.tensor(steps))
    start = splitmix64(seed & MASK64)
    expected = [(splitmix64((start + (step + 1) * 0x9E3779B97F4A7C15) & MASK64) >> 11) * 2.0**-53 for step in steps]
    assert got.tolist() == expected


def test_seeded_uniforms_are_uniform_and_uncorrelated_between_neighbouring_seeds() -> None:
    uniforms = seeded_uniforms(torch.arange(20_000), torch.zeros(20_000, dtype=torch.long)).numpy()
    assert stats.kstest(uniforms, "uniform").pvalue > 0.01
    following = seeded_uniforms(torch.arange(20_000), torch.ones(20_000, dtype=torch.long)).numpy()
    assert abs(float(stats.pearsonr(uniforms[:-1], following[1:]).statistic)) < 0.03


def test_draw_picks_the_slice_that_holds_the_target() -> None:
    weights = torch.tensor([[1.0, 0.0, 3.0, 4.0]]).repeat(6, 1)
    uniforms = torch.tensor([0.0, 0.124, 0.126, 0.499, 0.501, 1 - 2**-53], dtype=torch.float64)
    assert draw(weights, uniforms).tolist() == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("vocab_size", [2, 31, 64, 257, 4097, 49152])
def test_draw_equals_one_cumulative_sum(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    weights = torch.rand(64, vocab_size, generator=generator).pow(8)
    weights[:, ::3] = 0.0
    weights[:, vocab_size // 2] += 0.1
    uniforms = torch.rand(64, dtype=torch.float64, generator=generator)
    cdf = weights.double().cumsum(-1)
    target = uniforms * cdf[:, -1]
    got = draw(weights, uniforms)
    above = cdf.gather(1, got[:, None]).squeeze(1)
    below = above - weights.double().gather(1, got[:, None]).squeeze(1)
    slack = 1e-6 * cdf[:, -1]  # block sums are float32
    assert bool(((target < above + slack) & (target >= below - slack)).all())
    assert bool((weights.gather(1, got[:, None]) > 0).all())


@pytest.mark.parametrize("uniform", [0.0, 0.25, 0.5, 1 - 2**-53])
def test_draw_never_returns_a_token_of_weight_zero(uniform: float) -> None:
    weights = torch.zeros(1, 700)
    weights[0, [3, 300, 650]] = torch.tensor([1e-30, 1.0, 1e-30])
    assert int(draw(weights, torch.tensor([uniform], dtype=torch.float64))) in (3, 300, 650)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_draw_marks_rows_without_a_distribution(bad: float) -> None:
    weights = torch.ones(3, 300)
    weights[1, 7] = bad
    weights[2] = 0.0
    got = draw(weights, torch.full((3,), 0.5, dtype=torch.float64)).tolist()
    assert got[0] in range(300)
    assert got[1:] == [-1, -1]


def test_draw_has_the_right_frequencies() -> None:
    weights = torch.tensor([0.5, 0.2, 0.0, 0.25, 0.05])
    uniforms = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    counts = torch.bincount(draw(weights.expand(20_000, 5), uniforms), minlength=5)
    assert counts[2] == 0
    kept = [0, 1, 3, 4]
    assert stats.chisquare(counts[kept].numpy(), (weights[kept] * 20_000).numpy()).pvalue > 0.01


SETTINGS = [
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"top_p": 0.0},
    {"min_p": 0.1},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
    {"min_new_tokens": 4, "suppress_tokens": [5, 9], "top_k": 8},
    {"top_k": 10_000, "top_p": 0.999},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab_size", [40, 3000])
def test_scores_equal_transformers_processors_in_their_order(setting: dict, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, vocab_size, generator=generator) * 4
    if vocab_size == 40 and "top_p" not in setting:
        # Rounded to halves: many ties, as bfloat16 logits have. Which of two tied tokens top-p keeps is arbitrary in
        # transformers too (an unstable sort).
        logits = logits.round() / 2
    input_ids = torch.randint(0, vocab_size, (6, 12), generator=generator)
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    config = GenerationConfig(**{**neutral, "do_sample": True, "eos_token_id": [2, 3], **setting})
    model = tiny_model("llama")
    model._prepare_special_tokens(config, device=torch.device("cpu"))
    processors = model._get_logits_processor(config, input_ids_seq_length=10, logits_processor=LogitsProcessorList())
    expected = processors(input_ids, logits.clone())

    params = SamplingParams.from_generation_settings(
        {**neutral, "do_sample": True, "max_new_tokens": 8, "eos_token_id": [2, 3], **setting}
    )
    seen = torch.zeros(6, vocab_size, dtype=torch.bool).scatter_(1, input_ids, True)
    untouched = logits.clone()
    got = filter_scores(edit_scores(logits, params, torch.full((6,), 2), seen), params)
    assert torch.equal(logits, untouched)
    assert torch.equal(torch.isinf(got), torch.isinf(expected))
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_top_p_falls_back_to_a_full_sort_when_the_nucleus_is_large() -> None:
    logits = torch.zeros(2, 5000)
    logits[0] += torch.linspace(0, 0.01, 5000)
    params = SamplingParams(max_new_tokens=1, top_p=0.49999)
    kept = torch.isfinite(filter_scores(logits, params)).sum(-1)
    assert kept[1] == 2500
    assert 2480 < kept[0] < 2500


@pytest.mark.parametrize("setting", [{}, {"temperature": 0.6}, {"temperature": 0.6, "top_k": 3}, {"do_sample": False}])
def test_logprobs_are_of_the_full_softmax_at_the_temperature(setting: dict) -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)) * 3
    params = SamplingParams(max_new_tokens=1, **setting)
    uniforms = torch.rand(5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    drawn = choose(logits, params, uniforms, return_logprobs=True)
    full = torch.log_softmax(logits.double() / params.temperature, -1)
    expected = full.gather(1, drawn.token_ids[:, None]).squeeze(1)
    assert drawn.logprobs is not None
    torch.testing.assert_close(drawn.logprobs.double(), expected, rtol=0, atol=2e-6)


def test_greedy_ignores_the_warpers_but_not_the_processors() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    greedy = SamplingParams(max_new_tokens=1, do_sample=False, temperature=5.0, top_k=1)
    assert choose(logits, greedy, None).token_ids.item() == 1
    suppressed = SamplingParams(max_new_tokens=1, do_sample=False, suppress_token_ids=(1,))
    assert choose(logits, suppressed, None).token_ids.item() == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_new_tokens", 0), ("temperature", 0.0), ("top_k", -1), ("top_p", 1.5), ("min_p", -0.1),
     ("repetition_penalty", 0.0), ("min_new_tokens", -1)],
)  # fmt: skip
def test_parameters_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=field):
        SamplingParams(**{"max_new_tokens": 4, field: value})


def test_min_p_zero_keeps_everything() -> None:
    assert not SamplingParams(max_new_tokens=1, min_p=0.0).needs_filter
    assert math.isclose(SamplingParams(max_new_tokens=1).temperature, 1.0)
