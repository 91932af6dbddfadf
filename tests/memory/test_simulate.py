"""A simulated step allocates what the same step does on real tensors, byte for byte and in the same order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny_config

from trl_grpo_ext.memory.forwards import Rows
from trl_grpo_ext.memory.hollow import DataDependentError, HollowMode
from trl_grpo_ext.memory.mode import MemoryMode
from trl_grpo_ext.memory.simulate import Lora, Simulation, Workload, simulate

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2")
MODES = {
    "full": MemoryMode(tuning="full", gradient_checkpointing=False),
    "full-checkpointed": MemoryMode(tuning="full"),
    "full-8bit-adam": MemoryMode(tuning="full", optim="adamw_8bit"),
    "lora": MemoryMode(gradient_checkpointing=False),
    "lora-checkpointed": MemoryMode(),
    "lora-offloaded": MemoryMode(gradient_checkpointing=False, activation_offload=True, optim="paged_adamw_8bit"),
    "nf4-checkpointed": MemoryMode(base="nf4"),
    "nf4-8bit-adam": MemoryMode(base="nf4", gradient_checkpointing=False, optim="adamw_8bit"),
    "int8-checkpointed": MemoryMode(base="int8"),
}
ROWS = Rows((3, 2), 20, 24)


def both(config: Any, mode: MemoryMode, work: Workload, **kwargs: Any) -> tuple[Simulation, Simulation]:
    return simulate(config, mode, work, **kwargs), simulate(config, mode, work, on_real_tensors=True, **kwargs)


def allocations(simulation: Simulation) -> list[tuple[str, int, int]]:
    """Return the phase, the size and the total after each allocation; what dies at once may go in any order."""
    return [(e.phase, e.num_bytes, total) for e, total in simulation.trace.running() if e.num_bytes > 0]


def check(family: str, mode: MemoryMode, path: Any, as_on_cuda: bool) -> None:
    config = tiny_config(family, hidden=64, vocab_size=1000)
    attention = "eager" if family == "gemma2" else "sdpa"  # soft-capped scores have no fused kernel
    work = Workload(rows=ROWS, num_micro_batches=2, path=path, attn_implementation=attention)
    hollow, real = both(config, mode, work, as_on_cuda=as_on_cuda)
    assert hollow.trace.peak_bytes() == real.trace.peak_bytes() > 0
    assert allocations(hollow) == allocations(real)
    assert hollow.trace.peaks() == real.trace.peaks()
    assert hollow.trace.breakdowns() == real.trace.breakdowns()
    assert hollow.host_bytes == real.host_bytes
    assert (hollow.host_bytes > 0) == mode.activation_offload


@pytest.mark.parametrize("name", MODES)
def test_modes(name: str) -> None:
    check("llama", MODES[name], "packed", as_on_cuda=True)


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_families(family: str) -> None:
    check(family, MODES["lora-checkpointed"], "padded", as_on_cuda=False)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["packed", "padded", "logits"])
@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_modes_of_families(family: str, name: str, path: str) -> None:
    check(family, MODES[name], path, as_on_cuda=path != "logits")


def test_every_phase_is_there_and_ends_clean() -> None:
    """After the update, weights, adapter, optimiser states and the two workspaces are left, nothing else."""
    config = tiny_config("llama", hidden=64, vocab_size=1000)
    work = Workload(rows=ROWS, generation=Rows((4, 4), 20, 24), scoring=Rows((3,), 20, 24))
    hollow, real = both(config, MODES["lora-checkpointed"], work)
    assert allocations(hollow) == allocations(real)
    assert list(hollow.trace.peaks()) == ["load", "generate", "score", "forward", "backward", "optimizer"]
    held: dict[str, int] = {}
    for event in hollow.trace.events:
        category = hollow.trace.categories.get(event.block, "activations")
        held[category] = held.get(category, 0) + event.num_bytes
    # Rank 16 on q, k, v, o (64 x 64, 32 x 64, 32 x 64, 64 x 64), gate, up (128 x 64) and down, two layers, float32.
    adapter = 2 * 16 * 4 * (2 * 128 + 2 * 96 + 2 * 192 + 192)
    assert held["adapter"] == adapter
    # Two moments each, and a float32 step count of 4 bytes for each of 14 pairs.
    assert held["optimizer"] == 2 * adapter + 4 * 28
    assert held["gradients"] == held["activations"] == held["kv cache"] == 0
    # Embedding, head, q, k, v, o, gate, up, down and norms in bfloat16; two rotary tables of 8 float32.
    weights = 2 * (2 * 1000 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64 + 2 * 64) + 64) + 2 * 8 * 4
    assert held["weights"] == weights


@pytest.mark.parametrize("name", ["full", "nf4-checkpointed"])
def test_phases_are_linear_in_depth(name: str) -> None:
    """Two depths tell every other one, which is what lets the planner search quickly."""
    config = tiny_config("qwen2", layers=6, hidden=64, vocab_size=1000, layer_types=["full_attention"] * 6)
    work = Workload(rows=Rows((2,), 8, 8))
    two, three, six = (simulate(config, MODES[name], work, num_layers=n).trace.peaks() for n in (2, 3, 6))
    for phase, peak in six.items():
        assert peak == two[phase] + 4 * (three[phase] - two[phase]), phase


def test_monotone_in_every_size() -> None:
    """More of anything never needs less."""

    def peak(
        rows: Rows = ROWS, mode: MemoryMode = MODES["lora-checkpointed"], r: int = 8, micro_batches: int = 1
    ) -> int:
        config = tiny_config("llama", hidden=64, vocab_size=1000)
        work = Workload(rows=rows, num_micro_batches=micro_batches)
        return simulate(config, mode, work, Lora({"r": r})).trace.peak_bytes()

    base = peak()
    assert peak(Rows((3, 3), 20, 24)) > base
    assert peak(Rows((3, 2), 40, 24)) > base
    assert peak(Rows((3, 2), 20, 48)) > base
    assert peak(r=16) > base
    assert peak(micro_batches=2) >= base
    assert peak(mode=MODES["lora"]) > base


def test_foreach_needs_a_copy_and_fused_does_not() -> None:
    config = tiny_config("llama", hidden=64, vocab_size=1000)
    work = Workload(rows=Rows((1,), 2, 2))
    fused, foreach = (
        simulate(config, MODES["full"], work, optim=optim).trace.peaks()["optimizer"]
        for optim in ("adamw_torch_fused", "adamw_torch")
    )
    num_weights = 2 * 1000 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64 + 2 * 64) + 64
    # The square roots of the second moments, all of them at once: 2 bytes each.
    assert foreach - fused == pytest.approx(2 * num_weights, rel=0.01)


def test_hollow_tensors() -> None:
    """Floats are not computed, integers that follow from known ones are, and the others cannot be read."""
    with HollowMode():
        positions = torch.arange(6).view(2, 3)
        assert (positions % 3 == 0).sum().item() == 2
        hidden = torch.empty(4, 2**40 // 2**20)
        top = hidden.argmax(-1)
        assert top.shape == (4,)
        with pytest.raises(DataDependentError, match="item"):
            top.sum().item()
        with pytest.raises(DataDependentError):
            hidden.mean().item()
        assert (hidden[0] + 1.0).dtype == torch.float32
        assert (top + 1.0).dtype == torch.float32, "not the cached result of adding the integer 1"
        assert (top + 1).dtype == torch.int64


def test_hollow_tensors_use_no_memory() -> None:
    """Sixty-four GiB and a product of them; the machine has less."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with HollowMode():
        tensors = [torch.empty(2**15, 2**15) for _ in range(16)]
        product = tensors[0] @ tensors[1]
        total = torch.stack([product, tensors[2]]).sum()
        assert total.shape == ()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # KiB
