"""The kernel's count agrees with the tracker's: a process grows by what is tracked, on a GiB of real tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Every block from its own mapping, so that a freed one leaves the process at once and the peaks are comparable.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}

CHILD = """
import resource, sys
import torch
from transformers import AutoConfig
from trl_grpo_ext.memory.forwards import Rows
from trl_grpo_ext.memory.mode import MemoryMode
from trl_grpo_ext.memory.simulate import Workload, simulate

torch.set_num_threads(1)
tuning, checkpointing = sys.argv[1:]
config = AutoConfig.for_model("llama", vocab_size=8192, hidden_size=1024, intermediate_size=3072, num_hidden_layers=8,
    num_attention_heads=8, num_key_value_heads=4, head_dim=128)
mode = MemoryMode(tuning=tuning, gradient_checkpointing=checkpointing == "yes", base="float32")
def run(rows, layers):
    work = Workload(rows=rows, autocast=None)
    return simulate(config, mode, work, num_layers=layers, num_steps=1, on_real_tensors=True, as_on_cuda=False)
run(Rows((2,), 8, 8), 1)  # imports, thread pools and oneDNN's scratch
def now():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before = now()
simulation = run(Rows((2,), 64, 448), None)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(peak - before, simulation.trace.peak_bytes())
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc and tunes glibc")
@pytest.mark.parametrize(("tuning", "checkpointing"), [("full", "yes"), ("lora", "no")])
def test_resident_memory(tuning: str, checkpointing: str) -> None:
    environment = {**os.environ, **MALLOC, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, tuning, checkpointing],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    grown, counted = map(int, done.stdout.split()[-2:])
    print(f"{tuning}, checkpointing {checkpointing}: resident {grown / 2**30:.3f} GiB, counted {counted / 2**30:.3f}")
    assert counted > (2**30 if tuning == "full" else 2**29)
    assert grown == pytest.approx(counted, rel=0.02)
