"""What a checkpoint must remember about its policy that PEFT's own files do not say: reference and quantisation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from trl_grpo_ext.errors import ConfigurationError

FILE = "trl_grpo_policy.json"


class PolicyRecord(NamedTuple):
    """How a policy was trained.

    Attributes:
        kl_reference: ``"start"`` or ``"base"``; None without a KL term.
        quantization: The configuration that the base was quantised with; None: it was not.
        dtype: Name of the dtype that a quantised base was loaded in, from which its weights were rounded.
    """

    kl_reference: str | None = None
    quantization: dict[str, Any] | None = None
    dtype: str | None = None


def save_record(folder: Path, record: PolicyRecord) -> None:
    """Write the record into a folder; nothing is written where there is nothing to say."""
    if record != PolicyRecord():
        (folder / FILE).write_text(json.dumps(record._asdict(), indent=2) + "\n", encoding="utf-8")


def load_record(folder: Path) -> PolicyRecord:
    """Return the record of a folder; an empty one where there is none."""
    try:
        values = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return PolicyRecord()
    return PolicyRecord(**{name: values.get(name) for name in PolicyRecord._fields})


def loading_keywords(record: PolicyRecord, base: str, **hub: Any) -> dict[str, Any]:
    """Return the keywords of ``from_pretrained`` that store a base as training saw it; empty if it was not quantised.

    Args:
        record: Of the run.
        base: A directory or a hub id. One that is published quantised needs no keywords: it is always loaded as it is.
        **hub: ``revision`` and ``trust_remote_code``, as for the base itself.
    """
    if record.quantization is None:
        return {}
    from transformers import AutoConfig, BitsAndBytesConfig

    if getattr(AutoConfig.from_pretrained(base, **hub), "quantization_config", None) is not None:
        return {}
    keywords: dict[str, Any] = {"quantization_config": BitsAndBytesConfig.from_dict(record.quantization)}
    if record.dtype is not None:
        keywords["dtype"] = record.dtype
    return keywords


def check_kl_reference(recorded: str, asked: str | None, folder: Path) -> None:
    """Raise ConfigurationError if a run is resumed against another reference than it was started with."""
    if asked is not None and asked != recorded:
        raise ConfigurationError(
            f"kl_reference={asked!r} contradicts the checkpoint {str(folder)!r}, which was trained against "
            f"{recorded!r}. Leave kl_reference out to go on as before, or start a new run from its weights."
        )
