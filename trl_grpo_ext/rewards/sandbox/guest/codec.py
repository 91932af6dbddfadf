"""The private channel between a program and its judge: length-prefixed frames of tagged JSON.

Only exact built-in values come out of a :class:`Decoder`: whatever a program's objects claim about themselves (an
``__eq__`` that is always true, a subclass of ``int``), the judge compares plain values. There is no pickle. Sizes,
depth and the number of nodes are limited on both sides; floats travel as hexadecimal text, so nothing is rounded.

    None, bool, str      themselves           ["l"|"t"|"s"|"z"|"q", ...]   list, tuple, set, frozenset, deque
    int                  number or ["i", hex]  ["d", [key, value], ...]     dict
    float                ["f", hex]            ["b"|"B", hex]               bytes, bytearray
    complex              ["c", hex, hex]       ["r", start, stop, step]     range
    Decimal, Fraction    ["D", text], ["Q", n, d]   date, time, datetime, timedelta   ["T", kind, ...integers]
    anything else        ["h", id, type name, kind]  a handle: the object stays where it is
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import json
import os
import struct
from collections.abc import Callable
from typing import Any

MAX_FRAME_BYTES = 4 << 20
MAX_DEPTH = 64
MAX_NODES = 1_000_000
_SMALL_INT = 1 << 53
_HEADER = struct.Struct(">I")
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "l": list,
    "t": tuple,
    "s": set,
    "z": frozenset,
    "q": collections.deque,
}
_dumps = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"), check_circular=False).encode


class ProtocolError(Exception):
    """A frame that no honest peer sends: too large, too deep, unknown tag, or cut off."""


class OpaqueError(Exception):
    """A value that cannot travel."""


class ClosedError(Exception):
    """The peer is gone."""


class Encoder:
    """Turns values into tagged JSON.

    Args:
        handle: called with a value that is no built-in one; returns what stands for it, or raises :class:`OpaqueError`.
    """

    def __init__(self, handle: Callable[[Any], list[Any]]) -> None:
        self._handle = handle
        self._nodes = 0

    def encode(self, value: Any) -> Any:
        """Return the tagged form of one value.

        Raises:
            OpaqueError: if it is too large, too deep, or of a kind that cannot travel.
        """
        self._nodes = 0
        return self._encode(value, 0)

    def _encode(self, value: Any, depth: int) -> Any:
        self._nodes += 1
        if depth > MAX_DEPTH or self._nodes > MAX_NODES:
            raise OpaqueError("the value is nested too deeply" if depth > MAX_DEPTH else "the value has too many parts")
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if -_SMALL_INT < value < _SMALL_INT else ["i", hex(value)]
        if kind is float:
            return ["f", value.hex()]
        if kind is list or kind is tuple:
            return ["l" if kind is list else "t", *[self._encode(item, depth + 1) for item in value]]
        if kind is dict:
            return self._pairs(value.items(), depth)
        return self._encode_rarer(value, kind, depth)

    def _pairs(self, items: Any, depth: int) -> list[Any]:
        return ["d", *[[self._encode(key, depth + 1), self._encode(item, depth + 1)] for key, item in items]]

    def _encode_rarer(self, value: Any, kind: type, depth: int) -> Any:
        for tag, sequence in (("s", set), ("z", frozenset), ("q", collections.deque)):
            if kind is sequence:
                return [tag, *[self._encode(item, depth + 1) for item in value]]
        if kind is bytes or kind is bytearray:
            return ["b" if kind is bytes else "B", value.hex()]
        if kind is complex:
            return ["c", value.real.hex(), value.imag.hex()]
        if kind is range:
            return ["r", *[self._encode(part, depth + 1) for part in (value.start, value.stop, value.step)]]
        if kind is decimal.Decimal:
            return ["D", str(value)]
        if kind is fractions.Fraction:
            return ["Q", self._encode(value.numerator, depth + 1), self._encode(value.denominator, depth + 1)]
        if kind is datetime.datetime and value.tzinfo is None:
            parts = (value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond)
            return ["T", "datetime", *parts]
        if kind is datetime.date:
            return ["T", "date", value.year, value.month, value.day]
        if kind is datetime.time and value.tzinfo is None:
            return ["T", "time", value.hour, value.minute, value.second, value.microsecond]
        if kind is datetime.timedelta:
            return ["T", "timedelta", value.days, value.seconds, value.microseconds]
        if kind in (type({}.keys()), type({}.values()), type({}.items())):
            return self._encode(set(value) if kind is not type({}.values()) else list(value), depth)
        return self._encode_subclass(value, kind, depth)

    def _encode_subclass(self, value: Any, kind: type, depth: int) -> Any:
        """Reduce a subclass of a built-in type to its plain value, through the base class's own methods."""
        if issubclass(kind, dict):
            return self._pairs(dict.items(value), depth)
        if issubclass(kind, int):
            return self._encode(int.__add__(value, 0), depth)
        if issubclass(kind, float):
            return self._encode(float.__add__(value, 0.0), depth)
        if issubclass(kind, str):
            return str.__str__(value)[:] if type(str.__str__(value)) is str else "".join(str.__iter__(value))
        for base in (list, tuple, set, frozenset):
            if issubclass(kind, base):
                return self._encode(base(base.__iter__(value)), depth)
        if kind.__module__ == "numpy":
            if kind.__name__ == "ndarray":
                return self._encode(value.tolist(), depth)
            if hasattr(kind, "item"):
                return self._encode(value.item(), depth)
        return self._handle(value)


