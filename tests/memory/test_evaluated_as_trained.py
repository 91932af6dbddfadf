"""``trl-grpo eval``: an adapter is judged on the base that it was trained on, quantised or not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from runs import checkpoint, save_adapter
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from trl_grpo_ext.cli import run
from trl_grpo_ext.cli.main import main
from trl_grpo_ext.memory.quantised import bits_of, keep_differentiable
from trl_grpo_ext.memory.record import PolicyRecord, save_record
from trl_grpo_ext.recipe import load_recipe

IDS = torch.arange(3, 35).view(2, 16)
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
RECIPE: dict[str, Any] = {
    "model": {"name": "model", "dtype": "bfloat16"},
    "data": {"file": "data.jsonl", "held_out": 4},
    "rewards": ["exact"],
    "trainer": {"max_completion_length": 4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a recipe that says nothing of memory, and ``run``, an adapter of a run on 4-bit weights."""
    folder = tmp_path_factory.mktemp("recipe")
    save_adapter(checkpoint(folder / "model"), folder / "run")
    save_record(folder / "run", PolicyRecord(quantization=NF4.to_dict(), dtype="float32"))
    rows = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(20)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return folder


def test_the_policy_is_the_one_that_was_trained(folder: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32", quantization_config=NF4)
    keep_differentiable(base)  # as the trainer does; it also fixes which product is computed
    expected = PeftModel.from_pretrained(base, str(folder / "run")).eval()
    recipe = load_recipe(folder / "recipe.yaml", [f"model.name={folder / 'model'}"])
    loaded = run.load_policy(recipe, folder / "run")
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, expected(IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "bits"),
    [
        ([], 4),
        (["trainer.temperature=0.5"], 4),
        (["memory=lora"], None),
        (["trainer.memory=qlora-8bit"], 8),
        (["memory.base=int8"], 8),
    ],
)
def test_only_a_memory_on_the_command_line_wins_over_the_record(
    overrides: list[str], bits: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert evaluated_bits(folder / "recipe.yaml", folder / "run", overrides, monkeypatch) == bits


def test_the_record_wins_over_the_recipe_and_without_one_the_recipe_decides(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "eight.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "memory": "qlora-8bit"}))
    assert evaluated_bits(path, folder / "run", [], monkeypatch) == 4
    unrecorded = tmp_path / "run"
    shutil.copytree(folder / "run", unrecorded)
    (unrecorded / "trl_grpo_policy.json").unlink()
    assert evaluated_bits(path, unrecorded, [], monkeypatch) == 8


def evaluated_bits(recipe: Path, checkpoint: Path, overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Return the bits of the base that ``trl-grpo eval`` generates with; None: not quantised."""
    seen: list[int | None] = []
    generate = run.generate_completions

    def spy(model: Any, *arguments: Any, **keywords: Any) -> Any:
        seen.append(bits_of(model))
        return generate(model, *arguments, **keywords)

    monkeypatch.setattr(run, "generate_completions", spy)
    options = [word for override in overrides for word in ("--set", override)]
    with pytest.raises(SystemExit) as left:
        main(["eval", str(recipe), "--checkpoint", str(checkpoint), "--json", *options])
    assert left.value.code == 0
    return seen[-1]
