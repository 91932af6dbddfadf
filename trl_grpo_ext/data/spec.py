"""Where prompts come from and how they are split, as flat values."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class DataSpec:
    """A data source and its mapping to prompts and answers; exactly one of ``hub``, ``files``, ``task`` is set.

    Attributes:
        hub: name of a hub data set.
        config: its configuration, None for the only one.
        split: its split to train on.
        revision: branch, tag or commit.
        files: local JSONL, JSON, CSV, TSV or Parquet files, read in order.
        task: name of a reasoning-gym task.
        params: its parameters.
        size: rows to make.
        seed: of the task's generator.
        prompt: a column (text, or a list of chat messages), or a template such as ``"Q: {question}"``.
        answer: the column with the gold answer; it becomes ``answer``. None for data without one.
        answer_given: True if the recipe names that column, so that it must exist.
        system: system message put in front of every prompt that has none; None leaves the template's own.
        chat: True makes the prompt a chat, False plain text (only for text prompts).
        columns: {new name: column} for further columns that rewards need under another name.
        drop: columns to leave out.
        limit: at most so many rows are read; None takes all.
        deduplicate: True keeps the first of several rows with the same question.
        held_out: rows (int) or share (float below 1) kept out of training for evaluation.
        held_out_seed: salt of the hash that chooses them; the choice does not depend on the row order.
        held_out_files: evaluate on these files instead; their questions are removed from the training rows.
        held_out_split: the same with a split of the hub data set.
    """

    hub: str | None = None
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    files: tuple[Path, ...] = ()
    task: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    size: int = 500
    seed: int = 0
    prompt: str = "prompt"
    answer: str | None = "answer"
    answer_given: bool = False
    system: str | None = None
    chat: bool = True
    columns: dict[str, str] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    limit: int | None = None
    deduplicate: bool = True
    held_out: int | float = 0
    held_out_seed: int = 0
    held_out_files: tuple[Path, ...] = ()
    held_out_split: str | None = None

    @property
    def source(self) -> str:
        """The source in a few words, for messages and the model card."""
        if self.hub is not None:
            return f"hub data set {self.hub!r}" + (f" ({self.config})" if self.config else "")
        if self.task is not None:
            return f"reasoning-gym task {self.task!r}"
        return ", ".join(str(path) for path in self.files)
