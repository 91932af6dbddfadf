"""Which models the packed forward is exact for, and why not the others.

Two lines of defence: ``why_unsupported`` reads the configuration and the modules and names what cannot be reproduced;
``find_disagreement`` runs a handful of tokens both ways and catches what no list foresees.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from trl_grpo_ext.learner.attention import find_attention_modules
from trl_grpo_ext.learner.scoring import score_completions, unwrap
from trl_grpo_ext.memory.oom import is_out_of_memory

# GPT-2 takes its positions from the caller and, left alone, counts columns: so do packed rows.
_ABSOLUTE_POSITIONS_PROVEN = {"gpt2"}
_ABSOLUTE_POSITION_NAMES = ("wpe", "embed_positions", "position_embeddings", "position_embedding", "pos_embed")
_FUNCTIONAL_DROPOUT_NAMES = ("attention_dropout", "dropout", "activation_dropout", "hidden_dropout", "layerdrop")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# Mean difference between two ways to batch the same rows that can be rounding and nothing else, per dtype (a deep
# model in bfloat16 reaches 0.04), and the share of the effect of one changed prompt token above which it cannot.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
_MAX_SHARE_OF_A_TOKEN = 0.1


def why_unsupported(model: nn.Module, *, max_length: int | None = None, wants_router_loss: bool = False) -> str | None:
    """Return why log-probabilities of packed rows would differ from TRL's for this model, or None where they agree.

    Args:
        model: wrapped or not.
        max_length: longest padded row, in tokens; None if it is not known, which counts as very long.
        wants_router_loss: whether the load-balancing loss of a mixture of experts is added to the loss.

    Returns:
        A clause that fits after "using TRL's own forward: ", or None.
    """
    base = unwrap(model)
    for find in (_wrong_kind, _wrong_attention, _wrong_positions, _wrong_randomness, _wrong_adapter):
        for reason in find(model, base, max_length):
            return reason
    if wants_router_loss:
        return "the router's load-balancing loss counts every token, so a shared prompt would count once"
    return None


def _wrong_kind(model: nn.Module, base: Any, max_length: int | None) -> Iterator[str]:
    """Yield what is wrong with the model as a whole."""
    config = getattr(base, "config", None)
    if config is None or not hasattr(base, "get_output_embeddings"):
        yield f"{type(base).__name__} is not a transformers model"
        return
    if config.get_text_config() is not config or getattr(config, "vision_config", None) is not None:
        yield "the model takes images, audio or other inputs besides text"
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        yield "the model attends to an encoder"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        yield "the attention of the model is not causal"
    if any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in model.modules()):
        yield "torch.compile would compile anew for every layout"
    if getattr(base, "_tp_size", None) not in (None, 1):
        yield "the model is split by tensor parallelism"
    head = base.get_output_embeddings()
    if not isinstance(head, nn.Linear) or not head.weight.is_floating_point():
        yield f"the LM head is a {type(head).__name__}, which is more than a product with a matrix of numbers"


def _wrong_attention(model: nn.Module, base: Any, max_length: int | None) -> Iterator[str]:
    """Yield what is wrong with the attention layers."""
    config = base.config
    name = type(base).__name__
    if not getattr(base, "_supports_attention_backend", False):
        yield f"the attention of {name} does not go through transformers' AttentionInterface"
    layer_types = set(getattr(config, "layer_types", None) or []) - {"full_attention", "sliding_attention", "attention"}
    if layer_types:
        yield f"the model has {', '.join(sorted(layer_types))} layers, whose state runs on from one row to the next"
    modules = find_attention_modules(base)
    if len(modules) != config.num_hidden_layers:
        yield f"{name} has {len(modules)} attention modules of the usual form for {config.num_hidden_layers} layers"
        return
    if any(getattr(module, "sinks", None) is not None for module in modules):
        yield "the attention has sinks"
    source = inspect.getsource(inspect.unwrap(type(modules[0]).forward))
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    if window is not None and "sliding_window" not in source and (max_length is None or max_length > window):
        yield f"rows may be longer than the attention window of {window} tokens, which {name} hides in its mask"
    if getattr(config, "attn_logit_softcapping", None) is not None and "softcap" not in source:
        yield "the attention scores are soft-capped out of reach"


def _wrong_positions(model: nn.Module, base: Any, max_length: int | None) -> Iterator[str]:
    """Yield what is wrong with the positions."""
    config = base.config
    backbone = base.base_model
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        yield f"{type(backbone).__name__} takes no position_ids"
    if config.model_type not in _ABSOLUTE_POSITIONS_PROVEN:
        name = find_absolute_positions(backbone)
        if name is not None:
            yield f"{name} holds absolute positions, which depend on the padding"
    if getattr(config, "alibi", False):
        yield "the attention is biased by distance (ALiBi)"
    rope = getattr(config, "rope_parameters", None) or {}
    per_type = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    for parameters in per_type:
        kind = parameters.get("rope_type", "default")
        trained = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
        if kind in _LENGTH_DEPENDENT_ROPE and (max_length is None or max_length > trained):
            yield f"{kind} rotary embeddings change with the longest row once it exceeds {trained} tokens"


def find_absolute_positions(model: nn.Module) -> str | None:
    """Return the name of the embedding that a model takes absolute positions from, or None where it has none."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rsplit(".", 1)[-1] in _ABSOLUTE_POSITION_NAMES:
            return name
    return None


