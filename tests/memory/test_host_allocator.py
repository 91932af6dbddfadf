"""Freed memory stays with the process, so that the next step does not pay for fresh pages."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trl_grpo_ext.memory.host_allocator import keep_freed_memory

COUNT_FAULTS = """
import resource, sys, torch
from trl_grpo_ext.memory.host_allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in (40, 50, 60):
        torch.ones(size * 2**18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for _ in range(4):
    step()
print(step())
"""


def faults_of_a_later_step(kind: str) -> int:
    """Return the pages that a step had to be given although those before had freed as many."""
    result = subprocess.run([sys.executable, "-c", COUNT_FAULTS, kind], capture_output=True, text=True, check=True)
    return int(result.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc")
def test_a_step_uses_the_pages_of_the_step_before() -> None:
    assert keep_freed_memory({}), "this test needs glibc"
    pages = 150 * 2**20 // 4096
    assert faults_of_a_later_step("given back") > 0.9 * pages
    assert faults_of_a_later_step("kept") < 0.1 * pages


@pytest.mark.parametrize("environ", [{"MALLOC_ARENA_MAX": "2"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"}])
def test_whoever_configured_malloc_keeps_that(environ: dict[str, str]) -> None:
    assert not keep_freed_memory(environ)


def test_without_glibc_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory({})
