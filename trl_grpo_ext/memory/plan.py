"""Plan the memory of a run before anything is loaded: will it fit, in which mode, and what would make it fit."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from trl_grpo_ext.errors import ConfigurationError, nearest
from trl_grpo_ext.memory import report
from trl_grpo_ext.memory.bound import lower_bound
from trl_grpo_ext.memory.closed_forms import CUDA_CONTEXT_BYTES, GIB
from trl_grpo_ext.memory.configured import Configured, is_automatic, read_mode
from trl_grpo_ext.memory.job import Job, job_of
from trl_grpo_ext.memory.mode import MemoryMode, named_mode
from trl_grpo_ext.memory.shapes import ModelShape, full_name, read_config, shape_of

Fits = Literal["yes", "no", "uncertain"]
DEFAULT_RANK = 16
# ``mode``: exactly what the trainer will run, rather than the best that the settings leave open.
AS_CONFIGURED = "as-configured"
ALLOW = (AS_CONFIGURED, "lora", "qlora-8bit", "qlora")
# Families whose layers keep a state of another kind than keys and values, which nothing here counts.
_OTHER_STATES = ("linear_attention", "mamba", "recurrent", "conv")


@dataclass(frozen=True)
class Alternative:
    """A change that would make the run fit, or come nearer to it.

    Attributes:
        change: What to change, in words.
        process_gib: What the run would then need.
        fits: Whether that fits.
        settings: The trainer's settings to write for it; empty where the change is none of them.
    """

    change: str
    process_gib: float
    fits: bool
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MemoryPlan:
    """What a run needs and how it should be held; sizes in bytes.

    Attributes:
        fits: "yes"; "no"; "uncertain" where the figures may be off by more than the head-room (see ``assumptions``).
        mode: The levers.
        phases: For each phase, what is held at its peak, by category; they add up to the process's memory.
        peak: The most that tensors hold: ``torch.cuda.max_memory_allocated``.
        reserved: The most that PyTorch takes: ``torch.cuda.max_memory_reserved``.
        process: The most that the process takes, CUDA's context and vLLM included.
        host_ram: What offloading, paging and a sleeping vLLM keep in host memory.
        budget: Memory of the card.
        headroom: Share of it that must stay free.
        margin: What is left of the card beyond the head-room; negative where it does not fit.
        tier: "T0" a lower bound, "T1" extrapolated from a few layers, "T2" every layer, replayed.
        assumptions: What was taken for granted, and every reason for doubt.
        alternatives: The three cheapest changes, where it does not fit.
        notes: Why other modes were turned down.
        peft: The adapter's keywords, as given.
        job: The sizes that were planned for.
        seconds: Time that planning took.
    """

    fits: Fits
    mode: MemoryMode
    phases: dict[str, dict[str, int]]
    peak: int
    reserved: int
    process: int
    host_ram: int
    budget: int
    headroom: float
    tier: str
    job: Job
    model: str = ""
    assumptions: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    notes: tuple[str, ...] = ()
    peft: Mapping[str, Any] | None = None
    seconds: float = field(default=0.0, compare=False)

    @property
    def margin(self) -> int:
        """Bytes left of the card beyond the head-room."""
        return round(self.budget * (1 - self.headroom)) - self.process

    @property
    def planned_gib(self) -> dict[str, float]:
        """Tensors of each phase in GiB, under the names by which ``MemoryWatch`` compares them."""
        beside = ("reserved, unused", "CUDA context", "vLLM")
        planned: dict[str, float] = {}
        for phase, parts in self.phases.items():
            name = "train" if phase in ("forward", "backward") else phase
            held = sum(size for category, size in parts.items() if category not in beside) / GIB
            planned[name] = max(planned.get(name, 0.0), held)
        return planned

    def explain(self) -> str:
        """Return the plan in a few sentences."""
        return report.explain(self)

    def to_json(self, over: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the plan as plain data; ``over`` as for ``yaml``."""
        return report.to_json(self, over)

    def yaml(self, over: Mapping[str, Any] | None = None) -> str:
        """Return the part of a recipe that runs this plan, fit to be laid over the recipe ``over`` if one is given."""
        return report.to_yaml(self, over)

    def apply(self, config: Any) -> Any:
        """Return a copy of a ``GRPOConfig`` with the mode's settings; the config itself stays as it is."""
        changed = copy.copy(config)
        for name, value in report.settings(self).items():
            if hasattr(changed, name):
                setattr(changed, name, value)
        return changed


