"""Rewards by name: what a recipe writes under ``rewards:`` becomes functions with weights, names and columns.

Imports no torch and no TRL, and loads only the verifiers that are named, so that the command line can check a recipe's
reward names and option names in well under a second.
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from trl_grpo_ext.errors import ConfigurationError, nearest
from trl_grpo_ext.rewards.verifier import VerifierReward

ENTRY_POINT_GROUP = "trl_grpo_ext.rewards"

# A module in there is the reward of its name: a verifier of that name, or a function ``build(**options)``.
_BUILT_IN_PACKAGE = "trl_grpo_ext.rewards.verifiers"
_BUILT_IN = {
    module.name: f"{_BUILT_IN_PACKAGE}.{module.name}"
    for module in pkgutil.iter_modules([str(Path(__file__).parent / "verifiers")])
    if not module.name.startswith("_")
}
_REGISTERED: dict[str, Callable[..., Any]] = {}
_BASE_DIR: contextvars.ContextVar[str | Path | None] = contextvars.ContextVar("base_dir", default=None)

# What TRL hands to a reward besides the data set's columns.
CALL_NAMES = (
    "prompts",
    "completions",
    "completion_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
    "environments",
)


class RewardSet(NamedTuple):
    """Rewards ready for the trainer, one entry per reward in the order of the recipe.

    Attributes:
        functions: what TRL takes as ``reward_funcs``: callables, or a string that names a reward model.
        weights: TRL's ``reward_weights``.
        names: distinct display names.
        columns: {name: data-set columns it cannot do without}.
    """

    functions: list[Any]
    weights: list[float]
    names: list[str]
    columns: dict[str, tuple[str, ...]]


def register(name: str, factory: Callable[..., Any]) -> None:
    """Make a reward known by name.

    Args:
        name: the name for recipes; must be free.
        factory: a verifier class, or a callable that takes the options as keywords and returns a reward.

    Raises:
        ConfigurationError: if the name is taken by something else.
    """
    taken = name in _BUILT_IN or _REGISTERED.get(name, factory) is not factory
    if taken or not name or ":" in name:
        raise ConfigurationError(
            f"cannot register a reward as {name!r}: the name is taken, empty or contains ':'. "
            f"Taken: {', '.join(names())}"
        )
    _REGISTERED[name] = factory


def names() -> list[str]:
    """Return every reward name that a recipe can use here, sorted; entry points of other packages included."""
    return sorted({*_BUILT_IN, *_REGISTERED, *_entry_points()})


def build_rewards(spec: str | Mapping[str, Any] | Sequence[Any], *, base_dir: str | Path | None = None) -> RewardSet:
    """Return the rewards that a recipe's ``rewards:`` asks for.

    An entry is a name (``math``), a dotted path (``my_module:my_reward``, ``rewards.py:my_reward``), a mapping from one
    of these to its options (``{math: {tolerance: 1e-6, weight: 0.5}}``), or a callable.

    Args:
        spec: the entries. One entry alone is taken as a list of one.
        base_dir: folder in which modules of dotted paths are looked for first; the working folder if None.

    Raises:
        ConfigurationError: for an unknown name, option, or path, or an empty list.
    """
    entries = [spec] if isinstance(spec, (str, Mapping)) or callable(spec) else list(spec)
    if not entries:
        raise ConfigurationError("rewards: the list is empty; name at least one reward, for example 'rewards: [math]'")
    functions, weights, wanted_names = [], [], []
    # Rewards made of rewards build their parts here as well, and look for modules in the same folder.
    token = _BASE_DIR.set(base_dir if base_dir is not None else _BASE_DIR.get())
    try:
        for entry in entries:
            for target, options in _entry_items(entry):
                weight = _weight(target, options.pop("weight", 1.0))
                display = options.pop("name", None)
                function = build_reward(target, options, base_dir=_BASE_DIR.get())
                if display is not None and hasattr(function, "columns") and not isinstance(target, type):
                    function.__name__ = display  # what it logs itself goes under the name the user gave
                functions.append(function)
                weights.append(weight)
                wanted_names.append(display or reward_name(function))
    finally:
        _BASE_DIR.reset(token)
    distinct = unique_names(wanted_names)
    columns = {name: required_columns(function) for name, function in zip(distinct, functions, strict=True)}
    return RewardSet(functions, weights, distinct, columns)


def build_reward(target: Any, options: Mapping[str, Any] | None = None, *, base_dir: str | Path | None = None) -> Any:
    """Return one reward from a name, a dotted path or a callable, with its options bound.

    Raises:
        ConfigurationError: if there is no such reward or it does not take these options.
    """
    options = dict(options or {})
    if not isinstance(target, str):
        return _bind(target, options, getattr(target, "__name__", type(target).__name__))
    if ":" in target or (target not in names() and "." in target):
        return _bind(_import_path(target, base_dir), options, target)
    if target in _BUILT_IN:
        return _bind(_from_module(target, _BUILT_IN[target]), options, target, factory=True)
    if target in _REGISTERED:
        return _bind(_REGISTERED[target], options, target, factory=True)
    points = _entry_points()
    if target in points:
        return _bind(points[target].load(), options, target, factory=True)
    raise ConfigurationError(
        f"unknown reward {target!r}; known are {', '.join(names())}, or a path like 'my_module:my_reward'."
        + nearest(target, names())
    )


def unique_names(wanted: Sequence[str]) -> list[str]:
    """Return the names with ``_2``, ``_3``, … appended to repeats, never colliding with a name given elsewhere.

    The first bearer keeps the plain name: ["<lambda>", "<lambda>"] gives ["<lambda>", "<lambda>_2"].
    """
    taken, result = set(wanted), []
    seen: set[str] = set()
    for name in wanted:
        if name in seen:
            number = 2
            while f"{name}_{number}" in taken:
                number += 1
            name = f"{name}_{number}"
            taken.add(name)
        seen.add(name)
        result.append(name)
    return result


def reward_name(function: Any) -> str:
    """Return TRL's display name: the wrapped function of a partial, else ``__name__``, else the class's name."""
    if isinstance(function, str):
        return function.rstrip("/").split("/")[-1]
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def required_columns(function: Any) -> tuple[str, ...]:
    """Return the data-set columns that a reward cannot do without.

    A verifier declares them; for any other callable they are its named parameters without a default. A reward model
    and a callable without a readable signature need none.
    """
    declared = getattr(function, "columns", None)
    if isinstance(function, VerifierReward) or (isinstance(declared, tuple) and callable(function)):
        return tuple(declared)  # type: ignore[arg-type]
    if isinstance(function, str) or not callable(function):
        return ()
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(
        parameter.name
        for parameter in parameters
        if parameter.kind in named and parameter.default is parameter.empty and parameter.name not in CALL_NAMES
    )


def _entry_items(entry: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return (target, options) pairs of one entry of the list."""
    if isinstance(entry, Mapping):
        items = []
        for target, options in entry.items():
            if options is not None and not isinstance(options, Mapping):
                raise ConfigurationError(
                    f"rewards: {target!r} is followed by {options!r} ({type(options).__name__}); write its options "
                    f"as a mapping, for example '{target}: {{weight: 0.5}}'"
                )
            items.append((target, dict(options or {})))
        return items
    if isinstance(entry, str) or callable(entry):
        return [(entry, {})]
    raise ConfigurationError(
        f"rewards: an entry is {entry!r} ({type(entry).__name__}); it must be a name, a path, a mapping or a callable"
    )


