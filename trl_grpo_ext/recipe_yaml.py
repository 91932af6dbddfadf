"""Read YAML as people write it: ``1e-4`` is a number, ``no`` is a word, a key given twice is an error.

PyYAML follows YAML 1.1, where ``1e-4`` is a string, ``eval_strategy: no`` is False, ``010`` is 8, ``12:30`` is 750 and
``2024-01-01`` is a date. Each of them spoils a run silently, so the plain values here are those of YAML 1.2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from trl_grpo_ext.errors import ConfigurationError, nearest

_FLOAT = re.compile(
    r"^[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\.\d[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.(?:inf|Inf|INF))$"
    r"|^\.(?:nan|NaN|NAN)$"
)
_INT = re.compile(r"^[-+]?\d[\d_]*$|^0x[0-9a-fA-F]+$|^0o[0-7]+$")
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's plain values, and without duplicate keys."""


_REPLACED = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("bool", "float", "int", "timestamp"))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if tag not in _REPLACED]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value.replace("_", "")
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


def _mapping_without_duplicates(loader: yaml.SafeLoader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    mapping: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, (list, dict)):
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is not a word", key_node.start_mark)
        if key in mapping:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} occurs twice", key_node.start_mark)
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping_without_duplicates)


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of a YAML text; ``where`` names it in errors.

    Raises:
        ConfigurationError: one line with line and column of the first mistake.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # a subclass of SafeLoader: builds plain values only
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigurationError(f"{where}{place}: not valid YAML: {problem}") from error
    except ValueError as error:  # a date or number that looks right and is not, for example 2024-13-40
        raise ConfigurationError(f"{where}: not valid YAML: {error}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Raises:
        ConfigurationError: if the file is missing, unreadable, not UTF-8, not YAML or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        others = sorted(entry.name for entry in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        raise ConfigurationError(f"there is no recipe {str(path)!r}.{nearest(path.name, others)}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise ConfigurationError(f"cannot read the recipe {str(path)!r}: {error.strerror}") from error
    value = parse_yaml(text, str(path))
    if not isinstance(value, dict):
        found = "is empty" if value is None else f"holds a {type(value).__name__}"
        raise ConfigurationError(f"{path}: {found}; a recipe is a mapping with model, data, rewards, trainer")
    return value


def base_dir_of(recipe: Mapping[str, Any], path: Path) -> Path:
    """Return the folder that relative paths in a recipe start from: its ``base_dir``, else the folder it lies in.

    Args:
        recipe: the mapping.
        path: the file it came from; ``base_dir`` is relative to its folder.

    Raises:
        ConfigurationError: if ``base_dir`` is no directory.
    """
    folder, base_dir = path.resolve().parent, recipe.get("base_dir")
    if base_dir is None:
        return folder
    if not isinstance(base_dir, str) or not (folder / Path(base_dir).expanduser()).is_dir():
        raise ConfigurationError(
            f"base_dir is {base_dir!r}, and there is no such directory seen from {str(folder)!r}; give the folder that "
            "the other paths in the recipe start from, or leave it out for the recipe's own"
        )
    return (folder / Path(base_dir).expanduser()).resolve()


def apply_overrides(recipe: dict[str, Any], overrides: Iterable[str]) -> None:
    """Apply ``--set key=value`` in place: keys are dotted, list items are numbered, values are YAML.

    ``trainer.learning_rate=1e-4`` sets one field; ``rewards.0=exact`` replaces the first reward; ``peft=null`` removes
    the adapter. Missing mappings on the way are made, so the usual check of keys sees every slip.

    Raises:
        ConfigurationError: no ``=``, an empty key, or a way through something that is no mapping.
    """
    for override in overrides:
        key, separator, text = override.partition("=")
        parts = key.strip().split(".")
        if not separator or not all(parts):
            raise ConfigurationError(f"--set {override!r}: write key=value, for example trainer.learning_rate=1e-4")
        value = parse_yaml(text, f"--set {override!r}")
        target: Any = recipe
        for index, part in enumerate(parts[:-1]):
            target = _descend(target, part, override, ".".join(parts[:index]))
        last = parts[-1]
        if isinstance(target, list):
            target[_index(target, last, override)] = value
        elif isinstance(target, dict):
            target[last] = value
        else:
            raise ConfigurationError(
                f"--set {override!r}: {'.'.join(parts[:-1])!r} is {target!r}, which has no parts to set"
            )


def _descend(target: Any, part: str, override: str, so_far: str) -> Any:
    if isinstance(target, list):
        return target[_index(target, part, override)]
    if not isinstance(target, dict):
        raise ConfigurationError(f"--set {override!r}: {so_far!r} is {target!r}, which has no parts to set")
    if target.get(part) is None:
        target[part] = {}
    return target[part]


def _index(target: list[Any], part: str, override: str) -> int:
    if not part.isdigit() or int(part) >= len(target):
        raise ConfigurationError(
            f"--set {override!r}: {part!r} is not an item of a list; items are 0 to {len(target) - 1}"
        )
    return int(part)
