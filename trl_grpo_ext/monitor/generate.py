"""Generate completions for an evaluation, in batches of like length, without touching the training state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from trl_grpo_ext.monitor.evaluate import Completion


def render_prompt(tokenizer: Any, prompt: Any, template_kwargs: dict[str, Any] | None = None) -> list[int]:
    """Return the token ids of a prompt as the trainer makes them: chats through the template, text as it is."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    return list(
        tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=False, **(template_kwargs or {})
        )
    )


def generate_completions(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int,
    batch_size: int = 64,
    temperature: float | None = None,
    seed: int = 0,
    template_kwargs: dict[str, Any] | None = None,
    announce: Callable[[int, int], None] = lambda _done, _total: None,
) -> list[Completion]:
    """Return one completion per prompt, in order.

    Args:
        model: a causal language model, PEFT-wrapped or not.
        tokenizer: its tokenizer, with a pad token.
        prompts: chats or strings.
        max_new_tokens: limit per completion.
        batch_size: prompts per call of ``generate``.
        temperature: None is greedy; otherwise the softmax temperature, without top-k or top-p.
        seed: of the sampling. The global generators are left as they were.
        template_kwargs: further keywords of the chat template.
        announce: called with (done, total) after each batch.
    """
    ids = [render_prompt(tokenizer, prompt, template_kwargs) for prompt in prompts]
    # Longest first: a prompt that does not fit in memory fails at once, and padding stays small.
    order = sorted(range(len(ids)), key=lambda index: -len(ids[index]))
    config = _generation_config(model, tokenizer, max_new_tokens, temperature)
    results: dict[int, Completion] = {}
    with _evaluation_mode(model), torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            for index, completion in zip(
                batch, _generate_batch(model, tokenizer, [ids[index] for index in batch], config), strict=True
            ):
                results[index] = completion
            announce(len(results), len(order))
    return [results[index] for index in range(len(ids))]


def _generate_batch(model: Any, tokenizer: Any, ids: list[list[int]], config: GenerationConfig) -> list[Completion]:
    width = max(len(row) for row in ids)
    device = next(model.parameters()).device
    tokens = torch.tensor([[config.pad_token_id] * (width - len(row)) + row for row in ids], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=device)
    output = model.generate(input_ids=tokens, attention_mask=mask, generation_config=config)
    ends = set(config.eos_token_id)
    completions = []
    for row in output[:, width:].tolist():
        # The pad token is often an end token too, so the text ends at the first end token, wherever padding starts.
        length = next((position + 1 for position, token in enumerate(row) if token in ends), None)
        kept = row if length is None else row[:length]
        completions.append(Completion(tokenizer.decode(kept, skip_special_tokens=True), tuple(kept), length is None))
    return completions


def _generation_config(model: Any, tokenizer: Any, max_new_tokens: int, temperature: float | None) -> GenerationConfig:
    """Return a config that takes the end tokens of model and tokenizer and nothing else of the model's defaults."""
    own = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
    sampling = {} if temperature is None else {"temperature": float(temperature), "top_k": 0, "top_p": 1.0}
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature is not None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=sorted(ends),
        **sampling,
    )


@contextlib.contextmanager
def _evaluation_mode(model: Any) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
