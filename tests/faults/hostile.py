"""Messages of an attacker: slightly altered ones, and malformed ones."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np

from jaxfleet.transport.codec import Frame, encode
from jaxfleet.transport.framing import pack_frames
from jaxfleet.transport.messages import PROTOCOL, Kind, Message, Plain, Tensor

Frames = Sequence[Frame]

NUMBERS = (-1, 0, 1, 2, 3, 7, 999, 1 << 31, 1 << 62, (1 << 63) - 1)
SENDERS = (
    *("trainer 0", "trainer 1", "trainer 7", "trainer -1", "trainer ", "trainer ²", "trainer 1e9"),
    *("server 0", "server 1", "server 99", "server ²", "server ٣", "server", "", "x" * 1024, "\0"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1 << 40, 1.5, float("nan"), "", "x" * 5000, "²", [], {}, ["a"] * 200),
    *([[[[]]]], {"a": {"b": [1]}}, list(range(300)), "faults", "trainer 0"),
)
ARRAYS = (
    *(np.zeros(0, np.float32), np.ones((3, 3), np.float64), np.zeros((), np.int32)),
    *(np.full(16, np.nan, np.float32), np.zeros((1,) * 32, bool), np.zeros(70000, np.uint8)),
)


def valid(endpoints: Sequence[str], job: str) -> list[Message]:
    """Returns one message of each kind, as a job sends them."""
    hello: dict[str, Plain] = {
        "protocol": PROTOCOL,
        "job": job,
        "trainer": 1,
        "trainers": 2,
        "servers": list(endpoints),
        "program": "0" * 64,
        "session": "00",
    }
    bodies: dict[Kind, dict[str, Plain]] = {
        Kind.HELLO: hello,
        Kind.DEFINE: {"program": "program p\n  block 0\n"},
        Kind.ASSIGN: {"replace": True},
        Kind.PULL: {"names": ["state/0/a", "state/0/b"]},
        Kind.REDUCE: {"key": "sum loss", "how": "sum"},
        Kind.BARRIER: {"name": "send"},
        Kind.SAVE: {},
        Kind.LOAD: {"path": "/"},
        Kind.HEARTBEAT: {"doing": "step 3", "session": "00", "step": 5, "saved": 5},
        Kind.PARTS: {"program": "", "incarnation": "00"},
        Kind.ERROR: {"error": "failed", "what": "no", "hint": None},
    }
    arrays = (Tensor("state/0/a@GRAD", np.ones((12, 16), np.float32)),)
    carrying = {Kind.ASSIGN, Kind.PUSH, Kind.REDUCE, Kind.PARTS, Kind.VALUES}
    return [
        Message(kind, "trainer 1", 3, 9, bodies.get(kind, {}), arrays if kind in carrying else ())
        for kind in Kind
    ]


def messages(seeds: Sequence[Message], draw: random.Random) -> Iterator[Message]:
    """Yields well-formed messages without a sensible meaning."""
    while True:
        yield _changed(draw.choice(seeds), draw)


def frames(seeds: Sequence[Message], draw: random.Random) -> Iterator[Frames]:
    """Yields frames, many of them malformed."""
    for message in messages(seeds, draw):
        parts: list[Frame] = [bytes(frame) for frame in encode(message)]
        yield draw.choice(BREAKS)(parts, draw)


def _changed(message: Message, draw: random.Random) -> Message:
    body: dict[str, Plain] = dict(message.body)
    for _ in range(draw.randint(0, 2)):
        name = draw.choice([*body, "extra", "names", "how", "path", "step"])
        body[name] = draw.choice(VALUES)
    if draw.random() < 0.1 and body:
        del body[draw.choice([*body])]
    tensors = list(message.tensors)
    if draw.random() < 0.3:
        tensors.append(Tensor(draw.choice(("a", "", "state/0/b", "x" * 900)), draw.choice(ARRAYS)))
    if tensors and draw.random() < 0.4:
        tensors[0] = Tensor(tensors[0].name, draw.choice(ARRAYS))
    return replace(
        message,
        kind=draw.choice(list(Kind)) if draw.random() < 0.2 else message.kind,
        sender=draw.choice(SENDERS) if draw.random() < 0.5 else message.sender,
        step=draw.choice(NUMBERS) if draw.random() < 0.5 else message.step,
        number=abs(draw.choice(NUMBERS)) if draw.random() < 0.3 else message.number,
        body=body,
        tensors=tuple(tensors),
    )


Break = Callable[[list[Frame], random.Random], Frames]


def _whole(parts: list[Frame], _: random.Random) -> Frames:
    return parts


def _flipped(parts: list[Frame], draw: random.Random) -> Frames:
    header = bytearray(parts[0])
    for _ in range(draw.randint(1, 8)):
        header[draw.randrange(len(header))] = draw.randrange(256)
    return [bytes(header), *parts[1:]]


def _cut(parts: list[Frame], draw: random.Random) -> Frames:
    at = draw.randrange(len(parts))
    kept = bytes(parts[at])[: draw.randrange(len(bytes(parts[at])) + 1)]
    return [*parts[:at], kept, *parts[at + 1 :]]


def _shuffled(parts: list[Frame], draw: random.Random) -> Frames:
    return draw.sample(parts * 2, draw.randint(1, len(parts) * 2))


def _noise(_: list[Frame], draw: random.Random) -> Frames:
    return [draw.randbytes(draw.choice((0, 1, 7, 60, 2000))) for _ in range(draw.randint(1, 5))]


def _huge(parts: list[Frame], draw: random.Random) -> Frames:
    header = msgpack.unpackb(parts[0])
    size = draw.choice((1 << 20, 1 << 40, 1 << 62, -1, 3.5, "1", [1]))
    header["tensors"] = [["a", draw.choice(("float32", "object", "int4", 7)), [size, size]]]
    return [msgpack.packb(header), *parts[1:]]


def _opening(_: list[Frame], draw: random.Random) -> Frames:
    sizes = b"".join(
        draw.choice(NUMBERS[1:]).to_bytes(8, "little") for _ in range(draw.randint(0, 4))
    )
    return [b"\xc1" + draw.choice((b"o", b"p")) + sizes] + [b"x" * 100] * draw.randint(0, 2)


def _packed(parts: list[Frame], draw: random.Random) -> Frames:
    whole = pack_frames([*parts, *(b"" for _ in range(draw.randint(1, 3)))])
    return _flipped([bytes(part) for part in whole], draw)


def _bomb(_: list[Frame], draw: random.Random) -> Frames:
    deep = b"\x91" * draw.choice((10, 2000, 100_000))
    wide = b"\xdd\xff\xff\xff\xff" + b"\xc0" * 100
    return [draw.choice((deep, wide, b"\xdf\x00\x0f\xff\xff", b"\xc9\xff\xff\xff\xff\x01"))]


BREAKS: tuple[Break, ...] = (
    *(_whole, _whole, _whole, _flipped, _flipped, _packed, _packed, _cut, _shuffled, _noise),
    *(_huge, _opening, _bomb),
)
