"""Log-probabilities and entropies of a padded batch, computed on packed rows.

The result is what TRL's ``_get_per_token_logps_and_entropies`` returns, so every loss of TRL runs on top unchanged.
The model is entered through its (wrapped) forward, so DDP, FSDP, DeepSpeed, PEFT and quantisation do what they do.

Dimension legend: B rows, W prompt columns, T completion columns, S packed tokens, N scored tokens, H hidden size.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from trl_grpo_ext.learner.attention import LAYOUT_KEYWORD, AttentionLayout, watch_attention
from trl_grpo_ext.learner.head import read_head_transform, score_tokens
from trl_grpo_ext.learner.lora import fuse_adapters
from trl_grpo_ext.learner.packing import PackedRows, pack_batch

_REQUEST_KEYWORD = "packed_request"


class CompletionScores(NamedTuple):
    """Results of ``score_completions``, as TRL's method returns them."""

    logps_BT: torch.Tensor
    entropies_BT: torch.Tensor | None


class PackedRequest:
    """What to score in one packed row. Not a dataclass: FSDP copies those field by field."""

    def __init__(
        self,
        layout: AttentionLayout,
        source_N: torch.Tensor,
        label_N: torch.Tensor,
        temperature: float,
        cast_lm_head_to_fp32: bool,
        compute_entropy: bool,
    ) -> None:
        self.layout = layout
        self.source_N = source_N
        self.label_N = label_N
        self.temperature = temperature
        self.cast_lm_head_to_fp32 = cast_lm_head_to_fp32
        self.compute_entropy = compute_entropy


