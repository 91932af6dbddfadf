"""Which memory mode to take: the levers in their order, the least predicted step time among what fits.

Levers that leave the result alone are tried first and together, since they trade only time: gradient checkpointing,
smaller micro-batches, smaller generation batches, offloading. If no combination fits, the optimiser's states are kept
in 8 bits, then paged. What changes the result (an adapter instead of full tuning, a quantised base) is tried only
where it is allowed. Completions and groups are never made smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from trl_grpo_ext.memory.bound import lower_bound
from trl_grpo_ext.memory.estimate import Estimate, Estimator
from trl_grpo_ext.memory.job import Job
from trl_grpo_ext.memory.mode import MemoryMode
from trl_grpo_ext.memory.shapes import ModelShape

_OPTIMISERS = ("adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit")
_MIN_PASS_TOKENS = 512

# Rates behind predicted times. They only order candidates: a card of the A100's kind, and ratios that others published
# (torchtune: checkpointing 21 % slower, 8-bit AdamW 4.7 %; a T4: 4-bit steps 1.3 to 2 times those of 16-bit LoRA).
_FLOPS, _BYTES_PER_S, _PCIE_BYTES_PER_S = 1.2e14, 1.2e12, 1.2e10
_PASS_S, _DECODE_STEP_S, _VLLM_STEP_S = 0.05, 0.03, 0.006
_QUANTISED_SLOWDOWN = {"nf4": 1.4, "int8": 1.6}


class Found(NamedTuple):
    """The mode that was chosen, its estimate, and what was turned down on the way."""

    estimate: Estimate
    fits: bool
    notes: list[str]


@dataclass(frozen=True)
class Limits:
    """What must not be exceeded: bytes of the process, and of the card when vLLM starts."""

    process: int
    card: int


def predicted_seconds(shape: ModelShape, job: Job, mode: MemoryMode, vllm_rows: int = 0) -> float:
    """Return a step's time on a fictitious card, good for comparing modes of one job."""
    micro = job.micro_batch_tokens if mode.max_tokens_per_micro_batch is None else mode.max_tokens_per_micro_batch
    per_prompt, num_passes = job.largest_pass(micro)
    prompts = num_passes * len(per_prompt) if job.shares_prompts else job.num_completions
    tokens = prompts * job.prompt_tokens + job.num_completions * job.completion_tokens
    # A product costs 2 FLOPs a weight forward; backward as much for the input, and again for a trained weight.
    per_token = shape.parameters * (6 if mode.tuning == "full" else 4)
    train = tokens * per_token / _FLOPS * _QUANTISED_SLOWDOWN.get(mode.base, 1.0) + num_passes * _PASS_S
    if mode.gradient_checkpointing:
        train *= 1.27
    if mode.activation_offload:
        kept = 2 * shape.hidden * (1 if mode.gradient_checkpointing else 30)
        train += 2 * tokens * shape.layers * kept / _PCIE_BYTES_PER_S
    trained = shape.parameters if mode.tuning == "full" else shape.adapter_parameters(job.rank)
    update = 20 * trained / _BYTES_PER_S
    if mode.optim != "adamw_torch_fused":
        train *= 1.047
    if mode.optim.startswith("paged"):
        update += 4 * trained / _PCIE_BYTES_PER_S
    weights = 2 * shape.parameters / _BYTES_PER_S
    if mode.vllm_gpu_memory_utilization is not None:
        batches = -(-job.num_completions // max(vllm_rows, 1))
        sample = batches * job.completion_tokens * (weights + _VLLM_STEP_S)
        sample += 2 * 2 * shape.parameters / _PCIE_BYTES_PER_S if mode.vllm_enable_sleep_mode else 0.0
    else:
        batch = mode.max_tokens_per_generation_batch
        _, batches = job.generation_batch(job.generation_tokens if batch is None else batch)
        slowdown = _QUANTISED_SLOWDOWN.get(mode.base, 1.0)
        sample = batches * job.completion_tokens * (weights * slowdown + _DECODE_STEP_S)
    return train + update + sample


def find_mode(
    estimator: Estimator, start: MemoryMode, allow: Sequence[str], limits: Limits, fixed: frozenset[str] = frozenset()
) -> Found:
    """Return the fastest mode that fits, from the first of the stages in which one does; else the smallest one.

    Args:
        estimator: of the model and the job.
        start: what is configured; its tuning and base are the first stage's.
        allow: see ``plan_memory``.
        limits: what fits.
        fixed: names of fields that the user chose himself and that stay as they are.
    """
    notes: list[str] = []
    smallest: Estimate | None = None
    least: tuple[int, MemoryMode] | None = None
    for kind in _kinds(start, allow, fixed):
        bound = max(sum(p.values()) for p in lower_bound(estimator.shape, _frugal(kind), estimator.job).values())
        name = f"{kind.tuning} {kind.base} {kind.optim}"
        if least is None or bound < least[0]:
            least = (bound, kind)
        if bound > limits.process:
            notes.append(f"{name}: {bound / 2**30:.1f} GiB at least")
            continue
        chosen = _best_of_kind(estimator, kind, limits, fixed)
        if chosen.fits:
            return Found(chosen.estimate, True, notes)
        notes.append(f"{name}: {chosen.estimate.process / 2**30:.1f} GiB at best")
        if smallest is None or chosen.estimate.process < smallest.process:
            smallest = chosen.estimate
    if smallest is None:
        smallest = estimator.estimate(_smallest_settings(estimator, least[1] if least else start, fixed))
    return Found(smallest, False, notes)


def _kinds(start: MemoryMode, allow: Sequence[str], fixed: frozenset[str]) -> Iterator[MemoryMode]:
    """Yield tuning, base and optimiser in the order in which they may be given up."""
    ways = [start]
    if start.tuning == "full" and "lora" in allow:
        ways.append(replace(start, tuning="lora"))
    if start.base not in ("int8", "nf4"):
        if "qlora-8bit" in allow:
            ways.append(replace(start, tuning="lora", base="int8"))
        if "qlora" in allow:
            ways.append(replace(start, tuning="lora", base="nf4"))
    for way in ways:
        optimisers = _OPTIMISERS[_OPTIMISERS.index(way.optim) :] if "optim" not in fixed else (way.optim,)
        for optim in optimisers:
            yield replace(way, optim=optim)


def _frugal(kind: MemoryMode) -> MemoryMode:
    return replace(kind, gradient_checkpointing=True, activation_offload=True)


class _Best(NamedTuple):
    estimate: Estimate
    fits: bool


def _best_of_kind(estimator: Estimator, kind: MemoryMode, limits: Limits, fixed: frozenset[str]) -> _Best:
    """Return the fastest combination of the neutral levers that fits, or the smallest one."""
    job = estimator.job

    def seconds(mode: MemoryMode) -> float:
        share = mode.vllm_gpu_memory_utilization
        rows = 0 if share is None else estimator.vllm_rows(share)
        return predicted_seconds(estimator.shape, job, mode, rows)

    # The usual answer to a card that is too small: one estimate instead of all.
    smallest = estimator.estimate(_smallest_settings(estimator, kind, fixed))
    if smallest.process > limits.process:
        return _Best(smallest, False)
    fitting: list[Estimate] = []
    for engine in _engines(estimator, kind, limits, fixed):
        # Training and sampling hold nothing of each other, so each is chosen by itself.
        by_time = sorted(_training_options(job, engine, fixed), key=seconds)
        training = _first_that_fits(by_time, lambda mode: estimator.estimate(mode, phases="train"), limits, job)
        if training is None:
            continue
        sampling = sorted(_sampling_options(job, training.mode, fixed), key=seconds)
        whole = _first_that_fits(sampling, estimator.estimate, limits, job)
        if whole is not None:
            fitting.append(whole)
    if fitting:
        return _Best(min(fitting, key=lambda found: seconds(found.mode)), True)
    return _Best(smallest, False)


def _first_that_fits(
    modes: Sequence[MemoryMode], estimate: Callable[[MemoryMode], Estimate], limits: Limits, job: Job
) -> Estimate | None:
    """Return the estimate of the first mode within the limits; what needs more than one that failed is not tried."""
    failed: list[MemoryMode] = []
    for mode in modes:
        if any(_needs_no_less(mode, other, job) for other in failed):
            continue
        found = estimate(mode)
        if found.process <= limits.process:
            return found
        failed.append(mode)
    return None


def _needs_no_less(mode: MemoryMode, other: MemoryMode, job: Job) -> bool:
    """Return whether ``mode`` cannot be smaller than ``other``."""

    def size(budget: int | None, default: int) -> float:
        tokens = default if budget is None else budget
        return tokens or float("inf")

    return (
        mode.gradient_checkpointing <= other.gradient_checkpointing
        and mode.activation_offload <= other.activation_offload
        and size(mode.max_tokens_per_micro_batch, job.micro_batch_tokens)
        >= size(other.max_tokens_per_micro_batch, job.micro_batch_tokens)
        and size(mode.max_tokens_per_generation_batch, job.generation_tokens)
        >= size(other.max_tokens_per_generation_batch, job.generation_tokens)
    )


def _engines(estimator: Estimator, kind: MemoryMode, limits: Limits, fixed: frozenset[str]) -> Iterator[MemoryMode]:
    """Yield the mode with each way of sampling: vLLM awake, vLLM asleep while training, the trainer itself."""
    if not estimator.job.uses_vllm:
        yield kind
        return
    named = {"vllm_gpu_memory_utilization", "vllm_enable_sleep_mode"}
    configured = kind.vllm_gpu_memory_utilization or estimator.job.vllm_share
    steps = [configured] if named & fixed else [configured, *(round(0.05 * n, 2) for n in range(18, 1, -1))]
    for sleeps in (False, True):
        for share in steps:
            if estimator.vllm_rows(share) >= 1 and share * limits.card <= limits.process:
                # Older vLLM frees nothing while PyTorch's segments are expandable.
                expandable = kind.expandable_segments and not sleeps
                yield replace(
                    kind,
                    vllm_gpu_memory_utilization=share,
                    vllm_enable_sleep_mode=sleeps,
                    expandable_segments=expandable,
                )
    yield replace(kind, vllm_gpu_memory_utilization=None, vllm_enable_sleep_mode=False)


def _training_options(job: Job, kind: MemoryMode, fixed: frozenset[str]) -> list[MemoryMode]:
    budgets = _halvings(job.micro_batch_tokens, max(job.row_tokens, _MIN_PASS_TOKENS))
    if "max_tokens_per_micro_batch" in fixed:
        budgets = [kind.max_tokens_per_micro_batch or job.micro_batch_tokens]
    checkpointing = (kind.gradient_checkpointing,) if "gradient_checkpointing" in fixed else (False, True)
    offload = (kind.activation_offload,) if "activation_offload" in fixed else (False, True)
    return [
        replace(kind, max_tokens_per_micro_batch=b, gradient_checkpointing=c, activation_offload=o)
        for b in budgets
        for c in checkpointing
        for o in offload
    ]


def _sampling_options(job: Job, kind: MemoryMode, fixed: frozenset[str]) -> list[MemoryMode]:
    if kind.vllm_gpu_memory_utilization is not None or "max_tokens_per_generation_batch" in fixed:
        return [kind]
    budgets = _halvings(job.generation_tokens, job.row_tokens)
    return [replace(kind, max_tokens_per_generation_batch=budget) for budget in budgets]


def _halvings(budget: int, least: int) -> list[int]:
    """Return the budget, its half and so on, down to what one row needs; 0 (no budget) stays alone."""
    budgets = [budget]
    while budget and budget // 2 >= least:
        budget //= 2
        budgets.append(budget)
    return budgets


def _smallest_settings(estimator: Estimator, kind: MemoryMode, fixed: frozenset[str]) -> MemoryMode:
    """Return the combination of neutral levers that needs least."""
    job = estimator.job
    if job.uses_vllm and not fixed & {"vllm_gpu_memory_utilization", "vllm_enable_sleep_mode"}:
        kind = replace(kind, vllm_gpu_memory_utilization=None, vllm_enable_sleep_mode=False)
    mode = _training_options(job, kind, fixed)[-1]
    return _sampling_options(job, mode, fixed)[-1]
