"""What attacks aim at, all of it made here: a folder, a victim process, listeners, a secret in the environment.

    python tests/sandbox/stage.py [--backend NAME] [--controls]

runs every attack in the sandbox (or, with --controls, without one) and prints which got through, as JSON.
"""

# ruff: noqa: E402  # it also runs as a script, for another user
from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import secrets
import socket
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from attacks import Attack, all_attacks, numbers

from trl_grpo_ext.rewards.sandbox import SandboxLimits, SandboxPool
from trl_grpo_ext.rewards.sandbox.results import End

# Low limits, so that the controls of what is bounded here (3 CPU seconds, 1 GiB, 32 MiB of output) exceed them.
LIMITS = SandboxLimits(cpu_s=1.0, wall_s=2.0, memory_mib=256)
_VICTIM = """
import ctypes, os, sys, time
buffer = ctypes.create_string_buffer(b'the victim\\'s memory')
# Nothing stands in the way of tracing here but the sandbox.
print(ctypes.addressof(buffer), flush=True)
time.sleep(600)
"""


class Stage:
    """Targets for attacks; made anew by ``reset`` after one has hit."""

    def __init__(self) -> None:
        self.secret = secrets.token_hex(12)
        self._stack = contextlib.ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="attack-stage-")))
        self.folder.chmod(0o777)
        self.victim: subprocess.Popen[str] | None = None
        self.address = 0
        os.environ["TRAINER_SECRET"] = self.secret
        self.tcp = self._listener(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0))
        self.udp = self._listener(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0))
        self.abstract_name = f"attack-{self.secret}"
        self.abstract = self._listener(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + self.abstract_name)
        self.unix = self._listener(socket.AF_UNIX, socket.SOCK_STREAM, str(self.folder / "socket"))
        os.chmod(self.folder / "socket", 0o777)
        # A descriptor that a careless launcher would hand down.
        read_end, write_end = os.pipe()
        self._stack.callback(os.close, read_end)
        self._stack.callback(os.close, write_end)
        os.write(write_end, self.secret.encode())
        os.set_inheritable(read_end, True)
        self.leak = read_end
        self.reset()

    def _listener(self, family: int, kind: int, address: Any) -> socket.socket:
        listener = self._stack.enter_context(socket.socket(family, kind))
        listener.bind(address)
        if kind == socket.SOCK_STREAM:
            listener.listen(8)
        listener.setblocking(False)
        return listener

    def reset(self) -> None:
        """Put the files back and see to it that the victim is alive and as it was."""
        for path in self.folder.iterdir():
            if path.name != "socket":
                if path.is_dir():
                    path.rmdir()
                else:
                    path.unlink()
        (self.folder / "secret").write_text(self.secret)
        (self.folder / "log").write_text("a line\n")
        for name in ("secret", "log"):
            (self.folder / name).chmod(0o666)
            os.utime(self.folder / name, (1_000_000, 1_000_000))
        if self.victim is None or self.victim.poll() is not None or not self._victim_untouched():
            self._new_victim()
        os.set_blocking(self.leak, False)

    def _new_victim(self) -> None:
        self._end_victim()
        self.victim = subprocess.Popen(
            [sys.executable, "-c", _VICTIM], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.victim.stdout is not None
        self.address = int(self.victim.stdout.readline())

    def _end_victim(self) -> None:
        if self.victim is not None:
            self.victim.kill()
            self.victim.wait()
            assert self.victim.stdout is not None
            self.victim.stdout.close()

    def _victim_untouched(self) -> bool:
        assert self.victim is not None
        pid = self.victim.pid
        return (
            os.sched_getscheduler(pid) == os.SCHED_OTHER
            and os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)
            and os.sched_getaffinity(pid) == os.sched_getaffinity(0)
            and resource.prlimit(pid, resource.RLIMIT_CORE) == resource.getrlimit(resource.RLIMIT_CORE)
        )

    def effects(self) -> list[str]:
        """Return what an attack has visibly done to the targets."""
        assert self.victim is not None
        found = []
        names = {path.name for path in self.folder.iterdir()}
        if names != {"secret", "log", "socket"}:
            found.append(f"files {sorted(names)}")
        elif (self.folder / "log").read_text() != "a line\n" or (self.folder / "log").stat().st_mtime != 1_000_000:
            found.append("the file was changed")
        elif (self.folder / "log").stat().st_mode & 0o777 != 0o666:
            found.append("the file's mode was changed")
        if self.victim.poll() is not None:
            found.append("the victim is dead")
        elif not self._victim_untouched():
            found.append("the victim was changed")
        for listener, name in ((self.tcp, "TCP"), (self.abstract, "abstract"), (self.unix, "unix")):
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                found.append(f"{name} connection")
        with contextlib.suppress(BlockingIOError):
            self.udp.recv(100)
            found.append("UDP packet")
        return found

    def source(self, attack: Attack) -> str:
        """Return an attack's program with its targets filled in."""
        assert self.victim is not None
        values = {
            "folder": str(self.folder),
            "secret_file": str(self.folder / "secret"),
            "secret": self.secret,
            "victim": self.victim.pid,
            "victim_address": self.address,
            "tcp_port": self.tcp.getsockname()[1],
            "udp_port": self.udp.getsockname()[1],
            "abstract": self.abstract_name,
            "word": f"w{secrets.token_hex(6)}",
            "disk": next((name for name in ("vda", "sda", "nvme0n1") if os.path.exists(f"/dev/{name}")), "none"),
            **numbers(),
        }
        return string.Template(attack.source).safe_substitute(values)

    def close(self) -> None:
        """Remove everything."""
        self._end_victim()
        os.environ.pop("TRAINER_SECRET", None)
        self._stack.close()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Outcome:
    """What became of one attack: the reasons for which it counts as having got through."""

    def __init__(self, through: list[str], note: str = "") -> None:
        self.through, self.note = through, note


