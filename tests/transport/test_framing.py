"""Small parts are packed into one frame and round-trip; malformed ones are rejected."""

import random
import struct

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxfleet.transport.codec import FrameError
from jaxfleet.transport.framing import pack_frames, unpack_frames

LARGE = bytes(1 << 16)


@given(st.lists(st.binary(max_size=40) | st.just(LARGE), min_size=1, max_size=12))
def test_parts_come_out_as_they_went_in(parts: list[bytes]) -> None:
    assume(not parts[0].startswith(b"\xc1s"))  # the first is a header, which begins with no c1
    packed = pack_frames(parts)
    assert len(packed) <= 1 + parts.count(LARGE)
    assert [bytes(part) for part in unpack_frames(packed, most=len(parts))] == parts


def test_one_part_stays_as_it_is() -> None:
    parts = [b"header"]
    assert pack_frames(parts) is parts
    assert unpack_frames(parts, most=1) is parts


def test_only_so_much_is_copied() -> None:
    parts = [bytes(1 << 15)] * 20
    packed = pack_frames(parts)
    assert [len(bytes(part)) for part in packed[1:]] == [1 << 15] * 12
    assert list(map(bytes, unpack_frames(packed, most=20))) == parts


def changed(at: int, value: bytes) -> bytes:
    (first,) = pack_frames([b"one", b"three"])
    return bytes(first[:at]) + value + bytes(first[at + len(value) :])


@pytest.mark.parametrize(
    "parts",
    [
        [changed(0, b"\xc1s")[:4]],  # truncated
        [changed(2, struct.pack("<I", 0))],
        [changed(2, struct.pack("<I", 100))],
        [changed(2, struct.pack("<I", 1 << 31))],
        [changed(6, struct.pack("<I", 2))],  # a trailing byte
        [changed(6, struct.pack("<I", 1 << 20))],
        [changed(6, struct.pack("<I", 0xFFFFFFFF))],  # no content
        [changed(0, b"\xc1s"), b"another"],
    ],
)
def test_what_does_not_say_what_it_holds_is_refused(parts: list[bytes]) -> None:
    with pytest.raises(FrameError):
        unpack_frames(parts, most=8)


def test_no_bytes_make_it_fail_in_another_way() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        first = b"\xc1s" + chance.randbytes(chance.randrange(40))
        parts = [first, *(b"x" for _ in range(chance.randrange(3)))]
        try:
            unpack_frames(parts, most=8)
        except FrameError:
            continue
