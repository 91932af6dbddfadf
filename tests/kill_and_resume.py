"""Run training in child processes and kill them; the tests of resuming call this in a process of its own.

Usage: kill_and_resume.py RECIPE OUTPUT PLAN, where PLAN is JSON: a list of kills, each ``{"after_s": x}`` (a moment
after the start of training) or ``{"file": "optimizer.pt", "step": n}`` (half of that file of that checkpoint is
written). After the kills the run is resumed to its end. Heavy imports happen once, here; children are forks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")


def kill_while_saving(file: str, step: int) -> None:
    """Make this process die when half of ``file`` in ``checkpoint-<step>`` is written, whoever writes it."""
    real_open = os.open

    def watch() -> None:
        target = None
        while True:
            for path in Path(sys.argv[2]).glob(f"checkpoint-{step}/{file}"):
                target = path
            if target is not None and target.exists():
                content = target.read_bytes()
                handle = real_open(target, os.O_WRONLY | os.O_TRUNC)
                os.write(handle, content[: len(content) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.0002)

    threading.Thread(target=watch, daemon=True).start()


def child(arguments: list[str], plan: dict[str, Any] | None) -> int:
    """Fork, run the command line in the fork, and return its exit code (negative: the signal that ended it)."""
    pid = os.fork()
    if pid == 0:
        from trl_grpo_ext.cli.main import main

        try:
            if plan is not None and "file" in plan:
                kill_while_saving(plan["file"], plan["step"])
            main(arguments)
        except SystemExit as leaving:
            sys.stdout.flush()
            os._exit(int(leaving.code or 0))
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(99)
    if plan is not None and "after_s" in plan:
        metrics = Path(sys.argv[2]) / "metrics.jsonl"
        size = metrics.stat().st_size if metrics.exists() else 0
        deadline = time.monotonic() + 60
        # Training has begun when the file changes; then the moment counts from there.
        while time.monotonic() < deadline and (not metrics.exists() or metrics.stat().st_size == size):
            time.sleep(0.005)
        time.sleep(plan["after_s"])
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def main() -> None:
    """Kill according to the plan, resume to the end, print one JSON line with the exit codes."""
    import trl_grpo_ext.cli.run  # noqa: F401 (imported before the forks)

    recipe, output, plans = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    arguments = ["train", "--no-check", recipe, "--output-dir", output, "--resume"]
    codes = [child(arguments, plan) for plan in plans]
    codes.append(child(arguments, None))
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
