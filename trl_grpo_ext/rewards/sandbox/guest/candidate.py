"""What runs in a program's own process: the program as a script, or as a library whose functions the judge calls.

Nothing here is trusted by anybody: the program can rewrite all of it. It only makes honest programs work.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import io
import os
import random
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from typing import Any

from . import codec

CHANNEL = 3  # the descriptor that leads to the judge or the client
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "abs", "len", "str", "repr")


def fresh_streams(encoding: str = "utf-8") -> None:
    """Give the process standard streams of its own on descriptors 0 to 2."""
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, "r", closefd=False)), encoding, "surrogateescape")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding, "surrogateescape")
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(2, "w", closefd=False)), encoding, "backslashreplace", line_buffering=True
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def _module(name: str) -> types.ModuleType:
    """Return a new module under a name, so that dataclasses, pickle and typing find it."""
    module = types.ModuleType(name)
    module.__dict__["__builtins__"] = builtins
    sys.modules[name] = module
    return module


def describe(error: BaseException) -> list[Any]:
    """Return [nearest built-in type, own type, message, line] of an exception, all short."""
    builtin = next((base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins"), "Exception")
    try:
        message = str(error)[:300]
    except BaseException:
        message = ""
    line = error.lineno if isinstance(error, SyntaxError) else None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == "<program>":
            line = frame.lineno
    return [builtin, str(type(error).__name__)[:100], message, line if type(line) is int else 0]


def _compile(source: str) -> types.CodeType:
    return compile(source, "<program>", "exec", dont_inherit=True)


def run_script(source: str) -> None:
    """Run a program as ``__main__`` with its own standard streams, and end the process as the interpreter would."""
    fresh_streams()
    random.seed(0)  # the same program gets the same verdict
    code, report = 0, None
    module = _module("__main__")
    try:
        exec(_compile(source), module.__dict__)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        code, report = 1, describe(error)
        with contextlib.suppress(BaseException):
            trace = error.__traceback__
            traceback.print_exception(type(error), error, trace.tb_next if trace else None, limit=20)
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # wait for threads, as the interpreter does
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    if report is not None:
        with contextlib.suppress(BaseException):
            codec.send(CHANNEL, report)
    os._exit(code & 0xFF)


class _Objects:
    """Objects of the program that the judge holds handles to."""

    def __init__(self) -> None:
        self._by_id: dict[int, Any] = {}
        self._next = 0

    def keep(self, value: Any) -> list[Any]:
        self._next += 1
        self._by_id[self._next] = value
        kind = "iterator" if isinstance(value, Iterator) else "callable" if callable(value) else "object"
        return ["h", self._next, type(value).__name__[:100], kind]

    def get(self, number: int, *_: str) -> Any:
        return self._by_id[number]


class _Server:
    """Answers the judge's requests one after another."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._objects = _Objects()
        self._encoder = codec.Encoder(self._objects.keep)
        self._decoder = codec.Decoder(self._objects.get)

    def serve(self) -> None:
        while True:
            request = codec.receive(CHANNEL)
            try:
                reply = ["ok", self._encoder.encode(self._answer(*request))]
            except StopIteration:
                reply = ["stop"]
            except codec.OpaqueError as error:
                reply = ["opaque", str(error)[:200]]
            except BaseException as error:
                reply = ["raise", *describe(error)]
            try:
                codec.send(CHANNEL, reply)
            except codec.OpaqueError as error:
                codec.send(CHANNEL, ["opaque", str(error)])

    def _answer(self, operation: str, target: Any, *rest: Any) -> Any:
        if operation == "name":
            return self._lookup(target)
        subject = self._lookup(target) if type(target) is str else self._decoder.decode(target)
        values = [self._decoder.decode(item) for item in rest]
        if operation == "call":
            return subject(*values[0], **values[1])
        if operation == "method":  # a fresh instance for each call, as LeetCode's judge makes one
            return getattr(subject(), values[0])(*values[1], **values[2])
        if operation == "attr":
            return getattr(subject, values[0])
        if operation == "setattr":
            return setattr(subject, values[0], values[1])
        if operation == "iter":
            return iter(subject)
        if operation == "next":
            return next(subject)
        if operation == "item":
            return subject[values[0]]
        if operation == "setitem":
            subject[values[0]] = values[1]
            return None
        if operation == "contains":
            return values[0] in subject
        if operation in _OPERATORS:
            import operator

            function = getattr(builtins, operation, None) or getattr(operator, operation)
            return function(subject, *values)
        raise codec.ProtocolError(operation)

    def _lookup(self, name: str) -> Any:
        if name in self._namespace:
            return self._namespace[name]
        raise NameError(f"name {name!r} is not defined")


def serve_calls(source: str) -> None:
    """Load a program as a module and answer the judge until it hangs up."""
    random.seed(0)
    # Not "__main__": a guarded main program must not run. Standard streams lead nowhere.
    fresh_streams()
    module = _module("solution")
    try:
        exec(_compile(source), module.__dict__)
        hello: list[Any] = ["ready"]
    except BaseException as error:
        hello = ["failed", *describe(error)]
    with contextlib.suppress(codec.ClosedError):
        codec.send(CHANNEL, hello)
        if hello[0] == "ready":
            _Server(module.__dict__).serve()
    os._exit(0)
