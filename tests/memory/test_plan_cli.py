"""``trl-grpo plan``: exit codes, JSON, recipes, config files without weights, the table and the plot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import save_tiny, tiny_config

from trl_grpo_ext.cli.main import main
from trl_grpo_ext.memory.closed_forms import GIB
from trl_grpo_ext.memory.mode import named_mode
from trl_grpo_ext.recipe import parse_recipe

ROOT = Path(__file__).parents[2]


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["plan", *argv])
    return int(stop.value.code or 0)


def test_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("SmolLM2-135M", "--gpu", "24", "--tuning", "lora", "--quick") == 0
    shown = capsys.readouterr().out
    assert "fits" in shown
    assert "weights" in shown
    assert "max_completion_length: 1024" in shown


def test_does_not_fit_and_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("Qwen2.5-7B", "--gpu", "24", "--tuning", "full", "--quick", "--json") == 1
    data = json.loads(capsys.readouterr().out)
    assert data["fits"] == "no"
    assert data["alternatives"][0]["fits"]
    assert data["margin"] < 0


def test_auto_takes_an_adapter_where_full_tuning_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("Qwen2.5-7B", "--gpu", "24", "--quick", "--json") == 0
    assert json.loads(capsys.readouterr().out)["mode"]["tuning"] == "lora"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["Qwen2.5-7B", "--gpu", "big"], "no size in GiB"),
        (["Qwen2.5-7B", "--gpu", "24", "--tuning", "qlorra"], "Did you mean 'qlora'"),
        (["Qwen2.5-7B", "--gpu", "24", "--batch", "12"], "multiple"),
        (["Qwen2.5-7B", "--gpu", "24,40"], "table"),
        (["nobody/knows-this", "--gpu", "24"], "the hub is not asked"),
        (["nobody/knows-this", "--gpu", "24"], "Llama-3.1-8B"),
        (["Qwen2.5-7B", "--gpu", "24", "--set", "trainer.beta=1"], "changes a recipe"),
        (["Qwen2.5-7B"], "gpu"),
    ],
)
def test_could_not_plan(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) == 2
    assert message in capsys.readouterr().err


def test_a_folder_with_nothing_but_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_config("qwen2").save_pretrained(str(tmp_path))
    sizes = ("--gpu", "8", "--prompt", "8", "--completion", "8", "--quick", "--json", "--tuning", "full")
    assert run(str(tmp_path), *sizes) == 0
    by_folder = json.loads(capsys.readouterr().out)
    assert run(str(tmp_path / "config.json"), *sizes) == 0
    by_file = json.loads(capsys.readouterr().out)
    assert by_folder["process"] == by_file["process"]


def test_a_recipe_says_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n' * 8)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: HuggingFaceTB/SmolLM2-135M\ndata: {file: rows.jsonl, answer: answer}\nrewards: [exact]\n"
        "trainer: {max_completion_length: 64, num_generations: 4, per_device_train_batch_size: 4, memory: lora}\n"
        "peft: {r: 4}\n"
    )
    assert run(str(recipe), "--gpu", "24", "--prompt", "32", "--quick", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["job"]["completion_tokens"], data["job"]["num_generations"], data["job"]["rank"]) == (64, 4, 4)
    assert data["mode"]["tuning"] == "lora"


def test_prompts_of_a_local_recipe_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_tiny(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n{"prompt": "2 =", "answer": "2"}\n')
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: model\ndata: {file: rows.jsonl, answer: answer, held_out: 0}\nrewards: [exact]\n"
        "trainer: {max_completion_length: 8, num_generations: 2, per_device_train_batch_size: 2}\n"
        "peft: {r: 4, lora_alpha: 9}\n"
    )
    argv = (str(recipe), "--gpu", "24", "--quick", "--json", "--set", "trainer.max_completion_length=16")
    assert run(*argv) == 0
    data = json.loads(capsys.readouterr().out)
    assert 3 < data["job"]["prompt_tokens"] < 100
    assert data["job"]["completion_tokens"] == 16
    written = yaml.safe_load(data["yaml"])
    assert {"r": 4, "lora_alpha": 9}.items() <= written["peft"].items()
    assert run(*argv, "--prompt", "33") == 0
    assert json.loads(capsys.readouterr().out)["job"]["prompt_tokens"] == 33


def laid_over(recipe: Any, sections: Any) -> Any:
    """Return a recipe in which every key that the sections name is replaced."""
    if not isinstance(recipe, dict) or not isinstance(sections, dict):
        return sections
    return recipe | {key: laid_over(recipe.get(key), value) for key, value in sections.items()}


@pytest.mark.parametrize(
    ("said", "tuning"),
    [
        ({"memory": "lora"}, None),
        ({"memory": "auto", "peft": {"r": 4}}, None),
        ({"trainer": {"memory": {"base": "nf4"}}}, None),
        ({"trainer": {"adapter": "org/sft"}}, None),
        ({"memory": "qlora", "trainer": {"adapter": "org/sft"}}, None),
        ({"memory": "lora", "trainer": {"adapter": "org/sft"}}, "full"),
        ({"peft": "lora"}, "full"),
    ],
)
def test_what_a_plan_prints_can_be_laid_over_its_recipe(
    said: dict[str, Any], tuning: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"max_completion_length": 64, "num_generations": 4, "per_device_train_batch_size": 4}
    trainer = {**sizes, "learning_rate": 1e-5, **said.get("trainer", {})}
    raw = {"model": "HuggingFaceTB/SmolLM2-135M", "data": {"hub": "org/rows"}, "rewards": ["exact"], **said}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**raw, "trainer": trainer}))
    tuned = [] if tuning is None else ["--tuning", tuning]
    assert run(str(recipe), "--gpu", "24", "--prompt", "32", "--quick", *tuned) == 0
    _, _, printed = capsys.readouterr().out.partition("# These keys replace those of ")
    sections = yaml.safe_load("# " + printed)
    written = yaml.safe_load(recipe.read_text())
    trains_adapter, adapter = tuning != "full", said.get("trainer", {}).get("adapter")
    # Whole sections replaced, or key by key.
    for merged in ({**written, **sections}, laid_over(written, sections)):
        done = parse_recipe(merged, recipe)
        assert (named_mode(done.trainer["memory"]).tuning == "lora") == trains_adapter
        # One adapter at most: the one that is there, or a new one.
        assert done.trainer.get("adapter") == (adapter if trains_adapter else None)
        assert (done.peft is not None) == (trains_adapter and adapter is None)


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert run("SmolLM2-135M", "--gpu", "24", "--tuning", "lora", "--quick", "--plot", str(path)) == 0
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert run("SmolLM2-135M", "--gpu", "24", "--tuning", "lora", "--quick", "--plot", str(tmp_path / "no" / "x")) == 2


def test_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("trl_grpo_ext.cli.plan_table.MODELS", ("SmolLM2-135M",))
    monkeypatch.setattr("trl_grpo_ext.cli.plan_table.TUNINGS", ("full", "qlora"))
    assert run("table", "--gpu", "1,24", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["tuning"] for row in rows] == ["full", "qlora"]
    assert rows[0]["cells"][0].startswith("- ")
    assert float(rows[0]["cells"][1].split()[0]) < 24


@pytest.mark.slow
def test_eight_billion_in_little_time_and_memory() -> None:
    """CPU seconds, as the machine may be shared; below 15, and less than a GiB of memory, imports included."""
    code = (
        "import resource, sys; from trl_grpo_ext.cli.main import main\n"
        "try: main(['plan', 'Llama-3.1-8B', '--gpu', '24', '--tuning', 'lora', '--json'])\n"
        "except SystemExit as stop: code = stop.code\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(code or 0, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, file=sys.stderr)"
    )
    started = time.monotonic()
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment, timeout=280
    )
    status, cpu_s, resident = done.stderr.split()[-3:]
    print(f"8B: {time.monotonic() - started:.1f} s, {cpu_s} s of CPU, {int(resident) / GIB:.2f} GiB")
    assert status == "0"
    assert json.loads(done.stdout)["tier"] == "T2"
    assert float(cpu_s) < 15
    assert int(resident) < GIB
