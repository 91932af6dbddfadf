"""The command line on a tiny model: every result is written, evaluation repeats it, the control is marked."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import save_tiny

from trl_grpo_ext.cli.main import main
from trl_grpo_ext.cli.prepare import prepare
from trl_grpo_ext.cli.rundir import RunDirectory
from trl_grpo_ext.recipe import load_recipe

LETTERS = """
def letters(completions, **_):
    texts = [turns[-1]["content"] if isinstance(turns, list) else turns for turns in completions]
    return [sum(char.isalpha() for char in text) / max(1, len(text)) for text in texts]
"""
RECIPE: dict[str, Any] = {
    "model": "model",
    "data": {"file": "data.jsonl", "prompt": "question", "answer": "gold", "held_out": 6, "system": "Add."},
    # A random model gets no sum right, so the share of letters is what it can learn.
    "rewards": ["exact", {"letters.py:letters": {"weight": 0.5}}],
    "trainer": {
        "max_steps": 4,
        "save_steps": 2,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 1e-2,
        "reward_isolation": "never",
    },
    "peft": {"r": 2},
    "eval": {"examples": 3, "batch_size": 4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    save_tiny(folder / "model")
    rows = [{"question": f"What is {n} + {n % 3}?", "gold": n + n % 3} for n in range(30)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "letters.py").write_text(LETTERS)
    (folder / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    return folder


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(list(arguments))
    assert leaving.value.code == 0


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    run("train", "--no-check", str(folder / "tiny.yaml"), "--output-dir", str(folder / "out"), "--seed", "3")
    return folder / "out"


def test_every_result_is_there(folder: Path, trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    assert names >= {
        "adapter_model.safetensors",
        "adapter_config.json",
        "tokenizer.json",
        "README.md",
        "metrics.jsonl",
        "plot.png",
        "examples.md",
        "summary.json",
        "recipe.yaml",
        "checkpoint-2",
        "checkpoint-4",
    }
    assert not [name for name in names if name.endswith(".tmp")]
    assert (trained / "checkpoint-4" / "complete.json").is_file()
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["seed"] == 3
    assert summary["control"] is False
    assert summary["data"]["train"] == 24
    assert summary["before"]["strict"]["total"] == summary["after"]["strict"]["total"] == 6
    assert summary["wall_seconds"] >= summary["train_seconds"] > 0
    steps = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in steps if "reward" in entry] == [1, 2, 3, 4]
    assert all(entry["rewards/accuracy_strict/mean"] is not None for entry in steps if "reward" in entry)
    assert (trained / "examples.md").read_text().count("\n| What is") == 3
    assert "control:" not in (trained / "README.md").read_text()


def test_the_recipe_that_a_run_leaves_can_be_run_where_it_lies(folder: Path, trained: Path, tmp_path: Path) -> None:
    """Model, data and reward module lie beside the original; a copy of the copy finds them too."""
    directory = RunDirectory(tmp_path / "again")
    directory.open(load_recipe(trained / "recipe.yaml"), resume=False, overwrite=False, control=False)
    directory.begin(load_recipe(trained / "recipe.yaml"), control=False)
    directory.close()
    for copy in (trained / "recipe.yaml", directory.recipe_copy):
        left = prepare(copy, [])
        assert left.recipe.trainer["seed"] == 3
        assert Path(left.recipe.model.name).resolve() == (folder / "model").resolve()
        assert left.rewards.names == ["exact", "letters"]
        assert len(left.splits.train) == 24


def test_the_copy_goes_on_with_its_own_run(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("train", "--no-check", str(trained / "recipe.yaml"), "--output-dir", str(trained), "--resume")
    assert "already finished" in capsys.readouterr().out


def test_monitors_do_not_count(trained: Path) -> None:
    """reward = exact + 0.5 letters; the watched accuracies have weight 0."""
    for line in (trained / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if "reward" in entry:
            paid = entry["rewards/exact/mean"] + 0.5 * entry["rewards/letters/mean"]
            assert entry["reward"] == pytest.approx(paid, abs=1e-6)


def test_adapter_loads_with_plain_peft_and_has_moved(folder: Path, trained: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "model"), trained)
    moved = [parameter.abs().max().item() for name, parameter in model.named_parameters() if "lora_B" in name]
    assert moved
    assert max(moved) > 0
    assert AutoTokenizer.from_pretrained(trained).chat_template


def test_eval_repeats_the_figures_of_the_run(folder: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    for checkpoint, expected in ((["--checkpoint", str(trained)], "after"), ([], "before")):
        capsys.readouterr()
        run("eval", str(folder / "tiny.yaml"), "--json", *checkpoint)
        result = json.loads(capsys.readouterr().out)
        for name in ("strict", "lenient", "mean_tokens", "truncated"):
            assert result[name] == summary[expected][name], (expected, name)
    run("eval", str(folder / "tiny.yaml"), "--checkpoint", str(trained / "checkpoint-2"), "--sampled", "2")
    printed = capsys.readouterr().out
    assert "6 held-out prompts, 2 samples per prompt" in printed
    assert "strict in at least one of 2 samples" in printed


def test_second_run_is_refused_and_overwrite_allows_it(
    folder: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "twice"
    arguments = [
        "train",
        str(folder / "tiny.yaml"),
        "-o",
        str(out),
        "--set",
        "trainer.max_steps=1",
        "--set",
        "peft=null",
    ]
    run(*arguments)
    assert (out / "model.safetensors").is_file()
    with pytest.raises(SystemExit):
        main(arguments)
    assert "--overwrite" in capsys.readouterr().err
    (out / "my_notes.txt").touch()
    run(*arguments, "--overwrite")
    assert (out / "my_notes.txt").exists()


def test_resume_of_a_finished_run_adds_steps(folder: Path) -> None:
    out = folder / "longer"
    arguments = ["train", "--no-check", str(folder / "tiny.yaml"), "-o", str(out), "--resume"]
    run(*arguments, "--set", "trainer.max_steps=2")
    before = (out / "before.json").read_text()
    run(*arguments)
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in steps if "reward" in entry] == [1, 2, 3, 4]
    assert (out / "before.json").read_text() == before
    times = [entry["elapsed_s"] for entry in steps]
    assert times == sorted(times)


def test_resume_of_a_finished_run_touches_nothing(
    folder: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def contents() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in trained.rglob("*") if path.is_file() and path.name != ".lock"}

    arguments = ["train", "--no-check", str(folder / "tiny.yaml"), "-o", str(trained), "--seed", "3", "--resume"]
    before = contents()
    run(*arguments)
    assert contents() == before
    assert capsys.readouterr().out.startswith(f"already finished: {trained / 'summary.json'}")


def test_resume_of_a_run_killed_before_its_summary_makes_no_step_more(folder: Path, trained: Path) -> None:
    """Every step was made and saved; the 24 prompts of an epoch are not used up after 4 steps of 2."""
    from safetensors.torch import load_file

    out = folder / "killed"
    shutil.copytree(trained, out)
    (out / "summary.json").unlink()
    (out / "adapter_model.safetensors").unlink()
    run("train", "--no-check", str(folder / "tiny.yaml"), "-o", str(out), "--seed", "3", "--resume")
    assert json.loads((out / "summary.json").read_text())["steps"] == 4
    ours, theirs = (load_file(path / "adapter_model.safetensors") for path in (out, trained))
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_control_permutes_rewards_and_nothing_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from trl_grpo_ext.cli import run as run_module
    from trl_grpo_ext.trainer import GroupRelativeTrainer

    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    control = run_module.ShuffledRewardsTrainer

    class Watched(control):  # type: ignore[misc, valid-type]
        def _calculate_rewards(self, *args: Any) -> torch.Tensor:
            shuffled = super()._calculate_rewards(*args)
            seen.append((self.plain, shuffled.clone()))
            assert self._rewards_per_func is shuffled
            return shuffled

    plain_rewards = GroupRelativeTrainer._calculate_rewards

    def remember(self: Any, *args: Any) -> torch.Tensor:
        self.plain = plain_rewards(self, *args)
        # One value per row, so that the permutation can be read off.
        self.plain[:] = torch.arange(self.plain.numel()).view_as(self.plain).float()
        self.plain = self.plain.clone()
        return self.plain

    monkeypatch.setattr(GroupRelativeTrainer, "_calculate_rewards", remember)
    monkeypatch.setattr(run_module, "ShuffledRewardsTrainer", Watched)
    out = folder / "control"
    run(
        "train",
        "--no-check",
        str(folder / "tiny.yaml"),
        "-o",
        str(out),
        "--shuffle-rewards",
        "--set",
        "trainer.max_steps=2",
    )
    assert json.loads((out / "summary.json").read_text())["control"] is True
    assert "Control run" in (out / "README.md").read_text()
    orders = []
    for plain, shuffled in seen:
        assert torch.equal(shuffled[:, 2:], plain[:, 2:]), "watched accuracies stay in place"
        order = torch.stack([(plain[:, 0] == value).nonzero()[0, 0] for value in shuffled[:, 0]])
        assert sorted(order.tolist()) == list(range(8))
        assert torch.equal(plain[order][:, :2], shuffled[:, :2]), "one permutation for all rewards"
        assert order.tolist() != list(range(8))
        orders.append(order.tolist())
    assert orders[0] != orders[1]


def test_plain_prompts_without_held_out_rows(folder: Path) -> None:
    out = folder / "plain"
    changes = [
        "data.chat=false",
        "data.held_out=0",
        "data.answer=null",
        "rewards=[letters.py:letters]",
    ]
    sets = [part for change in changes for part in ("--set", change)]
    run(
        "train",
        "--no-check",
        str(folder / "tiny.yaml"),
        "-o",
        str(out),
        "--set",
        "trainer.max_steps=1",
        "--set",
        "eval=null",
        *sets,
    )
    summary = json.loads((out / "summary.json").read_text())
    assert summary["before"] is None
    assert summary["after"] is None
    assert not math.isnan(summary["train_seconds"])
    assert not (out / "examples.md").exists()


def test_a_combination_that_trl_refuses_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(
            [
                "train",
                "--no-check",
                str(folder / "tiny.yaml"),
                "-o",
                str(folder / "x"),
                "--set",
                "trainer.lr_scheduler_type=cosin",
            ]
        )
    assert leaving.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("trl-grpo: error: trainer: cosin is not a valid SchedulerType")


def test_generation_is_batched_without_effect(folder: Path) -> None:
    """Greedy texts do not depend on the batch, sampled ones follow the seed, and the model's state stays."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from trl_grpo_ext.cli.generate import _generate_padded, generate_completions, render_prompt

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model").train()
    prompts = [[{"role": "user", "content": "x" * n}] for n in (1, 9, 3, 20)]
    state = torch.get_rng_state()
    padded = _generate_padded(model.eval(), [render_prompt(tokenizer, prompt) for prompt in prompts], _greedy(6))
    model.train()
    greedy = [generate_completions(model, tokenizer, prompts, max_new_tokens=6, batch_size=size) for size in (1, 4)]
    assert greedy[0] == greedy[1]
    assert [list(item.token_ids) for item in greedy[0]] == padded, "the engine's texts are those of generate"
    drawn = [
        generate_completions(model, tokenizer, prompts, max_new_tokens=6, sampling={}, seed=seed) for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    ends = generate_completions(_Ending(model, 2), tokenizer, prompts, max_new_tokens=6)
    assert {(len(item.token_ids), item.truncated, item.text) for item in ends} == {(1, False, "")}


def _greedy(max_new_tokens: int) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0, eos_token_id=[2])


class _Ending:
    """A model of no known family that says the end token at once and then pads with it."""

    def __init__(self, model: Any, end: int) -> None:
        self._inner, self._end = model, end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def generate(self, *, input_ids: Any, **_: Any) -> Any:
        import torch

        return torch.cat([input_ids, torch.full((len(input_ids), 3), self._end)], dim=1)


def test_rewards_that_teach_the_wrong_thing_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A reward that pays the empty answer as much as the right one: exit code 1, and nothing is written."""
    (folder / "generous.py").write_text("def generous(completions, **_):\n    return [1.0] * len(completions)\n")
    changes = ["--set", "rewards=['generous.py:generous']", "-o", str(folder / "generous")]
    with pytest.raises(SystemExit) as leaving:
        main(["train", str(folder / "tiny.yaml"), *changes])
    assert leaving.value.code == 1
    assert "--no-check trains all the same" in capsys.readouterr().err
    assert not (folder / "generous").exists()