def control(stage: Stage, attack: Attack) -> Outcome:
    """Run an attack as a plain process of this user, and return whether it works at all."""
    stage.reset()
    source = stage.source(attack)
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-c", source],
            stdout=out,
            stderr=err,
            stdin=subprocess.DEVNULL,
            cwd=scratch,
            start_new_session=True,
            pass_fds=(stage.leak,),
        )
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        time.sleep(1.2 if "orphan" in attack.name else 0)
        out.seek(0)
        err.seek(0)
        output, errors = out.read(), err.read()
    through = ["it says so"] if b"GOT-IN" in output else []
    if len(output) > LIMITS.output_bytes or len(errors) > LIMITS.output_bytes:
        through.append("output")
    effects = stage.effects()
    _refill(stage)
    return Outcome(through + effects, errors[-200:].decode(errors="replace"))


def _refill(stage: Stage) -> None:
    """Put the secret back into the pipe that may have been read."""
    with contextlib.suppress(BlockingIOError):
        os.read(stage.leak, 1000)
    descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    for fd in descriptors:
        with contextlib.suppress(OSError):
            if fd != stage.leak and os.readlink(f"/proc/self/fd/{fd}") == os.readlink(f"/proc/self/fd/{stage.leak}"):
                os.write(fd, stage.secret.encode())
                return


def attempt(stage: Stage, pool: SandboxPool, attack: Attack) -> Outcome:
    """Run an attack in the sandbox."""
    stage.reset()
    begin = time.monotonic()
    result = pool.run_program(stage.source(attack))
    seconds = time.monotonic() - begin
    through = ["it says so"] if b"GOT-IN" in result.process.stdout else []
    if len(result.process.stdout) > LIMITS.output_bytes or len(result.process.stderr) > LIMITS.output_bytes:
        through.append("output")
    if result.process.end is End.FAULT:
        through.append(f"a fault of the sandbox: {result.process.detail}")
    # A loaded machine stretches wall time, never by so much.
    if seconds > 60:
        through.append(f"it took {seconds:.0f} s")
    through += stage.effects()
    return Outcome(through, f"{result.reason}: {result.error.name if result.error else result.process.end.value}")


def run_all(backend: str = "auto", *, controls: bool = False) -> dict[str, Any]:
    """Run every attack; return {"backend": ..., "uid": ..., "total": n, "through": {name: why}, "notes": {...}}."""
    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(Stage())
        pool = None if controls else stack.enter_context(SandboxPool(LIMITS, workers=2, backend=backend))
        outcomes = {
            attack.name: control(stage, attack) if pool is None else attempt(stage, pool, attack)
            for attack in all_attacks()
        }
        return {
            "backend": "none" if pool is None else pool.report.backend,
            "layers": {} if pool is None else dict(pool.report.layers),
            "uid": os.getuid(),
            "total": len(outcomes),
            "through": {name: outcome.through for name, outcome in outcomes.items() if outcome.through},
            "notes": {name: outcome.note for name, outcome in outcomes.items()},
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--controls", action="store_true")
    options = parser.parse_args()
    print(json.dumps(run_all(options.backend, controls=options.controls)))
