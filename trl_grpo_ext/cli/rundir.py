"""The directory of one run: whose it is, where to go on, and what lies where in it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import yaml

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.memory.record import FILE as RECORD_FILE
from trl_grpo_ext.monitor.checkpoints import checkpoint_step, last_complete_checkpoint, remove_incomplete
from trl_grpo_ext.monitor.files import write_json, write_text
from trl_grpo_ext.recipe import Recipe
from trl_grpo_ext.recipe_yaml import read_yaml

# What another run of the same recipe may change and still go on from the same checkpoint.
_MAY_CHANGE = {"eval", "base_dir"}
_MAY_CHANGE_IN_TRAINER = {
    "max_steps",
    "num_train_epochs",
    "save_steps",
    "save_total_limit",
    "logging_steps",
    "output_dir",
}

# What ``save_model`` writes: adapter, the copy of a starting adapter, or whole model; tokenizer; our record.
_MODEL_FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "ref/adapter_config.json",
    "ref/adapter_model.safetensors",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "training_args.bin",
    RECORD_FILE,
)


def is_main_process() -> bool:
    """Return whether this process is the one that writes, known from the launcher's variables before torch is there."""
    return int(os.environ.get("RANK", "0")) == 0


class RunDirectory:
    """Paths of a run, and the decision between a new run and the continuation of an old one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint: Path | None = None
        self.is_finished = False
        self._goes_on = self._overwrites = False
        self._lock: IO[str] | None = None

    metrics = property(lambda self: self.path / "metrics.jsonl")
    recipe_copy = property(lambda self: self.path / "recipe.yaml")
    kind = property(lambda self: self.path / "run.json")
    before = property(lambda self: self.path / "before.json")
    summary = property(lambda self: self.path / "summary.json")
    examples = property(lambda self: self.path / "examples.md")
    plot = property(lambda self: self.path / "plot.png")
    card = property(lambda self: self.path / "README.md")

    def open(self, recipe: Recipe, *, resume: bool, overwrite: bool, control: bool) -> None:
        """Claim the directory and change nothing in it; afterwards ``checkpoint`` is what to resume from, or None.

        Where ``--resume`` meets a run that has ended and is not asked for more, ``is_finished`` is True.

        Raises:
            ConfigurationError: it holds another run, or another process writes to it.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigurationError(f"the output directory {str(self.path)!r} is a file")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._claim()
        except OSError as error:
            raise ConfigurationError(
                f"cannot write to the output directory {str(self.path)!r}: {error.strerror}"
            ) from error
        try:
            self._overwrites = overwrite
            if not overwrite:
                self._decide(recipe, resume=resume, control=control)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the directory up to other processes; the end of this process does the same."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def begin(self, recipe: Recipe, *, control: bool) -> None:
        """Write what the run is into the opened directory, after deleting, if so asked, an earlier run.

        Apart from ``open``, so that the earlier run stays until recipe, data and settings of the new one are checked.
        """
        if not is_main_process():
            return
        if self._goes_on:
            remove_incomplete(self.path)
            self.summary.unlink(missing_ok=True)  # the run goes on, so it is finished no more
        if self._overwrites:
            self._clear()
        said = {section: value for section, value in recipe.raw.items() if section != "base_dir"}
        copy = {"base_dir": _way_to(recipe.base_dir, self.path), **said}
        write_text(self.recipe_copy, yaml.safe_dump(copy, sort_keys=False, allow_unicode=True))
        write_json(self.kind, {"control": control})

    def _decide(self, recipe: Recipe, *, resume: bool, control: bool) -> None:
        used = self.metrics.exists() or any(checkpoint_step(entry) >= 0 for entry in self.path.iterdir())
        if used and not resume:
            raise ConfigurationError(
                f"{str(self.path)!r} holds an earlier run; continue it with --resume, delete it with --overwrite, or "
                "choose another --output-dir"
            )
        if used:
            self._check_same(recipe.raw, control)
            self.is_finished = self._has_ended(recipe)
            self.checkpoint = last_complete_checkpoint(self.path)
        self._goes_on = used

    def _claim(self) -> None:
        """Lock the directory until this process ends, however it ends; other ranks of the run share the claim."""
        if not is_main_process():
            return
        try:
            import fcntl
        except ImportError:  # not on Windows: there the claim is left out
            return
        lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise ConfigurationError(f"another process is writing a run to {str(self.path)!r}") from error
        self._lock = lock

    def _clear(self) -> None:
        """Delete the files of a run, its model among them, and nothing that a run does not write."""
        for entry in self.path.iterdir():
            if entry.is_dir() and checkpoint_step(entry) >= 0:
                shutil.rmtree(entry)
        results = (self.metrics, self.kind, self.before, self.summary, self.examples, self.plot)
        if not any(path.exists() for path in results):
            return  # a model that no run of ours left here
        model = [path for pattern in _MODEL_FILES for path in self.path.glob(pattern)]
        for path in (*results, self.recipe_copy, self.card, *model):
            path.unlink(missing_ok=True)

    def _has_ended(self, recipe: Recipe) -> bool:
        """Return whether the earlier run wrote its summary, and the recipe asks for no longer one now.

        Asked is compared with asked, since a run may end before the step it was asked for.
        """
        if not self.summary.is_file():
            return False
        summary = json.loads(self.summary.read_text(encoding="utf-8"))
        max_steps, epochs = recipe.asked_length()
        asked_steps, asked_epochs = self._earlier_length(recipe, summary)
        if max_steps > 0:  # then TRL ignores the epochs
            return max_steps <= max(summary["steps"], asked_steps)
        return asked_steps <= 0 and epochs <= asked_epochs

    def _earlier_length(self, recipe: Recipe, summary: dict[str, Any]) -> tuple[int, float]:
        """Return (max_steps, num_train_epochs) that the finished run was asked for.

        Summaries did not always say so; the copy of the recipe beside an older one does. With neither, no number of
        epochs counts as done, so that the run goes on rather than ends too early.
        """
        if (asked := summary.get("asked")) is not None:
            return asked["max_steps"], asked["num_train_epochs"]
        if not self.recipe_copy.is_file():
            return summary["steps"], 0.0
        return replace(recipe, trainer=read_yaml(self.recipe_copy).get("trainer") or {}).asked_length()

    def _check_same(self, description: dict[str, Any], control: bool) -> None:
        """Raise if the earlier run was another one: its checkpoint would be continued with another task or model."""
        if not self.recipe_copy.is_file():
            return
        earlier = read_yaml(self.recipe_copy)
        if self.kind.is_file():
            earlier |= json.loads(self.kind.read_text(encoding="utf-8"))
        if "control" in earlier:  # in older directories it stands in the copy of the recipe
            description = {**description, "control": control}
        for section in sorted({*earlier, *description} - _MAY_CHANGE):
            old, new = earlier.get(section), description.get(section)
            if section == "trainer":
                old, new = (
                    {key: entry for key, entry in (value or {}).items() if key not in _MAY_CHANGE_IN_TRAINER}
                    for value in (old, new)
                )
            if old != new:
                changed = _first_difference(old, new, section)
                raise ConfigurationError(f"--resume: {changed}; restore it, or start anew with another --output-dir")


def _way_to(folder: Path, start: Path) -> str:
    """Return the path of a folder relative to ``start``, which stays right where both are moved together."""
    try:
        return os.path.relpath(folder, start.resolve())
    except ValueError:  # on another drive of Windows
        return str(folder)


def _first_difference(old: Any, new: Any, where: str) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *new]:
            if old.get(key) != new.get(key):
                return _first_difference(old.get(key), new.get(key), f"{where}.{key}")
    return f"{where} was {old!r} in the earlier run and is {new!r} now"
