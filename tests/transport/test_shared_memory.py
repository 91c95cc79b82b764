"""Large arrays between processes of one machine: lent, found, returned, always validated."""

import gc
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxfleet.transport import shared_memory
from jaxfleet.transport.codec import Frame, FrameError, decode, encode
from jaxfleet.transport.messages import Connections, Kind, Limits, Listener, Message, Tensor
from jaxfleet.transport.shared_memory import (
    ARENA_BYTES,
    FLAGS,
    HEADER_BYTES,
    MOST_ARENAS,
    Borrower,
    Lender,
    can_share,
    is_shared,
    share_frames,
)
from jaxfleet.transport.zmq.network import ZmqNetwork
from tests.transport.test_codec import same
from tests.transport.test_zmq_network import ask, dealer, echoing, lines_to

pytestmark = pytest.mark.skipif(not can_share(), reason="this system shares no memory")

LARGE = 1 << 20
LIMITS = Limits()


def push(*arrays: np.ndarray) -> Message:
    tensors = (Tensor(f"w{at}", array) for at, array in enumerate(arrays))
    return Message(Kind.PUSH, "trainer 0", 1, 1, {}, tuple(tensors))


def numbers(size: int = LARGE) -> np.ndarray:
    return np.arange(size, dtype=np.float32)


def first_byte(array: np.ndarray) -> int:
    """Returns the address of an array."""
    return array.ctypes.data


def bytes_of(frames: list[Frame]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


def test_large_frames_are_lent_and_small_ones_travel() -> None:
    message = push(numbers(), np.ones(3, np.float32))
    placed = share_frames(encode(message), Lender())
    assert is_shared(placed)
    assert [len(bytes(frame)) for frame in placed[2:]] == [0, 12]
    assert sum(len(bytes(frame)) for frame in placed) < 1000
    assert same(message, decode(Borrower(LIMITS).find(placed), LIMITS))


def test_small_messages_stay_as_they_are() -> None:
    frames = encode(push(np.ones(3, np.float32)))
    assert share_frames(frames, Lender()) is frames
    assert not is_shared(frames)


def test_a_block_is_free_again_when_nothing_uses_its_array() -> None:
    lender, borrower = Lender(), Borrower(LIMITS)
    first = decode(borrower.find(share_frames(encode(push(numbers())), lender)), LIMITS)
    part = first.tensors[0].array[5:7]
    del first
    again = borrower.find(share_frames(encode(push(numbers() + 1)), lender))
    assert part.tolist() == [5, 6]  # a single view keeps the block
    lent = [lender.lend(memoryview(bytes(LARGE))) for _ in range(2)]
    assert len({block.start for block in lent if block}) == 2
    start = first_byte(part) - 5 * part.itemsize
    del part, again
    gc.collect()
    found = (
        decode(borrower.find(share_frames(encode(push(numbers())), lender)), LIMITS)
        .tensors[0]
        .array
    )
    assert first_byte(found) == start


SMALL_ARENA_BYTES = 8 << 20


@pytest.fixture
def small_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "ARENA_BYTES", SMALL_ARENA_BYTES)


@pytest.mark.usefixtures("small_arenas")
def test_what_has_no_room_travels_in_the_message() -> None:
    lender = Lender()
    quarter = np.zeros(SMALL_ARENA_BYTES // 4, np.uint8)
    kept = [share_frames(encode(push(quarter)), lender) for _ in range(5)]
    room = [is_shared(frames) for frames in kept]  # the arena has a header
    assert room == [True, True, True, False, False]
    too_large = encode(push(np.zeros(SMALL_ARENA_BYTES, np.uint8)))
    assert share_frames(too_large, lender) is too_large


def test_there_are_only_so_many_flags() -> None:
    lender, array = Lender(), np.zeros(1, np.uint8)
    lent = [lender.lend(array.data, array) for _ in range(FLAGS + 1)]
    assert all(lent[:-1])
    assert lent[-1] is None


@pytest.mark.usefixtures("small_arenas")
def test_where_a_borrower_is_gone_there_comes_new_memory_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "_LONGEST_LOAN_S", -1.0)
    lender, whole = Lender(), memoryview(bytes(SMALL_ARENA_BYTES - HEADER_BYTES))
    lent = [lender.lend(whole) for _ in range(6)]
    assert [block is not None for block in lent] == [True] * 4 + [False] * 2
    assert len({block.fd for block in lent if block}) == 4
    lender.close()


