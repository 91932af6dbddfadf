"""Finds what a reward function changes outside itself, because in a worker process nobody else would see the change.

A look at the bytecode of the function itself, not of what it calls: assignments to globals, to variables of an
enclosing function and to attributes of its own object, and calls such as ``history.append(…)`` on shared containers.
"""

from __future__ import annotations

import collections
import dis
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

_CONTAINERS = (list, dict, set, bytearray, collections.deque)
_CHANGERS = frozenset(
    "add append appendleft clear discard extend insert pop popitem remove setdefault update".split()  # noqa: SIM905
)


def outside_changes(function: Callable[..., Any]) -> list[str]:
    """Return what the function changes outside itself, such as "global counter"; an empty list if nothing is seen."""
    while isinstance(function, functools.partial):
        function = function.func
    call: Any = function
    if not isinstance(function, (types.FunctionType, types.MethodType)):
        call = getattr(type(function), "__call__", None)  # noqa: B004 - the method itself is wanted
    bound = isinstance(function, types.MethodType) or call is not function
    call = getattr(call, "__func__", call)
    if not isinstance(call, types.FunctionType):
        return []
    own = call.__code__.co_varnames[0] if bound and call.__code__.co_argcount else None
    return list(dict.fromkeys(_changes(call, call.__code__, own)))


def _changes(function: types.FunctionType, code: types.CodeType, own: str | None) -> Iterator[str]:
    outer = function.__code__.co_freevars
    instructions = list(dis.get_instructions(code))
    augmented: set[str] = set()  # attributes of the own object that are loaded to be stored again
    for position, instruction in enumerate(instructions):
        before = instructions[position - 1] if position else None
        name = instruction.argval
        if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            yield f"global {name}"
        elif instruction.opname == "STORE_DEREF" and name in outer:
            yield f"nonlocal {name}"
        elif before is None:
            continue
        elif instruction.opname == "STORE_ATTR" and own is not None and (name in augmented or _loads(before, own)):
            yield f"{own}.{name}"
        elif instruction.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            if before.opname in ("COPY", "DUP_TOP") and own is not None and _loads(instructions[position - 2], own):
                augmented.add(name)
            value = _outside_value(function, before) if name in _CHANGERS else None
            if isinstance(value, _CONTAINERS):
                yield f"{before.argval}.{name}()"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _changes(function, constant, own)


def _loads(instruction: dis.Instruction, name: str) -> bool:
    """Return whether the instruction pushes the local variable last; newer Pythons push two with one instruction."""
    if not instruction.opname.startswith("LOAD_FAST"):
        return False
    value = instruction.argval
    return value == name or (isinstance(value, tuple) and value[-1] == name)


def _outside_value(function: types.FunctionType, instruction: dis.Instruction) -> Any:
    """Return the global or enclosing variable that the instruction pushes, or None."""
    name = instruction.argval
    if instruction.opname == "LOAD_GLOBAL":
        return function.__globals__.get(name)
    if instruction.opname == "LOAD_DEREF" and name in function.__code__.co_freevars and function.__closure__:
        try:
            return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents
        except ValueError:  # not assigned yet
            return None
    return None
