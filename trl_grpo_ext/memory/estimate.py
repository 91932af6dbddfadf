"""What a memory mode needs for a job: simulated at two depths (tier 1), or in full and replayed (tier 2)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from trl_grpo_ext.memory.caching_allocator import replay
from trl_grpo_ext.memory.closed_forms import CUDA_CONTEXT_BYTES, VLLM_REMAINDER_BYTES, kv_cache_bytes
from trl_grpo_ext.memory.forwards import Rows
from trl_grpo_ext.memory.job import Job
from trl_grpo_ext.memory.mode import MemoryMode
from trl_grpo_ext.memory.shapes import ModelShape
from trl_grpo_ext.memory.simulate import Lora, Workload, simulate

# Reserved over allocated where the trace is not replayed: what replays gave over the modes of docs/memory_plan.md.
_UNREPLAYED = {True: 1.03, False: 1.08}
# The replay comes out below what GPUs reserve; see the error table in docs/memory_plan.md.
_UNDER_PREDICTION = 1.05
_UNDER_PREDICTION_QUANTISED = 1.08
_MAX_EAGER_TOKENS = 4096


class _Peaks(NamedTuple):
    """What is kept of a simulation at one depth."""

    peaks: dict[str, int]
    breakdowns: dict[str, dict[str, int]]
    host_bytes: int
    seconds: float


# By model, mode and work: a table of cards, and a search after another, ask for the same again.
_shallow_runs_kept: dict[Any, list[_Peaks]] = {}
_MAX_KEPT = 1000


@dataclass
class Estimate:
    """What a mode needs, in bytes.

    Attributes:
        mode: The mode.
        phases: For each phase, the categories at its peak; they add up to what the process holds then.
        allocated: The most that tensors hold.
        reserved: The most that PyTorch takes from the driver, with the correction for what the model of it misses.
        process: The most that the process takes from the card.
        host_ram: What offloading, paging and a sleeping vLLM keep in host memory.
        tier: "T1" or "T2".
        doubts: Why the figures may be off by more than the head-room.
        seconds: Time spent.
    """

    mode: MemoryMode
    phases: dict[str, dict[str, int]]
    allocated: int
    reserved: int
    process: int
    host_ram: int
    tier: str
    doubts: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Estimator:
    """Estimate modes of one model and one job; simulations are kept, so asking twice costs once.

    Args:
        config: of a transformers model.
        shape: its sizes.
        job: what a step does.
        lora: the adapter, for modes that have one.
        card_bytes: memory of the card, which vLLM's share is a part of.
        context_bytes: what CUDA takes before the first tensor.
        attn_implementation: transformers' name; None for its default.
    """

    def __init__(
        self,
        config: Any,
        shape: ModelShape,
        job: Job,
        lora: Lora,
        *,
        card_bytes: int,
        context_bytes: int = CUDA_CONTEXT_BYTES,
        attn_implementation: str | None = None,
    ) -> None:
        self.config, self.shape, self.job, self.lora = config, shape, job, lora
        self.card_bytes, self.context_bytes = card_bytes, context_bytes
        self.why_padded = self._find_why_padded()
        softcap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
        self.attn_implementation = attn_implementation or ("eager" if softcap else "sdpa")
        self._model_key = f"{config.to_json_string(use_diff=False)} {lora}"
        self._kept: dict[Any, Any] = {}

    @classmethod
    def of_facts(cls, facts: dict[str, Any], shape: ModelShape, job: Job, peft: Any, **kwargs: Any) -> Estimator:
        """Return the estimator of a model given by the content of its ``config.json``."""
        from transformers import AutoConfig

        known = {name: value for name, value in facts.items() if name not in ("model_type", "transformers_version")}
        config = AutoConfig.for_model(facts["model_type"], **known)
        return cls(config, shape, job, Lora(peft), **kwargs)

    def for_job(self, job: Job) -> Estimator:
        """Return the estimator of another job of the same model on the same card."""
        return Estimator(
            self.config,
            self.shape,
            job,
            self.lora,
            card_bytes=self.card_bytes,
            context_bytes=self.context_bytes,
            attn_implementation=self.attn_implementation,
        )

    def _find_why_padded(self) -> str | None:
        """Return why completions are scored on TRL's padded path, or None."""
        if not self.job.shares_prompts:
            return "shared_prefix_forward is off"
        import copy

        from trl_grpo_ext.learner.support import why_unsupported
        from trl_grpo_ext.memory.fake_model import build_on_meta
        from trl_grpo_ext.memory.simulate import set_num_layers

        config = copy.deepcopy(self.config)
        set_num_layers(config, 2)
        model = build_on_meta(config, MemoryMode(tuning="full"))
        return why_unsupported(model, max_length=self.job.row_tokens)

    def work(self, mode: MemoryMode, *, samples: bool = True) -> Workload:
        """Return what a step does under a mode, in sizes."""
        job = self.job
        per_prompt, num_passes = job.largest_pass(_or(mode.max_tokens_per_micro_batch, job.micro_batch_tokens))
        sizes = (job.prompt_tokens, job.completion_tokens)
        generation = None
        if samples and mode.vllm_gpu_memory_utilization is None:
            batch, _ = job.generation_batch(_or(mode.max_tokens_per_generation_batch, job.generation_tokens))
            generation = Rows(batch, *sizes)
        return Workload(
            rows=Rows(per_prompt, *sizes),
            num_micro_batches=num_passes,
            path="packed" if self.why_padded is None else "padded",
            generation=generation,
            has_reference=job.has_kl and mode.tuning == "full",
            autocast=job.autocast,
            attn_implementation=self.attn_implementation,
            clips_gradients=job.clips_gradients,
        )

    def estimate(self, mode: MemoryMode, *, in_full: bool = False, phases: str = "all") -> Estimate:
        """Return what ``mode`` needs.

        Args:
            mode: the mode.
            in_full: True simulates every layer, twice, and replays the trace.
            phases: "all", or "train" to leave sampling out.
        """
        samples = phases == "all"
        key = (mode, in_full, samples)
        if key not in self._kept:
            self._kept[key] = self._in_full(mode) if in_full else self._extrapolated(mode, samples)
        return self._kept[key]

    def _extrapolated(self, mode: MemoryMode, samples: bool) -> Estimate:
        # A family that alternates kinds of layers repeats every two; two and four layers hold whole periods.
        depths = (2, 4) if len(set(self.shape.windows)) > 1 else (2, 3)
        work = self.work(mode, samples=samples)
        runs = self._shallow_runs(mode, work, depths)
        steps = (self.shape.layers - depths[0]) / (depths[1] - depths[0])

        def stretch(low: int, high: int) -> int:
            return max(round(low + steps * (high - low)), 0)

        peaks = [run.peaks for run in runs]
        shares = [run.breakdowns for run in runs]
        allocated = {phase: stretch(low, peaks[1].get(phase, low)) for phase, low in peaks[0].items()}
        phases: dict[str, dict[str, int]] = {}
        for phase, total in allocated.items():
            names = {**shares[0].get(phase, {}), **shares[1].get(phase, {})}
            parts = {n: stretch(shares[0][phase].get(n, 0), shares[1][phase].get(n, 0)) for n in names}
            # The two depths may peak at different operations; the total is exact, so the rest is activations.
            parts["activations"] = max(parts.get("activations", 0) + total - sum(parts.values()), 0)
            phases[phase] = {name: size for name, size in parts.items() if size}
        factor = _UNREPLAYED[mode.expandable_segments]
        reserved = {phase: round(total * factor) for phase, total in allocated.items()}
        seconds = sum(run.seconds for run in runs)
        host = stretch(runs[0].host_bytes, runs[1].host_bytes)
        return self._assemble(mode, phases, allocated, reserved, host, "T1", seconds)

    def _shallow_runs(self, mode: MemoryMode, work: Workload, depths: tuple[int, int]) -> list[_Peaks]:
        """Return the simulations at two depths; vLLM's settings and the allocator's have no part in them."""
        bare = replace(mode, vllm_gpu_memory_utilization=None, vllm_enable_sleep_mode=False, expandable_segments=True)
        key = (self._model_key, bare, work, depths)
        if key not in _shallow_runs_kept:
            runs = [
                simulate(self.config, mode, work, self.lora, num_layers=d, num_steps=1, starts_with_states=True)
                for d in depths
            ]
            if len(_shallow_runs_kept) >= _MAX_KEPT:
                _shallow_runs_kept.clear()
            _shallow_runs_kept[key] = [
                _Peaks(run.trace.peaks(), run.trace.breakdowns(), run.host_bytes, run.seconds) for run in runs
            ]
        return _shallow_runs_kept[key]

    def _in_full(self, mode: MemoryMode) -> Estimate:
        run = simulate(self.config, mode, self.work(mode), self.lora)
        usage = replay(run.trace.events, expandable_segments=mode.expandable_segments)
        allocated = {phase: used.allocated for phase, used in usage.items()}
        reserved = {phase: used.reserved for phase, used in usage.items()}
        phases = run.trace.breakdowns()
        for phase, parts in phases.items():
            parts["activations"] = parts.get("activations", 0) + allocated[phase] - sum(parts.values())
        return self._assemble(mode, phases, allocated, reserved, run.host_bytes, "T2", run.seconds)

    def _assemble(
        self,
        mode: MemoryMode,
        phases: dict[str, dict[str, int]],
        allocated: dict[str, int],
        reserved: dict[str, int],
        host_bytes: int,
        tier: str,
        seconds: float,
    ) -> Estimate:
        """Add to each phase what tensors do not show: unused reserve, CUDA's context, vLLM."""
        factor = _UNDER_PREDICTION_QUANTISED if mode.quantised else _UNDER_PREDICTION
        held = {phase: round(factor * size) for phase, size in reserved.items()}
        share = self._vllm_bytes(mode)
        if share:
            # The trainer's cache is emptied before vLLM wakes; its weights, adapter and states stay.
            resident = sum(
                size
                for name, size in phases["optimizer"].items()
                if name in ("weights", "adapter", "optimizer", "reference", "workspaces")
            )
            allocated["generate"] = resident
            held["generate"] = round(resident * factor)
            phases = {"load": phases["load"], "generate": dict(phases["optimizer"]), **phases}
            phases["generate"] = {n: s for n, s in phases["generate"].items() if n not in ("gradients", "activations")}
        full: dict[str, dict[str, int]] = {}
        for phase, parts in phases.items():
            parts = {name: size for name, size in parts.items() if size > 0}
            unused = held[phase] - sum(parts.values())
            parts["reserved, unused"] = max(unused, 0)
            parts["CUDA context"] = self.context_bytes
            if share and phase != "load":
                asleep = mode.vllm_enable_sleep_mode and phase != "generate"
                parts["vLLM"] = VLLM_REMAINDER_BYTES if asleep else share
            full[phase] = parts
        # Memory once reserved stays so; only vLLM's waking empties the cache.
        process = max(sum(parts.values()) for parts in full.values())
        host = host_bytes
        if share and mode.vllm_enable_sleep_mode:
            host += 2 * self.shape.parameters
        doubts = []
        if share:
            doubts.append("what vLLM needs beside weights and cache is a guess")
        if self.attn_implementation == "eager" and self.job.row_tokens > _MAX_EAGER_TOKENS:
            doubts.append(f"eager attention above {_MAX_EAGER_TOKENS} tokens is outside what was compared with GPUs")
        return Estimate(mode, full, max(allocated.values()), max(held.values()), process, host, tier, doubts, seconds)

    def _vllm_bytes(self, mode: MemoryMode) -> int:
        share = mode.vllm_gpu_memory_utilization
        return 0 if share is None else round(share * self.card_bytes)

    def vllm_rows(self, share: float) -> int:
        """Return how many of the longest rows vLLM can hold at once in its share of the card; below 1: too little."""
        free = share * self.card_bytes - 2 * self.shape.parameters - VLLM_REMAINDER_BYTES
        shape = self.shape
        row = kv_cache_bytes(self.job.row_tokens, 1, shape.windows, shape.kv_heads, shape.head_dim, 2)
        return int(free // row)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
