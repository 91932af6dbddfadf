"""Count every storage that PyTorch makes and frees, real or fake.

A storage is counted once however many tensors view it, from the operation that first returns it until its last
reference is gone. So views, in-place operations and ties cost nothing, and memory that autograd keeps is seen although
no Python variable names it. Memory that an operation allocates and frees inside itself is not seen.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trl_grpo_ext.memory.trace import Event, Trace


class StorageTracker(TorchDispatchMode):
    """Record allocations and releases while it is entered; enter it after a ``FakeTensorMode``, if there is one.

    Attributes:
        trace: What happened so far.
        num_bytes: Bytes allocated now.
        num_operations: Operations seen.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # PyTorch would wrap every call in one that switches the compiler off, which costs more than the rest.
        return False

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()
        self.num_bytes = 0
        self.num_operations = 0
        self._phase = "start"
        self._next_block = 0
        # A storage's Python object lives as long as the storage, so its identity is the storage's while it is here.
        self._alive: dict[int, tuple[int, int, Any]] = {}
        self._is_closed = False

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what happens inside; phases of one name are counted together."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def track(self, tensors: Iterable[torch.Tensor | None], category: str) -> None:
        """Count tensors that exist already, and say what they and any counted ones hold; None is skipped."""
        for tensor in tensors:
            if tensor is None:
                continue
            block = self._note(tensor.untyped_storage(), "given")
            if block is not None:
                self.trace.categories[block] = category

    def allocate(self, num_bytes: int, category: str) -> int:
        """Add a block that no tensor stands for, such as a library's workspace; return its number."""
        block = self._start_block(num_bytes, category)
        self.trace.categories[block] = category
        return block

    def release(self, block: int, num_bytes: int) -> None:
        """Take a block of :meth:`allocate` away again."""
        self._end_block(block, num_bytes)

    def close(self) -> None:
        """Stop recording; what is freed later leaves no trace."""
        self._is_closed = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Questions about a tensor, such as its device, come through here too when it is fake: most calls are of them.
        if func.namespace == "prim":
            return result
        self.num_operations += 1
        name = func.__name__
        self._note_tensors(result, name)
        # Inputs that no operation made, such as indices that came from NumPy, are memory too.
        for value in args:
            self._note_tensors(value, name)
        if kwargs:
            for value in kwargs.values():
                self._note_tensors(value, name)
        return result

    def _note_tensors(self, value: Any, origin: str) -> None:
        if isinstance(value, torch.Tensor):
            self._note(value.untyped_storage(), origin)
        elif isinstance(value, list | tuple):
            for item in value:
                self._note_tensors(item, origin)

    def _note(self, storage: Any, origin: str) -> int | None:
        """Count a storage that is new, or that changed its size; return its block, or None for an empty one."""
        key, size = id(storage), storage.nbytes()
        known = self._alive.get(key)
        if known is not None:
            block, old_size, reference = known
            if size == old_size:
                return block
            # Resized in place: to an allocator, the old block goes and another one comes.
            self._end_block(block, old_size)
            category = self.trace.categories.get(block)
            block = self._start_block(size, origin)
            if category is not None:
                self.trace.categories[block] = category
            self._alive[key] = (block, size, reference)
            return block
        if size == 0:
            return None
        block = self._start_block(size, origin)
        self._alive[key] = (block, size, weakref.ref(storage, lambda _: self._forget(key)))
        return block

    def _forget(self, key: int) -> None:
        block, size, _ = self._alive.pop(key)
        self._end_block(block, size)

    def _start_block(self, num_bytes: int, origin: str) -> int:
        block = self._next_block
        self._next_block += 1
        if not self._is_closed:
            self.num_bytes += num_bytes
            self.trace.events.append(Event(block, num_bytes, self._phase))
            self.trace.origins[block] = origin
        return block

    def _end_block(self, block: int, num_bytes: int) -> None:
        if not self._is_closed:
            self.num_bytes -= num_bytes
            self.trace.events.append(Event(block, -num_bytes, self._phase))
