"""Frames on a stream socket: four bytes of length, then the message.

Towards a worker a message is a pickle, because the trainer is trusted. Back from a worker it is JSON, because a reward
may have run text of the model, and reading JSON runs nothing.
"""

from __future__ import annotations

import json
import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!I")
MAX_REPLY_BYTES = 64 * 2**20


class BrokenFrameError(ValueError):
    """The other side sent something that is no frame of ours."""


def frame(payload: bytes) -> bytes:
    """Return the payload with its length in front."""
    return _LENGTH.pack(len(payload)) + payload


def send_pickle(sock: socket.socket, message: Any, fds: tuple[int, ...] = ()) -> None:
    """Send a message to a worker or the server, with file descriptors if given."""
    data = frame(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))
    if fds:
        sent = socket.send_fds(sock, [data], list(fds))
        data = data[sent:]
    if data:
        sock.sendall(data)


def send_json(sock: socket.socket, message: Any) -> None:
    """Send a message to the trainer. NaN and infinity are refused: scores are checked before they travel."""
    sock.sendall(frame(json.dumps(message, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")))


def receive_pickle(sock: socket.socket) -> Any:
    """Return the next message from the trainer; block until it is there.

    Raises:
        EOFError: if the trainer closed the connection.
    """
    (length,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size))
    return pickle.loads(_receive_exactly(sock, length))


def _receive_exactly(sock: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view, filled = memoryview(data), 0
    while filled < count:
        received = sock.recv_into(view[filled:])
        if received == 0:
            raise EOFError("connection closed")
        filled += received
    return data


class FrameReader:
    """Collects bytes as they arrive and hands out complete frames."""

    def __init__(self, max_bytes: int = MAX_REPLY_BYTES) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """Return the frames that are complete after these bytes.

        Raises:
            BrokenFrameError: if a frame announces more than ``max_bytes``.
        """
        self._buffer += data
        frames = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._max_bytes:
                raise BrokenFrameError(f"a frame announces {length} bytes; at most {self._max_bytes} are allowed")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return frames


def parse_json(payload: bytes) -> dict[str, Any]:
    """Return a reply as a dict.

    Raises:
        BrokenFrameError: if it is no JSON object.
    """
    try:
        message = json.loads(payload, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BrokenFrameError(f"a reply is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise BrokenFrameError(f"a reply is a JSON {type(message).__name__}, not an object")
    return message


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not allowed")
