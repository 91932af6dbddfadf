"""Merge an adapter into its base: an ordinary model that needs neither PEFT nor bitsandbytes."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_grpo_ext.errors import ConfigurationError
from trl_grpo_ext.memory.adapter import base_of_adapter, find_adapter
from trl_grpo_ext.memory.record import PolicyRecord, load_record, loading_keywords

DTYPES = ("bfloat16", "float16", "float32")


class Merged(NamedTuple):
    """What was merged: the base by name, and whether in the weights that quantisation left it in training."""

    base: str
    as_quantised: bool


def merge_adapter(
    checkpoint: Path,
    output: Path,
    *,
    base: str | None = None,
    dtype: str = "bfloat16",
    original_base: bool = False,
) -> Merged:
    """Write the model W + s B A with its tokenizer to ``output``, whole or not at all; return what was merged.

    An adapter trained on a quantised base has learnt to correct that base, rounding errors included, so by default it
    is merged into the quantised weights as they were, made ordinary numbers again.

    Args:
        checkpoint: A directory with an adapter.
        output: A directory that does not exist yet, or an empty one.
        base: The base model; None: the one that the adapter names.
        dtype: Of the merged weights, one of ``DTYPES``.
        original_base: True merges into the base's weights as published, even if training saw them quantised.

    Raises:
        ConfigurationError: if there is no adapter, or ``output`` has something in it.
    """
    adapter = find_adapter(str(checkpoint))
    if adapter is None:
        raise ConfigurationError(f"{str(checkpoint)!r} holds no adapter, so there is nothing to merge")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigurationError(f"{str(output)!r} exists already; name a directory that does not")
    if dtype not in DTYPES:
        raise ConfigurationError(f"dtype={dtype!r} is none of {', '.join(DTYPES)}")
    from peft import PeftModel

    base = base or base_of_adapter(str(adapter))
    record = PolicyRecord() if original_base else load_record(checkpoint)
    model: Any = _load_base(base, record, getattr(torch, dtype))
    model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(safe_merge=True)
    own_tokenizer = (checkpoint / "tokenizer_config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint) if own_tokenizer else base)
    _write(model, tokenizer, output)
    return Merged(base, record.quantization is not None)


def _load_base(name: str, record: PolicyRecord, dtype: torch.dtype) -> Any:
    """Return the base in plain numbers, of the values that quantisation left where the record names one."""
    kwargs: dict[str, Any] = {"dtype": dtype, **loading_keywords(record, name)}
    model: Any = AutoModelForCausalLM.from_pretrained(name, **kwargs)
    if getattr(model.config, "quantization_config", None) is not None:
        model = model.dequantize()
    return model.to(dtype)


def _write(model: Any, tokenizer: Any, output: Path) -> None:
    """Write beside ``output`` and rename, so that a killed merge leaves nothing that looks like a model."""
    output = output.expanduser().absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=output.name + ".", suffix=".tmp", dir=output.parent))
    try:
        model.save_pretrained(str(temporary))
        tokenizer.save_pretrained(str(temporary))
        os.chmod(temporary, 0o755)  # mkdtemp makes it private
        if output.is_dir():
            output.rmdir()
        os.rename(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
