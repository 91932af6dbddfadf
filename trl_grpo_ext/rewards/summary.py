"""What a run says about its rewards: metrics of every batch, and each kind of trouble once in the log."""

from __future__ import annotations

import collections
import logging
from collections.abc import Sequence

from trl_grpo_ext.rewards.outcome import Failure, Score
from trl_grpo_ext.rewards.scorings import Record
from trl_grpo_ext.rewards.work import Batch, Work

logger = logging.getLogger(__name__)


class RewardSummary:
    """Counts and reports. A metric that has appeared once appears in every later batch, if need be as 0, so that a mean
    over steps is a mean over all steps."""

    def __init__(self, names: Sequence[str]) -> None:
        self._said: set[tuple[str, str]] = set()
        self._known: dict[str, set[str]] = {name: {"failed", "abstained"} for name in names}

    def metrics(self, works: Sequence[Work], seconds: Sequence[float]) -> dict[str, float]:
        """Return the metrics of a batch.

        ``rewards/<name>/failed`` and ``…/failed/<reason>``: share of samples without a score because of a failure.
        ``…/abstained``: share for which the function had no opinion. ``…/verdict/<reason>``: share per reason code of a
        verifier. ``…/cached``: share that cost nothing. ``…/seconds``: until its last score.
        """
        metrics: dict[str, float] = {}
        for work, duration in zip(works, seconds, strict=True):
            name, size = work.plan.name, max(1, work.batch_size)
            counts = _counts(list(work.records.values()))
            self._known[name].update(counts)
            for what in sorted(self._known[name]):
                metrics[f"rewards/{name}/{what}"] = counts[what] / size
            metrics[f"rewards/{name}/seconds"] = duration
            if work.plan.identity is not None:
                metrics[f"rewards/{name}/cached"] = work.num_hits / size
        return metrics

    def report(self, work: Work, batch: Batch) -> None:
        """Log what has not been logged before: the first failure of each reason, an abstention, a split."""
        name = work.plan.name
        for sample in range(batch.size):
            record = work.records[sample]
            if isinstance(record, Failure) and self._first(name, record.reason):
                logger.warning(
                    "Reward %r failed on sample %d (%s); it counts as no reward. This is said once per reason, the "
                    "metric rewards/%s/failed goes on counting.\n%s",
                    name,
                    sample,
                    record.reason,
                    name,
                    record.detail,
                )
            elif _abstained(record) and record.reason is not None and self._first(name, f"abstained {record.reason}"):
                reference = _reference(work, batch, sample)
                logger.warning(
                    "Reward %r cannot judge sample %d (%s)%s; it counts as no reward. Said once per reason.",
                    name,
                    sample,
                    record.reason,
                    "" if reference is None else f"; its reference is {reference!r:.200}",
                )
        if getattr(work.scoring, "split_used", False) and not work.plan.per_sample and self._first(name, "split"):
            logger.warning(
                "Reward %r failed on a whole batch, so its samples were scored one call each. If it compares samples "
                "with each other, set its attribute per_sample = False: then the batch gets no reward from it instead.",
                name,
            )

    def _first(self, name: str, what: str) -> bool:
        first = (name, what) not in self._said
        self._said.add((name, what))
        return first


def _counts(records: Sequence[Record]) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    for record in records:
        if isinstance(record, Failure):
            counts["failed"] += 1
            counts[f"failed/{record.reason}"] += 1
        else:
            counts["abstained"] += record.value is None
            if record.reason is not None:
                counts[f"verdict/{record.reason}"] += 1
    return counts


def _abstained(record: Record) -> bool:
    return isinstance(record, Score) and record.value is None


def _reference(work: Work, batch: Batch, sample: int) -> object:
    column = getattr(work.plan.function, "reference", None)
    return batch.columns[column][sample] if isinstance(column, str) and column in batch.columns else None
