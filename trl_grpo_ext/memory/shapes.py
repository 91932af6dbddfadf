"""What a model's ``config.json`` says about its size, read without torch; a few published configs come along.

The parameter count is that of decoders of the Llama kind. Others are counted by building them on the meta device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trl_grpo_ext.errors import ConfigurationError, nearest

_DATA = Path(__file__).with_name("known_models.json")
# Families whose layer is: two norms, q, k, v, o, and a gated feed-forward network of three matrices.
_COUNTED = ("llama", "qwen2", "qwen3", "mistral")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder.

    Attributes:
        model_type: transformers' name of the family.
        hidden: Width.
        layers: Decoder layers.
        vocab: Vocabulary.
        kv_heads: Heads of keys and values.
        head_dim: Of a head.
        windows: What each layer can look back on; None for everything.
        linear_shapes: (rows, columns) of each linear layer of one decoder layer.
        is_tied: Whether the LM head is the embedding.
        is_counted: Whether the numbers of parameters below are exact.
    """

    model_type: str
    hidden: int
    layers: int
    vocab: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    linear_shapes: tuple[tuple[int, int], ...]
    is_tied: bool
    is_counted: bool

    @property
    def linear_parameters(self) -> int:
        """Parameters of the linear layers of all decoder layers: what quantisation and adapters act on."""
        return self.layers * sum(rows * columns for rows, columns in self.linear_shapes)

    @property
    def other_parameters(self) -> int:
        """Embedding, head and norms."""
        return self.vocab * self.hidden * (1 if self.is_tied else 2) + (2 * self.layers + 1) * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, but for biases and norms of heads, which are thousandths."""
        return self.linear_parameters + self.other_parameters

    def adapter_parameters(self, rank: int) -> int:
        """Return the parameters of an adapter of that rank on every linear layer."""
        return self.layers * sum(rank * (rows + columns) for rows, columns in self.linear_shapes)


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Return the sizes that a ``config.json`` states.

    Raises:
        ConfigurationError: if it lacks one.
    """
    text = config.get("text_config") or config
    try:
        hidden, layers = int(text["hidden_size"]), int(text["num_hidden_layers"])
        heads, vocab = int(text["num_attention_heads"]), int(text["vocab_size"])
        inner = int(text["intermediate_size"])
    except (KeyError, TypeError) as error:
        raise ConfigurationError(f"the model's config has no {error}, so its size is unknown") from error
    kv_heads = int(text.get("num_key_value_heads") or heads)
    head_dim = int(text.get("head_dim") or hidden // heads)
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    kinds = text.get("layer_types") or ["sliding_attention" if window else "full_attention"] * layers
    queries, keys = heads * head_dim, kv_heads * head_dim
    model_type = str(text.get("model_type", ""))
    return ModelShape(
        model_type=model_type,
        hidden=hidden,
        layers=layers,
        vocab=vocab,
        kv_heads=kv_heads,
        head_dim=head_dim,
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        linear_shapes=(
            (queries, hidden),
            (keys, hidden),
            (keys, hidden),
            (hidden, queries),
            (inner, hidden),
            (inner, hidden),
            (hidden, inner),
        ),
        is_tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", True))),
        is_counted=model_type in _COUNTED,
    )


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return the configs that come along, by hub id."""
    return {name: entry["config"] for entry in _entries() for name in entry["names"]}


@cache
def _entries() -> list[dict[str, Any]]:
    """Return what comes along: a config, and the names of all the models that have it."""
    return json.loads(_DATA.read_text(encoding="utf-8"))


def full_name(model: str) -> str:
    """Return the hub id of a model that is known by the last part of it; any other name as it is."""
    known = known_models()
    short = {name.split("/")[-1].lower(): name for name in known}
    return model if model in known else short.get(model.lower(), model)


def read_config(model: str) -> dict[str, Any]:
    """Return the config of a model: a directory, a ``config.json``, a hub id or the last part of one that is known.

    Nothing is fetched but what transformers has in its cache already.

    Raises:
        ConfigurationError: if there is none to be found offline.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigurationError(f"{str(path)!r} is no JSON: {error}") from error
    known = known_models()
    name = full_name(model)
    if name in known:
        return dict(known[name])
    cached = _cached_config(model)
    if cached is not None:
        return json.loads(cached.read_text(encoding="utf-8"))
    hint = nearest(model.split("/")[-1], [name.split("/")[-1] for name in known])
    sizes = ", ".join(entry["names"][0].split("/")[-1] for entry in _entries())
    raise ConfigurationError(
        f"the sizes of {model!r} are not known offline, and the hub is not asked.{hint} Give a directory with its "
        f"config.json, the file itself, or one of {sizes} (their instruct, coder and math variants too)"
    )


def _cached_config(model: str) -> Path | None:
    """Return the hub cache's copy of a model's config."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json")
    except Exception:  # no hub package, or no legal hub id
        return None
    return Path(found) if isinstance(found, str) else None