class Decoder:
    """Turns tagged JSON into values; everything unknown is refused.

    Args:
        handle: called with (id, type name, kind) of a handle; returns what stands for the object on this side.
    """

    def __init__(self, handle: Callable[[int, str, str], Any]) -> None:
        self._handle = handle

    def decode(self, data: Any) -> Any:
        """Return the value.

        Raises:
            ProtocolError: for anything that :class:`Encoder` does not make.
        """
        try:
            return self._decode(data, 0)
        except ProtocolError:
            raise
        except Exception as error:
            raise ProtocolError(f"malformed value: {type(error).__name__}") from None

    def _decode(self, data: Any, depth: int) -> Any:
        if depth > MAX_DEPTH + 2:
            raise ProtocolError("value nested too deeply")
        kind = type(data)
        if data is None or kind is bool or kind is str or kind is int:
            return data
        if kind is not list or not data or type(data[0]) is not str:
            raise ProtocolError("untagged value")
        tag, rest = data[0], data[1:]
        if tag in _SEQUENCES:
            return _SEQUENCES[tag]([self._decode(item, depth + 1) for item in rest])
        if tag == "d":
            return {self._decode(key, depth + 1): self._decode(item, depth + 1) for key, item in rest}
        if tag == "f":
            return float.fromhex(_text(rest[0]))
        if tag == "i":
            return int(_text(rest[0]), 16)
        if tag in ("b", "B"):
            return (bytes if tag == "b" else bytearray).fromhex(_text(rest[0]))
        if tag == "c":
            return complex(float.fromhex(_text(rest[0])), float.fromhex(_text(rest[1])))
        if tag == "r":
            return range(*[_integer(self._decode(part, depth + 1)) for part in rest])
        if tag == "D":
            return decimal.Decimal(_text(rest[0]))
        if tag == "Q":
            return fractions.Fraction(*[_integer(self._decode(part, depth + 1)) for part in rest])
        if tag == "T":
            makers: dict[str, Any] = {
                "datetime": datetime.datetime,
                "date": datetime.date,
                "time": datetime.time,
                "timedelta": datetime.timedelta,
            }
            return makers[_text(rest[0])](*[_integer(part) for part in rest[1:]])
        if tag == "h":
            return self._handle(_integer(rest[0]), _text(rest[1]), _text(rest[2]))
        raise ProtocolError("unknown tag")


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ProtocolError("text expected")
    return value


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ProtocolError("integer expected")
    return value


def no_handle(value: Any) -> list[Any]:
    """Refuse every value that is no built-in one; for an :class:`Encoder` without handles.

    Raises:
        OpaqueError: always.
    """
    raise OpaqueError(f"a value of type {type(value).__name__} cannot be passed")


def _refuse_number(text: str) -> Any:
    raise ProtocolError("a float or constant must be tagged")


def _bounded_int(text: str) -> int:
    if len(text) > 20:
        raise ProtocolError("a large integer must be tagged")
    return int(text)


def dumps(message: Any) -> bytes:
    """Return a message of JSON values (already encoded) as bytes.

    Raises:
        OpaqueError: if it exceeds the frame size.
    """
    body = _dumps(message).encode("ascii")
    if len(body) > MAX_FRAME_BYTES:
        raise OpaqueError("the value is too large")
    return body


def loads(body: bytes) -> Any:
    """Return the JSON value of a frame.

    Raises:
        ProtocolError: if it is no JSON, has a bare float or a constant such as NaN, or is nested too deeply.
    """
    try:
        return json.loads(
            body.decode("ascii"), parse_float=_refuse_number, parse_constant=_refuse_number, parse_int=_bounded_int
        )
    except (ValueError, RecursionError):
        raise ProtocolError("malformed frame") from None


def send(fd: int, message: Any) -> None:
    """Write one frame.

    Raises:
        OpaqueError: if the message exceeds the frame size; nothing was written.
        ClosedError: if the peer is gone.
    """
    body = dumps(message)
    view = memoryview(_HEADER.pack(len(body)) + body)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except OSError:
        raise ClosedError from None


def receive(fd: int) -> Any:
    """Read one frame.

    Raises:
        ClosedError: if the peer is gone, also in the middle of a frame.
        ProtocolError: if the frame is malformed or larger than allowed.
    """
    (length,) = _HEADER.unpack(_read_exactly(fd, _HEADER.size))
    if length > MAX_FRAME_BYTES:
        raise ProtocolError("frame too large")
    return loads(_read_exactly(fd, length))


def _read_exactly(fd: int, count: int) -> bytes:
    parts = []
    while count:
        try:
            part = os.read(fd, min(count, 1 << 20))
        except OSError:
            raise ClosedError from None
        if not part:
            raise ClosedError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
