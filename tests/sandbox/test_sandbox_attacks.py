"""Every attack, on every backend to be had here, as root and as an ordinary user, and without a sandbox for control."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attacks import all_attacks
from stage import run_all

HERE = Path(__file__).parent
NOBODY = 65534
BACKENDS = ["namespaces+landlock+seccomp", "namespaces+seccomp", "landlock+seccomp", "seccomp-noopen"]
is_root = os.geteuid() == 0


def interpreter_of(uid: int) -> str | None:
    """Return a Python that the user can run, None if there is none (a virtual environment in root's home is not)."""
    for candidate in (sys.executable, shutil.which("python3", path="/usr/bin:/usr/local/bin:/bin")):
        if candidate is None:
            continue
        try:
            done = subprocess.run([candidate, "-c", "pass"], user=uid, group=uid, extra_groups=[], capture_output=True)
        except (OSError, subprocess.SubprocessError):
            continue
        if done.returncode == 0:
            return candidate
    return None


def run_as(uid: int, *arguments: str, like: str | None = None) -> dict[str, Any]:
    """Return the outcome of all attacks by ``stage.py`` run by another user, or in an emulated place."""
    python = sys.executable if uid == os.geteuid() else interpreter_of(uid)
    if python is None:
        pytest.skip(f"no Python that user {uid} could run")
    places = [] if like is None else [python, str(HERE / "like.py"), like]
    ids: dict[str, Any] = {} if uid == os.geteuid() else {"user": uid, "group": uid, "extra_groups": []}
    done = subprocess.run(
        [*places, python, str(HERE / "stage.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        cwd="/",
        env={"PATH": os.environ.get("PATH", ""), "PYTHONDONTWRITEBYTECODE": "1"},
        **ids,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout))


def skip_unless_offered(backend: str) -> None:
    from trl_grpo_ext.errors import SandboxError
    from trl_grpo_ext.rewards.sandbox import SandboxPool

    try:
        with SandboxPool(workers=1, backend=backend) as pool:
            assert pool.report.backend == backend
    except SandboxError as error:
        pytest.skip(str(error)[:200])


def test_there_are_enough() -> None:
    assert len(all_attacks()) >= 100
    assert len({attack.name for attack in all_attacks()}) == len(all_attacks())


def test_nothing_gets_through_the_best_backend() -> None:
    found = run_all()
    assert found["through"] == {}
    assert found["total"] == len(all_attacks())


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_gets_through(backend: str) -> None:
    skip_unless_offered(backend)
    found = run_all(backend)
    assert (found["backend"], found["through"]) == (backend, {})


@pytest.mark.slow
@pytest.mark.skipif(not is_root, reason="only root can become another user")
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_gets_through_as_an_ordinary_user(backend: str) -> None:
    skip_unless_offered(backend)
    found = run_as(NOBODY, "--backend", backend)
    assert (found["backend"], found["uid"], found["through"]) == (backend, NOBODY, {})


@pytest.mark.slow
@pytest.mark.parametrize(("place", "backend"), [("docker", "landlock+seccomp"), ("gvisor", "seccomp-noopen")])
@pytest.mark.parametrize("uid", [0, NOBODY] if is_root else [os.geteuid()])
def test_nothing_gets_through_where_more_is_forbidden(place: str, backend: str, uid: int) -> None:
    """What Docker and gVisor refuse is refused by a filter; the choice must fall on the right backend by itself."""
    if place == "docker":
        skip_unless_offered(backend)
    found = run_as(uid, like=place)
    assert (found["backend"], found["uid"], found["through"]) == (backend, uid, {})


def test_without_any_layer_it_refuses() -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "like.py"), "bare", sys.executable, str(HERE / "stage.py")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "no safe backend on this machine" in done.stderr
    assert "Programs are not run" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("uid", [0, NOBODY] if is_root else [os.geteuid()])
def test_positive_controls(uid: int) -> None:
    """Without the sandbox the attacks work; otherwise stopping them would mean nothing."""
    found = run_all(controls=True) if uid == os.geteuid() else run_as(uid, "--controls")
    failed = {attack.name: attack.needs for attack in all_attacks() if attack.name not in found["through"]}
    unexpected = {name for name, needs in failed.items() if needs == "" or (needs == "root" and uid == 0)}
    assert unexpected == set(), {name: found["notes"][name] for name in unexpected}
    assert len(failed) <= (6 if uid == 0 else 16)
