"""Which data-set columns reach a reward, checked before training instead of found out in step one."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from trl_grpo_ext.errors import DataError, nearest

logger = logging.getLogger(__name__)

# TRL drops these columns on the way to the rewards …
_NEVER_ARRIVE = ("completion", "completion_ids")
# … and these names are its own arguments, so that a column would crash the call or be overwritten in silence.
_TAKEN = ("prompts", "completions", "trainer_state", "log_extra", "log_metric", "environments")
RESERVED_COLUMNS = (*_NEVER_ARRIVE, *_TAKEN)


def check_columns(dataset_columns: Iterable[str] | None, needed: Mapping[str, Sequence[str]]) -> None:
    """Raise DataError if a column that a reward needs is missing or has a name under which it cannot arrive.

    A column that TRL drops on the way, and that no reward asks for by name, is worth a warning only: prompt-completion
    data sets have one, and scripts that ignore it work in TRL.

    Args:
        dataset_columns: column names of the data set; None if they are not known (a stream): then nothing is checked.
        needed: {reward: columns it cannot do without}.
    """
    if dataset_columns is None:
        return
    columns = list(dataset_columns)
    reserved = [column for column in columns if column in RESERVED_COLUMNS]
    # The prompt reaches a reward as ``prompts``, so a reward that asks for it by TRL's column name gets nothing.
    missing = {
        name: [column for column in wanted if column not in columns or column in RESERVED_COLUMNS or column == "prompt"]
        for name, wanted in needed.items()
    }
    missing = {name: wanted for name, wanted in missing.items() if wanted}
    if not missing and not any(column in _TAKEN for column in reserved):
        for column in reserved:
            logger.warning("The data set's column %r does not reach any reward; TRL keeps it back.", column)
        return
    lines = []
    for column in reserved:
        why = (
            "TRL does not pass it on to rewards"
            if column in _NEVER_ARRIVE
            else "it is the name of an argument of TRL's"
        )
        lines.append(
            f"the data set has a column {column!r}, but {why}. Rename it, for example "
            f"dataset.rename_column({column!r}, {_new_name(column, columns, missing)!r}), or remove it"
        )
    usable = [column for column in columns if column not in RESERVED_COLUMNS and column != "prompt"]
    for name, wanted in missing.items():
        for column in wanted:
            if column in reserved:
                continue
            if column == "prompt":
                lines.append(f"reward {name!r} needs 'prompt', which arrives as 'prompts' (all of the batch)")
                continue
            lines.append(
                f"reward {name!r} needs the column {column!r}, which the data set does not have."
                + (nearest(column, usable) or _rename_hint(column, usable))
            )
    needs = "; ".join(f"{name}: {', '.join(wanted) or 'none'}" for name, wanted in needed.items())
    raise DataError(
        "The rewards and the data set do not fit together:\n- "
        + "\n- ".join(lines)
        + f"\nColumns needed, by reward: {needs or 'none'}. Columns of the data set: {', '.join(columns) or 'none'}."
    )


def _new_name(column: str, columns: Sequence[str], missing: Mapping[str, Sequence[str]]) -> str:
    """Return the column that a reward is waiting for if there is just one, else a free name."""
    waited_for = {name for wanted in missing.values() for name in wanted if name not in columns and name != "prompt"}
    waited_for -= set(RESERVED_COLUMNS)
    if len(waited_for) == 1:
        return waited_for.pop()
    return "answer" if column == "completion" and "answer" not in columns else f"{column}_column"


def _rename_hint(column: str, usable: Sequence[str]) -> str:
    if not usable:
        return ""
    return (
        f" If one of {', '.join(usable)} holds it, say so ('reference: {usable[0]}' in a recipe) "
        f"or rename it with dataset.rename_column({usable[0]!r}, {column!r})."
    )
