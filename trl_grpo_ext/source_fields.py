"""Read the field names of config classes from their source, without importing TRL, transformers or PEFT.

Importing them takes many seconds on a busy machine; a misspelt key should be refused in well under one. The classes are
plain dataclasses, so the annotated names in their bodies and in those of their bases are the legal keys. A test holds
this reading against ``dataclasses.fields``.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

# Where a class lives when the importing file names only a package with a lazy __init__.
_HOMES = {
    ("trl", "GRPOConfig"): "trl.trainer.grpo_config",
    ("transformers", "TrainingArguments"): "transformers.training_args",
    ("peft", "LoraConfig"): "peft.tuners.lora.config",
}


class Field(NamedTuple):
    """One dataclass field as its source shows it.

    Attributes:
        annotation: the annotation as text, for example ``"float | None"``.
        default: the default if it is a literal, else ``UNKNOWN``.
    """

    annotation: str
    default: Any


UNKNOWN = object()  # a default that is no literal (a factory, a call, a name)


class SourceNotFoundError(Exception):
    """The class cannot be read from source; the caller imports it instead."""


def trainer_fields() -> dict[str, Field]:
    """Return {name: Field} of ``GroupRelativeConfig``, TRL's and transformers' fields included."""
    return _fields_or_import("trl_grpo_ext.config", "GroupRelativeConfig")


def lora_fields() -> dict[str, Field]:
    """Return {name: Field} of ``peft.LoraConfig``."""
    return _fields_or_import("peft.tuners.lora.config", "LoraConfig")


@functools.cache
def _fields_or_import(module: str, name: str) -> dict[str, Field]:
    try:
        return class_fields(module, name)
    except (SourceNotFoundError, SyntaxError, OSError):
        import dataclasses

        found = getattr(importlib.import_module(module), name)
        return {
            field.name: Field(str(field.type), UNKNOWN if field.default is dataclasses.MISSING else field.default)
            for field in dataclasses.fields(found)
            if field.init
        }


def class_fields(module: str, name: str) -> dict[str, Field]:
    """Return the init fields of the dataclass ``module.name`` and of its bases, bases first.

    Raises:
        SourceNotFoundError: if a module or a base class cannot be followed in source.
    """
    tree = _parse(module)
    node = next((item for item in tree.body if isinstance(item, ast.ClassDef) and item.name == name), None)
    if node is None:
        return class_fields(*_imported_from(tree, module, name))
    fields: dict[str, Field] = {}
    for base in reversed(node.bases):
        if isinstance(base, ast.Name) and base.id not in ("object", "Protocol"):
            fields.update(class_fields(module, base.id))
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        annotation = ast.unparse(item.annotation)
        if annotation.startswith(("ClassVar", "typing.ClassVar")) or _is_not_init(item.value):
            fields.pop(item.target.id, None)
            continue
        fields[item.target.id] = Field(annotation, _default(item.value))
    return fields


@functools.cache
def _parse(module: str) -> ast.Module:
    return ast.parse(module_path(module).read_text(encoding="utf-8"))


def module_path(module: str) -> Path:
    """Return the source file of a module, found without importing it or the packages it is in.

    Raises:
        SourceNotFoundError: if there is no such source file.
    """
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    roots = list(spec.submodule_search_locations or []) if spec else []
    for root in roots:
        path = Path(root).joinpath(*rest)
        for candidate in (path.with_suffix(".py") if rest else path / "__init__.py", path / "__init__.py"):
            if candidate.is_file():
                return candidate
    raise SourceNotFoundError(module)


def _imported_from(tree: ast.Module, module: str, name: str) -> tuple[str, str]:
    """Return (module, original name) of an imported name; relative imports are resolved."""
    for item in ast.walk(tree):
        if not isinstance(item, ast.ImportFrom):
            continue
        for alias in item.names:
            if (alias.asname or alias.name) != name:
                continue
            source = item.module or ""
            if item.level:
                parts = module.split(".")
                if module_path(module).name != "__init__.py":
                    parts = parts[:-1]
                parts = parts[: len(parts) - (item.level - 1)]
                source = ".".join([*parts, source] if source else parts)
            return _HOMES.get((source, alias.name), source), alias.name
    raise SourceNotFoundError(f"{module}.{name}")


def _is_not_init(value: ast.expr | None) -> bool:
    """Return whether the assigned value is ``field(init=False, ...)``."""
    return isinstance(value, ast.Call) and any(
        keyword.arg == "init" and isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        for keyword in value.keywords
    )


def _default(value: ast.expr | None) -> Any:
    """Return the literal default of ``name: T = default`` or ``name: T = field(default=...)``."""
    if isinstance(value, ast.Call):
        value = next((keyword.value for keyword in value.keywords if keyword.arg == "default"), None)
    if value is None:
        return UNKNOWN
    try:
        return ast.literal_eval(value)
    except ValueError:
        return UNKNOWN


# Annotations that a YAML value can be checked against. Everything else is left to the class itself.
_PLAIN: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "dict": (dict,),
    "list": (list,),
    "None": (type(None),),
}


def allowed_types(annotation: str) -> tuple[type, ...] | None:
    """Return the Python types that an annotation admits, or None if it cannot be judged.

    ``"float | None"`` gives (int, float, NoneType); ``"Optional[int]"`` likewise; ``"IntervalStrategy | str"`` None.
    """
    text = annotation.strip()
    for prefix in ("Optional[", "typing.Optional["):
        if text.startswith(prefix) and text.endswith("]"):
            inner = allowed_types(text[len(prefix) : -1])
            return None if inner is None else (*inner, type(None))
    types: list[type] = []
    for arm in _split_union(text):
        name = arm.split("[", 1)[0].strip().lower() if arm[:4].lower() in ("dict", "list") else arm
        if name not in _PLAIN:
            return None
        types.extend(_PLAIN[name])
    return tuple(dict.fromkeys(types))


def _split_union(text: str) -> list[str]:
    """Split ``A | B[C | D]`` at the top-level bars."""
    arms, depth, current = [], 0, ""
    for char in text:
        depth += (char == "[") - (char == "]")
        if char == "|" and depth == 0:
            arms.append(current.strip())
            current = ""
        else:
            current += char
    return [*arms, current.strip()]


def fits(value: Any, annotation: str) -> bool:
    """Return whether a YAML value may be given to a field; True where the annotation cannot be judged.

    A bool is not an int here (``per_device_train_batch_size: true`` is a slip), and a field that takes a float takes an
    int.
    """
    types = allowed_types(annotation)
    if types is None:
        return True
    if isinstance(value, bool):
        return bool in types
    return isinstance(value, types)
