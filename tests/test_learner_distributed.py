"""Two processes (gloo): DDP, FSDP1 and FSDP2 around the model leave the packed forward as exact as it is alone.

All scenarios run in one launch, because starting two processes costs more than they do.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from reference.packing_reference import ragged_batch, score_padded, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from trl.trainer.utils import add_fused_lm_head

from trl_grpo_ext.learner.scoring import score_completions
from trl_grpo_ext.learner.support import find_disagreement, why_unsupported

pytestmark = pytest.mark.slow  # mostly imports, three times
TOLERANCE = 1e-5
SCENARIOS = {
    "ddp": {},
    "ddp, two forwards before one backward": {"budget": 25},
    "ddp, lora, checkpointing": {"lora": True, "checkpointing": True},
    "ddp, one rank without completions": {"empty_rank": 1},
    "fsdp2": {"wrapper": "fsdp2"},
    "fsdp2, ranks with unlike numbers of forwards": {"wrapper": "fsdp2", "budget": 20},
    "fsdp2, checkpointing": {"wrapper": "fsdp2", "checkpointing": True},
    "fsdp2, lora": {"wrapper": "fsdp2", "lora": True},
    "fsdp2, one rank without completions": {"wrapper": "fsdp2", "empty_rank": 0},
    "fsdp1": {"wrapper": "fsdp1"},
    "fsdp1, ranks with unlike numbers of forwards": {"wrapper": "fsdp1", "budget": 20},
}


def _build(lora: bool = False):
    model = tiny_model("qwen2" if not lora else "llama")  # with tied and with separate heads
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
        torch.manual_seed(3)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    return model.train()


def _wrap(model, wrapper: str):
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    if wrapper == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    mesh = init_device_mesh("cpu", (2,))
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _weighted(logps, entropies, rows):
    weights = torch.randn(2, 10, logps.size(1), generator=torch.Generator().manual_seed(2))[:, rows]
    return (logps * weights[0] + 0.3 * entropies * weights[1]).sum()


def _full(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def _compare(
    lora: bool = False,
    wrapper: str = "ddp",
    checkpointing: bool = False,
    budget: int | None = None,
    empty_rank: int | None = None,
) -> float:
    """Return the relative gradient error of this scenario against the padded batch in one process."""
    rank = dist.get_rank()
    input_ids, mask, num_kept = ragged_batch()
    if empty_rank is not None:
        mask[5 * empty_rank : 5 * empty_rank + 5, -num_kept:] = 0
    alone = _build(lora)
    _weighted(*score_padded(alone, input_ids, mask, num_kept), slice(None)).backward()
    # Wrappers average over processes.
    expected = {n: p.grad / 2 for n, p in alone.named_parameters() if p.requires_grad}
    model = _build(lora)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if lora:
            model.enable_input_require_grads()
    wrapped = _wrap(model, wrapper)
    assert why_unsupported(wrapped) is None
    disagreement = find_disagreement(wrapped)
    assert disagreement is None, disagreement
    rows = slice(5 * rank, 5 * rank + 5)
    options = {"compute_entropy": True, "min_token_ratio": 1.0, "max_packed_tokens": budget}
    _weighted(*score_completions(wrapped, input_ids[rows], mask[rows], num_kept, **options), rows).backward()
    if wrapper == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
            found = {n: p.grad.clone() for n, p in wrapped.named_parameters() if p.grad is not None}
    else:
        found = {n: _full(p.grad) for n, p in wrapped.named_parameters() if p.grad is not None}
    found = {n.replace("_fsdp_wrapped_module.", "").removeprefix("module."): g for n, g in found.items()}
    assert found.keys() == expected.keys()
    difference = sum(float((found[n] - expected[n]).square().sum()) for n in expected)
    return (difference / sum(float(g.square().sum()) for g in expected.values())) ** 0.5


def _worker(rank: int, directory: str) -> None:
    torch.set_num_threads(1)
    # Ranks that disagree on the number of forwards wait for each other: fail before the test's own limit.
    limit = timedelta(seconds=60)
    address = f"file://{directory}/rendezvous"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=limit)
    errors = {}
    for name, scenario in SCENARIOS.items():
        errors[name] = _compare(**scenario)
    torch.save(errors, Path(directory) / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("two_processes"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.multiprocessing.spawn(_worker, (directory,), nprocs=2)
    return [torch.load(Path(directory) / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_gradients_equal_those_of_one_process(errors, name):
    for of_rank in errors:
        assert of_rank[name] < TOLERANCE
