"""What --resume does with a directory is decided by what was asked for then and now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from trl_grpo_ext.cli.rundir import RunDirectory
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.recipe import Recipe, parse_recipe


def recipe_of(**trainer: Any) -> Recipe:
    raw = {"model": "m", "data": {"hub": "d"}, "rewards": ["exact"], "trainer": trainer}
    return parse_recipe(raw, Path("r.yaml"))


def resumed(folder: Path, recipe: Recipe) -> RunDirectory:
    directory = RunDirectory(folder)
    directory.open(recipe, resume=True, overwrite=False, control=False)
    if not directory.is_finished:
        directory.begin(recipe, control=False)
    directory.close()
    return directory


# Asked then: max_steps, num_train_epochs, and the steps made; the recipe now; is that all done?
CASES = [
    ((3, 3.0), 3, {"max_steps": 3}, True),
    ((3, 3.0), 3, {"max_steps": 2}, True),
    ((3, 3.0), 3, {"max_steps": 4}, False),
    ((9, 3.0), 3, {"max_steps": 9}, True),  # a callback ended it early
    ((3, 3.0), 3, {}, False),  # three epochs, by TRL's default
    ((-1, 2.0), 8, {"num_train_epochs": 2}, True),
    ((-1, 2.0), 8, {"num_train_epochs": 3}, False),
    ((-1, 2.0), 8, {"max_steps": 8}, True),
    ((-1, 2.0), 8, {"max_steps": 9}, False),
]


@pytest.mark.parametrize(("asked", "steps", "now", "done"), CASES)
def test_a_finished_run_goes_on_only_if_asked_for_more(
    tmp_path: Path, asked: tuple[int, float], steps: int, now: dict[str, Any], done: bool
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    lengths = {"max_steps": asked[0], "num_train_epochs": asked[1]}
    (tmp_path / "summary.json").write_text(json.dumps({"steps": steps, "asked": lengths}))
    assert resumed(tmp_path, recipe_of(**now)).is_finished is done
    # A run that goes on has no summary until it ends again, so that a kill on the way leaves an unfinished one.
    assert (tmp_path / "summary.json").exists() is done
    assert (tmp_path / "recipe.yaml").exists() is not done


@pytest.mark.parametrize(("asked", "steps", "now", "done"), CASES)
def test_a_directory_from_before_asked_was_written(
    tmp_path: Path, asked: tuple[int, float], steps: int, now: dict[str, Any], done: bool
) -> None:
    """Its recipe.yaml says what was asked for, and whether it was a control run; there is no run.json."""
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "summary.json").write_text(json.dumps({"steps": steps}))
    then = recipe_of(max_steps=asked[0], num_train_epochs=asked[1])
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**then.raw, "control": False}))
    assert resumed(tmp_path, recipe_of(**now)).is_finished is done


def test_a_summary_that_says_neither_length_nor_recipe(tmp_path: Path) -> None:
    for now, done in (({"max_steps": 3}, True), ({"num_train_epochs": 1}, False)):
        (tmp_path / "metrics.jsonl").touch()
        (tmp_path / "recipe.yaml").unlink(missing_ok=True)
        (tmp_path / "summary.json").write_text(json.dumps({"steps": 3}))
        assert resumed(tmp_path, recipe_of(**now)).is_finished is done


def test_an_older_control_run_is_not_continued_as_another(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**recipe_of().raw, "control": True}))
    with pytest.raises(ConfigurationError, match="control was True in the earlier run and is False now"):
        resumed(tmp_path, recipe_of())


def test_a_run_without_summary_is_not_finished(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert not resumed(tmp_path, recipe_of(max_steps=3)).is_finished


def test_overwrite_deletes_results_and_model_when_the_run_begins(tmp_path: Path) -> None:
    results = ["metrics.jsonl", "summary.json", "README.md", "adapter_model.safetensors", "tokenizer.json"]
    for name in [*results, "my_notes.txt"]:
        (tmp_path / name).touch()
    (tmp_path / "checkpoint-3").mkdir()
    directory = RunDirectory(tmp_path)
    directory.open(recipe_of(), resume=False, overwrite=True, control=False)
    assert all((tmp_path / name).exists() for name in results), "the new run may still be refused"
    directory.begin(recipe_of(), control=True)
    directory.close()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"my_notes.txt", ".lock", "recipe.yaml", "run.json"}
    assert json.loads((tmp_path / "run.json").read_text()) == {"control": True}


def test_a_model_that_no_run_left_is_kept(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    directory = RunDirectory(tmp_path)
    directory.open(recipe_of(), resume=False, overwrite=True, control=False)
    directory.begin(recipe_of(), control=False)
    directory.close()
    assert (tmp_path / "config.json").exists()
