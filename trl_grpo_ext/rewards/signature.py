"""How a reward wants to be called, read from its signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from trl_grpo_ext.rewards.verifier import VerifierReward


class Accepted(NamedTuple):
    """Keywords that a reward takes.

    Attributes:
        everything: it has ``**kwargs``, or its signature cannot be read.
        names: the keywords it names.
    """

    everything: bool
    names: frozenset[str]

    def takes(self, name: str) -> bool:
        """Return whether the keyword may be passed."""
        return self.everything or name in self.names


def accepted_keywords(function: Callable[..., Any]) -> Accepted:
    """Return the keywords of a reward; of a verifier, its columns and the facts of a row that it names."""
    if isinstance(function, VerifierReward):
        facts = {"prompt": "prompts", "completion_ids": "completion_ids"}
        named = {facts[fact] for fact in function.row_facts if fact in facts}
        return Accepted(False, frozenset({"completions", *named, *function.columns, *function.optional_columns}))
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return Accepted(True, frozenset())
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return Accepted(everything, frozenset(parameter.name for parameter in parameters if parameter.kind in by_name))


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calling it returns a coroutine; partials and objects with an async ``__call__`` included."""
    while isinstance(function, functools.partial):
        function = function.func
    call = getattr(type(function), "__call__", None)  # noqa: B004 - the method itself is wanted, not whether it exists
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def is_per_sample(function: Callable[..., Any]) -> bool:
    """Return whether a sample's reward depends on that sample alone, so that a batch may be split and cached.

    Verifiers say so; any other reward can by an attribute ``per_sample = True`` or ``deterministic = True``.
    """
    return _declared(function, "per_sample") is True or is_deterministic(function)


def is_deterministic(function: Callable[..., Any]) -> bool:
    """Return whether the same sample always gets the same score: the attribute ``deterministic``."""
    return _declared(function, "deterministic") is True


def needs_whole_batch(function: Callable[..., Any]) -> bool:
    """Return whether a reward forbids scoring its samples one at a time: the attribute ``per_sample = False``."""
    return _declared(function, "per_sample") is False


def _declared(function: Callable[..., Any], name: str) -> Any:
    """Return an attribute of the function, or of what a partial wraps; None if nobody has set it."""
    while isinstance(function, functools.partial) and not hasattr(function, name):
        function = function.func
    return getattr(function, name, None)
