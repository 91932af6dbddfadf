"""Tell what a user wrote into a configuration from what it says by default; any dataclass of settings will do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


def written_settings(args: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return those of the settings ``names`` that the user wrote, with their values.

    Written is what was passed to the constructor, and what differs from its default (assigned later, or passed to a
    plain ``trl.GRPOConfig``, which does not say).
    """
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    passed: frozenset[str] = getattr(args, "_written", frozenset())
    return {
        name: getattr(args, name)
        for name in names
        if hasattr(args, name) and (name in passed or getattr(args, name) != defaults.get(name))
    }
