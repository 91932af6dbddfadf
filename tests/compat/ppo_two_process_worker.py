"""One rank of ``test_ppo_two_processes``: a classic step and a v2 update on gloo.

torchrun --nproc_per_node 2 tests/compat/ppo_two_process_worker.py OUTPUT_DIR
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import conftest  # noqa: F401  the same environment as the tests
import torch
from ppo_tools import Recorder, classic_config, v2_trainer
from tiny import tiny_model, tiny_tokenizer

from trl_grpo_ext.compat.ppo import PPOTrainer

# Eight responses of equal length to two queries; the second group lies on both ranks.
QUERIES = [[40, 41, 42]] * 3 + [[50, 51]] * 5
SCORES = [0.0, 1.0, 3.0, 0.5, 2.0, 2.5, 1.0, 4.0]


def responses() -> list[list[int]]:
    """Return eight responses of four tokens."""
    return torch.randint(3, 300, (8, 4), generator=torch.Generator().manual_seed(5)).tolist()


def classic_step(rank: int, world_size: int) -> dict[str, Any]:
    """Return the weights and figures after one step on this rank's share of the rows."""
    model = tiny_model()
    rows = 8 // world_size
    mine = slice(rank * rows, (rank + 1) * rows)
    backend = {"ddp_backend": "gloo"} if world_size > 1 else {}
    trainer = PPOTrainer(
        classic_config(batch_size=rows, mini_batch_size=rows, ppo_epochs=1, **backend),
        model,
        tiny_model(seed=1),
        tiny_tokenizer(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
    )
    stats = trainer.step(QUERIES[mine], responses()[mine], SCORES[mine])
    kept = ("objective/kl", "ppo/mean_scores", "ppo/policy/advantages")
    return {
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "stats": {name: torch.as_tensor(stats[name]) for name in kept},
        "kl_coef": trainer.kl_ctl.value,
    }


def v2_update(directory: Path) -> dict[str, Any]:
    """Return the rewards that this rank saw and what was logged."""
    record = Recorder()
    trainer = v2_trainer(
        directory,
        ref_model=tiny_model(seed=1),
        missing_eos_penalty=1.0,
        per_device_train_batch_size=4,
        total_episodes=8,
        callbacks=[record],
        ddp_backend="gloo",
    )
    trainer.train()
    weights = {
        name: p.detach().clone() for name, p in trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    }
    return {
        "rewards": trainer._rewards_per_func,
        "logs": record.logs[:1],
        "weights": weights,
        "batch_size": trainer.config.batch_size,
        "episode": trainer.state.episode,
    }


def main() -> None:
    """Run both and write what happened."""
    output = Path(sys.argv[1])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.save({"classic": classic_step(rank, world), "v2": v2_update(output / "runs")}, output / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