def _wrong_randomness(model: nn.Module, base: Any, max_length: int | None) -> Iterator[str]:
    """Yield what draws random numbers: one draw on a shared prompt is not an independent one per row."""
    for name, module in model.named_modules():
        rate = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else 0.0
        for attribute in _FUNCTIONAL_DROPOUT_NAMES:
            value = getattr(module, attribute, 0.0)
            rate = max(rate, value) if isinstance(value, float) else rate
        if rate > 0:
            where = name or type(module).__name__
            yield f"{where} has dropout {rate:g}, of which a shared prompt would see one draw and not one per row"
    if getattr(base.config, "router_jitter_noise", 0.0):
        yield "the router of the experts is jittered"


def _wrong_adapter(model: nn.Module, base: Any, max_length: int | None) -> Iterator[str]:
    """Yield what is wrong with a PEFT adapter."""
    configs: dict[str, Any] = {}
    for module in model.modules():
        found = getattr(module, "peft_config", None)
        configs.update(found if isinstance(found, dict) else {})
    for name, config in configs.items():
        if getattr(config, "is_prompt_learning", False):
            yield f"adapter {name!r} prepends learned tokens to every row"
        if getattr(config, "alora_invocation_tokens", None):
            yield f"adapter {name!r} starts at a token of each row"


def find_disagreement(
    model: nn.Module,
    *,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> str | None:
    """Return how packed and padded log-probabilities of a few tokens differ, or None where only rounding does.

    Runs a few short forwards without gradients; in a distributed run every process must call it, and all get the same
    answer. Two yardsticks: how much the padded forward differs from itself when its rows come one by one, and how much
    one other token in the prompt changes. Differences are means over the scored tokens.

    Args:
        model: with TRL's fused LM head, wrapped or not.
        temperature: as in the run.
        cast_lm_head_to_fp32: as in the run.
        autocast: as in the run.

    Returns:
        A clause that fits after "using TRL's own forward: ", or None.
    """
    base = unwrap(model)
    device = next(iter(base.parameters())).device
    vocabulary = base.config.vocab_size  # the embedding may be sharded
    num_kept = 4
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(vocabulary, (5, 6 + num_kept), generator=generator)
    input_ids[3, :6] = input_ids[1, :6] = input_ids[0, :6]
    attention_mask = torch.ones_like(input_ids)
    attention_mask[2, :2] = 0
    for row, length in enumerate((4, 2, 3, 1, 4)):
        attention_mask[row, 6 + length :] = 0
    input_ids, attention_mask = input_ids.to(device), attention_mask.to(device)
    kept = attention_mask[:, -num_kept:].bool()

    def score_padded(rows: slice, tokens: torch.Tensor = input_ids) -> torch.Tensor:
        labels = tokens[rows].masked_fill(attention_mask[rows] == 0, -100)
        labels[:, :-num_kept] = -100
        with autocast():
            outputs = model(
                input_ids=tokens[rows], attention_mask=attention_mask[rows], labels=labels, fused_lm_head=True
            )
        return outputs.log_probs[:, -num_kept:]

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            padded = score_padded(slice(None))
            one_by_one = torch.cat([score_padded(slice(row, row + 1)) for row in range(len(input_ids))])
            other = input_ids.clone()
            other[:, 3] = (other[:, 3] + vocabulary // 2) % vocabulary
            effect = (score_padded(slice(None), other) - padded).abs()[kept].mean()
            packed, _ = score_completions(
                model,
                input_ids,
                attention_mask,
                num_kept,
                temperature=temperature,
                cast_lm_head_to_fp32=cast_lm_head_to_fp32,
                min_token_ratio=1.0,
                autocast=autocast,
            )
        noise = (padded - one_by_one).abs()[kept].mean()
        difference = (padded - packed).abs()[kept].mean()
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        if is_out_of_memory(error):  # says nothing about the model
            raise
        noise, effect = torch.zeros(2, device=device)
        difference = torch.full((), float("inf"), device=device)
        message = f"the packed forward failed on a few test tokens ({type(error).__name__}: {error})"
    else:
        message = (
            f"packed and padded log-probabilities of a few test tokens differ by {difference:.2g} on average (one "
            f"row at a time against all at once: {noise:.2g}, one other token in the prompt: {effect:.2g})"
        )
    finally:
        model.train(was_training)
    dtype = torch.bfloat16 if autocast is not nullcontext else next(base.parameters()).dtype
    most = _ROUNDING.get(dtype, 0.1)
    rounding = torch.clamp(_MAX_SHARE_OF_A_TOKEN * effect, min=most / 50, max=most)
    is_wrong = ~(difference <= torch.maximum(5 * noise, rounding))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        verdict = is_wrong.to(torch.int32)
        torch.distributed.all_reduce(verdict, torch.distributed.ReduceOp.MAX)
        is_wrong = verdict.bool()
    return message if is_wrong else None
