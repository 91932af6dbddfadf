"""Run PyTorch code without computing: tensors have shapes and storages, and nobody writes to them.

Floating-point operations return uninitialised CPU tensors of the right shape, whose pages the system never hands out
because nothing touches them: a 70B model costs address space only. Integers and booleans that follow from known ones
(positions, masks, indices) are computed, so that code which looks at them takes its ordinary way.

PyTorch's own ``FakeTensorMode`` does a similar job, slower (each question for a tensor's device is a Python call) and
not to the byte: it decomposes some operations that a real run does not.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Above so many elements even integers are left uncomputed.
_MAX_COMPUTED_ELEMENTS = 2**24

_aten = torch.ops.aten
# They share their input's storage although their schema does not say so.
_UNDECLARED_VIEWS = {_aten._unsafe_view.default, _aten.lift.default, _aten.lift_fresh.default}
# They change sizes or storages, which costs nothing to do for real.
_RESHAPING = {_aten.resize_.default, _aten.set_.source_Tensor, _aten.set_.source_Storage}
_READING = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default, _aten.nonzero.default}
# Methods that read a CPU tensor without asking a mode.
_READERS = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__")


class DataDependentError(RuntimeError):
    """Code under simulation asked for a number that only a real run knows."""


class HollowMode(TorchDispatchMode):
    """Make operations allocate what they would, and nothing else. Enter it before the tracker."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # PyTorch would wrap every call in one that switches the compiler off, which costs more than the rest.
        return False

    def __init__(self) -> None:
        super().__init__()
        self._specs: dict[Any, Any] = {}
        # Storages of integers whose values are not known, by identity.
        self._unknown: dict[int, Any] = {}

    def __enter__(self) -> HollowMode:
        super().__enter__()
        self._replaced = {name: torch.Tensor.__dict__.get(name) for name in _READERS}
        for name in _READERS:
            setattr(torch.Tensor, name, self._guarded(name, getattr(torch.Tensor, name)))
        return self

    def __exit__(self, *error: Any) -> None:
        for name, original in self._replaced.items():
            if original is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, original)
        super().__exit__(*error)

    def _guarded(self, name: str, read: Any) -> Any:
        @functools.wraps(read)
        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._is_known(tensor):
                raise DataDependentError(f"Tensor.{name} reads values, which a simulation does not have")
            return read(tensor, *args, **kwargs)

        return method

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _kind_of(func)
        if kind == "view":
            return func(*args, **kwargs)
        tensors = [value for value in _flatten((*args, *kwargs.values())) if isinstance(value, torch.Tensor)]
        is_known = all(self._is_known(tensor) for tensor in tensors)
        if func in _READING:
            if not is_known:
                raise DataDependentError(f"{func} reads values, which a simulation does not have")
            return func(*args, **kwargs)
        if kind == "mutates":
            if is_known and tensors and _is_small(tensors):
                return func(*args, **kwargs)
            return self._leave(func, args, kwargs)
        specs = self._specs_of(func, args, kwargs)
        leaves = [spec for spec in _flatten(specs) if isinstance(spec, _Spec)]
        if is_known and all(not s.dtype.is_floating_point and s.numel <= _MAX_COMPUTED_ELEMENTS for s in leaves):
            return func(*args, **kwargs)
        return _rebuild(specs, self._make)

    def _make(self, spec: _Spec) -> torch.Tensor:
        tensor = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype)
        if not spec.dtype.is_floating_point:
            storage = tensor.untyped_storage()
            key = id(storage)
            self._unknown[key] = weakref.ref(storage, lambda _: self._unknown.pop(key))
        return tensor

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return not tensor.dtype.is_floating_point and id(tensor.untyped_storage()) not in self._unknown

    def _leave(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operation that changes its arguments would return, without doing it."""
        values = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        values.update(kwargs)
        returned = []
        for result in func._schema.returns:
            aliases = result.alias_info.before_set if result.alias_info is not None else set()
            returned.append(
                next(
                    values[argument.name]
                    for argument in func._schema.arguments
                    if argument.alias_info is not None and argument.alias_info.before_set & aliases
                )
            )
        if not returned:
            return None
        return returned[0] if len(returned) == 1 else tuple(returned)

    def _specs_of(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the shapes of an operation's results, found once on the meta device."""
        key = (func, _key(args), _key(tuple(kwargs.items())))
        found = self._specs.get(key)
        if found is None:
            moved = {name: "meta" if name == "device" else _to_meta(value) for name, value in kwargs.items()}
            if "pin_memory" in moved:
                moved["pin_memory"] = None
            if not any(isinstance(value, torch.Tensor) for value in _flatten((*args, *kwargs.values()))):
                moved["device"] = "meta"
            found = _rebuild_tensors(func(*_to_meta(args), **moved))
            self._specs[key] = found
        return found


class _Spec:
    """Shape, strides and dtype of a tensor to be made."""

    __slots__ = ("dtype", "numel", "size", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.size, self.stride, self.dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
        self.numel = tensor.numel()


_kinds: dict[Any, str] = {}


def _kind_of(func: Any) -> str:
    kind = _kinds.get(func)
    if kind is None:
        schema = func._schema
        aliases = [r.alias_info for r in schema.returns if r.alias_info is not None]
        if not any("Tensor" in str(r.type) for r in schema.returns) and not schema.is_mutable:
            kind = "view"  # a question, or a mark for the profiler
        elif func in _UNDECLARED_VIEWS or func in _RESHAPING or (aliases and not any(a.is_write for a in aliases)):
            kind = "view"
        elif schema.is_mutable:
            kind = "mutates"
        else:
            kind = "makes"
        _kinds[func] = kind
    return kind


def _is_small(tensors: list[torch.Tensor]) -> bool:
    return all(tensor.numel() <= _MAX_COMPUTED_ELEMENTS for tensor in tensors)


def _flatten(values: Any) -> list[Any]:
    if not isinstance(values, list | tuple):
        return [values]
    flat = []
    for value in values:
        if isinstance(value, list | tuple):
            flat.extend(_flatten(value))
        else:
            flat.append(value)
    return flat


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return tuple([_key(item) for item in value])
    # 1, 1.0 and True are equal, and lead to different dtypes.
    return (type(value), value)


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, list | tuple):
        return [_to_meta(item) for item in value] if isinstance(value, list) else tuple(map(_to_meta, value))
    return value


def _rebuild_tensors(value: Any) -> Any:
    """Return a result with a spec in the place of every tensor."""
    if isinstance(value, torch.Tensor):
        return _Spec(value)
    if isinstance(value, list | tuple):
        return type(value)([_rebuild_tensors(item) for item in value])
    return value


def _rebuild(value: Any, make: Any) -> Any:
    """Return a result with a tensor in the place of every spec."""
    if isinstance(value, _Spec):
        return make(value)
    if isinstance(value, list | tuple):
        return type(value)([_rebuild(item, make) for item in value])
    return value
