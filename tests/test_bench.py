"""The comparison with TRL: it measures what it says, on a tiny model, and notices a gradient that differs."""

from __future__ import annotations

import json
import math
import runpy
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import save_tiny, tiny_model

from trl_grpo_ext.bench.clock import PhaseClock
from trl_grpo_ext.bench.compare import BenchError, Comparison, gradient_error
from trl_grpo_ext.bench.floor import FloorSeconds, TokenCounts, floor_seconds
from trl_grpo_ext.bench.jobs import JOBS, prompt_rows, reward_by_tokens, scripted_completions
from trl_grpo_ext.bench.show import markdown
from trl_grpo_ext.cli.main import main


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as leaving:
        main(list(arguments))
    return int(leaving.value.code or 0)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of job C on a tiny model in float32: two real processes."""
    folder = tmp_path_factory.mktemp("bench")
    model = save_tiny(folder / "model")
    code = run(
        *("bench", "C", "--model", model, "--dtype", "fp32", "--steps", "2", "--threads", "1"),
        *("--json", str(folder / "bench.json"), "--plot", str(folder / "bench.png")),
        *("--set", "max_completion_length=12", "--set", "reward_isolation=never"),
    )
    assert code == 0
    assert (folder / "bench.png").stat().st_size > 5000
    return json.loads((folder / "bench.json").read_text())["jobs"][0]


def test_both_sides_do_the_same_work(report: dict[str, Any]) -> None:
    for counts in report["counts"].values():
        # Completions run to their full length: 2 prompts x 8 completions x 12 tokens, less where this random model
        # happens to sample the one token in 384 that ends a row.
        assert all(0.8 * 16 * 12 < step["num_completion"] <= 16 * 12 for step in counts)
        assert [step["num_rows"] for step in counts] == [16, 16]
    mine, theirs = report["counts"]["ours"], report["counts"]["trl"]
    assert [step["num_prompt"] for step in mine] == [step["num_prompt"] for step in theirs]
    assert [step["scored_share"] for step in mine] == pytest.approx([0.5, 0.5], abs=0.05), "the dead half is not scored"


def test_the_gradients_agree(report: dict[str, Any]) -> None:
    assert 0 < report["gradient_error"] < 1e-5  # exactly 0 would mean that nothing was compared


def test_phases_add_up_to_the_step(report: dict[str, Any]) -> None:
    for side in ("trl", "ours"):
        for step in report["steps"][side]:
            parts = sum(step[phase] for phase in ("rollout", "scoring", "forward_backward", "optimizer"))
            assert parts == pytest.approx(step["step"])
            assert min(step.values()) > 0
    assert report["peak_bytes"]["trl"] > 2**27


@pytest.mark.slow
def test_a_recipe_is_a_job(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    rows = [{"question": f"What is {n} + {n % 3}?", "gold": n + n % 3} for n in range(30)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tiny.yaml").write_text(
        "model: model\n"
        "data: {file: data.jsonl, prompt: question, answer: gold, held_out: 6}\n"
        "rewards: [exact, numeric]\n"
        "trainer: {per_device_train_batch_size: 8, num_generations: 4, max_completion_length: 8}\n"
        "peft: {r: 2}\n"
    )
    path = tmp_path / "bench.json"
    arguments = ["bench", str(tmp_path / "tiny.yaml"), "--steps", "1", "--threads", "1", "--json", str(path)]
    assert run(*arguments, "--set", "reward_isolation=never") == 0
    job = json.loads(path.read_text())["jobs"][0]
    assert job["job"] == "tiny"
    assert job["counts"]["ours"][0]["num_rows"] == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["F"], "neither a recipe file nor one of the jobs"),
        (["A", "--dtype", "fp23"], "Did you mean 'fp32'?"),
        (["missing.yaml"], "missing.yaml"),
    ],
)
def test_wrong_calls_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", *arguments) == 2
    assert message in capsys.readouterr().err


def test_gradient_error_notices_a_difference() -> None:
    theirs = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    assert gradient_error(dict(theirs), theirs) == 0.0
    assert gradient_error({"a": torch.tensor([3.0, 0.5]), "b": torch.tensor([4.0])}, theirs) == pytest.approx(0.1)
    zero = {name: torch.zeros_like(gradient) for name, gradient in theirs.items()}
    assert math.isnan(gradient_error(dict(zero), zero)), "dead groups on both sides compare nothing"
    assert gradient_error(theirs, zero) == math.inf
    with pytest.raises(BenchError, match="not the same tensors"):
        gradient_error({"a": theirs["a"]}, theirs)


def test_the_clock_tells_the_phases_apart() -> None:
    trainer: Any = SimpleNamespace()
    trainer._generate = lambda: time.sleep(0.03)
    trainer._generate_and_score_completions = lambda: (trainer._generate(), time.sleep(0.02))
    trainer.training_step = lambda: (trainer._generate_and_score_completions(), time.sleep(0.05))
    clock = PhaseClock(trainer)
    clock.start()
    trainer.training_step()
    time.sleep(0.01)
    seconds = clock.stop()
    for phase, least in (("rollout", 0.03), ("scoring", 0.02), ("forward_backward", 0.05), ("optimizer", 0.01)):
        assert least <= seconds[phase]
    assert seconds["rollout"] + seconds["scoring"] + seconds["forward_backward"] + seconds["optimizer"] == (
        pytest.approx(seconds["step"])
    )
    clock.start()
    assert clock.stop()["rollout"] == 0.0, "a step starts at zero"


def comparison(**changes: Any) -> Comparison:
    def step(seconds: float) -> dict[str, float]:
        return dict.fromkeys(("rollout", "scoring", "forward_backward", "optimizer", "step", "cpu"), seconds)

    fields: dict[str, Any] = {
        "job": "A",
        "about": "",
        "dtype": "bf16",
        "num_threads": 1,
        "steps": {"trl": [step(10), step(12), step(20)], "ours": [step(2), step(3), step(2)]},
        "counts": {side: [TokenCounts(10, 50, 5)] * 3 for side in ("trl", "ours")},
        "peak_bytes": {"trl": 4 * 2**30, "ours": 2**30},
        "gradient_error": 1e-6,
        "floor": FloorSeconds(1.0, 1.0),
    }
    return Comparison(**{**fields, **changes})


def test_figures_of_the_table() -> None:
    c = comparison()
    assert c.ratio("step") == (5.0, 4.0, 10.0)  # 10/2, 12/3, 20/2
    assert c.memory_ratio == 0.25
    assert c.tokens_per_second("trl") == pytest.approx(150 / 42)
    assert c.above_floor == 2.0  # (2 + 2) / (1 + 1)
    assert "**5.00** [4.00, 10.00]" in markdown([c])
    assert "all rewards equal" in markdown([comparison(gradient_error=math.nan)])
    half = [TokenCounts(10, 50, 5, scored_share=0.5)] * 3
    assert comparison(counts={"trl": half, "ours": half}).scored_share == 0.5


def test_dead_groups_are_spread_and_paid_alike() -> None:
    rows = prompt_rows(JOBS["C"], 3)
    assert [row["is_dead"] for row in rows] == [False, True] * 3
    assert reward_by_tokens(["x"] * 3, [[1], [2], [1]], [False, False, True])[2] == 0.5
    first, second, _ = reward_by_tokens(["x"] * 3, [[1], [2], [1]], [False, False, True])
    assert first != second


def test_scripted_completions_are_ragged_and_the_same_each_time() -> None:
    completions = scripted_completions(8, 64, 1000)
    assert completions == scripted_completions(8, 64, 1000)
    assert len({len(ids) for ids in completions}) > 1
    assert max(map(len, completions)) <= 64


def test_the_floor_grows_with_what_must_be_computed() -> None:
    model = tiny_model(hidden=64)
    one = floor_seconds(model, TokenCounts(1000, 1000, 8))
    dead = floor_seconds(model, TokenCounts(1000, 1000, 8, scored_share=0.0))
    assert one.rollout > 0
    assert one.training > 0
    assert dead.training == 0


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        (SimpleNamespace(_watch=SimpleNamespace(highest_bytes=9)), 9),
        (SimpleNamespace(_watch=None), 4),
        (SimpleNamespace(), 4),
        (None, 4),
    ],
)
def test_the_ppo_bench_counts_the_peak_of_all_phases(
    trainer: Any, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's counter speaks of the last phase only, where our trainer watches; elsewhere it is right."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 4)
    bench_ppo = runpy.run_path(str(Path(__file__).parent / "bench" / "bench_ppo.py"), run_name="bench_ppo")
    assert bench_ppo["peak_bytes"]("cuda", trainer) == expected
