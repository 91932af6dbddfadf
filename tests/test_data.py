"""Sources, prompts and splits: nothing is guessed, nothing is in both splits."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from trl_grpo_ext.data import gym
from trl_grpo_ext.data.prompts import check_reward_columns, make_row, output_columns, question_text
from trl_grpo_ext.data.sources import peek_columns, read_rows
from trl_grpo_ext.data.spec import DataSpec
from trl_grpo_ext.data.splits import load_splits, remove_held_out, split_rows, to_dataset
from trl_grpo_ext.errors import ConfigurationError, DataError


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format of the file's ending."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix in (".csv", ".tsv"):
        mark = "\t" if path.suffix == ".tsv" else ","
        lines = [mark.join(rows[0]), *(mark.join(str(value) for value in row.values()) for row in rows)]
        path.write_text("\n".join(lines))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_files(tmp_path: Path, ending: str) -> None:
    rows = [{"question": f"q{n}", "gold": f"0{n}.50"} for n in range(5)]
    spec = DataSpec(files=(write(tmp_path / f"d.{ending}", rows),), limit=4)
    assert peek_columns(spec) == ["question", "gold"]
    assert read_rows(spec) == rows[:4], "the text of gold answers is kept: 00.50 is not 0.5"


def test_several_files_are_read_in_order(tmp_path: Path) -> None:
    files = tuple(write(tmp_path / f"{n}.jsonl", [{"q": n}]) for n in range(3))
    assert [row["q"] for row in read_rows(DataSpec(files=files))] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": \n', r"a.jsonl, line 2: not valid JSON"),
        ("a.jsonl", '{"a": 1}\n[1]\n', r"line 2: a list; every row must be an object"),
        ("a.jsonl", "\n\n", r"holds no rows"),
        ("a.json", "[1]", r"item 1: a int; every row must be an object"),
        ("a.csv", "a,b\n1,2\n1\n", r"line 3: the number of cells differs from the header's 2"),
        ("a.csv", "a,b\n1,2,3\n", r"line 2: the number of cells differs"),
        ("a.csv", "a,b\n", r"holds no rows"),
        ("a.parquet", "no", r"is not a Parquet file"),
    ],
)
def test_broken_files_are_told_by_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read_rows(DataSpec(files=(tmp_path / name,)))


def test_row_from_columns() -> None:
    spec = DataSpec(
        files=(Path("x"),),
        prompt="q",
        answer="gold",
        answer_given=True,
        system="Be brief.",
        columns={"tests": "cases"},
        drop=("id",),
    )
    row = make_row({"q": "1+1?", "gold": 2, "cases": [1], "id": 7, "level": 3}, spec, "row 1")
    assert row == {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}],
        "answer": "2",
        "tests": [1],
        "level": 3,
    }
    assert output_columns(spec, ["q", "gold", "cases", "id", "level"]) == ["level", "tests", "answer"]


def test_row_from_template_and_plain_text() -> None:
    spec = DataSpec(files=(Path("x"),), prompt="Q: {q} ({meta[unit]})\nA:", chat=False, system="S")
    row = make_row({"q": "how far?", "meta": {"unit": "km"}, "answer": "3"}, spec, "row 1")
    assert row["prompt"] == "S\n\nQ: how far? (km)\nA:"
    assert row["q"] == "how far?", "columns used in a template stay, rewards may read them"
    with pytest.raises(DataError, match="row 1: the column 'q' of the prompt template is empty"):
        make_row({"q": None, "meta": {"unit": "km"}}, spec, "row 1")


def test_messages_are_kept_and_a_system_turn_is_put_in_front() -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    spec = DataSpec(files=(Path("x"),), system="S")
    assert make_row({"prompt": chat}, spec, "row 1")["prompt"] == [{"role": "system", "content": "S"}, *chat]
    own = [{"role": "system", "content": "own"}, *chat]
    assert make_row({"prompt": own}, spec, "row 1")["prompt"] == own


@pytest.mark.parametrize("prompt", ["", "  ", None, [], [1], 7])
def test_empty_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(DataError, match="row 3: the prompt is"):
        make_row({"prompt": prompt}, DataSpec(files=(Path("x"),)), "row 3")


def test_same_question_whatever_its_spaces_case_and_system_turn() -> None:
    user = {"role": "user", "content": "What  is\n1 + 1?"}
    assert question_text([user]) == question_text(
        [{"role": "system", "content": "x"}, {**user, "content": "what is 1 + 1?"}]
    )
    assert question_text([user]) != question_text([{"role": "user", "content": "What is 1 - 1?"}])


def test_reward_columns() -> None:
    check_reward_columns({"a": ("answer",), "b": ()}, ["answer"])
    with pytest.raises(
        DataError, match=r"the reward 'a' needs the column 'tests'.* Did you mean 'test'\?.*data.columns"
    ):
        check_reward_columns({"a": ("tests",)}, ["test", "answer"])


def rows_of(texts: list[str]) -> list[dict[str, Any]]:
    return [{"prompt": text, "answer": str(number)} for number, text in enumerate(texts)]


def test_splits_are_disjoint_whatever_the_duplicates() -> None:
    generator = random.Random(0)
    rows = rows_of([f"question {generator.randrange(60)}" for _ in range(300)])
    for deduplicate in (True, False):
        splits = split_rows(rows, 15, seed=1, deduplicate=deduplicate)
        train, held_out = ({question_text(row["prompt"]) for row in part} for part in splits[:2])
        assert len(splits.held_out) == len(held_out) == 15
        assert not train & held_out
        assert splits.counts.held_out == 15
        assert splits.counts.train == len(splits.train)
    assert len(splits.train) > len(train), "without deduplication repeats stay in training"
    distinct = len({row["prompt"] for row in rows})
    assert split_rows(rows, 15).counts == (300, 300 - distinct, 300 - distinct, distinct - 15, 15, 0)


def test_the_choice_does_not_depend_on_the_order_and_follows_the_seed() -> None:
    rows = rows_of([f"question {n}" for n in range(100)])
    chosen = {row["prompt"] for row in split_rows(rows, 0.2).held_out}
    assert len(chosen) == 20
    assert {row["prompt"] for row in split_rows(rows[::-1], 20).held_out} == chosen
    assert {row["prompt"] for row in split_rows(rows, 20, seed=1).held_out} != chosen


def test_too_much_held_out() -> None:
    with pytest.raises(
        DataError, match=r"asks for 3 held-out questions, but there are only 2 different ones \(4 rows\)"
    ):
        split_rows(rows_of(["a", "b", "a", "b"]), 3)


def test_separate_held_out_source(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", [{"prompt": f"q{n}", "answer": n} for n in range(10)])
    test = write(tmp_path / "test.jsonl", [{"prompt": f"Q{n}", "answer": n} for n in (3, 5, 11)])
    splits = load_splits(DataSpec(files=(train,), held_out_files=(test,)))
    assert [row["answer"] for row in splits.train] == ["0", "1", "2", "4", "6", "7", "8", "9"]
    assert splits.counts == (10, 0, 0, 8, 3, 2)
    with pytest.raises(DataError, match="nothing is left to train on"):
        remove_held_out(splits.train, splits.train)


def test_dataset_keeps_each_rows_own_keys() -> None:
    rows = [{"prompt": "a", "answer": "14", "meta": {"x": 1}}, {"prompt": "b", "answer": "x", "meta": {"y": [2, 3]}}]
    dataset = to_dataset(rows)
    assert [dataset[0], dataset[1]] == rows
    with pytest.raises(DataError, match="mixes types"):
        to_dataset([{"prompt": "a", "level": 1}, {"prompt": "b", "level": "high"}])


class TestGym:
    """reasoning-gym tasks."""

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("reasoning_gym")

    def test_names_and_parameters_read_from_source_are_the_real_ones(self) -> None:
        import dataclasses

        from reasoning_gym.factory import DATASETS

        assert set(gym._tasks()) == set(DATASETS)
        for task, (_, config) in DATASETS.items():
            real = {field.name for field in dataclasses.fields(config)} - {"size", "seed"}
            assert set(gym._parameters(task) or ()) == real, task

    def test_rows_are_those_of_the_package(self) -> None:
        rows = gym.make_rows("chain_sum", {"min_terms": 2, "max_terms": 2}, 5, 3)
        assert rows == gym.make_rows("chain_sum", {"min_terms": 2, "max_terms": 2}, 5, 3)
        assert rows != gym.make_rows("chain_sum", {"min_terms": 2, "max_terms": 2}, 5, 4)
        assert all(isinstance(row["answer"], str) and "arithmetic problem" in row["question"] for row in rows)

    def test_values_that_the_task_refuses(self) -> None:
        with pytest.raises(DataError, match=r"the task 'chain_sum' refuses .*min_terms must be positive"):
            gym.make_rows("chain_sum", {"min_terms": 0}, 5, 3)

    def test_missing_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("trl_grpo_ext.data.gym.importlib.util.find_spec", lambda _name: None)
        gym._tasks.cache_clear()
        with pytest.raises(ImportError, match="run: pip install reasoning-gym"):
            gym.check_task("chain_sum", {})
        gym._tasks.cache_clear()

    def test_unknown_task(self) -> None:
        with pytest.raises(ConfigurationError, match=r"no task 'zzz'\. There are \d+"):
            gym.check_task("zzz", {})
