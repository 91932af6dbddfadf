"""Two processes (gloo): the same global gradient as one process, as TRL's on two, and no rank ever waits for nothing.

All scenarios run in one launch, because starting two processes costs more than they do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import LOSS_TYPES, ScriptedRollouts, build, gradient_gap, prompt_rows
from tiny import save_tiny

HERE = Path(__file__).parent
HANG_S = 240.0  # the launch takes about 20 s, most of it imports
TOLERANCE = 1e-5

# Per process: 2 steps of 2 x 8 completions in groups of 4; rank 0 has the first four prompts of a step.
BASE = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_prompts": 8}


def pair(name: str, **fields: Any) -> dict[str, dict[str, Any]]:
    """Return a scenario for our trainer, with a small budget, and the same for TRL's."""
    fields = {**BASE, **fields}
    return {
        f"{name}/ours": {"ours": True, "fields": {"max_tokens_per_micro_batch": 60, **fields}},
        f"{name}/trl": {"ours": False, "fields": fields},
    }


SCENARIOS: dict[str, dict[str, Any]] = {}
for _loss in LOSS_TYPES:
    SCENARIOS |= pair(f"loss {_loss}", loss_type=_loss)
SCENARIOS |= pair("dead on rank 0", dead=[0, 1, 2, 3])
SCENARIOS |= pair("one dead on rank 1", dead=[6])
SCENARIOS |= pair("dead everywhere", dead=list(range(8)))
SCENARIOS |= pair("ragged", long_first_half=True)
SCENARIOS |= pair(
    "group on both ranks",
    num_generations=16,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=1,
    num_prompts=3,
    dead=[1],
)
SCENARIOS |= pair("kl and two iterations", beta=0.04, num_iterations=2, max_steps=4, dead=[0])
SCENARIOS |= pair("entropy quantile", top_entropy_quantile=0.4)
SCENARIOS |= pair("checkpointing", gradient_checkpointing=True, dead=[0, 1, 2, 3])
SCENARIOS |= pair("every extra", shared_prefix_forward=True, reward_isolation="never", dead=[0, 1, 2, 3])
# Memory runs out on one rank only; TRL's run, which it is compared with, is undisturbed.
OUT_OF_MEMORY = {
    "in a forward": {"ranks": [1], "phase": "train", "at": [1]},
    "in the first forward": {"ranks": [0], "phase": "train", "at": [0]},
    "in a backward": {"ranks": [0], "phase": "train", "at": [1], "place": "backward"},
    "on each rank in turn": {"ranks": [0, 1], "phase": "train", "at": [0, 9], "place": "backward"},
    "in the reference pass": {"ranks": [1], "phase": "score", "at": [0]},
}
for _place, _injection in OUT_OF_MEMORY.items():
    SCENARIOS |= pair(f"out of memory {_place}", beta=0.04 if _injection["phase"] == "score" else 0.0)
    SCENARIOS[f"out of memory {_place}/ours"]["fields"] |= {
        "out_of_memory": _injection,
        "max_tokens_per_micro_batch": 160,
        "gradient_checkpointing": _place == "in a backward",
    }
