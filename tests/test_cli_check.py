"""``trl-grpo check`` on a good recipe and on broken ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from trl_grpo_ext.cli import check as check_module
from trl_grpo_ext.cli.check import check, check_rows, quick_check
from trl_grpo_ext.errors import ConfigurationError, DataError
from trl_grpo_ext.rewards.registry import build_rewards

app = typer.Typer()
app.command()(check)


def sums(**further: Any) -> list[dict[str, Any]]:
    pairs = [(3, 9), (20, 7), (14, 5), (2, 2), (31, 8), (6, 6), (9, 1), (17, 4), (40, 2), (5, 3)]
    return [{"prompt": f"Add {a} and {b}.", "answer": str(a + b), **further} for a, b in pairs]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that writes a recipe with rows and rewards and runs the command on it."""
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    monkeypatch.setattr(check_module, "_render", lambda recipe, prompts: ([f"rendered {len(prompts)}"], ["no model"]))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def run(rewards: Any, rows: list[dict[str, Any]], *options: str, data: dict[str, Any] | None = None) -> Any:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        content = {"model": str(checkpoint), "data": {"file": "rows.jsonl", **(data or {})}, "rewards": rewards}
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps(content))  # JSON is YAML
        return CliRunner().invoke(app, [str(path), *options])

    return run


def test_a_good_recipe_passes(recipe: Any) -> None:
    result = recipe(["exact", {"length": {"weight": 0.1, "max_length": 100, "min_length": 1, "unit": "chars"}}], sums())
    assert result.exit_code == 0, result.output
    assert "every gold answer gets 1 (form: bare)" in result.output
    assert "rendered 3" in result.output
    assert "note: no model" in result.output
    assert "10 of 10 rows" in result.output
    assert "0 failed" in result.output


def test_json_has_everything(recipe: Any) -> None:
    result = recipe(["exact"], sums(), "--json")
    report = json.loads(result.output)
    assert report["failed"] is False
    assert report["columns"] == {"exact": ["answer"]}
    assert report["forms"] == {"exact": "bare"}
    assert {finding["check"] for finding in report["findings"]} >= {"gold", "empty", "prompt", "wrong", "hedged"}
    assert report["milliseconds"]["exact"] > 0


@pytest.mark.parametrize(
    ("rewards", "rows", "data", "words"),
    [
        (["exact"], sums(topic="sums"), {"answer": "topic"}, "every row has the gold answer 'sums'"),
        (["math"], [{**row, "answer": "\\frac{1}{"} for row in sums()], {}, "10 of 10 gold answers (100%) cannot be"),
        (["mine.py:short"], sums(), {}, "no text tried is paid more than an empty one (1)"),
        (["mine.py:flat"], sums(), {}, "every text tried got 0.5"),
        (["mine.py:broken"], sums(), {}, "for example: ValueError: no idea"),
        (["mine.py:substring"], sums(), {}, "a list of several answers is paid as much"),
    ],
)  # fmt: skip
def test_broken_recipes_fail(recipe: Any, tmp_path: Path, rewards: Any, rows: Any, data: Any, words: str) -> None:
    (tmp_path / "mine.py").write_text(
        "def text(c): return c[0]['content']\n"
        "def short(completions, **kw): return [float(len(text(c)) < 20) for c in completions]\n"
        "def flat(completions, **kw): return [0.5] * len(completions)\n"
        "def broken(completions, **kw): raise ValueError('no idea')\n"
        "def substring(completions, answer, **kw): return [float(a in text(c)) for c, a in zip(completions, answer)]\n"
    )
    result = recipe(rewards, rows, data=data)
    assert result.exit_code == 1, result.output
    assert "FAIL" in result.output
    assert words in result.output


def test_warnings_fail_when_strict(recipe: Any) -> None:
    rows = sums()
    rows[3]["answer"] = None
    assert recipe(["exact"], rows).exit_code == 0
    result = recipe(["exact"], rows, "--strict")
    assert result.exit_code == 1
    assert "1 of 10 rows have no gold answer" in result.output


def test_own_forms_and_gold_columns() -> None:
    def program(completions: Any, tests: Any, **kwargs: Any) -> list[float]:
        return [float(text == f"<<{test}>>") for text, test in zip(completions, tests, strict=True)]

    rows = [{**row, "tests": row["answer"], "result": row.pop("answer")} for row in sums()]
    rewards = build_rewards([program])
    report = check_rows(rows, rewards)
    assert [finding.status for finding in report.findings] == ["warn"]
    report = check_rows(rows, rewards, gold="result", forms=["<<{answer}>>"])
    assert report.forms == {"program": "own 1"}
    assert not report.failed(strict=True), report.findings
    with pytest.raises(ConfigurationError, match=r"has no \{answer\}"):
        check_rows(rows, rewards, forms=["no place"])
    with pytest.raises(ConfigurationError, match=r"--gold reslt.*Did you mean 'result'"):
        check_rows(rows, rewards, gold="reslt")


def test_rewards_with_golds_of_their_own() -> None:
    rows = [{**row, "letter": "ABCD"[number % 4]} for number, row in enumerate(sums())]
    report = check_rows(rows, build_rewards(["exact", {"choice": {"reference": "letter"}}]))
    found = {(finding.check, finding.reward): finding.status for finding in report.findings}
    assert found["gold", "exact"] == found["gold", "choice"] == "ok"
    assert found["wrong", "choice"] == "ok"


def test_the_quick_check_looks_at_few_rows() -> None:
    report = quick_check(sums() * 10, build_rewards(["exact"]))
    assert (report.num_rows, report.num_available) == (16, 100)
    assert not report.failed()


def test_bad_data_are_refused_at_once() -> None:
    with pytest.raises(DataError, match="no rows to check"):
        check_rows([], build_rewards(["exact"]))
    with pytest.raises(DataError, match="'exact' needs the column 'answer'"):
        check_rows([{"prompt": "x", "solution": "y"}], build_rewards(["exact"]))


def test_reward_models_are_left_out() -> None:
    report = check_rows(sums(), build_rewards(["exact", {"model": {"model": "some/reward-model"}}]))
    assert report.notes == ["reward-model: a reward model, not checked"]
    assert not report.failed()
