"""Write down in a checkpoint what the KL term is measured against, and read it back."""

from __future__ import annotations

import json
from pathlib import Path

from trl_grpo_ext.errors import ConfigurationError

FILE = "kl_reference.json"


def save_kl_reference(folder: Path, reference: str) -> None:
    """Write the name of the reference (``"start"`` or ``"base"``) into a checkpoint's folder."""
    text = json.dumps({"kl_reference": reference}) + "\n"
    (folder / FILE).write_text(text, encoding="utf-8")


def load_kl_reference(folder: Path) -> str | None:
    """Return the reference that a checkpoint was trained against, or None where it does not say."""
    try:
        return json.loads((folder / FILE).read_text(encoding="utf-8"))["kl_reference"]
    except FileNotFoundError:
        return None


def check_kl_reference(recorded: str, asked: str | None, folder: Path) -> None:
    """Raise ConfigurationError if a run is resumed against another reference than it was started with."""
    if asked is not None and asked != recorded:
        raise ConfigurationError(
            f"kl_reference={asked!r} contradicts the checkpoint {str(folder)!r}, which was trained against "
            f"{recorded!r}. Leave kl_reference out to go on as before, or start a new run from its weights."
        )