def _weight(target: Any, weight: Any) -> float:
    if (
        isinstance(weight, bool)
        or not isinstance(weight, (int, float))
        or weight != weight
        or abs(weight) == float("inf")
    ):
        raise ConfigurationError(f"rewards: the weight of {target!r} is {weight!r}; it must be a finite number")
    return float(weight)


@functools.lru_cache(maxsize=1)
def _entry_points() -> dict[str, metadata.EntryPoint]:
    return {point.name: point for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}


def _from_module(name: str, module_name: str) -> Callable[..., Any]:
    """Return the verifier class called ``name`` in the module, or the module's ``build``."""
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        raise ConfigurationError(f"the reward {name!r} is not part of this installation ({module_name})") from error
    for value in vars(module).values():
        if (
            isinstance(value, type)
            and issubclass(value, VerifierReward)
            and getattr(value, "verifier_name", "") == name
        ):
            return value
    if not hasattr(module, "build"):
        raise ConfigurationError(
            f"{module_name} holds neither a verifier named {name!r} nor a function build(**options)"
        )
    return module.build


def _bind(target: Any, options: dict[str, Any], label: str, *, factory: bool = False) -> Any:
    """Return ``target`` with its options: a class or factory is called, a plain function becomes a partial."""
    if isinstance(target, type) or factory:
        if not (isinstance(target, type) and issubclass(target, VerifierReward)):
            _check_keywords(target, options, label)
        return target(**options)
    if not callable(target):
        raise ConfigurationError(f"reward {label!r} is a {type(target).__name__}, not a callable")
    if not options:
        return target
    _check_keywords(target, options, label)
    return functools.partial(target, **options)


def _check_keywords(target: Callable[..., Any], options: Mapping[str, Any], label: str) -> None:
    """Raise ConfigurationError for a keyword that the callable does not take."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    choices = [name for name in parameters if name not in CALL_NAMES]
    for key in options:
        if key not in choices:
            raise ConfigurationError(
                f"reward {label!r} has no option {key!r}; it has {', '.join([*choices, 'weight', 'name'])}."
                + nearest(key, choices)
            )


def _import_path(path: str, base_dir: str | Path | None) -> Any:
    """Return the object at ``module:attribute``, ``file.py:attribute`` or ``module.attribute``."""
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    folder = Path(base_dir) if base_dir is not None else Path.cwd()
    wanted_file: Path | None = None
    if module_name.endswith(".py"):
        wanted_file = (folder / module_name).resolve()
        if not wanted_file.is_file():
            raise ConfigurationError(f"reward {path!r}: there is no file {wanted_file}")
        folder, module_name = wanted_file.parent, wanted_file.stem
    # Workers get the same search path, so the function pickles by reference and stays importable there.
    if str(folder.resolve()) not in [os.path.abspath(entry) for entry in sys.path]:
        sys.path.insert(0, str(folder.resolve()))
        importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise
        raise ConfigurationError(
            f"reward {path!r}: there is no module {module_name!r} on the path or in {folder}"
        ) from error
    if wanted_file is not None and Path(getattr(module, "__file__", None) or "").resolve() != wanted_file:
        raise ConfigurationError(
            f"reward {path!r}: another module called {module_name!r} is already loaded; rename the file"
        )
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(
                f"reward {path!r}: {module_name!r} has no {attribute!r}."
                + nearest(part, [name for name in vars(module) if not name.startswith("_")])
            )
        found = getattr(found, part)
    return found
