"""Files that are whole, checkpoints that are complete, logs without repeats, intervals that are right."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from trl_grpo_ext.monitor import files, progress
from trl_grpo_ext.monitor.checkpoints import (
    MANIFEST,
    last_complete_checkpoint,
    mark_complete,
    remove_incomplete,
    why_incomplete,
)
from trl_grpo_ext.monitor.evaluate import Completion, evaluate, rate, wilson_interval
from trl_grpo_ext.monitor.metrics_log import MetricsLog, read_metrics
from trl_grpo_ext.monitor.plot import plot_run, smoothed
from trl_grpo_ext.monitor.progress import ProgressDisplay, format_duration
from trl_grpo_ext.monitor.report import examples_markdown, merged_card, model_card, versions


class TestFiles:
    def test_a_write_that_fails_leaves_the_old_content(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "a.txt"
        files.write_text(path, "old")

        def fail(source: Any, target: Any) -> None:
            raise OSError("no")

        monkeypatch.setattr(files.os, "replace", fail)
        with pytest.raises(OSError):
            files.write_text(path, "new")
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]

    def test_readers_never_see_half(self, tmp_path: Path) -> None:
        path, stop, seen = tmp_path / "a.txt", threading.Event(), set()
        files.write_text(path, "a" * 100_000)

        def read() -> None:
            while not stop.is_set():
                text = path.read_text()
                seen.add((text[0], len(text), len(set(text))))

        reader = threading.Thread(target=read)
        reader.start()
        for round_number in range(50):
            files.write_text(path, "ab"[round_number % 2] * 100_000)
        stop.set()
        reader.join()
        assert seen <= {("a", 100_000, 1), ("b", 100_000, 1)}

    def test_json_has_no_nan(self, tmp_path: Path) -> None:
        import numpy as np

        files.write_json(tmp_path / "a.json", {"a": float("nan"), "b": [np.float32(0.5), float("inf")], 3: "é"})
        text = (tmp_path / "a.json").read_text(encoding="utf-8")
        assert json.loads(text, parse_constant=pytest.fail) == {"a": None, "b": [0.5, None], "3": "é"}


def checkpoint(folder: Path, step: int, *, leave_out: str = "", marked: bool = False) -> Path:
    """Write a checkpoint of one process as the trainer does, without the file ``leave_out``."""
    import torch
    from safetensors.torch import save_file

    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    save_file({"weight": torch.arange(1000.0)}, path / "adapter_model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"a": torch.zeros(10)}, path / name)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    if leave_out:
        (path / leave_out).unlink()
    if marked:
        mark_complete(path)
    return path


class TestCheckpoints:
    def test_whole_ones(self, tmp_path: Path) -> None:
        assert why_incomplete(checkpoint(tmp_path, 1)) is None
        assert why_incomplete(checkpoint(tmp_path, 2, marked=True)) is None
        # By number, not by name or time: 10 comes after 2.
        assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
        newest = checkpoint(tmp_path, 10)
        os.utime(newest, (0, 0))
        assert last_complete_checkpoint(tmp_path) == newest

    @pytest.mark.parametrize("marked", [True, False])
    @pytest.mark.parametrize(
        "name", ["adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]
    )
    def test_a_missing_file(self, tmp_path: Path, name: str, marked: bool) -> None:
        good, bad = checkpoint(tmp_path, 5), checkpoint(tmp_path, 6, marked=marked)
        (bad / name).unlink()
        assert why_incomplete(bad) is not None
        assert last_complete_checkpoint(tmp_path) == good

    @pytest.mark.parametrize("name", ["adapter_model.safetensors", "trainer_state.json"])
    def test_a_file_cut_off_without_a_mark(self, tmp_path: Path, name: str) -> None:
        path = checkpoint(tmp_path, 5)
        content = (path / name).read_bytes()
        for length in (0, 4, len(content) // 2, len(content) - 1):
            (path / name).write_bytes(content[:length])
            assert why_incomplete(path) is not None, length

    def test_a_marked_file_of_another_size(self, tmp_path: Path) -> None:
        path = checkpoint(tmp_path, 5, marked=True)
        (path / "optimizer.pt").write_bytes(b"x")
        assert "optimizer.pt has 1 bytes" in (why_incomplete(path) or "")

    def test_a_broken_manifest_and_unmarked_ranks(self, tmp_path: Path) -> None:
        path = checkpoint(tmp_path, 5)
        (path / MANIFEST).write_text("{")
        assert "unreadable" in (why_incomplete(path) or "")
        path = checkpoint(tmp_path, 6)
        (path / "rng_state_0.pth").touch()
        assert "several processes" in (why_incomplete(path) or "")
        mark_complete(path)
        assert why_incomplete(path) is None

    def test_removal(self, tmp_path: Path) -> None:
        good, bad = checkpoint(tmp_path, 5), checkpoint(tmp_path, 6, leave_out="optimizer.pt")
        other = tmp_path / "checkpoint-x"
        other.mkdir()
        assert remove_incomplete(tmp_path) == ["removed checkpoint-6: optimizer.pt is missing"]
        assert good.exists()
        assert other.exists()
        assert not bad.exists()
        assert last_complete_checkpoint(tmp_path / "nowhere") is None


class TestMetricsLog:
    def test_resume_drops_later_entries_and_goes_on_with_the_clock(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        log = MetricsLog(path)
        log.start(None)
        for step in range(1, 6):
            log.append(step, {"reward": step / 10})
        lines = path.read_text().splitlines()
        lines[2] = json.dumps({**json.loads(lines[2]), "elapsed_s": 100.0})
        path.write_text("\n".join(lines) + '\n{"step": 6, "rew')  # killed in the middle of a line
        again = MetricsLog(path)
        again.start(3)
        assert [entry["step"] for entry in read_metrics(path)] == [1, 2, 3]
        assert 100.0 <= again.elapsed_s() < 101.0
        again.append(4, {"reward": float("nan")})
        assert [(entry["step"], entry["reward"]) for entry in read_metrics(path)][-1] == (4, None)

    def test_a_new_run_begins_empty(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1, "reward": 1}\n')
        MetricsLog(path).start(None)
        assert read_metrics(path) == []

    def test_repeated_steps_count_once(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text(
            '{"step": 2, "a": 1}\n{"step": 1, "a": 1}\nnonsense\n{"step": 2, "a": 3}\n{"step": 2, "b": 4}\n'
        )
        assert read_metrics(path) == [{"step": 1, "a": 1}, {"step": 2, "a": 3}, {"step": 2, "b": 4}]

    def test_lines_are_whole_when_the_writer_is_killed(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        code = (
            "import sys\nfrom pathlib import Path\nfrom trl_grpo_ext.monitor.metrics_log import MetricsLog\n"
            "log = MetricsLog(Path(sys.argv[1]))\nlog.start(None)\n"
            "for step in range(10**9):\n    log.append(step, {'text': 'x' * 3000})\n"
        )
        writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
        try:
            while not path.exists() or path.stat().st_size < 200_000:
                assert writer.poll() is None
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        lines = path.read_text().splitlines()
        assert all(json.loads(line)["text"] == "x" * 3000 for line in lines)


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [
        # Brown, Cai, DasGupta (2001) and by hand: n=10, p=0: z²/(n+z²) = 3.8415/13.8415
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (5, 10, 0.2366, 0.7634),
        (81, 263, 0.2553, 0.3662),
    ],
)
def test_wilson_interval(right: int, total: int, low: float, high: float) -> None:
    assert wilson_interval(right, total) == pytest.approx((low, high), abs=1e-4)


def test_wilson_interval_at_the_ends_and_outside() -> None:
    assert wilson_interval(0, 200)[0] == 0.0
    assert wilson_interval(200, 200)[1] == 1.0
    assert wilson_interval(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="between 0 and total"):
        wilson_interval(3, 2)
    assert str(rate(1, 4)) == "25.0 % [4.6, 69.9]"


def test_evaluation_counts() -> None:
    from trl_grpo_ext.rewards.registry import build_rewards

    rows = [{"prompt": [{"role": "user", "content": f"{n}+0?"}], "answer": str(n), "level": n} for n in (1, 2, 3)]
    replies = ["1", "It is 1", "2 or 3", "no", "3.", "3"]
    strict, lenient = build_rewards(["exact", {"numeric": {"extract": "last_number"}}]).functions

    def generate(prompts: list[Any]) -> list[Completion]:
        assert [prompt[-1]["content"] for prompt in prompts] == ["1+0?", "1+0?", "2+0?", "2+0?", "3+0?", "3+0?"]
        return [Completion(text, (1,) * len(text), text == "no") for text in replies]

    result = evaluate(generate, rows, strict, lenient, num_samples=2, greedy=False)
    assert (result.strict.right, result.strict.total) == (1.0, 3)  # half of row 1, half of row 3
    assert (result.lenient.right, result.lenient.total) == (2.0, 3)
    assert result.pass_any == pytest.approx(2 / 3)
    assert result.truncated == pytest.approx(1 / 6)
    assert [example.completion for example in result.examples] == ["1", "2 or 3", "3."]
    assert [example.strict for example in result.examples] == [True, False, False]
    assert result.to_dict()["strict"]["share"] == pytest.approx(1 / 3)


class TestProgress:
    LOGS: dict[str, Any] = {"reward": 0.25, "acc": 0.5, "completions/mean_length": 7.0, "num_tokens": 1000.0}  # noqa: RUF012

    def display(self, *, terminal: bool) -> tuple[ProgressDisplay, io.StringIO]:
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, width=120, color_system=None)
        return ProgressDisplay(console, accuracy_key="acc"), out

    def test_plain_lines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = iter([100.0, 102.0, 106.0])
        monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
        display, out = self.display(terminal=False)
        monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
        clock = iter([100.0, 102.0, 106.0])
        display.start(0, 10)
        display.update(1, self.LOGS)
        display.update(2, {**self.LOGS, "num_tokens": 3000.0})
        display.update(2, {"train_runtime": 1.0})
        display.stop()
        assert out.getvalue().splitlines() == [
            "step 1/10  reward 0.250  accuracy 50 %  length 7.0  500 tok/s  ETA 0:18",
            "step 2/10  reward 0.250  accuracy 50 %  length 7.0  500 tok/s  ETA 0:24",
        ]

    def test_live_bar(self) -> None:
        display, out = self.display(terminal=True)
        display.start(0, 10)
        display.update(3, self.LOGS)
        display.stop()
        assert "3/10" in out.getvalue()
        assert "accuracy 50 %" in out.getvalue()

    def test_missing_and_empty_metrics_do_not_end_a_run(self) -> None:
        display, out = self.display(terminal=False)
        display.start(4, 10)
        display.update(5, {"reward": 0.5, "acc": None, "completions/mean_length": float("nan"), "num_tokens": 10})
        display.update(6, {"reward": None})
        assert out.getvalue().startswith("step 5/10  reward 0.500  ETA")
        assert len(out.getvalue().splitlines()) == 1

    def test_durations(self) -> None:
        assert [format_duration(s) for s in (0, 59.6, 61, 3725)] == ["0:00", "1:00", "1:01", "1:02:05"]


def test_smoothing_begins_at_the_first_point() -> None:
    assert smoothed([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    # (0.2*1*0.8 + 0.2*0) / (1 - 0.64)
    assert smoothed([1.0, 0.0], 0.8) == pytest.approx([1.0, 0.16 / 0.36])


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    entries = [{"step": step, "reward": step / 9, "acc": None if step == 3 else step / 20} for step in range(1, 9)]
    plot_run(tmp_path / "p.png", entries, title="t", accuracy_keys={"strict": "acc"}, before={"strict": 0.0})
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    plot_run(tmp_path / "empty.png", [], title="t", accuracy_keys={})
    assert (tmp_path / "empty.png").stat().st_size > 1000


def test_examples_stay_in_their_cells() -> None:
    rows = [{"prompt": "a|b", "answer": "<1>"}]
    nasty = "x | y\n**bold** `code` <b>"

    def result(text: str) -> Any:
        return evaluate(
            lambda prompts: [Completion(text, (1,), False) for _ in prompts],
            rows,
            lambda **_: [1.0 if text == "ok" else 0.0],
            lambda **_: [0.0],
        ).examples

    lines = examples_markdown(result(nasty), result("ok"), 5).splitlines()
    assert lines[-1] == ("| a\\|b | &lt;1&gt; | ✗ x \\| y ⏎ \\*\\*bold\\*\\* \\`code\\` &lt;b&gt; | ✓ ok |")
    assert "| – | ✓ ok |" in examples_markdown(None, result("ok"), 5)


def test_model_card_front_matter() -> None:
    card = model_card(
        name="demo",
        base="org/base",
        published="org/base",
        licence="apache-2.0",
        adapter=True,
        source="d.jsonl",
        counts={"train": 3, "held_out": 2},
        rewards=["exact (1)"],
        command="trl-grpo train r.yaml",
        summary={"steps": 4, "train_seconds": 5.0, "seed": 0, "versions": versions(), "control": True},
        before=None,
        after=None,
        recipe_yaml="model: x\n",
    )
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front)["base_model"] == "org/base"
    assert yaml.safe_load(front)["library_name"] == "peft"
    assert "Control run" in body
    assert "```yaml\nmodel: x\n```" in body


def test_a_merged_model_says_what_it_is_made_of() -> None:
    facts = {"name": "m", "adapter": "runs/a", "dtype": "bfloat16", "as_quantised": True, "command": "trl-grpo merge x"}
    card = merged_card(base="/cache/copy", published="org/base", licence="apache-2.0", **facts)
    front = yaml.safe_load(card.split("---\n", 2)[1])
    assert front["base_model"] == "org/base"
    assert front["license"] == "apache-2.0"
    assert front["library_name"] == "transformers"
    assert "Base model: org/base, as it was quantised in training" in card
    assert "- Weights: bfloat16." in card
    # The hub takes base_model for a hub id, and a licence that nobody knows is not made up.
    local = merged_card(base="/my/model", published=None, licence=None, **{**facts, "as_quantised": False})
    assert not {"base_model", "license"} & yaml.safe_load(local.split("---\n", 2)[1]).keys()
    assert "Base model: /my/model.\n" in local
    assert "Licence: not known here" in local