def plan_memory(
    model_or_config: Any,
    grpo_config: Any = None,
    peft_config: Any = None,
    *,
    budget_gib: float,
    headroom: float = 0.10,
    allow: Sequence[str] = (AS_CONFIGURED,),
    prompt_len: int,
    engine: Literal["auto", "vllm", "transformers"] = "auto",
    mode: MemoryMode | str | None = None,
    tier: Literal["T0", "T1", "T2"] = "T2",
    context_gib: float | None = None,
    attn_implementation: str | None = None,
    with_alternatives: bool = True,
) -> MemoryPlan:
    """Return whether a GRPO run fits a card, in which memory mode, and what it needs in each phase.

    No weight is loaded and no GPU is needed: the step is simulated on tensors without data. Lengths are the longest
    that the settings allow, never the mean.

    Args:
        model_or_config: a directory, a ``config.json``, a known name, a transformers config, or a model (its config).
        grpo_config: ours or TRL's; None for the defaults.
        peft_config: the adapter, or its keywords; None trains every weight unless ``memory`` says otherwise.
        budget_gib: memory of the card, less what other processes hold.
        headroom: share of it that stays free.
        allow: "lora", "qlora-8bit" and "qlora" let the planner change the tuning; it never does so by itself.
        prompt_len: tokens of the longest prompt.
        engine: "auto" as configured; what samples completions.
        mode: plan exactly this mode, instead of searching for one; "as-configured": the one that the trainer will run
            with these settings. A search keeps what they say.
        tier: "T2" verifies the chosen mode in full, "T1" leaves it at the extrapolation, "T0" at a lower bound.
        context_gib: what CUDA takes before the first tensor, if it was measured; 0.5 unless given.
        attn_implementation: transformers' name; None for what transformers would choose.
        with_alternatives: whether to look for changes where the run does not fit.

    Raises:
        ConfigurationError: for sizes that cannot be, or a model whose config is not to be found.
    """
    started = time.perf_counter()
    for word in allow:
        if word not in ALLOW:
            raise ConfigurationError(f"allow={word!r} is none of {', '.join(ALLOW)}.{nearest(word, ALLOW)}")
    if not 0 <= headroom < 1 or budget_gib <= 0:
        raise ConfigurationError(
            f"budget_gib={budget_gib} and headroom={headroom} must be above 0 and a share from 0 to below 1"
        )
    facts = _facts(model_or_config)
    shape = shape_of(facts)
    job = job_of(grpo_config, prompt_tokens=prompt_len, rank=_rank(peft_config), engine=engine)
    if mode == AS_CONFIGURED and is_automatic(grpo_config):
        mode = None  # the trainer will search too
    if mode is None or mode == AS_CONFIGURED:
        configured = read_mode(grpo_config, peft_config, job, exact=mode is not None)
    else:
        configured = Configured(named_mode(mode), frozenset())
    request = _Request(
        facts=facts,
        shape=shape,
        job=job,
        start=configured.mode,
        fixed=frozenset() if mode is not None else configured.fixed,
        unclear=configured.doubts,
        is_given=mode is not None,
        allow=tuple(allow),
        peft=peft_config,
        budget=round(budget_gib * GIB),
        headroom=headroom,
        context=CUDA_CONTEXT_BYTES if context_gib is None else round(context_gib * GIB),
        attn_implementation=attn_implementation,
        with_alternatives=with_alternatives,
    )
    if tier == "T0":
        plan = _bound_plan(request, ())
    else:
        try:
            plan = _simulated_plan(request, in_full=tier == "T2")
        except ConfigurationError:
            raise
        # Whatever an unknown architecture raises under simulation, a bound is still worth having.
        except Exception as error:
            plan = _bound_plan(request, (f"the simulation failed ({type(error).__name__}: {error}); lower bound only",))
    name = str(facts.get("_name_or_path") or shape.model_type)
    if isinstance(model_or_config, str):
        name = full_name(model_or_config)
    peft = dict(peft_config) if isinstance(peft_config, Mapping) else None
    return replace(plan, model=name, peft=peft, seconds=time.perf_counter() - started)


@dataclass(frozen=True)
class _Request:
    """The arguments of ``plan_memory``, read."""

    facts: dict[str, Any]
    shape: ModelShape
    job: Job
    start: MemoryMode
    fixed: frozenset[str]
    unclear: tuple[str, ...]
    is_given: bool
    allow: tuple[str, ...]
    peft: Any
    budget: int
    headroom: float
    context: int
    attn_implementation: str | None
    with_alternatives: bool

    @property
    def limit(self) -> int:
        return round(self.budget * (1 - self.headroom))


