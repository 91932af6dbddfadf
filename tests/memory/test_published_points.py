"""The simulation against GPU measurements that others published; see docs/memory_plan.md for the whole table."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "bench" / "bench_plan.py"


def load_bench() -> Any:
    spec = importlib.util.spec_from_file_location("bench_plan", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_plan"] = module
    spec.loader.exec_module(module)
    return module


def test_points_say_where_they_are_from() -> None:
    points = load_bench().read_points()
    assert len(points) >= 20
    needed = {"source", "gpu", "model", "config", "base", "lora", "rows", "tokens", "allocated_mib", "reserved_mib"}
    assert all(needed <= point.keys() for point in points)
    assert len({point["source"] for point in points}) == len(points)


@pytest.mark.slow
def test_allocated_within_two_percent() -> None:
    """Every point: what tensors hold, extrapolated from two depths."""
    bench = load_bench()
    found = [bench.compare(point, quick=True) for point in bench.read_points()]
    wrong = {f.point["source"]: f.allocated_error for f in found if abs(f.allocated_error) > 0.02}
    assert wrong == {}
