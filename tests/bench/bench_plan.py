"""Compare the planner's simulation with GPU measurements that others published; print the table of errors.

    python tests/bench/bench_plan.py [--attention sdpa] [--start N] [--limit N] [--quick]

The points are in ``tests/memory/published_points.jsonl``, one a line, each with its source and every setting that the
simulation needs. Nothing in the simulation was fitted to them.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

POINTS = Path(__file__).parents[1] / "memory" / "published_points.jsonl"
MIB = 2**20


class Comparison(NamedTuple):
    """One point: measured and simulated MiB."""

    point: dict[str, Any]
    allocated_mib: float
    reserved_mib: float | None

    @property
    def allocated_error(self) -> float:
        """Simulated over measured, less one."""
        return self.allocated_mib / self.point["allocated_mib"] - 1

    @property
    def reserved_error(self) -> float | None:
        """Replayed over measured, less one; without the planner's correction."""
        return None if self.reserved_mib is None else self.reserved_mib / self.point["reserved_mib"] - 1


def read_points(attention: str | None = None) -> list[dict[str, Any]]:
    """Return the points, of one attention implementation if it is given."""
    points = [json.loads(line) for line in POINTS.read_text(encoding="utf-8").splitlines()]
    return [point for point in points if attention in (None, point["attention"])]


def compare(point: dict[str, Any], *, quick: bool = False) -> Comparison:
    """Simulate a published run in full and replay it, or extrapolate it from two depths without a replay."""
    import torch
    from transformers import AutoConfig

    from trl_grpo_ext.memory.caching_allocator import replay
    from trl_grpo_ext.memory.forwards import Rows
    from trl_grpo_ext.memory.mode import MemoryMode
    from trl_grpo_ext.memory.simulate import Lora, Workload, simulate

    facts = dict(point["config"])
    config = AutoConfig.for_model(facts.pop("model_type"), **facts)
    mode = MemoryMode(base=point["base"], gradient_checkpointing=point["checkpointing"])
    work = Workload(
        rows=Rows((1,) * point["rows"], point["tokens"] - 1, 1),
        path=point["path"],
        autocast=point["autocast"],
        attn_implementation=point["attention"],
        clips_gradients=False,
    )
    lora = Lora(point["lora"], getattr(torch, point["adapter_dtype"]), point["double_quantised"], point["upcast_rest"])
    if quick:
        # Exact for what tensors hold, see tests/memory/test_simulate.py; what is reserved needs the whole trace.
        two, three = (
            simulate(
                config, mode, work, lora, optim=point["optim"], num_layers=depth, num_steps=1, starts_with_states=True
            )
            for depth in (2, 3)
        )
        low, high = (run.trace.peaks() for run in (two, three))
        peaks = [low[phase] + (config.num_hidden_layers - 2) * (high[phase] - low[phase]) for phase in low]
        return Comparison(point, max(peaks) / MIB, None)
    run = simulate(config, mode, work, lora, optim=point["optim"])
    usage = replay(run.trace.events, expandable_segments=point["expandable_segments"])
    return Comparison(
        point,
        max(used.allocated for used in usage.values()) / MIB,
        max(used.reserved for used in usage.values()) / MIB,
    )


def print_table(points: list[dict[str, Any]], *, quick: bool) -> Iterator[Comparison]:
    """Print a line a point as they come."""
    print(
        "| model | base | attention | rows x tokens | allocated MiB | simulated | error | reserved | replayed | error |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for point in points:
        found = compare(point, quick=quick)
        reserved = "" if found.reserved_mib is None else f"{found.reserved_mib:.0f} | {found.reserved_error:+.1%}"
        print(
            f"| {point['model'].split('/')[-1]} | {point['base']} | {point['attention']} "
            f"| {point['rows']} x {point['tokens']} "
            f"| {point['allocated_mib']:.0f} | {found.allocated_mib:.0f} | {found.allocated_error:+.2%} "
            f"| {point['reserved_mib']:.0f} | {reserved or '|'} |",
            flush=True,
        )
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", choices=["sdpa", "eager"])
    parser.add_argument("--start", type=int, default=0, help="leave out so many points")
    parser.add_argument("--limit", type=int, help="and take so many")
    parser.add_argument("--quick", action="store_true", help="extrapolate from two depths; no replay")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    found = list(print_table(read_points(args.attention)[args.start :][: args.limit], quick=args.quick))
    for name, errors in (
        ("allocated", [f.allocated_error for f in found]),
        ("reserved", [f.reserved_error for f in found if f.reserved_error is not None]),
    ):
        if not errors:
            continue
        mean = statistics.mean(abs(e) for e in errors)
        print(f"\n{name}: {len(errors)} points, mean |error| {mean:.2%}, from {min(errors):+.2%} to {max(errors):+.2%}")


if __name__ == "__main__":
    main()
