"""Each question of the pre-flight: a case where all is well, and one where it is not."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from rich.console import Console
from tiny import CHAT_TEMPLATE, save_tiny, tiny_config, tiny_tokenizer

from trl_grpo_ext.cli import preflight as cli_preflight
from trl_grpo_ext.cli.main import main
from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.memory.plan import Alternative
from trl_grpo_ext.memory.trainable import count_trainable, lora_config
from trl_grpo_ext.preflight.fit import answer_of_plan, answer_without_plan
from trl_grpo_ext.preflight.lengths import check_clipping, check_prompt_lengths, measure_longest
from trl_grpo_ext.preflight.report import Answer, print_answers, worst
from trl_grpo_ext.preflight.steps import check_data, check_trainable
from trl_grpo_ext.preflight.template import check_template

CHAT = [{"role": "system", "content": "Reply briefly."}, {"role": "user", "content": "2 + 3?"}]


def adds_bos(template: str = CHAT_TEMPLATE) -> Any:
    """Return a tokenizer that puts BOS before plain text, and a template that may write one too."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    bos = tokenizer.bos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    tokenizer.chat_template = template
    assert tokenizer("a")["input_ids"][0] == bos
    return tokenizer


def template(text: str) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = text
    return tokenizer


def only(answers: list[Answer]) -> Answer:
    assert len(answers) == 1, answers
    return answers[0]


def test_a_good_template() -> None:
    answer = only(check_template(tiny_tokenizer(), [CHAT]))
    assert answer.colour == "green"
    assert "the header" in answer.finding
    assert "<|im_start|>assistant\\n' ends them" in answer.finding
    assert only(check_template(tiny_tokenizer(), ["plain"])).colour == "green"


