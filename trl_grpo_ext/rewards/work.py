"""One reward's share of one batch: what has to be scored, what a worker is sent for it, and what came back."""

from __future__ import annotations

import contextlib
import pickle
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl_grpo_ext.rewards.cache import RewardCache, content_key
from trl_grpo_ext.rewards.in_process import InProcessScoring
from trl_grpo_ext.rewards.log_calls import LogCall, merge_split_calls
from trl_grpo_ext.rewards.outcome import Failure
from trl_grpo_ext.rewards.placing import Plan
from trl_grpo_ext.rewards.scorings import EachScoring, Record, WholeScoring

_MAX_LOG_HISTORY = 100
_PER_SAMPLE_NAMES = ("prompts", "completions", "completion_ids")


@dataclass
class Batch:
    """What the trainer hands over: B samples and what TRL gives to every reward besides."""

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Any] | None
    columns: dict[str, Sequence[Any]]
    trainer_state: Any = None
    environments: Sequence[Any] | None = None
    _state: bytes | None = None

    @property
    def size(self) -> int:
        return len(self.completions)

    def pickled_state(self) -> bytes | None:
        """Return the trainer's state as plain values, so that a worker need not import transformers to read it."""
        if self.trainer_state is None:
            return None
        if self._state is None:
            values = dict(vars(self.trainer_state)) if hasattr(self.trainer_state, "__dict__") else {}
            if isinstance(values.get("log_history"), list):
                values["log_history"] = values["log_history"][-_MAX_LOG_HISTORY:]
            try:
                self._state = pickle.dumps(types.SimpleNamespace(**values))
            except Exception:
                self._state = pickle.dumps(types.SimpleNamespace(**_picklable(values)))
        return self._state


class Work:
    """What one reward has to do for one batch.

    Attributes:
        samples: numbers of the samples to score: not in the cache, and the first of their kind in the batch.
        scoring: who scores them; None if nothing is left to score.
        records: a score or failure for every sample, after ``collect``.
        keys: {sample: key of its score in the cache}.
        num_hits: samples that cost nothing.
        finished_at: ``time.monotonic()`` of the last score.
    """

    def __init__(self, plan: Plan, batch: Batch, cache: RewardCache) -> None:
        self.plan = plan
        self.batch_size = batch.size
        self.scoring: EachScoring | WholeScoring | InProcessScoring | None = None
        self.records: dict[int, Record] = {}
        self.keys: dict[int, bytes] = {}
        self.num_hits = 0
        self.finished_at: float | None = None
        self._twins: dict[int, int] = {}
        if plan.identity is None or cache.max_entries == 0:
            self.samples = list(range(batch.size))
        else:
            self.samples = self._look_up(batch, cache)

    def _look_up(self, batch: Batch, cache: RewardCache) -> list[int]:
        """Return the samples that must be scored; fill in the others from the cache and note twins."""
        assert self.plan.identity is not None
        sources = _sources(self.plan, batch)
        first_with: dict[bytes, int] = {}
        to_score = []
        for sample in range(batch.size):
            parts = [None if values is None else values[sample] for values in sources.values()]
            key = content_key(self.plan.identity, [list(sources), parts])
            if key is None:
                to_score.append(sample)
            elif key in first_with:
                self._twins[sample] = first_with[key]
            elif (score := cache.get(key)) is not None:
                self.records[sample] = score
            else:
                first_with[key] = sample
                self.keys[sample] = key
                to_score.append(sample)
        self.num_hits = batch.size - len(to_score)
        return to_score

    def collect(self) -> None:
        """Take over the records of the scoring, so that every sample of the batch has one."""
        if self.scoring is not None:
            in_order = isinstance(self.scoring, InProcessScoring)
            for position, sample in enumerate(self.samples):
                self.records[sample] = self.scoring.records[position if in_order else sample]
        for sample in range(self.batch_size):
            if sample in self._twins:
                # The twin of a cached sample can only be in the batch if that one was scored or found first.
                self.records[sample] = self.records[self._twins[sample]]
        missing = Failure("crash", "no worker reported a score for this sample")
        for sample in range(self.batch_size):
            self.records.setdefault(sample, missing)

    def sample_logs(self) -> dict[int, list[LogCall]]:
        """Return the log calls that were made for single samples; a twin's are those of the sample it equals."""
        if self.scoring is None:
            return {}
        in_order = isinstance(self.scoring, InProcessScoring)
        made = {self.samples[key] if in_order else key: calls for key, calls in self.scoring.logs.items() if calls}
        twins = {twin: made[first] for twin, first in self._twins.items() if first in made}
        return {**made, **twins}

    def log_calls(self) -> list[LogCall]:
        """Return the log calls of the batch."""
        whole = getattr(self.scoring, "whole_logs", None)
        return whole if whole is not None else merge_split_calls(self.sample_logs(), self.batch_size)


def job_maker(
    work: Work, batch: Batch, seed: int | None, *, in_process: bool = False
) -> Callable[[Sequence[int], bool, float], dict[str, Any]]:
    """Return a function that makes the message for a worker: (samples, all in one call?, timeout_s) -> job.

    Only what the reward takes is sent.
    """
    plan = work.plan
    sources = _sources(plan, batch)
    if in_process and batch.environments is not None and not plan.is_verifier and plan.accepted.takes("environments"):
        sources["environments"] = batch.environments
    log_names = [name for name in ("log_extra", "log_metric") if not plan.is_verifier and plan.accepted.takes(name)]
    takes_state = not plan.is_verifier and plan.accepted.takes("trainer_state")

    def make_job(samples: Sequence[int], whole: bool, timeout_s: float) -> dict[str, Any]:
        everything = len(samples) == batch.size
        cut = {
            name: values if values is None or everything else [values[sample] for sample in samples]
            for name, values in sources.items()
        }
        job: dict[str, Any] = {
            "function": plan.pool_index,
            "mode": "whole" if whole else "each",
            "is_verifier": plan.is_verifier,
            "is_async": plan.is_async,
            "num_samples": len(samples),
            "timeout_s": timeout_s,
            "seed": None if seed is None or plan.is_verifier else seed + 31 * (samples[0] if samples else 0),
            "call": {name: cut.pop(name) for name in _PER_SAMPLE_NAMES if name in cut},
            "columns": cut,
            "log_names": log_names,
        }
        if takes_state and (in_process or batch.trainer_state is None):
            job["constants"] = {"trainer_state": batch.trainer_state}
        elif takes_state:
            job["state"] = batch.pickled_state()
        return job

    return make_job


def _sources(plan: Plan, batch: Batch) -> dict[str, Sequence[Any] | None]:
    """Return {keyword: B values} of everything that the reward takes."""
    given: dict[str, Sequence[Any] | None] = {
        "prompts": batch.prompts,
        "completions": batch.completions,
        "completion_ids": batch.completion_ids,
        **batch.columns,
    }
    return {name: _as_list(values) for name, values in given.items() if plan.accepted.takes(name)}


def _as_list(values: Sequence[Any] | None) -> Sequence[Any] | None:
    return values if values is None or isinstance(values, list) else list(values)


def _picklable(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in values.items():
        with contextlib.suppress(Exception):
            pickle.dumps(value)
            kept[name] = value
    return kept
