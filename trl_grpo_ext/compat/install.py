"""Put the PPO names back where TRL had them, on request."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

# Where each name could be imported from in some version of TRL.
_PLACES: dict[str, tuple[str, ...]] = {
    "PPOConfig": ("trl", "trl.trainer", "trl.trainer.ppo_config", "trl.experimental.ppo"),
    "PPOTrainer": ("trl", "trl.trainer", "trl.trainer.ppo_trainer", "trl.experimental.ppo"),
    "PPOv2Config": ("trl", "trl.trainer", "trl.trainer.ppov2_config"),
    "PPOv2Trainer": ("trl", "trl.trainer", "trl.trainer.ppov2_trainer"),
    "AutoModelForCausalLMWithValueHead": ("trl", "trl.models", "trl.experimental.ppo"),
    "AutoModelForSeq2SeqLMWithValueHead": ("trl", "trl.models", "trl.experimental.ppo"),
    "create_reference_model": ("trl", "trl.models"),
    "set_seed": ("trl", "trl.core"),
    "LengthSampler": ("trl.core",),
    "respond_to_batch": ("trl.core",),
    "get_kbit_device_map": ("trl", "trl.trainer.utils"),
    "SIMPLE_CHAT_TEMPLATE": ("trl.trainer.utils",),
}

# TRL still has these, deprecated, and without knowing the value-head wrapper.
_REPLACED = frozenset({"create_reference_model"})


def install() -> Callable[[], None]:
    """Make ``from trl import PPOTrainer`` and the other old imports work in this process.

    Names that the installed TRL still has are left alone, except its own deprecated ``create_reference_model``.

    Returns:
        A function that undoes it.
    """
    import trl  # noqa: F401 (must exist before names are put into it)

    from trl_grpo_ext.compat import ppo

    undo: list[Callable[[], None]] = []
    for name, places in _PLACES.items():
        for place in places:
            module = _module(place, undo)
            if not hasattr(module, name) or name in _REPLACED:
                _put(module, name, getattr(ppo, name), undo)

    def uninstall() -> None:
        for step in reversed(undo):
            step()
        undo.clear()

    return uninstall


def _module(name: str, undo: list[Callable[[], None]]) -> types.ModuleType:
    """Return module ``name``, made if TRL has none."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        module = types.ModuleType(name, "Made by trl_grpo_ext.compat.ppo.install().")
        sys.modules[name] = module
        undo.append(functools.partial(_forget, name))
        parent, _, child = name.rpartition(".")
        _put(importlib.import_module(parent), child, module, undo)
        return module


def _put(module: types.ModuleType, name: str, value: Any, undo: list[Callable[[], None]]) -> None:
    missing = object()
    before = vars(module).get(name, missing)
    setattr(module, name, value)

    def restore() -> None:
        if before is missing:
            delattr(module, name)
        else:
            setattr(module, name, before)

    undo.append(restore)


def _forget(name: str) -> None:
    sys.modules.pop(name, None)