BODY = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
FAULTS = {
    "no generation header": (BODY, CHAT, "red", "no generation header"),
    "system dropped": (
        BODY.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}") + HEADER,
        CHAT,
        "red",
        "the system turn does not reach the model",
    ),
    "system refused": (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        + BODY
        + HEADER,
        CHAT,
        "red",
        "it refuses turns of system, user: System role not supported",
    ),
    "None from a variable": ("{{ none }}" + BODY + HEADER, CHAT, "red", 'the rendered prompt says "None"'),
    "prefill closed": (
        BODY + HEADER,
        [*CHAT, {"role": "assistant", "content": "The answer is"}],
        "yellow",
        "a prefilled answer is not continued: after 'The answer is'",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_template(name: str) -> None:
    text, prompt, colour, finding = FAULTS[name]
    answer = only(check_template(template(text), [prompt]))
    assert answer.colour == colour
    assert answer.finding.startswith(finding)
    assert answer.fix


def test_none_in_the_question_is_no_fault() -> None:
    prompt = [{"role": "user", "content": "What does None mean in Python?"}]
    assert only(check_template(tiny_tokenizer(), [prompt])).colour == "green"


def test_bos_exactly_once() -> None:
    """Field case 9: the tokenizer adds BOS, the template writes one, and the third kind of prompt has it already."""
    both = adds_bos("{{ bos_token }}" + CHAT_TEMPLATE.replace("<|im_start|>", "§"))
    rendered = both.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert only(check_template(both, [CHAT])).colour == "green"
    assert only(check_template(both, ["2 + 3?"])).colour == "green"
    twice = only(check_template(both, [rendered]))
    assert twice.colour == "yellow"
    assert twice.finding.startswith("two BOS tokens: the prompts contain it already")
    missing = only(check_template(adds_bos(CHAT_TEMPLATE.replace("<|im_start|>", "§")), [CHAT]))
    assert missing.finding.startswith("no BOS")


def test_prompt_lengths() -> None:
    """Field case 11: one prompt in a hundred is ten times as long as the rest."""
    prompts = ["x" * 20] * 198 + ["x" * 200] * 2
    counts = measure_longest(prompts, len, limit=100)
    assert len(counts) < 60, "not every prompt is tokenised"
    fields: dict[str, Any] = {"max_completion_length": 28}
    good = check_prompt_lengths(counts, 200, max_positions=256, **fields)
    assert good.colour == "green"
    assert "200 + 28 of 256 positions" in good.finding
    cut = check_prompt_lengths(counts, 200, max_positions=210, **fields)
    assert cut.colour == "yellow"
    assert cut.finding.startswith("2 of 200 prompts are longer than 182 tokens")
    beyond = check_prompt_lengths(counts, 200, max_positions=128, **fields)
    assert beyond.colour == "red"
    assert check_prompt_lengths(counts, 200, max_positions=None, **fields).colour == "green"
    assert check_prompt_lengths(counts, 200, max_positions=28, **fields).colour == "red"


def test_all_long_prompts_are_counted() -> None:
    prompts = ["x" * (500 - n) for n in range(100)]
    counts = measure_longest(prompts, len, limit=420)
    assert sum(count > 420 for count in counts) == 80


def test_data_fill_a_step() -> None:
    """Field case 12."""
    assert check_data(8, 16, 4).colour == "green"
    assert check_data(None, 16, 4).colour == "green"
    short = check_data(3, 16, 4)
    assert (short.colour, short.finding) == ("red", "3 prompts; one step takes 4")


def test_trainable() -> None:
    full = count_trainable(tiny_config())
    assert full.trainable == full.total > 0
    lora = count_trainable(
        tiny_config(), lora_config({"r": 2, "task_type": "CAUSAL_LM", "target_modules": "all-linear"})
    )
    assert 0 < lora.trainable < lora.total
    assert check_trainable(*lora, 1e-5).colour == "green"
    assert check_trainable(*lora, 0.0).colour == "yellow"
    assert check_trainable(0, 100, 1e-5).colour == "red"
    with pytest.raises(ConfigurationError, match=r"linear layers are called down_proj, .*all-linear"):
        count_trainable(tiny_config(), lora_config({"task_type": "CAUSAL_LM", "target_modules": ["query"]}))


def test_completions_cut() -> None:
    assert check_clipping(1, 32, 64).colour == "green"
    assert check_clipping(16, 32, 64).colour == "yellow"
    answer = check_clipping(32, 32, 64)
    assert answer.colour == "red"
    assert "Raise max_completion_length" in answer.fix


@pytest.mark.parametrize(("fits", "colour"), [("yes", "green"), ("no", "red"), ("uncertain", "yellow")])
def test_will_it_fit(fits: str, colour: str) -> None:
    plan = SimpleNamespace(fits=fits, explain=lambda: "\npeak 19.2 GiB in training\nmore")
    answer = answer_of_plan(plan, 24)
    assert answer.colour == colour
    assert answer.finding == f"{fits} for 24 GiB. peak 19.2 GiB in training"
    assert answer_without_plan(24, KeyError("x")).colour == "yellow"


def test_what_gives_way_by_itself_is_no_reason_to_stop() -> None:
    """Budgets are halved when memory runs out; a lever that somebody has to write ends the run."""
    for settings, colour in (
        ({"max_tokens_per_micro_batch": 2048}, "yellow"),
        ({"gradient_checkpointing": True}, "red"),
        ({}, "red"),
    ):
        change = Alternative("trainer.this: that", 1.0, True, settings)
        plan = SimpleNamespace(fits="no", explain=lambda: "too large", alternatives=[change])
        answer = answer_of_plan(plan, 24, "mine.yaml")
        assert answer.colour == colour
        assert ("Write trainer.this: that." in answer.fix) == bool(settings)
        assert "trl-grpo plan mine.yaml --gpu 24" in answer.fix


def test_table() -> None:
    console = Console(record=True, width=100)
    answers = [Answer("data", "green", "fine"), Answer("chat template", "yellow", "no BOS [sic]", "look")]
    print_answers(answers, console, only_problems=True)
    shown = console.export_text()
    assert "no BOS [sic]" in shown
    assert "fine" not in shown
    assert worst(answers) == "yellow"
    assert worst([]) == "green"


RECIPE: dict[str, Any] = {
    "model": "model",
    "data": {"file": "data.jsonl", "prompt": "question", "answer": "gold", "held_out": 6, "system": "Add."},
    "rewards": ["exact"],
    "trainer": {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8},
    "peft": {"r": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    save_tiny(folder / "model")
    rows = [{"question": f"What is {n} + {n % 3}?", "gold": n + n % 3} for n in range(30)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tiny.yaml").write_text(yaml.safe_dump(RECIPE))
    return folder


def leave(*arguments: str) -> int:
    with pytest.raises(SystemExit) as leaving:
        main(list(arguments))
    return int(leaving.value.code or 0)


def preflight(folder: Path, *overrides: str, **options: Any) -> dict[str, Answer]:
    from trl_grpo_ext.cli.prepare import prepare

    answers, _ = cli_preflight.run_preflight(prepare(folder / "tiny.yaml", overrides, for_training=False), **options)
    return {answer.question: answer for answer in answers}


def test_a_good_recipe_is_green(folder: Path) -> None:
    answers = preflight(folder)
    assert list(answers) == ["data", "chat template", "trainable", "prompt lengths"]
    assert {answer.colour for answer in answers.values()} == {"green"}


def test_a_probe_counts_cut_completions(folder: Path) -> None:
    """A random model never says that it is done."""
    assert preflight(folder, probe=True)["completions cut"].colour == "red"


def test_a_plan_is_asked_for_where_a_card_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def plan_memory(model: str, args: Any, peft_config: Any, **options: Any) -> Any:
        seen.update(options, model=model, peft=peft_config, completion=args.max_completion_length)
        return SimpleNamespace(fits="no", explain=lambda: "needs 30 GiB")

    planner = SimpleNamespace(plan_memory=plan_memory, AS_CONFIGURED="as-configured")
    monkeypatch.setattr(cli_preflight, "load_planner", lambda: planner)
    assert preflight(folder, gpu_gib=24.0)["will it fit"].colour == "red"
    assert seen["budget_gib"] == 24.0
    assert seen["mode"] == "as-configured"
    assert 20 < seen["prompt_len"] < 100
    assert seen["completion"] == 8
    assert seen["peft"].r == 2


def test_the_run_is_judged_as_the_recipe_says(folder: Path) -> None:
    sizes = "trainer.max_completion_length=128"
    for written, mode in (("false", "no checkpointing"), ("true", "adamw_torch_fused, checkpointing")):
        changes = (sizes, f"trainer.gradient_checkpointing={written}")
        finding = preflight(folder, *changes, gpu_gib=24.0)["will it fit"].finding
        assert f", {mode}" in finding, finding


def test_red_ends_train_with_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "never"
    changes = ["--set", "trainer.max_completion_length=1024", "--no-check", "-o", str(out)]
    assert leave("train", str(folder / "tiny.yaml"), *changes) == 2
    captured = capsys.readouterr()
    line = captured.err.strip().splitlines()[-1]
    assert line.startswith("trl-grpo: error: pre-flight: prompt lengths: max_completion_length=1024 alone fills")
    assert not (out / "metrics.jsonl").exists()


def test_a_run_that_cannot_start_deletes_nothing(folder: Path) -> None:
    out = folder / "earlier"
    out.mkdir()
    (out / "metrics.jsonl").write_text("{}\n")
    changes = ["--set", "trainer.max_completion_length=1024", "--no-check", "--overwrite", "-o", str(out)]
    assert leave("train", str(folder / "tiny.yaml"), *changes) == 2
    assert (out / "metrics.jsonl").is_file()


def test_check_prints_the_table_and_counts_red(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(folder / "tiny.yaml")
    assert leave("check", recipe, "--json", "--set", "peft.target_modules=[query]") == 1
    report = json.loads(capsys.readouterr().out)
    rows = {row["question"]: row for row in report["preflight"]}
    assert rows["trainable"]["colour"] == "red"
    assert report["failed"]
    assert leave("check", recipe) == 0
    assert "Before training" in capsys.readouterr().out
