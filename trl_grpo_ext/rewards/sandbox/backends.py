"""Which layers confine programs on this machine, how that is found out, and what each choice leaves open."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trl_grpo_ext.errors import ConfigurationError, SandboxError, nearest
from trl_grpo_ext.rewards.sandbox.limits import SandboxLimits
from trl_grpo_ext.rewards.sandbox.process import Confined, ForkServer
from trl_grpo_ext.rewards.sandbox.results import End

UNSAFE = "unsafe"
# Best first; the layers that must be in force for the name to be true.
BACKENDS: dict[str, tuple[str, ...]] = {
    "namespaces+landlock+seccomp": ("namespaces", "landlock", "seccomp"),
    "namespaces+seccomp": ("namespaces", "seccomp"),
    "landlock+seccomp": ("landlock", "seccomp"),
    "seccomp-noopen": ("seccomp",),
    UNSAFE: (),
}
_LAYERS = ("namespaces", "landlock", "seccomp")

_ALWAYS_OPEN = (
    "a hole in the kernel's system calls that are allowed (gVisor or a virtual machine is for that)",
    "timing and load: a program sees the clock and the number of processors, and uses its CPU time",
)
_OPEN: dict[str, tuple[str, ...]] = {
    "namespaces+landlock+seccomp": _ALWAYS_OPEN,
    "namespaces+seccomp": _ALWAYS_OPEN,
    "landlock+seccomp": (
        "that a file exists, its size and its dates can be seen by path (its content, and what a folder holds, cannot)",
        "the process ids and user ids of itself and its parent are the real ones",
        *_ALWAYS_OPEN,
    ),
    "seccomp-noopen": (
        "programs can import only what was preloaded, which covers most of the standard library",
        "that a file exists, its size and its dates can be seen by a raw system call",
        "the process ids and user ids of itself and its parent are the real ones",
        *_ALWAYS_OPEN,
    ),
    UNSAFE: ("everything: programs run with the rights of the user, by the user's explicit word",),
}


@dataclass(frozen=True)
class SandboxReport:
    """What was chosen and why.

    Attributes:
        backend: a key of :data:`BACKENDS`.
        layers: {layer: None if in force, else why not}.
        leaves_open: what this backend does not stop.
        canary: how many forbidden acts were tried and refused.
        start_s: seconds from the start of the server to its readiness.
    """

    backend: str
    layers: Mapping[str, str | None]
    leaves_open: tuple[str, ...]
    canary: int = 0
    start_s: float = 0.0

    def lines(self) -> list[str]:
        """Return the report as lines of text, for a log or a terminal."""
        lines = [f"code sandbox: {self.backend}"]
        if self.backend == UNSAFE:
            lines[0] += " - NOTHING PROTECTS THIS MACHINE FROM THE PROGRAMS"
        else:
            lines[0] += f" ({self.canary} of {self.canary} forbidden acts refused)"
        lines += [f"  {name}: {'in force' if why is None else f'missing: {why}'}" for name, why in self.layers.items()]
        lines += [f"  does not stop: {text}" for text in self.leaves_open]
        return lines


def disabled_layers(backend: str) -> tuple[str, ...]:
    """Return the layers that a wish for ``backend`` switches off; none for "auto".

    Raises:
        ConfigurationError: if there is no such backend.
    """
    if backend == "auto":
        return ()
    if backend not in BACKENDS:
        choices = ["auto", *BACKENDS, "wasm"]
        raise ConfigurationError(
            f"sandbox={backend!r} is no backend; it must be one of {', '.join(choices)}, or a runner object."
            + nearest(backend, choices)
        )
    off = tuple(layer for layer in _LAYERS if layer not in BACKENDS[backend])
    return (*off, "uid") if backend == UNSAFE else off


def name_of(layers: Mapping[str, str | None]) -> str | None:
    """Return the best backend whose layers are all in force, None if that is none of the safe ones."""
    for name, needed in BACKENDS.items():
        if name != UNSAFE and all(layers.get(layer, "missing") is None for layer in needed):
            return name
    return None


def choose(server: ForkServer, wish: str) -> SandboxReport:
    """Return the report on a freshly started server, after its canary was refused everything.

    Args:
        server: started with :func:`disabled_layers` of the wish.
        wish: "auto" or a backend.

    Raises:
        SandboxError: if no safe backend is there, the wish is not fulfilled, or the canary got something through.
    """
    if wish == UNSAFE:
        return SandboxReport(UNSAFE, server.layers, _OPEN[UNSAFE], start_s=server.start_s)
    found = name_of(server.layers)
    if found is None or (wish != "auto" and found != wish):
        raise SandboxError(_refusal(server.layers, wish, ""))
    outcome = run_canary(server)
    if outcome["failed"]:
        raise SandboxError(_refusal(server.layers, wish, outcome["failed"]))
    if outcome["through"]:
        what = f"the canary got through: {', '.join(outcome['through'])}"
        raise SandboxError(_refusal(server.layers, wish, what))
    return SandboxReport(found, server.layers, _OPEN[found], canary=outcome["total"], start_s=server.start_s)


def _refusal(layers: Mapping[str, str | None], wish: str, what: str) -> str:
    what = what or "; ".join(f"{name}: {why}" for name, why in layers.items() if why)
    wanted = "no safe backend" if wish == "auto" else f"the backend {wish!r} is not to be had"
    return (
        f"code sandbox: {wanted} on this machine ({what}). Programs are not run. What helps: a kernel with Landlock "
        "(5.13 or newer; Docker allows it by default) or user namespaces ('docker run --security-opt "
        "seccomp=unconfined'), a remote runner (docs/sandbox.md), or sandbox='unsafe' to run them with your own rights"
    )


@contextlib.contextmanager
def _bait() -> Iterator[dict[str, Any]]:
    """Lay out what the canary is to go for: a file, listeners and a process, all made here and removed afterwards."""
    secret = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="trl-grpo-canary-"))
        os.chmod(folder, 0o777)  # so that it is the sandbox that refuses, and not the file's mode
        path = os.path.join(folder, "secret")
        with open(path, "w") as file:
            file.write(secret)
        os.chmod(path, 0o644)
        tcp = stack.enter_context(socket.socket())
        tcp.bind(("127.0.0.1", 0))
        tcp.listen(1)
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        name = f"trl-grpo-canary-{secret}"
        abstract.bind("\0" + name)
        abstract.listen(1)
        yield {
            "secret_file": path,
            "secret": secret,
            "folder": folder,
            "tcp_port": tcp.getsockname()[1],
            "abstract_name": name,
            "victim": os.getpid(),
        }


def run_canary(server: ForkServer) -> dict[str, Any]:
    """Return the canary's outcome.

    The result has "through" (names of the acts that were not refused), "total" (their number) and "failed" (why the
    canary did not run to its end, empty if it did).
    """
    with _bait() as task:
        canary = Confined(server, "canary", json.dumps(task).encode(), SandboxLimits(cpu_s=5.0))
        wait_for([canary])
        result = canary.result
        assert result is not None
        if result.end is not End.EXITED or len(result.channel) < 4:
            how = result.detail or f"{result.end.value}, exit code {result.exit_code}, signal {result.signal}"
            return {"through": [], "total": 0, "failed": f"the canary did not come back: {how}"}
        return {**json.loads(result.channel[4:]), "failed": ""}


def wait_for(processes: list[Confined], tick_s: float = 0.02) -> None:
    """Wait until all processes have ended, keeping them to their limits."""
    while any(process.result is None for process in processes):
        owner = {fd: process for process in processes for fd in process.descriptors()}
        poll = select.poll()
        for fd in owner:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(tick_s * 1000):
            owner[fd].on_ready(fd)
        now = time.monotonic()
        for process in processes:
            process.check(now)


def platform_reason() -> str | None:
    """Return None if the local sandbox can work on this kind of system, else why not and what to do."""
    if sys.platform.startswith("linux"):
        return None
    return (
        f"the local code sandbox needs Linux; this is {sys.platform}. Run the training in a Linux container or WSL 2, "
        "or give the reward a remote runner (docs/sandbox.md)"
    )
