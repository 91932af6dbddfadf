"""Calls of ``log_extra`` and ``log_metric`` that rewards made elsewhere, put together and made in the trainer.

Whether a value can be logged at all is the trainer's business (``monitor.user_logs``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

LogCall = list[Any]  # ["extra", column, values] or ["metric", name, value]


def merge_split_calls(calls_by_sample: Mapping[int, Sequence[LogCall]], num_samples: int) -> list[LogCall]:
    """Return the calls of a whole batch from calls that were made one sample at a time.

    A column gets each sample's value, None where a sample made no such call; a metric gets the mean of its numbers.
    """
    columns: dict[str, list[Any]] = {}
    metrics: dict[str, list[float]] = {}
    for sample, calls in sorted(calls_by_sample.items()):
        for kind, name, value in calls:
            if kind == "extra" and isinstance(value, list) and len(value) == 1:
                columns.setdefault(name, [None] * num_samples)[sample] = value[0]
            elif kind == "metric" and isinstance(value, (int, float)):
                metrics.setdefault(name, []).append(value)
    merged: list[LogCall] = [["extra", name, values] for name, values in columns.items()]
    merged += [["metric", name, sum(values) / len(values)] for name, values in metrics.items()]
    return merged


def deliver(
    calls_by_function: Mapping[str, Sequence[LogCall]],
    log_extra: Callable[[str, Any], None] | None,
    log_metric: Callable[[str, Any], None] | None,
) -> None:
    """Make the calls that the rewards of one batch asked for, in the order of the rewards.

    Two rewards that log a column of the same name would fill it twice, so the second one's is called ``column/reward``.

    Args:
        calls_by_function: {reward: its calls}.
        log_extra: TRL's function, or None to drop columns.
        log_metric: TRL's function, or None to drop metrics.
    """
    used: set[str] = set()
    for function, calls in calls_by_function.items():
        columns: dict[str, Any] = {}
        for kind, name, value in calls:
            if kind == "extra":
                columns[name] = value  # a second call of the same reward replaces the first
            elif log_metric is not None:
                log_metric(name, value)
        for name, values in columns.items():
            column = name if name not in used else f"{name}/{function}"
            used.add(column)
            if log_extra is not None:
                log_extra(column, values)