def score_completions(
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    *,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    compute_entropy: bool = False,
    max_packed_tokens: int | None = None,
    min_token_ratio: float = 1.2,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> CompletionScores:
    """Return the log-probability of every completion token and, on request, the entropy of its distribution.

    Each distinct prompt enters the model once, without padding; the LM head sees only completion tokens.

    Args:
        model: a causal language model for which ``why_unsupported`` returns None, wrapped or not.
        input_ids: (B, W + T): left-padded prompts, right-padded completions.
        attention_mask: (B, W + T). A row whose completion is masked out scores 0 everywhere.
        logits_to_keep: T.
        temperature: the logits are divided by it.
        cast_lm_head_to_fp32: run the LM head in float32, outside autocast.
        compute_entropy: whether to return entropies.
        max_packed_tokens: most tokens per forward; see ``pack_batch``. With gradients this cuts no memory, as all
            graphs are kept: cut the batch instead.
        min_token_ratio: see ``pack_batch``.
        autocast: enters the precision of the forward.

    Returns:
        (B, T) float32 (float64 for a float64 model), 0 where the mask is 0; gradients flow from both.

    Raises:
        IrregularRowsError: if a mask has holes or a prompt is empty.
        RuntimeError: if the attention of the model ignored the layout.
    """
    chunks = pack_batch(
        input_ids.cpu().numpy(),
        attention_mask.cpu().numpy(),
        logits_to_keep,
        min_token_ratio=min_token_ratio,
        max_packed_tokens=max_packed_tokens,
    )
    enable_packed_forward(unwrap(model))
    logps: list[torch.Tensor] = []
    entropies: list[Any] = []
    targets: list[torch.Tensor] = []
    for chunk in _pad_to_all_processes(model, chunks, max_packed_tokens is not None):
        with autocast():
            logps_N, entropies_N = _score_chunk(
                model, chunk, input_ids.device, temperature, cast_lm_head_to_fp32, compute_entropy
            )
        logps.append(logps_N)
        entropies.append(entropies_N)
        targets.append(torch.from_numpy(chunk.target_N).to(logps_N.device))
    shape = (input_ids.size(0), logits_to_keep)
    target_N = torch.cat(targets)
    return CompletionScores(
        _scatter(torch.cat(logps), target_N, shape),
        _scatter(torch.cat(entropies), target_N, shape) if compute_entropy else None,
    )


def _score_chunk(
    model: nn.Module,
    chunk: PackedRows,
    device: torch.device,
    temperature: float,
    cast_lm_head_to_fp32: bool,
    compute_entropy: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run one packed row through the wrapped model; return (N,) log-probabilities and entropies."""
    request = PackedRequest(
        AttentionLayout(chunk.segments),
        torch.from_numpy(chunk.source_N).to(device),
        torch.from_numpy(chunk.label_N).to(device),
        temperature,
        cast_lm_head_to_fp32,
        compute_entropy,
    )
    return model(
        input_ids=torch.from_numpy(chunk.input_ids_S).to(device).unsqueeze(0),
        position_ids=torch.from_numpy(chunk.position_ids_S).to(device).unsqueeze(0),
        **{_REQUEST_KEYWORD: request},
    )


def _scatter(values_N: torch.Tensor, target_N: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return ``values_N`` at their places in zeros of ``shape``; connected to the model even where N is 0."""
    return values_N.new_zeros(shape[0] * shape[1]).index_copy(0, target_N, values_N).view(shape)


def _pad_to_all_processes(model: nn.Module, chunks: list[PackedRows], is_limited: bool) -> list[PackedRows]:
    """Return as many chunks as the process with most has, for a model whose forward is a collective operation.

    The added ones repeat the smallest and score nothing.
    """
    if not (is_limited and torch.distributed.is_available() and torch.distributed.is_initialized()):
        return chunks
    if not forward_is_collective(model):
        return chunks
    most = torch.tensor(len(chunks), device=next(model.parameters()).device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    smallest = min(chunks, key=lambda chunk: chunk.input_ids_S.size)
    idle = smallest._replace(
        source_N=smallest.source_N[:0], label_N=smallest.label_N[:0], target_N=smallest.target_N[:0]
    )
    return chunks + [idle] * (int(most) - len(chunks))


def forward_is_collective(model: nn.Module) -> bool:
    """Return whether every process must run the same number of forwards.

    FSDP and DeepSpeed ZeRO-3 gather parameters in a forward; DDP broadcasts buffers, such as rotary frequencies.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    wrappers = (DistributedDataParallel, FSDPModule, FullyShardedDataParallel)
    if any(isinstance(module, wrappers) for module in model.modules()):
        return True
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def unwrap(model: nn.Module) -> Any:
    """Return the transformers model inside DDP, FSDP, DeepSpeed, ``torch.compile`` and PEFT wrappers.

    What holds no transformers model is returned as it is.
    """
    inner: Any = model
    while inner is not None and not isinstance(inner, PreTrainedModel):
        # Looked up on the class and in the submodules, as FSDP and DeepSpeed pass unknown attributes through.
        if hasattr(type(inner), "get_base_model"):
            inner = inner.get_base_model()
        else:
            children = inner._modules
            inner = next((children[n] for n in ("module", "_fsdp_wrapped_module", "_orig_mod") if n in children), None)
    return model if inner is None else inner


def enable_packed_forward(model: Any) -> None:
    """Teach the forward of a transformers model the keyword that ``score_completions`` uses.

    Without the keyword the forward is the one that was there, but for LoRA layers, which compute PEFT's numbers in
    fewer passes (``fuse_adapters``). Calling it twice does no harm; it is called again after someone replaced
    ``model.forward``.
    """
    if getattr(model.forward, "_handles_packed_request", False):
        return
    plain = model.forward
    # Held unbound, so that a deep copy of the model runs itself and not the original.
    plain_function = plain.__func__ if getattr(plain, "__self__", None) is model else None
    num_layers = watch_attention(model)
    fuse_adapters(model)

    @functools.wraps(plain)  # `generate` checks its keywords against the signature
    def forward(self: nn.Module, *args: Any, packed_request: PackedRequest | None = None, **kwargs: Any) -> Any:
        if packed_request is None:
            return plain(*args, **kwargs) if plain_function is None else plain_function(self, *args, **kwargs)
        return _forward_packed(self, packed_request, num_layers, kwargs["input_ids"], kwargs["position_ids"])

    forward._handles_packed_request = True  # type: ignore[attr-defined]
    model.forward = types.MethodType(forward, model)


def _forward_packed(
    model: Any, request: PackedRequest, num_layers: int, input_ids: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run backbone and head; a plain tuple, as wrappers look for tensors in it."""
    # A mask with four dimensions is passed on as it is, so no (S, S) mask is built. An empty one makes an attention
    # that does not know the layout fail.
    no_mask = torch.empty(1, 1, 0, 0, dtype=torch.bool, device=input_ids.device)
    outputs = model.base_model(
        input_ids=input_ids,
        position_ids=position_ids,
        attention_mask=no_mask,
        use_cache=False,
        **{LAYOUT_KEYWORD: request.layout},
    )
    if request.layout.num_calls != num_layers:
        raise RuntimeError(
            f"{type(model).__name__} called packed attention {request.layout.num_calls} times for {num_layers} "
            "attention layers, so its log-probabilities would be wrong. Use TRL's own path for this model."
        )
    head = model.get_output_embeddings()
    device = head.weight.device  # with the model split over devices, the backbone may end on another one
    hidden = outputs.last_hidden_state[0].to(device).index_select(0, request.source_N.to(device))
    precision: AbstractContextManager = nullcontext()
    if request.cast_lm_head_to_fp32:
        hidden = hidden.float()
        precision = torch.autocast(hidden.device.type, enabled=False)
    weight, bias = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in (head.weight, head.bias))
    with precision:
        return score_tokens(
            hidden,
            weight,
            bias,
            request.label_N.to(device),
            read_head_transform(model.config, request.temperature),
            compute_entropy=request.compute_entropy,
            gather=_gather_sharded_head,
        )


def _gather_sharded_head(*parameters: Any) -> AbstractContextManager:
    """Gather a head that DeepSpeed ZeRO-3 sharded, as TRL's fused head does."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()  # also spares the memory planner the import of TRL
    from trl.trainer.utils import maybe_gather_lm_head_ctx

    return maybe_gather_lm_head_ctx(*parameters)
