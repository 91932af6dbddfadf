"""The judge's view of the program: names, and objects that stay in the program's process.

A proxy can be called, asked for attributes and items, and iterated over; each answer is a plain value or another proxy.
It cannot be compared or used as a truth value: a program could otherwise return an object that equals everything.
"""

from __future__ import annotations

import builtins
from typing import Any

from . import codec

_EXCEPTIONS = {
    name: value
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, Exception) and name not in ("StopIteration", "StopAsyncIteration")
}
_MAX_CALLS = 1_000_000


class CandidateError(Exception):
    """The program raised something that is not an ordinary built-in exception (SystemExit, for example)."""


class CandidateGone(BaseException):
    """The program's process ended, or spoke nonsense. No Exception: a test's ``except Exception`` must not hide it."""


class OpaqueComparison(BaseException):
    """A test compared an object of the program's own making. Not an Exception, for the same reason."""


class Unpassable(BaseException):
    """A test passed an argument that cannot travel: a fault of the test, not of the program."""


class Peer:
    """One program, asked over a channel."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._encoder = codec.Encoder(_own_handle)
        self._decoder = codec.Decoder(self._proxy)
        self.calls = 0

    def hello(self) -> list[Any] | None:
        """Wait until the program is loaded; return None, or what its loading raised (see ``candidate.describe``)."""
        message = self._receive()
        if message == ["ready"]:
            return None
        if type(message) is list and len(message) == 5 and message[0] == "failed":
            return [str(part)[:300] for part in message[1:4]] + [message[4] if type(message[4]) is int else 0]
        raise CandidateGone

    def name(self, name: str) -> Name:
        """Return a proxy for a global name of the program; whether it exists shows when it is used."""
        return Name(self, name)

    def call(self, target: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """Call ``function`` or, with a fresh instance, ``Class.method``."""
        owner, _, method = target.partition(".")
        if method:
            return self.ask("method", owner, method, arguments, keywords)
        return self.ask("call", owner, arguments, keywords)

    def ask(self, operation: str, target: Any, *values: Any) -> Any:
        """Send one request and return the answer.

        Raises:
            Exception: what the program raised, as the nearest built-in exception.
            CandidateGone: if there is no sensible answer.
            Unpassable: if a value cannot be sent.
        """
        self.calls += 1
        if self.calls > _MAX_CALLS:
            raise CandidateGone
        try:
            request = [operation, target, *[self._encoder.encode(value) for value in values]]
            codec.send(self._fd, request)
        except codec.OpaqueError as error:
            raise Unpassable(str(error)) from None
        except codec.ClosedError:
            raise CandidateGone from None
        reply = self._receive()
        if type(reply) is not list or not reply:
            raise CandidateGone
        if reply[0] == "ok" and len(reply) == 2:
            try:
                return self._decoder.decode(reply[1])
            except codec.ProtocolError as error:
                raise OpaqueComparison(str(error)) from None
        if reply == ["stop"]:
            raise StopIteration
        if reply[0] == "opaque":
            raise OpaqueComparison(str(reply[1:])[:200])
        if reply[0] == "raise" and len(reply) == 5:
            raise _rebuilt(reply[1], reply[3], target)
        raise CandidateGone

    def _receive(self) -> Any:
        try:
            return codec.receive(self._fd)
        except (codec.ClosedError, codec.ProtocolError):
            raise CandidateGone from None

    def _proxy(self, number: int, type_name: str, kind: str) -> Proxy:
        return (Iterating if kind == "iterator" else Proxy)(self, ["h", number, type_name[:100], kind])


def _rebuilt(name: Any, message: Any, target: Any) -> Exception:
    """Return the exception that the program raised, as a built-in one marked as coming from it."""
    kind = _EXCEPTIONS.get(name if type(name) is str else "", CandidateError)
    text = message if type(message) is str else ""
    try:
        error = kind(text)
    except TypeError:  # UnicodeDecodeError wants five arguments
        error = ValueError(text)
    error.remote_type = name if type(name) is str else "Exception"  # type: ignore[attr-defined]
    error.missing = text == f"name {target!r} is not defined"  # type: ignore[attr-defined]
    return error


def _own_handle(value: Any) -> Any:
    if isinstance(value, Name):
        peer: Peer = object.__getattribute__(value, "_peer")
        found = peer.ask("name", object.__getattribute__(value, "_target"))
        return codec.Encoder(_own_handle).encode(found)
    if isinstance(value, Proxy):
        return object.__getattribute__(value, "_target")
    if hasattr(type(value), "__next__"):  # map, zip, a generator: what is in it can travel
        return ["l", *[codec.Encoder(codec.no_handle).encode(item) for item in _bounded(value)]]
    raise codec.OpaqueError(f"an argument of type {type(value).__name__} cannot be passed to the program")


def _bounded(iterator: Any) -> list[Any]:
    items = []
    for item in iterator:
        items.append(item)
        if len(items) > 100_000:
            raise codec.OpaqueError("an iterator with more than 100,000 items cannot be passed to the program")
    return items


def _refuse_comparison(self: Any, other: Any) -> Any:
    if self is other:
        return True
    raise OpaqueComparison("the program returned an object of its own class where the test compares a value")


class Proxy:
    """An object in the program's process."""

    __slots__ = ("_peer", "_target")

    def __init__(self, peer: Peer, target: Any) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_target", target)

    def _ask(self, operation: str, *values: Any) -> Any:
        peer: Peer = object.__getattribute__(self, "_peer")
        return peer.ask(operation, object.__getattribute__(self, "_target"), *values)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._ask("call", arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return self._ask("attr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("setitem", key, value)

    def __iter__(self) -> Any:
        found = self._ask("iter")
        return found if isinstance(found, Iterating) else iter(_plain(found, (list, tuple, dict, set, str, range)))

    def __contains__(self, item: Any) -> bool:
        return _plain(self._ask("contains", item), (bool,))

    def __len__(self) -> int:
        return _plain(self._ask("len"), (int,))

    def __str__(self) -> str:
        return _plain(self._ask("str"), (str,))

    def __repr__(self) -> str:
        return _plain(self._ask("repr"), (str,))

    def __add__(self, other: Any) -> Any:
        return self._ask("add", other)

    def __sub__(self, other: Any) -> Any:
        return self._ask("sub", other)

    def __mul__(self, other: Any) -> Any:
        return self._ask("mul", other)

    def __truediv__(self, other: Any) -> Any:
        return self._ask("truediv", other)

    def __neg__(self) -> Any:
        return self._ask("neg")

    def __abs__(self) -> Any:
        return self._ask("abs")

    def __bool__(self) -> bool:
        raise OpaqueComparison("the program returned an object of its own class where the test asks whether it is true")

    def __hash__(self) -> int:
        raise OpaqueComparison("an object of the program's own class cannot be a key or a member of a set")

    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse_comparison

    def __ne__(self, other: Any) -> bool:
        return not _refuse_comparison(self, other)


class Iterating(Proxy):
    """An iterator in the program's process; items are fetched one by one, so it may be endless."""

    __slots__ = ()

    def __iter__(self) -> Iterating:
        return self

    def __next__(self) -> Any:
        return self._ask("next")


class Name(Proxy):
    """A global name of the program."""

    __slots__ = ()

    def _ask(self, operation: str, *values: Any) -> Any:
        peer: Peer = object.__getattribute__(self, "_peer")
        target: str = object.__getattribute__(self, "_target")
        if operation == "call":
            return peer.call(target, *values)
        return peer.ask(operation, target, *values)


def _plain(value: Any, kinds: tuple[type, ...]) -> Any:
    if type(value) in kinds:
        return value
    raise OpaqueComparison(f"the program answered with a {type(value).__name__}")
