"""Guard what reward functions log: a bad value is dropped with one warning, it does not end the run."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, MutableMapping
from numbers import Number
from typing import Any

logger = logging.getLogger(__name__)

_KINDS: tuple[tuple[str, type | tuple[type, ...]], ...] = (
    ("bool", bool),
    ("number", Number),
    ("text", str),
    ("list", (list, tuple)),
    ("mapping", Mapping),
)


class UserLogs:
    """Decide which columns and metrics of a reward function can be logged; warn once for each that cannot."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def accepts_column(self, column: str, values: Any) -> bool:
        """Return whether ``values`` is a list of one kind (None allowed anywhere) under a text name."""
        if not isinstance(column, str):
            return self._refuse(repr(column), f"log_extra got the column name {column!r}; it must be text")
        if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
            return self._refuse(column, f"log_extra({column!r}) got {type(values).__name__}; it takes a list")
        kinds = {_kind(value) for value in values if value is not None}
        if len(kinds) > 1:
            return self._refuse(column, f"log_extra({column!r}) mixes {', '.join(sorted(kinds))}; use one kind")
        return True

    def accepts_metric(self, name: str, value: Any) -> bool:
        """Return whether ``value`` is one finite number under a text name."""
        try:
            number = float(value) if not isinstance(value, str | bytes) else None
        except (TypeError, ValueError, RuntimeError):
            number = None
        if not isinstance(name, str) or number is None:
            return self._refuse(str(name), f"log_metric({name!r}) got {value!r}; it takes a text and one number")
        if not math.isfinite(number):
            return self._refuse(name, f"log_metric({name!r}) got {number}; it takes a finite number")
        return True

    def drop_unusable_columns(self, pending: MutableMapping[str, list], *, num_rows: int) -> None:
        """Remove from ``pending`` every column that does not hold exactly one value per row."""
        for column in [name for name, values in pending.items() if len(values) != num_rows]:
            count = len(pending.pop(column))
            self._refuse(column, f"log_extra({column!r}) got {count} values for {num_rows} completions")

    def _refuse(self, key: str, reason: str) -> bool:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning("%s. It is left out; this is said once.", reason)
        return False


def _kind(value: Any) -> str:
    for name, types in _KINDS:
        if isinstance(value, types):
            return name
    return type(value).__name__
