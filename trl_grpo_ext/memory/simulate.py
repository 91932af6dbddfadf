"""Run a whole optimiser step for its allocations: load, generate, score, forward, backward, update.

On fake tensors nothing is computed and no memory is used, so a 70B step runs on a laptop; on real ones the same code
counts the same bytes, which the tests hold it to.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trl_grpo_ext.learner.device import planning_for_accelerator
from trl_grpo_ext.learner.scoring import unwrap
from trl_grpo_ext.memory.closed_forms import CUBLAS_WORKSPACE_BYTES, CUBLAS_WORKSPACES, sampling_bytes
from trl_grpo_ext.memory.cuda_rules import cuda_softmax
from trl_grpo_ext.memory.fake_model import DTYPES, build_on_meta, give_storage, trainable
from trl_grpo_ext.memory.forwards import Path, Rows, log_probs, prefill, prepare
from trl_grpo_ext.memory.hollow import HollowMode
from trl_grpo_ext.memory.mode import MemoryMode
from trl_grpo_ext.memory.stand_ins import EightBitAdamW, ForeachAdamW, StandInLinear
from trl_grpo_ext.memory.trace import Trace
from trl_grpo_ext.memory.tracker import StorageTracker

# Tensors that TRL's offloading leaves where they are.
_MIN_OFFLOADED_ELEMENTS = 1024
# Keys and values are kept in the precision of the products, half precision on every card.
_KV_WIDTH = 2


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one optimiser step does, in sizes.

    Attributes:
        rows: The largest micro-batch.
        num_micro_batches: Passes per optimiser step; more than two cost no more memory than two.
        path: Which forward scores completions.
        generation: Rows sampled at once; None where another engine samples, or nothing is to be sampled.
        scoring: Rows of a pass for old or reference log-probabilities; None for none.
        has_reference: Whether a second copy of the weights is held for the KL term.
        autocast: dtype of mixed precision, or None.
        attn_implementation: transformers' name.
        clips_gradients: Whether the norm of the gradient is limited.
    """

    rows: Rows
    num_micro_batches: int = 1
    path: Path = "packed"
    generation: Rows | None = None
    scoring: Rows | None = None
    has_reference: bool = False
    autocast: str | None = "bfloat16"
    attn_implementation: str = "sdpa"
    clips_gradients: bool = True


@dataclass
class Simulation:
    """What a simulated run allocated.

    Attributes:
        trace: Every allocation, with the phases in the order of the run.
        host_bytes: What offloading and paging keep in host memory at most.
        num_operations: Operations that were run.
        seconds: How long the simulation took.
    """

    trace: Trace
    host_bytes: int = 0
    num_operations: int = 0
    seconds: float = 0.0


@dataclass
class Lora:
    """The adapter and how the rest of the model is held beside it; see ``build_on_meta``."""

    config: Any = None
    adapter_dtype: torch.dtype | None = torch.float32
    double_quantised: bool = True
    upcast_rest: bool = False


def simulate(
    config: Any,
    mode: MemoryMode,
    work: Workload,
    lora: Lora | None = None,
    *,
    num_layers: int | None = None,
    num_steps: int = 2,
    starts_with_states: bool = False,
    on_real_tensors: bool = False,
    as_on_cuda: bool = True,
    optim: str | None = None,
) -> Simulation:
    """Return what ``num_steps`` optimiser steps allocate.

    Args:
        config: of a transformers causal language model.
        mode: how the policy is held.
        work: what a step does.
        lora: the adapter; ignored for full tuning.
        num_layers: decoder layers; None for the config's own. A phase's peak is linear in them.
        num_steps: from the second on, optimiser states are there from the start.
        starts_with_states: True makes the optimiser's states before the first step, which then is like any later one.
        on_real_tensors: True allocates and computes.
        as_on_cuda: True takes the paths and adds the workspaces of a GPU; False counts exactly what the CPU does.
        optim: overrides the mode's, with ``"adamw_torch"`` (one more copy in the update) or ``"sgd"`` too.
    """
    started = time.perf_counter()
    lora = lora or Lora()
    config = copy.deepcopy(config)
    if num_layers is not None:
        set_num_layers(config, num_layers)
    model = build_on_meta(
        config,
        mode,
        lora.config,
        double_quantised=lora.double_quantised,
        adapter_dtype=lora.adapter_dtype,
        upcast_rest=lora.upcast_rest,
    )
    prepare(model, work.path, work.attn_implementation)
    hollow: Any = contextlib.nullcontext() if on_real_tensors else HollowMode()
    tracker = StorageTracker()
    with _quiet_checkpointing(), planning_for_accelerator(as_on_cuda), cuda_softmax(as_on_cuda), hollow, tracker:
        run = _Run(model, mode, work, tracker, as_on_cuda, optim or mode.optim, fills=on_real_tensors)
        if starts_with_states:
            run.make_states()
        for number in range(num_steps):
            # A second pass finds the first one's gradients; once is enough to see what that costs.
            run.step(min(work.num_micro_batches, 2) if number == num_steps - 1 else 1)
        host_bytes = run.host_bytes
        tracker.close()
    return Simulation(tracker.trace, host_bytes, tracker.num_operations, time.perf_counter() - started)