def _facts(model: Any) -> dict[str, Any]:
    """Return the content of a model's ``config.json``."""
    if isinstance(model, str):
        return read_config(model)
    if isinstance(model, Mapping):
        return dict(model)
    config = getattr(model, "config", model)
    if not hasattr(config, "to_dict"):
        raise ConfigurationError(f"{type(model).__name__} is neither a name, a path, a config nor a model")
    return config.to_dict()


def _rank(peft: Any) -> int:
    if peft is None:
        return DEFAULT_RANK
    return int(peft.get("r", DEFAULT_RANK) if isinstance(peft, Mapping) else getattr(peft, "r", DEFAULT_RANK))


def _simulated_plan(request: _Request, *, in_full: bool) -> MemoryPlan:
    from trl_grpo_ext.memory.alternatives import cheapest_changes
    from trl_grpo_ext.memory.estimate import Estimator
    from trl_grpo_ext.memory.search import Limits, find_mode

    estimator = Estimator.of_facts(
        request.facts,
        request.shape,
        request.job,
        request.peft,
        card_bytes=request.budget,
        context_bytes=request.context,
        attn_implementation=request.attn_implementation,
    )
    limits = Limits(request.limit, request.budget)
    notes: list[str] = []
    if request.is_given:
        estimate = estimator.estimate(request.start)
        fits = estimate.process <= limits.process
    else:
        estimate, fits, notes = find_mode(estimator, request.start, request.allow, limits, request.fixed)
    if in_full:
        estimate = estimator.estimate(estimate.mode, in_full=True)
        if not request.is_given and fits and estimate.process > limits.process:
            # The replay found more than the extrapolation did: search once more, that much below the limit.
            notes.append(f"{estimate.process / GIB:.1f} GiB once replayed, so a smaller mode was sought")
            tighter = limits.process - (estimate.process - estimator.estimate(estimate.mode).process) - GIB // 10
            below = Limits(tighter, request.budget)
            estimate, _, more = find_mode(estimator, request.start, request.allow, below, request.fixed)
            notes += more
            estimate = estimator.estimate(estimate.mode, in_full=True)
    fits = estimate.process <= limits.process
    assumptions = [*_assumptions(request, estimator.why_padded), *estimate.doubts]
    doubts = [*estimate.doubts, *_doubts(request)]
    verdict: Fits = "no" if not fits else ("uncertain" if doubts else "yes")
    changes = cheapest_changes(estimator, request, limits) if not fits and request.with_alternatives else []
    return MemoryPlan(
        fits=verdict,
        mode=estimate.mode,
        phases=estimate.phases,
        peak=estimate.allocated,
        reserved=estimate.reserved,
        process=estimate.process,
        host_ram=estimate.host_ram,
        budget=request.budget,
        headroom=request.headroom,
        tier=estimate.tier,
        job=request.job,
        assumptions=tuple(dict.fromkeys([*assumptions, *doubts])),
        alternatives=tuple(changes),
        notes=tuple(notes),
    )


def _bound_plan(request: _Request, doubts: tuple[str, ...]) -> MemoryPlan:
    """Return a plan on the lower bound alone: it can say no, never yes."""
    phases = lower_bound(request.shape, request.start, request.job)
    process = max(sum(parts.values()) for parts in phases.values())
    tensors = process - request.context
    return MemoryPlan(
        fits="no" if process > request.limit else "uncertain",
        mode=request.start,
        phases=phases,
        peak=tensors,
        reserved=tensors,
        process=process,
        host_ram=0,
        budget=request.budget,
        headroom=request.headroom,
        tier="T0",
        job=request.job,
        assumptions=(*doubts, "a lower bound: activations and unused reserve come on top", *_doubts(request)),
    )


def _assumptions(request: _Request, why_padded: str | None) -> list[str]:
    job = request.job
    lines = [
        f"every prompt has {job.prompt_tokens} tokens and every completion {job.completion_tokens}",
        f"CUDA takes {request.context / GIB:.2f} GiB before the first tensor",
    ]
    if why_padded is not None:
        lines.append(f"completions are scored on TRL's padded path: {why_padded}")
    return lines


def _doubts(request: _Request) -> list[str]:
    text = request.facts.get("text_config") or request.facts
    kinds = {str(kind) for kind in text.get("layer_types") or ()}
    doubts = list(request.unclear)
    for word in _OTHER_STATES:
        if any(word in kind for kind in kinds) or word in request.shape.model_type:
            doubts.append(f"{word} layers keep states that are not counted")
    if request.facts.get("vision_config") is not None:
        doubts.append("images and the tower that reads them are not counted")
    if not request.shape.is_counted and not request.facts.get("model_type"):
        doubts.append("the family of the model is not known")
    return doubts
