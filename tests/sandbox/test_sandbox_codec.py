"""What may travel between a program and its judge, and what may not."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import math
import os
import random
from typing import Any

import pytest

from trl_grpo_ext.rewards.sandbox.guest import codec

DECODER = codec.Decoder(lambda number, name, kind: ("handle", number, name, kind))


def there_and_back(value: Any) -> Any:
    return DECODER.decode(codec.loads(codec.dumps(codec.Encoder(codec.no_handle).encode(value))))


VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    2**53,
    -(2**53),
    10**400,
    1.5,
    -0.0,
    5e-324,
    "",
    "ä\n\0\ud800 \N{GRINNING FACE}",
    b"\0\xff",
    bytearray(b"x"),
    3 + 4j,
    [],
    [1, [2, (3,)]],
    (),
    {1, 2},
    frozenset({"a"}),
    {"a": {1: (2,)}, (1, 2): None},
    range(3, 10, 2),
    collections.deque([1, 2]),
    decimal.Decimal("1.10"),
    fractions.Fraction(2, 3),
    datetime.date(2024, 2, 29),
    datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
    datetime.time(1, 2),
    datetime.timedelta(days=-1, microseconds=5),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:30])
def test_values_come_back(value: Any) -> None:
    back = there_and_back(value)
    assert type(back) is type(value)
    assert back == value
    assert repr(back) == repr(value)  # also the sign of zero, and the order of a dict


def test_not_a_number_comes_back() -> None:
    assert math.isnan(there_and_back(math.nan))
    assert there_and_back([math.inf, -math.inf]) == [math.inf, -math.inf]


def test_random_values_come_back() -> None:
    rng = random.Random(0)

    def make(depth: int) -> Any:
        kind = rng.randrange(9 if depth else 5)
        if kind < 5:
            return [rng.randint(-(10**20), 10**20), rng.random(), str(rng.random()), None, rng.random() < 0.5][kind]
        items = [make(depth - 1) for _ in range(rng.randrange(4))]
        if kind == 5:
            return items
        return tuple(items) if kind == 6 else {str(index): item for index, item in enumerate(items)}

    for _ in range(300):
        value = make(5)
        assert there_and_back(value) == value


class _Everything:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_subclasses_are_reduced_to_what_they_hold() -> None:
    class Liar(int):
        def __eq__(self, other: object) -> bool:
            return True

        def __add__(self, other: int) -> int:
            return 99

        def __index__(self) -> int:
            return 99

        __hash__ = int.__hash__

    class Text(str):
        def __str__(self) -> str:
            return "lie"

    class List(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter([99])

    Point = collections.namedtuple("Point", "x y")
    colour = enum.IntEnum("colour", "RED")
    assert there_and_back(Liar(9)) == 9
    assert type(there_and_back(Liar(9))) is int
    assert there_and_back(List([1])) == [1]
    assert there_and_back(Point(1, 2)) == (1, 2)
    assert there_and_back(colour.RED) == 1
    assert there_and_back(collections.Counter("aab")) == {"a": 2, "b": 1}
    assert type(there_and_back(collections.defaultdict(int, x=1))) is dict
    assert type(there_and_back(Text("x"))) is str


def test_objects_do_not_travel() -> None:
    for value in (_Everything(), object(), int, len, [_Everything()], {1: _Everything()}):
        with pytest.raises(codec.OpaqueError):
            there_and_back(value)


def test_size_depth_and_number_of_parts_are_limited() -> None:
    nested: list[Any] = []
    for _ in range(codec.MAX_DEPTH + 2):
        nested = [nested]
    shared: list[Any] = []
    for _ in range(40):
        shared = [shared, shared]  # 2**40 parts in 40 objects
    cycle: list[Any] = []
    cycle.append(cycle)
    for value in (nested, shared, cycle, "x" * (codec.MAX_FRAME_BYTES + 1)):
        with pytest.raises(codec.OpaqueError):
            there_and_back(value)


@pytest.mark.parametrize(
    "body",
    [
        b"1.5",
        b"NaN",
        b"[Infinity]",
        b"123456789012345678901234567890",
        b"[" * 200_000,
        b"{",
        b"\xff",
        b'["?",1]',
        b'["f","zz"]',
        b'["f",1]',
        b'["i",5]',
        b'["h","1","x","y"]',
        b'["d",[1]]',
        b'["d",[["l"],1]]',
        b'["s",["l"]]',
        b'["r",1,2,["f","0x1p0"]]',
        b'["T","eval",1]',
        b'["T","date",0,0,0]',
        b'["b","zz"]',
        b"{}",
        b'{"a":1}',
        b"[]",
        b"[1]",
        b'["l",' + b'["l",' * 100 + b"1" + b"]" * 101,
    ],
    ids=lambda body: body[:24].decode("latin1"),
)
def test_nonsense_is_refused(body: bytes) -> None:
    with pytest.raises(codec.ProtocolError):
        DECODER.decode(codec.loads(body))


def test_frames() -> None:
    read_end, write_end = os.pipe()
    codec.send(write_end, ["call", ["l", 1]])
    assert codec.receive(read_end) == ["call", ["l", 1]]
    os.write(write_end, b"\xff\xff\xff\xff")
    with pytest.raises(codec.ProtocolError):
        codec.receive(read_end)
    os.write(write_end, b"\0\0\0\5ab")
    os.close(write_end)
    with pytest.raises(codec.ClosedError):
        codec.receive(read_end)
    os.close(read_end)