def set_num_layers(config: Any, num_layers: int) -> None:
    """Change the depth of a config, its per-layer lists included."""
    text = config.get_text_config()
    before, text.num_hidden_layers = text.num_hidden_layers, num_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, [value[layer % before] for layer in range(num_layers)])
    if getattr(text, "max_window_layers", None) is not None:
        text.max_window_layers = min(text.max_window_layers, num_layers)


class _Run:
    """One simulated run: the state that outlives a step."""

    def __init__(
        self,
        model: nn.Module,
        mode: MemoryMode,
        work: Workload,
        tracker: StorageTracker,
        as_on_cuda: bool,
        optim: str,
        fills: bool,
    ) -> None:
        self.model, self.mode, self.work, self.tracker, self.as_on_cuda = model, mode, work, tracker, as_on_cuda
        self.host_bytes = 0
        self.num_workspaces = 0
        with tracker.phase("load"):
            give_storage(model, fill=fills, around=self._staging)
            frozen = [p for p in model.parameters() if not p.requires_grad]
            self.parameters = trainable(model)
            tracker.track([*frozen, *model.buffers()], "weights")
            tracker.track(self.parameters, "weights" if mode.tuning == "full" else "adapter")
            if work.has_reference:
                self.reference = [torch.empty_like(p) for p in model.parameters()]
                tracker.track(self.reference, "reference")
        self.optimizer = make_optimizer(self.parameters, optim)

    @contextlib.contextmanager
    def _staging(self, module: nn.Module) -> Iterator[None]:
        """Hold the half-precision weight that a quantised one is made from, while it is made."""
        if not isinstance(module, StandInLinear):
            yield
            return
        size = 2 * module.in_features * module.out_features
        block = self.tracker.allocate(size, "staging")
        yield
        self.tracker.release(block, size)

    def make_states(self) -> None:
        """Let the optimiser make its states."""
        with self.tracker.phase("load"):
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
                self.tracker.track([parameter.grad], "gradients")
            self._update()

    def step(self, num_passes: int) -> None:
        """Make one optimiser step of so many forward and backward passes."""
        work, tracker = self.work, self.tracker
        if work.generation is not None:
            self._generate(work.generation)
        if work.scoring is not None:
            with tracker.phase("score"), torch.no_grad(), self._precision():
                log_probs(self.model, work.path, work.scoring)
        for _ in range(num_passes):
            with self._offloading():
                with tracker.phase("forward"), self._precision():
                    self._add_workspace()
                    loss = log_probs(self.model, work.path, work.rows)
                with tracker.phase("backward"):
                    self._add_workspace()
                    loss.backward()
                    del loss
                    tracker.track((p.grad for p in self.parameters), "gradients")
        with tracker.phase("optimizer"):
            if work.clips_gradients:
                nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self._update()

    def _update(self) -> None:
        self.optimizer.step()
        states = [s for state in self.optimizer.state.values() for s in state.values()]
        self.tracker.track((s for s in states if isinstance(s, torch.Tensor)), "optimizer")
        self.host_bytes = max(self.host_bytes, getattr(self.optimizer, "host_bytes", 0))
        self.optimizer.zero_grad(set_to_none=True)

    def _generate(self, rows: Rows) -> None:
        """Hold the prompts' keys and values during the prefill, all of them and the sampler's tensors at the end."""
        tracker = self.tracker
        config = unwrap(self.model).config.get_text_config()
        packed = self.work.path == "packed"
        num_prompts = len(rows.per_prompt) if packed else rows.num_rows
        with tracker.phase("generate"), torch.no_grad():
            blocks = self._cache(config, rows.prompt_tokens, num_prompts)
            with self._precision(), _without_checkpointing(self.model):
                prefill(self.model, rows, packed=packed)
            if packed:
                blocks += self._cache(config, rows.completion_tokens, rows.num_rows)
            else:
                self._drop(blocks)
                blocks = self._cache(config, rows.prompt_tokens + rows.completion_tokens, rows.num_rows)
            # A layer's keys and values exist twice while they grow.
            growing = max(size for _, size in blocks)
            size = sampling_bytes(rows.num_rows, config.vocab_size) + 2 * growing
            blocks.append((tracker.allocate(size, "sampling"), size))
            self._drop(blocks)

    def _cache(self, config: Any, num_tokens: int, num_rows: int) -> list[tuple[int, int]]:
        """Allocate keys and values of every layer; return the blocks and their sizes."""
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = num_tokens * num_rows * num_kv_heads * head_dim * _KV_WIDTH
        return [(self.tracker.allocate(size, "kv cache"), size) for _ in range(2 * config.num_hidden_layers)]

    def _drop(self, blocks: list[tuple[int, int]]) -> None:
        for block, size in blocks:
            self.tracker.release(block, size)

    def _add_workspace(self) -> None:
        if self.as_on_cuda and self.num_workspaces < CUBLAS_WORKSPACES:
            self.num_workspaces += 1
            self.tracker.allocate(CUBLAS_WORKSPACE_BYTES, "workspaces")

    def _precision(self) -> contextlib.AbstractContextManager:
        if self.work.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=DTYPES[self.work.autocast])

    @contextlib.contextmanager
    def _offloading(self) -> Iterator[None]:
        """Keep saved activations off the card: dropped when saved, made anew when used, counted for the host."""
        if not self.mode.activation_offload:
            yield
            return
        kept = {p.untyped_storage()._cdata for p in [*self.model.parameters(), *self.model.buffers()]}
        on_host = 0

        def pack(tensor: torch.Tensor) -> Any:
            nonlocal on_host
            if tensor.numel() < _MIN_OFFLOADED_ELEMENTS or tensor.untyped_storage()._cdata in kept:
                return tensor
            on_host += tensor.numel() * tensor.element_size()
            self.host_bytes = max(self.host_bytes, on_host)
            return (tensor.shape, tensor.dtype)

        def unpack(saved: Any) -> torch.Tensor:
            nonlocal on_host
            if isinstance(saved, torch.Tensor):
                return saved
            shape, dtype = saved
            tensor = torch.empty(shape, dtype=dtype)
            on_host -= tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


def make_optimizer(parameters: list[nn.Parameter], optim: str) -> torch.optim.Optimizer:
    """Return the optimiser of that name, or what allocates the same."""
    if optim in ("adamw_8bit", "paged_adamw_8bit"):
        return EightBitAdamW(parameters, paged=optim.startswith("paged"))
    if optim == "sgd":
        return torch.optim.SGD(parameters, lr=0.0)
    if optim == "adamw_torch":
        return ForeachAdamW(parameters)
    return torch.optim.AdamW(parameters, lr=0.0, fused=True)


@contextlib.contextmanager
def _without_checkpointing(model: nn.Module) -> Iterator[None]:
    switched = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]
    for module in switched:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in switched:
            module.gradient_checkpointing = True  # type: ignore[assignment]


@contextlib.contextmanager
def _quiet_checkpointing() -> Iterator[None]:
    """Switch off warnings that a simulation has no use for."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
