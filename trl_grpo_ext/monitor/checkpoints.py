"""Tell whole checkpoints from those that a killed process left behind.

A checkpoint is a directory of many files, written one after the other. Two signs prove it whole: a manifest, written
last by ``mark_complete``, that lists every file with its size; or, where there is none (the process died between the
save and the mark, or plain TRL wrote it), the files that a resume needs, each intact, and among them
``trainer_state.json``, which the trainer writes last.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path

from trl_grpo_ext.monitor.files import write_json

MANIFEST = "complete.json"
_FOLDER = re.compile(r"^checkpoint-(\d+)$")
_WEIGHTS = ("adapter_model.safetensors", "model.safetensors", "model.safetensors.index.json")


def checkpoint_step(path: Path) -> int:
    """Return the step in the name ``checkpoint-N``, or -1 for another name."""
    match = _FOLDER.match(path.name)
    return int(match.group(1)) if match else -1


def mark_complete(checkpoint: Path) -> None:
    """Write the manifest of a checkpoint that is fully on disk; call it after the last file, on one process."""
    sizes = {
        str(path.relative_to(checkpoint)): path.stat().st_size
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != MANIFEST and not path.name.endswith(".tmp")
    }
    write_json(checkpoint / MANIFEST, {"files": sizes})


def why_incomplete(checkpoint: Path) -> str | None:
    """Return why a checkpoint must not be resumed from, or None if it is whole."""
    try:
        manifest = checkpoint / MANIFEST
        if manifest.is_file():
            return _manifest_mismatch(checkpoint, json.loads(manifest.read_text(encoding="utf-8"))["files"])
        return _missing_part(checkpoint)
    except (OSError, ValueError, KeyError, struct.error) as error:
        return f"unreadable: {error}"


def last_complete_checkpoint(output_dir: Path) -> Path | None:
    """Return the whole checkpoint with the highest step in a run's directory, or None."""
    for path in _checkpoints(output_dir):
        if why_incomplete(path) is None:
            return path
    return None


def remove_incomplete(output_dir: Path, newer_than: int = -1) -> list[str]:
    """Delete checkpoints after step ``newer_than`` that are not whole; return one line on each.

    A resumed run saves into directories of the same names. Old files in them could pass for new ones.
    """
    removed = []
    for path in _checkpoints(output_dir):
        reason = why_incomplete(path) if checkpoint_step(path) > newer_than else None
        if reason is not None:
            shutil.rmtree(path, ignore_errors=True)
            removed.append(f"removed {path.name}: {reason}")
    return removed


def _checkpoints(output_dir: Path) -> list[Path]:
    """Return the checkpoint directories, newest step first."""
    if not output_dir.is_dir():
        return []
    found = [path for path in output_dir.iterdir() if path.is_dir() and checkpoint_step(path) >= 0]
    return sorted(found, key=checkpoint_step, reverse=True)


def _manifest_mismatch(checkpoint: Path, sizes: dict[str, int]) -> str | None:
    for name, size in sizes.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
    return None


def _missing_part(checkpoint: Path) -> str | None:
    """Return what an unmarked checkpoint lacks for a resume."""
    state = checkpoint / "trainer_state.json"
    if not state.is_file():
        return "trainer_state.json is missing, so the save did not finish"
    json.loads(state.read_text(encoding="utf-8"))
    if not any((checkpoint / name).is_file() for name in _WEIGHTS):
        return "there are no weights"
    if any(checkpoint.glob("rng_state_*.pth")):
        return "several processes wrote it and none marked it as finished"
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
    for path in checkpoint.glob("*.safetensors"):
        if path.stat().st_size != _promised_size(path):
            return f"{path.name} is cut off"
    return None


def _promised_size(path: Path) -> int:
    """Return the size in bytes that the header of a safetensors file promises."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > path.stat().st_size:
            return -1
        header = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return 8 + length + max(ends, default=0)
