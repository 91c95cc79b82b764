"""Small parts travel as one, and come out as they went in; what is no such part is refused."""

import random
import struct

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxfleet.ps.frames import FrameError
from jaxfleet.ps.packing import pack, unpack

LARGE = bytes(1 << 16)


@given(st.lists(st.binary(max_size=40) | st.just(LARGE), min_size=1, max_size=12))
def test_parts_come_out_as_they_went_in(parts: list[bytes]) -> None:
    assume(not parts[0].startswith(b"\xc1s"))  # the first is a header, which begins with no c1
    packed = pack(parts)
    assert len(packed) <= 1 + parts.count(LARGE)
    assert [bytes(part) for part in unpack(packed, most=len(parts))] == parts


def test_one_part_stays_as_it_is() -> None:
    parts = [b"header"]
    assert pack(parts) is parts
    assert unpack(parts, most=1) is parts


def test_only_so_much_is_copied() -> None:
    parts = [bytes(1 << 15)] * 20
    packed = pack(parts)
    assert [len(bytes(part)) for part in packed[1:]] == [1 << 15] * 12
    assert list(map(bytes, unpack(packed, most=20))) == parts


def changed(at: int, value: bytes) -> bytes:
    (first,) = pack([b"one", b"three"])
    return bytes(first[:at]) + value + bytes(first[at + len(value) :])


@pytest.mark.parametrize(
    "parts",
    [
        [changed(0, b"\xc1s")[:4]],  # breaks off
        [changed(2, struct.pack("<I", 0))],
        [changed(2, struct.pack("<I", 100))],
        [changed(2, struct.pack("<I", 1 << 31))],
        [changed(6, struct.pack("<I", 2))],  # a byte is left
        [changed(6, struct.pack("<I", 1 << 20))],
        [changed(6, struct.pack("<I", 0xFFFFFFFF))],  # nothing follows
        [changed(0, b"\xc1s"), b"another"],
    ],
)
def test_what_does_not_say_what_it_holds_is_refused(parts: list[bytes]) -> None:
    with pytest.raises(FrameError):
        unpack(parts, most=8)


def test_no_bytes_make_it_fail_in_another_way() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        first = b"\xc1s" + chance.randbytes(chance.randrange(40))
        parts = [first, *(b"x" for _ in range(chance.randrange(3)))]
        try:
            unpack(parts, most=8)
        except FrameError:
            continue
