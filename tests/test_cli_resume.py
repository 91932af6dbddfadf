"""kill -9 at random and at chosen moments, then --resume: the run ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_cli_run import LETTERS, RECIPE
from tiny import save_tiny

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("kill_and_resume.py")
STEPS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    save_tiny(folder / "model")
    rows = [{"question": f"What is {n} + {n % 3}?", "gold": n + n % 3} for n in range(30)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "letters.py").write_text(LETTERS)
    trainer = {**RECIPE["trainer"], "max_steps": STEPS, "save_steps": 1, "save_total_limit": 3}
    (folder / "tiny.yaml").write_text(yaml.safe_dump({**RECIPE, "trainer": trainer}))
    return folder


def kill_and_resume(folder: Path, name: str, plans: list[dict[str, Any]]) -> tuple[Path, list[int], str]:
    """Return (output directory, exit codes, everything printed)."""
    out = folder / name
    command = [sys.executable, str(SCRIPT), str(folder / "tiny.yaml"), str(out), json.dumps(plans)]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return out, json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


def rewards_by_step(out: Path) -> list[tuple[int, float, float]]:
    entries = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(entry["step"], entry["reward"], entry["grad_norm"]) for entry in entries if "reward" in entry]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    out, codes, printed = kill_and_resume(folder, "undisturbed", [])
    assert codes == [0], printed
    return out


def check(out: Path, undisturbed: Path) -> None:
    """Same steps, same rewards, same gradients, same adapter as the run that nobody killed."""
    from safetensors.torch import load_file

    assert rewards_by_step(out) == rewards_by_step(undisturbed)
    ours, theirs = (load_file(path / "adapter_model.safetensors") for path in (out, undisturbed))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert json.loads((out / "summary.json").read_text())["steps"] == STEPS
    for path in out.glob("checkpoint-*"):
        assert (path / "complete.json").is_file(), "no half-written checkpoint is left"


def test_killed_at_random_moments(folder: Path, undisturbed: Path) -> None:
    generator = random.Random(7)
    plans = [{"after_s": generator.uniform(0.0, 0.6)} for _ in range(4)]
    out, codes, printed = kill_and_resume(folder, "random", plans)
    assert codes[-1] == 0, printed
    assert codes.count(-9) >= 2, f"too few kills hit a running process: {codes}"
    check(out, undisturbed)


def test_killed_while_saving(folder: Path, undisturbed: Path) -> None:
    """Each file of a checkpoint in turn is left half-written; the checkpoint before it is taken."""
    files = ["adapter_model.safetensors", "optimizer.pt", "trainer_state.json", "complete.json"]
    plans = [{"file": name, "step": step} for step, name in enumerate(files, start=2)]
    out, codes, printed = kill_and_resume(folder, "saving", plans)
    assert codes == [-9, -9, -9, -9, 0], printed
    # Killed in the save of step n, so the checkpoint of n - 1 is the newest whole one.
    resumed = re.findall(r"resuming from \S*checkpoint-(\d)", printed)
    assert resumed == ["1", "2", "3", "4"], printed
    check(out, undisturbed)
