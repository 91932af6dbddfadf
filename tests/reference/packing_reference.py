"""Slow, independent answers for the packed forward: one row at a time, no padding, plain logits, float64 softmax.

Shares no code with the package. Also the tiny random models and the ragged batch that the learner's tests use.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCABULARY = 83
NUM_PROMPT_COLUMNS = 12
NUM_COMPLETION_COLUMNS = 9

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_SPECIFIC: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_sliding": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "mistral_sliding": {"sliding_window": 5},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 6, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 6, "query_pre_attn_scalar": 8},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "phi3": {},
    "granite": {"logits_scaling": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7},
    "cohere": {"logit_scale": 0.3},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": {"use_bias": True, "sliding_window": None},
}
FAMILIES = [*_SPECIFIC, "gpt2"]


def tiny_model(family: str, *, dtype: torch.dtype = torch.float32, scale: float = 3.0, **changes: Any) -> Any:
    """Return a random two-layer causal model whose predictions depend visibly on every token before them.

    Weight matrices are ``scale`` times the usual; at 1 a leaked row would drown in rounding.
    """
    if family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=128, n_embd=32, n_layer=2, n_head=4, pad_token_id=0, eos_token_id=2,
            attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **changes,
        )  # fmt: skip
    else:
        arguments = {**_COMMON, **_SPECIFIC[family], **changes}
        config = transformers.AutoConfig.for_model(family.removesuffix("_sliding"), **arguments)
    torch.manual_seed(0)
    # The grouped matrix product of the experts knows no float64.
    options = {"experts_implementation": "eager"} if "moe" in family and dtype == torch.float64 else {}
    model = transformers.AutoModelForCausalLM.from_config(config, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return model.to(dtype)


def ragged_batch() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return token ids, mask and T of ten rows: a group of four, apart, and two; a single; three that are distinct.

    Completion lengths include 0, 1 and T. Padding and end of sequence are the same id, which also occurs inside.
    """
    generator = torch.Generator().manual_seed(1)
    width = NUM_PROMPT_COLUMNS + NUM_COMPLETION_COLUMNS
    input_ids = torch.randint(3, VOCABULARY, (10, width), generator=generator)
    prompt_of_row = (0, 0, 1, 0, 2, 0, 1, 3, 4, 5)
    prompt_lengths = (12, 7, 9, 1, 10, 4)
    completion_lengths = (9, 1, 4, 7, 8, 0, 9, 2, 6, 1)
    mask = torch.ones_like(input_ids)
    for row, (prompt, length) in enumerate(zip(prompt_of_row, completion_lengths, strict=True)):
        first = prompt_of_row.index(prompt)
        input_ids[row, :NUM_PROMPT_COLUMNS] = input_ids[first, :NUM_PROMPT_COLUMNS]
        mask[row, : NUM_PROMPT_COLUMNS - prompt_lengths[prompt]] = 0
        mask[row, NUM_PROMPT_COLUMNS + length :] = 0
    input_ids[2, 15] = input_ids[0, 14] = 2  # end of sequence inside a completion, and as its last token
    input_ids[mask == 0] = 2
    return input_ids, mask, NUM_COMPLETION_COLUMNS


def score_row_by_row(
    model: Any,
    input_ids: torch.Tensor,
    mask: torch.Tensor,
    num_kept: int,
    temperature: float,
    *,
    positions_from_zero: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (B, T) log-probabilities and entropies from the plain logits of every row on its own, unpadded.

    Positions are the columns of the padded batch, as in a padded forward that is given none, or count from zero, as
    in a row that never was padded.
    """
    logps = torch.zeros(len(input_ids), num_kept, dtype=torch.float64)
    entropies = torch.zeros_like(logps)
    for row in range(len(input_ids)):
        columns = torch.nonzero(mask[row]).squeeze(-1)
        positions = columns - columns[0] if positions_from_zero else columns
        num_scored = int(mask[row, -num_kept:].sum())
        tokens = input_ids[row, columns].unsqueeze(0)
        logits = model(input_ids=tokens, position_ids=positions.unsqueeze(0), use_cache=False).logits[0].double()
        if num_scored == 0:
            continue
        log_p = torch.log_softmax(logits[-num_scored - 1 : -1] / temperature, -1)
        logps[row, :num_scored] = log_p.gather(-1, tokens[0, -num_scored:].unsqueeze(-1)).squeeze(-1)
        entropies[row, :num_scored] = -(log_p.exp() * log_p).sum(-1)
    return logps, entropies


def score_padded(
    model: Any, input_ids: torch.Tensor, mask: torch.Tensor, num_kept: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what TRL's trainer computes with its fused head, on the padded batch."""
    labels = input_ids.masked_fill(mask == 0, -100)
    labels[:, :-num_kept] = -100
    outputs = model(input_ids=input_ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    return outputs.log_probs[:, -num_kept:], outputs.entropy[:, -num_kept:]


def gradients(model: torch.nn.Module, logps: torch.Tensor, entropies: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradient of a fixed random weighting of both results; parameters without one are left out."""
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(2, *logps.shape, generator=generator, dtype=torch.float64)
    model.zero_grad()
    (logps.double() * weights[0] + 0.3 * entropies.double() * weights[1]).sum().backward()
    found = {name: p.grad.double().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return |found - expected| / |expected| over all parameters together; infinite where the names differ."""
    if found.keys() != expected.keys():
        return float("inf")
    difference = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    return (difference / sum(float(x.square().sum()) for x in expected.values())) ** 0.5
