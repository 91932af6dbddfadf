"""Rows from a reasoning-gym task; names and parameters are checked without importing it (that takes seconds)."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

from trl_grpo_ext.errors import ConfigurationError, DataError, MissingDependencyError, nearest
from trl_grpo_ext.source_fields import SourceNotFoundError, class_fields

INSTALL = "pip install reasoning-gym"
COLUMNS = ("question", "answer", "metadata")
# Given by our own keys, so that the recipe has one place for each.
_OURS = {"size": "data.size", "seed": "data.seed"}
_REGISTRATION = re.compile(r"^register_dataset\(\s*([\w\"']+)\s*,\s*\w+\s*,\s*(\w+)", re.MULTILINE)
_NAME = re.compile(r"^DATASET_NAME\s*(?::\s*str\s*)?=\s*[\"'](\w+)[\"']", re.MULTILINE)


def check_task(task: str, params: dict[str, Any]) -> None:
    """Raise if reasoning-gym is missing, has no such task, or the task has no such parameter; imports nothing heavy.

    Raises:
        MissingDependencyError: reasoning-gym is not installed.
        ConfigurationError: an unknown task or parameter.
    """
    tasks = _tasks()
    if task not in tasks:
        hint = nearest(task, tasks) or f" There are {len(tasks)}, for example chain_sum, gcd, leg_counting."
        raise ConfigurationError(f"data: reasoning-gym has no task {task!r}.{hint}")
    known = _parameters(task)
    for name in params:
        if name in _OURS:
            raise ConfigurationError(f"data.params: give {name!r} as {_OURS[name]}")
        if known is not None and name not in known:
            raise ConfigurationError(
                f"data.params: the task {task!r} has no parameter {name!r}; it has {', '.join(known)}."
                + nearest(name, known)
            )


def make_rows(task: str, params: dict[str, Any], size: int, seed: int) -> list[dict[str, Any]]:
    """Return ``size`` rows with ``question``, ``answer`` (text) and ``metadata`` (a dict).

    Raises:
        DataError: if the task refuses its parameters, or a row has no question.
    """
    check_task(task, params)
    import reasoning_gym

    # Lists in YAML stand for the tuples in the tasks' own defaults.
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
    try:
        dataset = reasoning_gym.create_dataset(task, size=size, seed=seed, **values)
        rows = [dict(dataset[index]) for index in range(size)]
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"data.params: the task {task!r} refuses {params}: {error}") from error
    for row in rows:
        row["answer"] = None if row.get("answer") is None else str(row["answer"])
    return rows


def _package_dir() -> Path:
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(f"data: reasoning_gym needs the package reasoning-gym; run: {INSTALL}")
    return Path(next(iter(spec.submodule_search_locations)))


@functools.cache
def _tasks() -> dict[str, tuple[str, str]]:
    """Return {task: (module, config class)}, read from the package's source."""
    folder = _package_dir()
    tasks = {}
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if "register_dataset(" not in text:
            continue
        constant = _NAME.search(text)
        module = ".".join(["reasoning_gym", *path.relative_to(folder).with_suffix("").parts])
        for name, config in _REGISTRATION.findall(text):
            word = constant.group(1) if name == "DATASET_NAME" and constant else name.strip("\"'")
            tasks[word] = (module, config)
    return tasks


def _parameters(task: str) -> list[str] | None:
    """Return the names of a task's parameters, ours left out; None if they cannot be read from source."""
    try:
        return [name for name in class_fields(*_tasks()[task]) if name not in _OURS]
    except (SourceNotFoundError, SyntaxError, OSError):
        return None
