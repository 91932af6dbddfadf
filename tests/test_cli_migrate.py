"""``trl-grpo migrate``: ten scripts of both eras in the styles seen in public, a GRPO script, and the edges."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("libcst")

import torch
from tiny import save_tiny, tiny_config, tiny_tokenizer

from trl_grpo_ext import GroupRelativeConfig
from trl_grpo_ext.cli.migrate import migrate
from trl_grpo_ext.compat.migrate import migrate_source, unified_diff
from trl_grpo_ext.compat.migrate_notebook import migrate_notebook
from trl_grpo_ext.compat.migrate_rules import GRPO_KEYWORDS, MOVED, trl_has
from trl_grpo_ext.errors import DataError, MissingDependencyError

OLD = Path(__file__).parent / "compat" / "old_scripts"
# A bare pip may belong to another Python than the one that misses the package.
PIP = re.escape(f"{shlex.quote(sys.executable)} -m pip install")
SCRIPTS = sorted(path.stem for path in OLD.glob("*.py"))

# What each script leaves to a person, by line; the texts are looked for inside the remarks.
REMARKS: dict[str, list[tuple[int, str]]] = {
    "adaptive_kl": [(10, "gamma=0.99: rewards are not discounted")],
    "custom_collator": [],
    "grpo": [(18, "use_liger_loss is dropped")],
    "hf_argparser": [(27, "value_model is not passed on: delete where it is loaded")],
    "list_dataset": [(12, "keywords in * or ** of PPOv2Config"), (33, "value is not passed on")],
    "lora": [(46, "'ppo/loss/value' came from the critic")],
    "pipeline_reward": [(40, "'ppo/val/var_explained' came from the critic")],
    "quantised": [(14, "reward_adapter: reward adapters are not supported"), (26, ".compute_reward_score: reward")],
    "trainer_subclass": [(51, "value_model is not passed on")],
    "while_loop": [(10, "batch_size=1 has nothing to compare"), (17, ".v_head"), (18, ".record_step_stats")],
}


def migrated(name: str) -> Any:
    return migrate_source((OLD / f"{name}.py").read_text(), name)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_parse_and_say_what_is_left(name: str) -> None:
    result = migrated(name)
    ast.parse(result.code)
    assert [remark.line for remark in result.remarks] == [line for line, _ in REMARKS[name]]
    for remark, (_, text) in zip(result.remarks, REMARKS[name], strict=True):
        assert text in remark.text
    imported = {
        alias.name
        for node in ast.walk(ast.parse(result.code))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trl"
        for alias in node.names
    }
    assert not imported & MOVED.keys()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_second_run_changes_nothing(name: str) -> None:
    once = migrated(name).code
    assert migrate_source(once, name).code == once


def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    from transformers import AutoModelForSequenceClassification

    made = {"POLICY": save_tiny(tmp_path / "policy", vocab_size=len(tiny_tokenizer()))}
    for name, labels in (("REWARD", 1), ("CLASSIFIER", 2)):
        config = tiny_config("llama", num_labels=labels)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
        made[name] = str(tmp_path / name)
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"prompt": f"What is {i} + {i}?"}) for i in range(16)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows))
    made |= {"DATA": str(tmp_path / "data"), "OUTPUT": str(tmp_path / "out"), "ACCELERATE_USE_CPU": "true"}
    made["ADAPTER"] = "someone/reward-adapter"
    for name, value in made.items():
        monkeypatch.setenv(name, value)
    return made


def run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: str = "") -> dict[str, Any]:
    path = tmp_path / "script.py"
    path.write_text(code)
    monkeypatch.setattr(sys, "argv", [str(path), *argv.split()])
    return runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize(
    "name", ["adaptive_kl", "custom_collator", "list_dataset", "lora", "pipeline_reward", "trainer_subclass"]
)
def test_migrated_scripts_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths(tmp_path, monkeypatch)
    ran = run(migrated(name).code, tmp_path, monkeypatch)
    trainer = ran.get("ppo_trainer", ran.get("trainer"))
    steps = {"list_dataset": 2 * 2 * 2, "trainer_subclass": 2}.get(name, 2)
    assert trainer.state.global_step == steps
    if name == "trainer_subclass":
        assert trainer.logged >= 2
        assert type(trainer).__name__ == "LoggingTrainer"


def test_a_migrated_command_line_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = paths(tmp_path, monkeypatch)
    argv = (
        f"--dataset_name {made['DATA']} --model_name_or_path {made['POLICY']} --sft_model_path {made['POLICY']} "
        f"--reward_model_path {made['REWARD']} --output_dir {made['OUTPUT']} --total_episodes 16 --num_ppo_epochs 1 "
        "--response_length 4 --use_cpu --bf16 False --report_to none --save_strategy no --learning_rate 1e-4"
    )
    assert run(migrated("hf_argparser").code, tmp_path, monkeypatch, argv)["trainer"].state.global_step == 2


def test_a_migrated_grpo_script_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths(tmp_path, monkeypatch)
    # Workers would import this whole test session for a reward that cannot fail.
    code = migrated("grpo").code.replace("max_steps=2,", 'max_steps=2, reward_isolation="off",')
    trainer = run(code, tmp_path, monkeypatch)["trainer"]
    assert trainer.state.global_step == 2
    assert type(trainer).__mro__[1].__name__ == "GroupRelativeTrainer"


def test_a_batch_of_one_fails_as_the_remark_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match="batch_size=1 holds one"):
        run(migrated("while_loop").code, tmp_path, monkeypatch)


def test_a_reward_adapter_fails_as_the_remark_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths(tmp_path, monkeypatch)
    with pytest.raises(ValueError, match="load the adapter as its own sequence classifier"):
        run(migrated("quantised").code, tmp_path, monkeypatch)


def test_a_migrated_quantised_script_runs_once_both_remarks_are_dealt_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    paths(tmp_path, monkeypatch)
    wide = save_tiny(tmp_path / "wide", vocab_size=len(tiny_tokenizer()), hidden=64)  # a 4-bit block has 64 weights
    monkeypatch.setenv("POLICY", wide)
    code = migrated("quantised").code
    for old, new in (
        ('    reward_adapter=os.environ["ADAPTER"],\n', ""),
        ("ppo_trainer.model.compute_reward_score(r.unsqueeze(0))", "torch.tensor(float(len(r)))"),
    ):
        assert code.count(old) == 1
        code = code.replace(old, new)
    ran = run(code, tmp_path, monkeypatch)
    layer = ran["ppo_trainer"].model.get_base_model().model.layers[0].mlp.up_proj
    assert type(layer).__name__ == "Linear8bitLt"
    assert type(ran["ref"].model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    assert ran["ppo_trainer"].state.global_step == 2
    assert abs(ran["stats"]["objective/kl"]) > 0, "the 4-bit reference is not the 8-bit policy"


# --- the notebook


def test_a_notebook_is_one_script_in_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (OLD / "notebook.ipynb").read_text()
    result = migrate_notebook(text, "notebook.ipynb")
    old, new = json.loads(text)["cells"], json.loads(result.text)["cells"]
    changed = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    assert changed == [3, 4]
    assert "".join(new[3]["source"]).count("trl_grpo_ext.compat.ppo") == 2
    assert "mini_batch_size=8" in "".join(new[4]["source"])
    assert "vf_coef" not in "".join(new[4]["source"])
    assert new[1] == old[1], "magics stay"
    assert new[5] == old[5]
    assert [(cell, remark.line) for cell, remark in result.remarks] == [(1, 1), (6, 1), (7, 5)]
    assert "needs trl>=1.16" in result.remarks[0][1].text
    assert "cannot be parsed" in result.remarks[1][1].text
    assert "--- a/notebook.ipynb cell 3" in result.diff
    assert migrate_notebook(result.text, "x").text == result.text
    paths(tmp_path, monkeypatch)
    code = "\n".join("".join(new[i]["source"]) for i in (3, 4, 7))
    assert run(code, tmp_path, monkeypatch)["ppo_trainer"].state.global_step == 1


def test_what_is_no_notebook_is_refused() -> None:
    with pytest.raises(DataError, match="x is not a notebook"):
        migrate_notebook("{}", "x")


# --- edges, each a line or two of script


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("from trl import PPOTrainer\n", "from trl_grpo_ext.compat.ppo import PPOTrainer\n"),
        ("from trl import PPOTrainer as T\nT()\n", "from trl_grpo_ext.compat.ppo import PPOTrainer as T\nT()\n"),
        ("from trl import PPOv2Trainer\nPPOv2Trainer\n",
         "from trl_grpo_ext.compat.ppo import PPOTrainer\nPPOTrainer\n"),
        ("from trl.experimental.ppo import PPOConfig\n", "from trl_grpo_ext.compat.ppo import PPOConfig\n"),
        ("from trl import SFTTrainer, GRPOTrainer\n",
         "from trl import SFTTrainer\nfrom trl_grpo_ext import GroupRelativeTrainer\n"),
        ("# why\nfrom trl import set_seed  # now\n", "# why\nfrom trl_grpo_ext.compat.ppo import set_seed  # now\n"),
        ("from trl import SFTTrainer\n", "from trl import SFTTrainer\n"),
        ("PPOTrainer = 3\n", "PPOTrainer = 3\n"),
        ("from trl import GRPOTrainer\nx.GRPOTrainer = f(GRPOTrainer=1)\n",
         "from trl_grpo_ext import GroupRelativeTrainer\nx.GRPOTrainer = f(GRPOTrainer=1)\n"),
        ("from trl import PPOConfig\nPPOConfig(\n    ppo_epochs=2,\n    lam=0.9,\n)\n",
         "from trl_grpo_ext.compat.ppo import PPOConfig\nPPOConfig(\n    ppo_epochs=2,\n)\n"),
        ("from trl import PPOConfig\nPPOConfig(gamma=1.0, response_length=3)\n",
         "from trl_grpo_ext.compat.ppo import PPOConfig\nPPOConfig(response_length=3)\n"),
        ("from trl import GRPOConfig\nGRPOConfig(evaluation_strategy='no', beta=0.1)\n",
         "from trl_grpo_ext import GroupRelativeConfig\nGroupRelativeConfig(eval_strategy='no', beta=0.1)\n"),
        ("import trl\nc = trl.PPOConfig(ppo_epochs=1)\n",
         "import trl\nfrom trl_grpo_ext.compat.ppo import PPOConfig\n\nc = PPOConfig(ppo_epochs=1)\n"),
        ("t.apply_chat_template(m)\n", "t.apply_chat_template(m, return_dict=False)\n"),
        ("t.apply_chat_template(\n    m,\n)\n", "t.apply_chat_template(\n    m, return_dict=False,\n)\n"),
        ("t.apply_chat_template(m, tokenize=False)\n", "t.apply_chat_template(m, tokenize=False)\n"),
        ("M.from_pretrained(p, use_auth_token=True)\n", "M.from_pretrained(p, token=True)\n"),
    ],
)  # fmt: skip
def test_small_changes(old: str, new: str) -> None:
    assert migrate_source(old).code == new


@pytest.mark.parametrize(
    ("code", "remark"),
    [
        ("from trl import *\n", "from trl import *: name what the script uses"),
        ("from trl.core import stack_dicts\n", "the installed TRL has no stack_dicts in trl.core"),
        ("import trl.core\n", "the installed TRL has no module trl.core"),
        ("from trl import PPOConfig\nPPOConfig(ppo_epoch=1)\n", "PPOConfig has no field 'ppo_epoch'"),
        ("from trl import PPOConfig\nPPOConfig(non_eos_penalty=True)\n", "missing_eos_penalty subtracts"),
        ("from trl import GRPOConfig\nGRPOConfig(epsilonn=1)\n", "GroupRelativeConfig has no field 'epsilonn'"),
        (
            "from trl import PPOTrainer\nclass A(PPOTrainer):\n    def loss(self): ...\n",
            "A.loss overrides a method that is",
        ),
        ("from trl import PPOTrainer\nPPOTrainer.step = f\n", "PPOTrainer.step = ...: a method of the old trainer is"),
        ("from trl import PPOTrainer\nPPOTrainer(**k)\n", "keywords in * or ** of the trainer call"),
        ("from trl import PPOTrainer\nt = PPOTrainer(c)\nt.value_model.save()\n", ".value_model is None"),
        ("from trl import AutoModelForSeq2SeqLMWithValueHead as M\nM.from_pretrained(p)\n", "seq2seq models cannot"),
    ],
)
def test_what_a_person_must_decide(code: str, remark: str) -> None:
    assert remark in " ".join(r.text for r in migrate_source(code).remarks)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("max_prompt_length=64", 'max_prompt_length=64, overlong_prompts="truncate"'),
        ("seed=1, max_prompt_length=n", 'seed=1, max_prompt_length=n, overlong_prompts="truncate"'),
        (
            "\n    max_prompt_length=64,  # of 2048\n    seed=1,\n",
            '\n    max_prompt_length=64,  # of 2048\n    overlong_prompts="truncate",\n    seed=1,\n',
        ),
        (
            "\n    seed=1,  # any\n    max_prompt_length=64,\n",
            '\n    seed=1,  # any\n    max_prompt_length=64,\n    overlong_prompts="truncate",\n',
        ),
        ('max_prompt_length=64, overlong_prompts="drop"', 'max_prompt_length=64, overlong_prompts="drop"'),
        ("max_prompt_length=None", "max_prompt_length=None"),
    ],
)
def test_a_limit_on_prompts_stays_and_cuts_as_it_did(before: str, after: str) -> None:
    result = migrate_source(f"from trl import GRPOConfig\nargs = GRPOConfig({before})\n")
    assert result.code.split("GroupRelativeConfig", 2)[2] == f"({after})\n"
    assert not result.remarks
    values = eval(f"dict({after})", {"n": 64})
    assert GroupRelativeConfig(output_dir="x", use_cpu=True, bf16=False, **values).max_prompt_length in (64, None)


def test_the_rules_know_the_installed_trl() -> None:
    assert trl_has("trl", "GRPOTrainer")
    assert trl_has("trl.trainer.utils", "pad")
    assert not trl_has("trl", "PPOTrainer")
    assert not trl_has("trl.trainer.ppo_trainer")
    from dataclasses import fields

    from trl import GRPOConfig

    current = {f.name for f in fields(GRPOConfig)}
    assert {new for new in GRPO_KEYWORDS.values() if new} <= current


# --- the command


def test_the_command_prints_a_diff_and_writes_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "old.py"
    path.write_text((OLD / "lora.py").read_text())
    migrate(path)
    out, err = capsys.readouterr()
    assert "+from trl_grpo_ext.compat.ppo import" in out
    assert "1 to decide by hand" in err
    assert "line 46: 'ppo/loss/value'" in err
    assert "Add --write" in err
    assert path.read_text() == (OLD / "lora.py").read_text()
    migrate(path, write=True)
    assert "written" in capsys.readouterr().err
    assert path.read_text() == migrated("lora").code
    migrate(path)
    out, err = capsys.readouterr()
    assert out == ""
    assert "nothing to change" in err
    book = tmp_path / "old.ipynb"
    book.write_text((OLD / "notebook.ipynb").read_text())
    migrate(book, write=True)
    assert "cell 7, line 5: 'ppo/returns/mean'" in capsys.readouterr().err
    assert "trl_grpo_ext" in book.read_text()


def test_the_command_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="There is no file"):
        migrate(tmp_path / "none.py")
    path = tmp_path / "bad.py"
    path.write_text("def (:\n")
    with pytest.raises(DataError, match=r"bad\.py, line 1: not Python"):
        migrate(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="is not UTF-8"):
        migrate(path)


def test_without_libcst_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libcst", None)
    monkeypatch.delitem(sys.modules, "trl_grpo_ext.compat.migrate")
    with pytest.raises(MissingDependencyError, match=PIP + r" 'trl-grpo-ext\[migrate\]'"):
        import trl_grpo_ext.compat.migrate  # noqa: F401


def test_a_diff_is_empty_without_a_change() -> None:
    assert unified_diff("a\n", "a\n", "x") == ""
    assert "-a\n+b\n" in unified_diff("a", "b\n", "x")
    assert torch.__version__, "tiny models are built with torch"
