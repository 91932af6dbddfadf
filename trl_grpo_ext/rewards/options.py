"""Checks of reward options: names against what a verifier has, values against simple annotations."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, Literal, Union

from trl_grpo_ext.errors import ConfigurationError, nearest

# Keys of a recipe entry that belong to the reward's place in the run and not to the verifier.
RESERVED_OPTIONS = ("weight", "name", "reference", "columns")


def option_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the resolved annotations of a function, or nothing where they cannot be resolved."""
    try:
        return typing.get_type_hints(function)
    except Exception:  # a name that exists for the type checker only: then values go unchecked
        return {}


def check_option_names(name: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigurationError for an option that the verifier ``name`` does not have."""
    known = list(known)
    for key in options:
        if key in ("prompts", "completions"):
            raise ConfigurationError(
                f"reward {name!r} is a class of rewards; call it first, for example {name}(), and pass what it returns"
            )
        if key not in known:
            choices = sorted([*known, *RESERVED_OPTIONS])
            raise ConfigurationError(
                f"reward {name!r} has no option {key!r}; it has {', '.join(choices)}.{nearest(key, choices)}"
            )


def check_option_value(name: str, key: str, value: Any, hint: Any) -> None:
    """Raise ConfigurationError where a value does not fit a simple annotation; other annotations are not checked."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        arms = typing.get_args(hint)
        if any(_fits(value, arm) is not False for arm in arms):
            return
    elif _fits(value, hint) is not False:
        return
    raise ConfigurationError(
        f"reward {name!r}: {key}={value!r} ({type(value).__name__}) is not allowed; it must be {_hint_text(hint)}"
    )


def _fits(value: Any, hint: Any) -> bool | None:
    """Return whether the value fits, or None where the annotation is not one that can be checked."""
    if typing.get_origin(hint) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(hint))
    if hint is type(None):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str)
    return None


def _hint_text(hint: Any) -> str:
    if typing.get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_hint_text(arm) for arm in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(hint))
    return "None" if hint is type(None) else getattr(hint, "__name__", str(hint))