def test_several_borrowers_share_one_copy() -> None:
    lender, array = Lender(), numbers()
    frames, borrowers = encode(push(array)), [Borrower(LIMITS) for _ in range(3)]
    found = [
        decode(one.find(share_frames(frames, lender, sources=[array])), LIMITS).tensors[0].array
        for one in borrowers
    ]
    blocks = [lender.lend(array.data.cast("B"), source) for source in (array, None, array.copy())]
    starts = [block.start for block in blocks if block]
    assert len(set(starts)) == 3  # neither other bytes nor a copy of these share memory
    del found[0], found[0]
    gc.collect()
    assert lender.lend(memoryview(bytes(LARGE))) is not None
    assert found[0].tolist() == array.tolist()  # a single borrower keeps the block


def test_a_source_that_is_gone_is_not_mistaken_for_another() -> None:
    lender = Lender()
    for value in range(20):
        array = np.full(LARGE, value, np.float32)  # often at the last one's address
        frames = share_frames(encode(push(array)), lender, sources=[array])
        got = decode(Borrower(LIMITS).find(frames), LIMITS).tensors[0].array
        assert got[[0, -1]].tolist() == [value, value]


def changed(frames: list[bytes], place_: int, value: bytes) -> list[bytes]:
    """Returns frames with a modified second record (the first array's)."""
    size, start = struct.calcsize("<II16sIQQ"), 2
    record = bytearray(frames[0][start + size : start + 2 * size])
    record[place_ : place_ + len(value)] = value
    first = frames[0][: start + size] + bytes(record) + frames[0][start + 2 * size :]
    return [first, *frames[1:]]


@pytest.mark.parametrize(
    ("where", "value", "complaint"),
    [
        (0, struct.pack("<I", 1 << 30), "cannot be shared"),
        (4, struct.pack("<I", 0), "cannot be shared"),
        (4, struct.pack("<I", 1 << 20), "cannot be shared"),
        (8, bytes(16), "does not match the message"),
        (24, struct.pack("<I", FLAGS), "lies outside"),
        (28, struct.pack("<Q", 0), "lies outside"),
        (28, struct.pack("<Q", ARENA_BYTES - 8), "lies outside"),
        (28, struct.pack("<Q", (1 << 64) - 1), "lies outside"),
        (36, struct.pack("<Q", 1 << 63), "lies outside"),
        (36, struct.pack("<Q", ARENA_BYTES), "lies outside"),
    ],
)
def test_a_false_record_is_refused(where: int, value: bytes, complaint: str) -> None:
    lender = Lender()
    frames = bytes_of(list(share_frames(encode(push(numbers())), lender)))
    assert Borrower(LIMITS).find(frames)
    with pytest.raises(FrameError, match=complaint):
        Borrower(LIMITS).find(changed(frames, where, value))


def test_what_does_not_name_each_frame_is_refused() -> None:
    frames = bytes_of(list(share_frames(encode(push(numbers())), Lender())))
    for wrong in ([frames[0]], frames[:2], [*frames, b""], [frames[0] + b"x", *frames[1:]]):
        with pytest.raises(FrameError, match="does not say where"):
            Borrower(LIMITS).find(wrong)
    with pytest.raises(FrameError, match="in shared memory too"):
        Borrower(LIMITS).find([*frames[:2], b"both"])


def test_other_files_are_not_opened(tmp_path: Path) -> None:
    with (tmp_path / "secret").open("wb") as file:
        file.truncate(ARENA_BYTES)
    unsealed = os.memfd_create("jaxfleet")
    os.ftruncate(unsealed, ARENA_BYTES)
    frames = bytes_of(list(share_frames(encode(push(numbers())), Lender())))
    with (tmp_path / "secret").open("r+b") as plain:
        for fd in (plain.fileno(), unsealed):
            with pytest.raises(FrameError, match="cannot be shared"):
                Borrower(LIMITS).find(changed(frames, 4, struct.pack("<I", fd)))
    os.close(unsealed)


