"""Generate completions for an evaluation without touching the training state: with the rollout engine where it can."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from trl_grpo_ext.data.prompt_tokens import drop_doubled_bos
from trl_grpo_ext.monitor.evaluate import Completion
from trl_grpo_ext.rollout.engine import SamplingParams
from trl_grpo_ext.rollout.support import device_of, merged_generation_settings
from trl_grpo_ext.rollout.transformers_engine import TransformersRolloutEngine

# Keys of the trainer's settings that say how to sample, with TRL's defaults.
SAMPLING_DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None}


def render_prompt(tokenizer: Any, prompt: Any, template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
    """Return the token ids of a prompt as the trainer makes them: chats through the template, text as it is."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    else:
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=False, **(template_kwargs or {})
        )
    return drop_doubled_bos(ids, tokenizer.bos_token_id)


def generate_completions(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int,
    batch_size: int = 64,
    sampling: Mapping[str, Any] | None = None,
    seed: int = 0,
    template_kwargs: Mapping[str, Any] | None = None,
    announce: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[Completion]:
    """Return one completion per prompt, in order.

    Args:
        model: a causal language model, PEFT-wrapped or not.
        tokenizer: its tokenizer, with a pad token.
        prompts: chats or strings.
        max_new_tokens: limit per completion.
        batch_size: prompts at a time.
        sampling: None is greedy; otherwise the values of ``SAMPLING_DEFAULTS`` that differ from them.
        seed: of the sampling. The global generators are left as they were.
        template_kwargs: further keywords of the chat template.
        announce: called with (done, total) after each batch.
    """
    ids = [render_prompt(tokenizer, prompt, template_kwargs) for prompt in prompts]
    # Longest first: a prompt that does not fit in memory fails at once. Equal ones stay together and are computed once.
    order = sorted(range(len(ids)), key=lambda index: (-len(ids[index]), ids[index], index))
    config = _generation_config(model, tokenizer, max_new_tokens, sampling)
    row_seeds = np.random.SeedSequence(seed).generate_state(len(ids), np.uint64)
    engine = TransformersRolloutEngine(tokenizer)
    completions: dict[int, Completion] = {}
    with _evaluation_mode(model), torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        settings = merged_generation_settings(model, config)
        plain = engine.why_unsupported(model, SamplingParams.from_generation_settings(settings), settings) is not None
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            rows = [ids[index] for index in batch]
            if plain:
                texts = _generate_padded(model, rows, config)
            else:
                seeds = [int(row_seeds[index]) for index in batch] if config.do_sample else None
                texts = engine.generate(
                    model, rows, SamplingParams.from_generation_settings(settings, seeds)
                ).completion_ids
            for index, tokens in zip(batch, texts, strict=True):
                completions[index] = _completion(tokenizer, tokens, config.eos_token_id)
            announce(len(completions), len(order))
    return [completions[index] for index in range(len(ids))]


def _completion(tokenizer: Any, tokens: Sequence[int], ends: Sequence[int]) -> Completion:
    """Return the text up to the first end token; the pad token is often one too, so what follows is not looked at."""
    tokens = [int(token) for token in tokens]
    length = next((position + 1 for position, token in enumerate(tokens) if token in ends), None)
    kept = tokens if length is None else tokens[:length]
    return Completion(tokenizer.decode(kept, skip_special_tokens=True), tuple(kept), length is None)


def _generate_padded(model: Any, ids: list[list[int]], config: GenerationConfig) -> list[list[int]]:
    """Return what the model's own ``generate`` adds to left-padded prompts."""
    width, device = max(len(row) for row in ids), device_of(model)
    tokens = torch.tensor([[config.pad_token_id] * (width - len(row)) + row for row in ids], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=device)
    output = model.generate(input_ids=tokens, attention_mask=mask, generation_config=config)
    added: list[list[int]] = output[:, width:].tolist()
    return added


def _generation_config(
    model: Any, tokenizer: Any, max_new_tokens: int, sampling: Mapping[str, Any] | None
) -> GenerationConfig:
    """Return a config that takes the end tokens of model and tokenizer and nothing else of the model's defaults."""
    own = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=sampling is not None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=sorted(ends),
        repetition_penalty=1.0,
        **({} if sampling is None else {**SAMPLING_DEFAULTS, **sampling}),
    )


@contextlib.contextmanager
def _evaluation_mode(model: Any) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
