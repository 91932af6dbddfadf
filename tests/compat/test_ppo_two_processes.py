"""Two processes (gloo): groups, rewards and figures are those of all rows together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ppo_two_process_worker import classic_step

HERE = Path(__file__).parent


@pytest.mark.slow
def test_two_processes_are_one(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, *command, "localhost:0", str(HERE / "ppo_two_process_worker.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]
    alone = classic_step(0, 1)
    for rank in ranks:
        for name, weight in alone["weights"].items():
            assert torch.allclose(rank["classic"]["weights"][name], weight, atol=1e-5), name
        for name, value in alone["stats"].items():
            assert torch.allclose(rank["classic"]["stats"][name].float(), value.float(), atol=1e-4), name
        assert rank["classic"]["kl_coef"] == pytest.approx(alone["kl_coef"])
    first, second = (rank["v2"] for rank in ranks)
    assert first["rewards"].shape == (8, 3), "both ranks see all rows"
    assert torch.equal(first["rewards"], second["rewards"])
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])
    assert (first["batch_size"], first["episode"]) == (8, 8)
    log = first["logs"][0]
    assert log["reward"] == pytest.approx(first["rewards"].sum(dim=1).mean().item(), abs=1e-5)
    assert log["objective/scores"] == pytest.approx(first["rewards"][:, :2].sum(dim=1).mean().item(), abs=1e-5)
    assert log["objective/non_score_reward"] == pytest.approx(first["rewards"][:, 2].mean().item(), abs=1e-5)