def test_an_array_outlives_the_process_that_lent_it() -> None:
    script = (
        "import sys, numpy as np\n"
        "from tests.transport.test_shared_memory import bytes_of, numbers, push\n"
        "from jaxfleet.transport.shared_memory import Lender\n"
        "from jaxfleet.transport.shared_memory import share_frames\n"
        "from jaxfleet.transport.codec import encode\n"
        "lender = Lender()\n"
        "for part in bytes_of(list(share_frames(encode(push(numbers())), lender))):\n"
        "    print(part.hex(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        parts = [bytes.fromhex(child.stdout.readline()) for _ in range(3)]
        found = decode(Borrower(LIMITS).find(parts), LIMITS).tensors[0].array
        child.kill()
        child.wait(10)
        assert found.tobytes() == numbers().tobytes()
        with pytest.raises(FrameError, match="cannot be shared"):
            Borrower(LIMITS).find(parts)


def test_a_copy_of_the_process_gives_nothing_back() -> None:
    script = (
        "import os, numpy as np\n"
        "from tests.transport.test_shared_memory import LIMITS, numbers, push\n"
        "from jaxfleet.transport.shared_memory import Lender\n"
        "from jaxfleet.transport.shared_memory import Borrower, share_frames\n"
        "from jaxfleet.transport.codec import decode, encode\n"
        "lender, borrower = Lender(), Borrower(LIMITS)\n"
        "found = decode(borrower.find(share_frames(encode(push(numbers())), lender)), LIMITS)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    del found\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "share_frames(encode(push(numbers() + 1)), lender)\n"
        "print(found.tensors[0].array[:3].tolist())\n"
    )
    run = [sys.executable, "-W", "ignore", "-c", script]
    assert subprocess.check_output(run, text=True, timeout=250) == "[0.0, 1.0, 2.0]\n"


def lent_bytes(ends: Connections | Listener) -> int:
    found = getattr(ends, "_lenders", None) or [getattr(ends, "_lender")]  # noqa: B009
    return sum(len(lender._arenas) for lender in found if lender is not None)  # noqa: SLF001


def test_both_ends_of_a_line_lend() -> None:
    network = ZmqNetwork()
    with echoing(network) as listener, lines_to(network, listener.endpoint) as lines:
        for number in range(30):
            assert ask(lines, number, size=LARGE) is not None
        assert (lent_bytes(lines), lent_bytes(listener)) == (1, 1)
        assert listener.rejected == 0


def test_neither_end_lends_where_it_shall_not() -> None:
    network = ZmqNetwork(share_memory=False)
    with echoing(network) as listener, lines_to(network, listener.endpoint) as lines:
        assert ask(lines, size=LARGE) is not None
        assert (lent_bytes(lines), lent_bytes(listener)) == (0, 0)


def test_a_stranger_with_false_records_hears_of_it() -> None:
    frames = bytes_of(list(share_frames(encode(push(numbers())), Lender())))
    network = ZmqNetwork()
    with echoing(network) as listener, dealer(listener.endpoint) as stranger:
        stranger.send_multipart(changed(frames, 8, bytes(16)))
        assert stranger.poll(10_000)
        assert b"does not match the message" in stranger.recv()
        assert listener.rejected == 1


def test_a_peer_has_few_arenas_mapped_however_many_it_names() -> None:
    borrower, lenders = Borrower(LIMITS), [Lender() for _ in range(MOST_ARENAS + 3)]
    messages = [share_frames(encode(push(numbers())), lender) for lender in lenders]
    for placed in messages:
        assert same(push(numbers()), decode(borrower.find(placed, b"one"), LIMITS))
    assert borrower.mapped_bytes == MOST_ARENAS * ARENA_BYTES
    first = share_frames(encode(push(numbers())), lenders[0])
    borrower.find(first, b"another")
    assert borrower.mapped_bytes == (MOST_ARENAS + 1) * ARENA_BYTES
    for lender in lenders:
        lender.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_memory_of_another_user_is_not_mapped() -> None:
    lender = Lender()
    placed = share_frames(encode(push(numbers())), lender)
    (fd,) = struct.unpack_from("<I", bytes(placed[0]), 2 + struct.calcsize("<II16sIQQ") + 4)
    os.fchown(fd, 65534, -1)
    with pytest.raises(FrameError, match="another user's"):
        Borrower(LIMITS).find(placed)
    lender.close()
