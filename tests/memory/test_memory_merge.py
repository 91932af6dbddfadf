"""``trl-grpo merge``: the merged model computes what base and adapter did, and is written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from runs import checkpoint, make
from tiny import tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_grpo_ext.cli.main import main
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.memory import merge as merging
from trl_grpo_ext.memory.merge import merge_adapter
from trl_grpo_ext.memory.record import load_record

# Quantised, but computing in float32, so that the comparison sees nothing but the weights.
FLOAT32 = {"model_init_kwargs": {"dtype": "float32"}}
IDS = torch.arange(3, 35).view(2, 16)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(IDS).logits.float()


def gap(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).abs().max() / second.abs().max())


def plain(path: Path | str, **kwargs: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(path), **kwargs)


def test_merged_logits_are_those_of_base_and_adapter(base: str, adapter: str, tmp_path: Path) -> None:
    merge_adapter(Path(adapter), tmp_path / "merged", dtype="float32")
    expected = logits(PeftModel.from_pretrained(plain(base), adapter))
    assert gap(logits(plain(tmp_path / "merged")), expected) < 1e-5
    assert gap(logits(plain(base)), expected) > 0.1  # the adapter matters
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged"]
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    assert AutoTokenizer.from_pretrained(str(tmp_path / "merged")).get_vocab() == tiny_tokenizer().get_vocab()


@pytest.mark.parametrize("memory", ["qlora", "qlora-8bit"])
def test_a_quantised_run_is_merged_into_the_weights_it_saw(
    memory: str, base: str, adapter: str, tmp_path: Path
) -> None:
    trainer = make(tmp_path / "run", base, memory=memory, adapter=adapter, max_steps=1, **FLOAT32)
    trainer.train()
    trainer.save_model(str(tmp_path / "run"))
    main_exit(["merge", str(tmp_path / "run"), "--output", str(tmp_path / "merged"), "--dtype", "float32"])
    main_exit(
        ["merge", str(tmp_path / "run"), "-o", str(tmp_path / "original"), "--dtype", "float32", "--original-base"]
    )
    trained = logits(trainer.model)
    cards = [(tmp_path / name / "README.md").read_text() for name in ("merged", "original")]
    assert ["quantised in training" in card for card in cards] == [True, False]
    merged = plain(tmp_path / "merged")
    assert getattr(merged.config, "quantization_config", None) is None
    assert {p.dtype for p in merged.parameters()} == {torch.float32}
    close, far = gap(logits(merged), trained), gap(logits(plain(tmp_path / "original")), trained)
    if memory == "qlora":
        assert close < 1e-4
        assert far > 0.02  # the published weights are another model than the one that was trained
    else:  # the products of 8-bit layers round their inputs too, which no merged model does
        assert close < 0.05


def main_exit(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 0


def test_bfloat16_is_the_default(base: str, adapter: str, tmp_path: Path) -> None:
    merge_adapter(Path(adapter), tmp_path / "merged")
    merged = plain(tmp_path / "merged", dtype="auto")
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}
    assert gap(logits(merged), logits(PeftModel.from_pretrained(plain(base), adapter))) < 0.03


def test_a_merge_that_fails_leaves_nothing(adapter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def save_pretrained(self, folder: str) -> None:
            (Path(folder) / "half.safetensors").touch()
            raise OSError("No space left on device")

    monkeypatch.setattr(merging.AutoTokenizer, "from_pretrained", lambda *_: Full())
    with pytest.raises(OSError, match="No space left"):
        merge_adapter(Path(adapter), tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


def test_errors(base: str, adapter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match="holds no adapter, so there is nothing to merge"):
        merge_adapter(Path(base), tmp_path / "merged")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigurationError, match="exists already; name a directory that does not"):
        merge_adapter(Path(adapter), tmp_path / "full")
    with pytest.raises(ConfigurationError, match="dtype='int8' is none of bfloat16, float16, float32"):
        merge_adapter(Path(adapter), tmp_path / "merged", dtype="int8")
    with pytest.raises(SystemExit) as left:
        main(["merge", str(tmp_path / "nowhere"), "--output", str(tmp_path / "merged")])
    assert left.value.code == 2
    assert "there is no directory" in capsys.readouterr().err


def test_a_recipe_with_a_mode_trains_evaluates_and_merges(tmp_path: Path) -> None:
    """From the command line: the quantised base is used before, in and after training, and the result can be merged."""
    checkpoint(tmp_path / "model")
    rows = [{"prompt": f"What is {n} + {n % 3}?", "answer": str(n + n % 3)} for n in range(20)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = {"max_steps": 1, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 4}
    recipe = {
        "model": "model",
        "memory": "qlora",
        "data": {"file": "data.jsonl", "held_out": 4},
        "rewards": [{"length": {"shape": "range", "min_length": 1, "max_length": 3}}],
        "trainer": {**trainer, "reward_isolation": "never", "beta": 0.1},
        "eval": {"batch_size": 4},
    }
    path, out = tmp_path / "recipe.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(recipe))
    main_exit(["train", "--no-check", str(path), "--output-dir", str(out)])
    assert load_record(out).quantization["load_in_4bit"] is True
    assert "adapter" in (out / "README.md").read_text()
    main_exit(["eval", str(path), "--checkpoint", str(out), "--json"])
    main_exit(["merge", str(out), "--output", str(tmp_path / "merged")])
    card = (tmp_path / "merged" / "README.md").read_text()
    assert f"Base model: {tmp_path / 'model'}, as it was quantised in training" in card
    assert f"Adapter: `{out}`" in card
    assert plain(tmp_path / "merged").config.model_type == "llama"