SCENARIOS["out of memory for ever/ours"] = {
    "ours": True,
    "fields": {**BASE, "out_of_memory": {"ranks": [1], "phase": "train", "at": list(range(99))}},
}
SCENARIOS["out of memory while sampling/ours"] = {
    "ours": True,
    "fields": {**BASE, "out_of_memory": {"ranks": [1], "phase": "generate", "at": [3]}, "samples": True},
}
SCENARIOS["rewards fail on rank 1"] = {
    "ours": True,
    "fields": {**BASE, "reward_isolation": "never", "reward_fails_on_rank_1": True},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def ranks(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run every scenario on two processes; return the results of rank 0 and of rank 1."""
    directory = tmp_path_factory.mktemp("two")
    (directory / "scenarios.json").write_text(json.dumps(SCENARIOS))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    worker = [str(HERE / "two_process_worker.py"), str(directory / "scenarios.json"), str(directory), checkpoint]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            launch + worker, env=environment, capture_output=True, text=True, timeout=HANG_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"")[-2000:]
        pytest.fail(f"two processes did not end within {HANG_S:.0f} s, so a rank waits for the other: {output!r}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [torch.load(directory / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def gaps(mine: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> float:
    assert len(mine) == len(other) > 0
    return max(gradient_gap(a, b) for a, b in zip(mine, other, strict=True))


@pytest.mark.timeout(HANG_S + 60)
@pytest.mark.parametrize("name", sorted({key.rsplit("/", 1)[0] for key in SCENARIOS if key.endswith("/trl")}))
def test_two_processes_have_trl_s_gradient(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(ranks):
        ours, theirs = results[f"{name}/ours"], results[f"{name}/trl"]
        if name != "dead everywhere":
            assert any(value.abs().max() > 1e-3 for value in theirs["gradients"][0].values())
        assert gaps(ours["gradients"], theirs["gradients"]) <= TOLERANCE, f"rank {rank}"
    first, second = (results[f"{name}/ours"] for results in ranks)
    assert gaps(first["gradients"], second["gradients"]) == 0.0, "the ranks would drift apart"


@pytest.mark.parametrize("loss_type", [loss for loss in LOSS_TYPES if loss != "bnpo"])
def test_two_processes_have_the_gradient_of_one(
    loss_type: str, ranks: list[dict[str, Any]], checkpoint: str, tmp_path: Any
) -> None:
    """bnpo is left out: it divides by the tokens of a process's micro-batch, in TRL too."""
    trainer, record = build(
        True,
        tmp_path,
        model=checkpoint,
        rows=prompt_rows(8),
        rollouts=ScriptedRollouts(),
        shuffle_dataset=False,
        loss_type=loss_type,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
    )
    trainer.train()
    assert gaps(ranks[0][f"loss {loss_type}/ours"]["gradients"], record.gradients) <= TOLERANCE


def test_ranks_make_the_same_number_of_passes(ranks: list[dict[str, Any]]) -> None:
    """A sharded model gathers its parameters in each pass, so that one rank's extra pass would wait for ever."""
    for name in ("ragged/ours", "dead on rank 0/ours", "one dead on rank 1/ours", "dead everywhere/ours"):
        first, second = (results[name]["num_passes"] for results in ranks)
        assert first == second, name
    # the long prompts of rank 0 do not fit together any more: the shorter plan of rank 1 was filled up
    assert ranks[1]["ragged/ours"]["num_passes"] > ranks[1]["loss dapo/ours"]["num_passes"]
    assert ranks[0]["dead everywhere/ours"]["num_passes"] == 2  # one a step, so that gradients exist


def test_dead_share_counts_all_processes(ranks: list[dict[str, Any]]) -> None:
    log = ranks[0]["dead on rank 0/ours"]["logs"][0]
    assert log["dead_groups/share"] == log["dead_groups/skipped_share"] == 0.5
    assert 0.3 < log["window/scored_token_share"] < 0.7
    assert ranks[0]["group on both ranks/ours"]["logs"][1]["dead_groups/share"] == 1.0


def test_all_ranks_stop_together_when_rewards_fail_on_one(ranks: list[dict[str, Any]]) -> None:
    """Half of all samples fail, more than the 20 % allowed; the healthy rank must not wait in a collective."""
    first, second = (results["rewards fail on rank 1"] for results in ranks)
    for result in (first, second):
        assert "failed on 16 of 32 samples" in result["stopped_by"]
        assert result["step"] == 0
        assert result["seconds"] < 30
    assert "on another rank" in first["stopped_by"]
    assert "the judge is down" in second["stopped_by"]


@pytest.mark.parametrize("place", OUT_OF_MEMORY)
def test_all_ranks_do_it_again_when_one_runs_out_of_memory(place: str, ranks: list[dict[str, Any]]) -> None:
    """That the gradient is TRL's is tested above."""
    first, second = (results[f"out of memory {place}/ours"] for results in ranks)
    phase = OUT_OF_MEMORY[place]["phase"]
    assert first["budgets"] == second["budgets"]
    assert first["budgets"][phase]["num_halvings"] == (2 if place == "on each rank in turn" else 1)
    assert first["budgets"][phase]["max_tokens"] <= 80
    assert first["stopped_by"] is second["stopped_by"] is None


def test_all_ranks_stop_together_when_one_is_out_of_memory_for_ever(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        result = results["out of memory for ever/ours"]
        assert "Out of memory in the training step" in result["stopped_by"]
        assert result["seconds"] < 30
    assert "on another process" in ranks[0]["out of memory for ever/ours"]["stopped_by"]


def test_all_ranks_take_the_lower_budget_of_sampling(ranks: list[dict[str, Any]]) -> None:
    first, second = (results["out of memory while sampling/ours"] for results in ranks)
    assert first["budgets"] == second["budgets"]
    assert first["budgets"]["generate"]["num_halvings"] == 1
    assert first["step"] == second["step"] == 2
    assert gaps(first["gradients"], second["gradients"]) == 0.0
