"""One rank of `test_two_processes`: run scenarios on gloo and write down each one's gradients and passes.

torchrun --nproc_per_node 2 tests/two_process_worker.py SCENARIOS.json OUTPUT_DIR CHECKPOINT
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import conftest  # noqa: F401  the same environment as the tests
import torch
from harness import ScriptedRollouts, build, prompt_rows, scripted_reward
from out_of_memory import out_of_memory
from trl import GRPOTrainer

from trl_grpo_ext.errors import MemoryBudgetError, RewardError


def fails_on_rank_1(prompts: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Return the scripted rewards, except on rank 1, where the judge is down."""
    if os.environ["RANK"] == "1":
        raise ConnectionError("the judge is down")
    return scripted_reward(prompts, completion_ids, **columns)


def memory_runs_out(trainer: Any, injection: dict[str, Any] | None) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which memory runs out on the rank that the scenario names."""
    if injection is None or int(os.environ["RANK"]) not in injection["ranks"]:
        return contextlib.nullcontext()
    return out_of_memory(trainer, injection["phase"], injection["at"], place=injection.get("place", "forward"))


def run(scenario: dict[str, Any], directory: Path, checkpoint: str) -> dict[str, Any]:
    """Return the gradients of one run and the number of passes with gradient on this rank."""
    num_passes = 0
    forward = GRPOTrainer._get_per_token_logps_and_entropies

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_passes
        num_passes += int(torch.is_grad_enabled())
        return forward(*args, **kwargs)

    fields = dict(scenario["fields"])
    injection = fields.pop("out_of_memory", None)
    rows = prompt_rows(fields.pop("num_prompts"), dead=tuple(fields.pop("dead", ())))
    if fields.pop("long_first_half", False):  # the prompts of rank 0 are longer, so that its plan has more passes
        for row in rows[: len(rows) // 2]:
            row["prompt"] = "far " * 30 + row["prompt"]
    reward = fails_on_rank_1 if fields.pop("reward_fails_on_rank_1", False) else scripted_reward
    trainer, record = build(
        scenario["ours"],
        directory,
        model=checkpoint,
        rows=rows,
        rollouts=None if fields.pop("samples", False) else ScriptedRollouts(),
        reward=reward,
        shuffle_dataset=False,
        ddp_backend="gloo",
        **fields,
    )
    GRPOTrainer._get_per_token_logps_and_entropies = counting
    started, stopped_by = time.monotonic(), None
    try:
        with memory_runs_out(trainer, injection):
            trainer.train()
    except (RewardError, MemoryBudgetError) as error:
        stopped_by = str(error)
    finally:
        GRPOTrainer._get_per_token_logps_and_entropies = forward
    return {
        "gradients": record.gradients,
        "logs": record.logs,
        "num_passes": num_passes,
        "budgets": {name: budget.state_dict() for name, budget in trainer._budgets().items()}
        if scenario["ours"]
        else {},
        "stopped_by": stopped_by,
        "step": trainer.state.global_step,
        "seconds": time.monotonic() - started,
    }


def main() -> None:
    """Run every scenario in order; a rank that waits for the other would hang here."""
    scenarios, output, checkpoint = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    results = {name: run(scenario, output / "runs", checkpoint) for name, scenario in scenarios.items()}
    torch.save(results, output / f"rank{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
