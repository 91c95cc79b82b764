"""Messages round-trip through their frames, and no other frames decode to a message."""

import random
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxfleet.transport.codec import Frame, FrameError, decode, encode
from jaxfleet.transport.messages import PROTOCOL, Kind, Limits, Message, Plain, Tensor

LIMITS = Limits(max_tensors=8, max_bytes=1 << 16, max_message_bytes=1 << 18, max_body_bytes=1 << 14)

plain: st.SearchStrategy[Plain] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
arrays = hnp.arrays(
    st.sampled_from(["bool", "int8", "int64", "uint32", "float16", "float64", "complex64", ">f4"]),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
)


def example() -> Message:
    weights = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensors = (Tensor("w", weights), Tensor("flag", np.array(True)), Tensor("b", weights[0]))
    return Message(Kind.PUSH, "trainer 1", 7, 3, {"names": ["w", "b"], "n": 2}, tensors)


def raw(**changes: Any) -> bytes:
    header = {
        "v": PROTOCOL,
        "kind": "push",
        "sender": "trainer 0",
        "step": 1,
        "number": 1,
        "body": {},
        "tensors": [["w", "float32", [2]]],
    }
    packed: bytes = msgpack.packb({**header, **changes})
    return packed


def same(one: Message, other: Message) -> bool:
    heads = [(m.kind, m.sender, m.step, m.number, m.body) for m in (one, other)]
    pairs = zip(one.tensors, other.tensors, strict=True)
    return heads[0] == heads[1] and all(
        a.name == b.name
        and a.array.shape == b.array.shape
        and a.array.dtype.newbyteorder("=") == b.array.dtype.newbyteorder("=")
        and a.array.astype(b.array.dtype).tobytes() == b.array.tobytes()
        for a, b in pairs
    )


@given(
    kind=st.sampled_from(Kind),
    body=st.dictionaries(st.text(), plain, max_size=4),
    drawn=st.lists(st.tuples(st.text(max_size=20), arrays), max_size=4),
    step=st.integers(-1, 2**63 - 1),
)
def test_a_message_comes_out_as_it_went_in(
    kind: Kind, body: dict[str, Plain], drawn: list[tuple[str, np.ndarray]], step: int
) -> None:
    message = Message(kind, "server 0", step, 5, body, tuple(Tensor(n, a) for n, a in drawn))
    sent = [bytes(frame) for frame in encode(message)]
    assert same(message, decode(sent, Limits()))


@pytest.mark.parametrize("name", ["bfloat16", "int4", "uint4", "float8_e4m3fn", "float8_e5m2"])
def test_narrow_types_of_jax_travel(name: str) -> None:
    array = np.arange(6).astype(getattr(ml_dtypes, name)).reshape(2, 3)
    message = Message(Kind.PUSH, "trainer 0", tensors=(Tensor("w", array),))
    assert same(message, decode(encode(message), Limits()))


def test_an_array_is_not_copied_on_either_side() -> None:
    array = np.arange(1000, dtype=np.float32)
    frames = encode(Message(Kind.PUSH, "trainer 0", tensors=(Tensor("w", array),)))
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), array)
    received = decode(frames, Limits()).tensors[0].array
    assert np.shares_memory(received, array)
    assert not received.flags.writeable


def test_an_array_in_another_order_is_sent_in_c_order() -> None:
    array = np.arange(12.0).reshape(3, 4).T
    message = Message(Kind.PUSH, "trainer 0", tensors=(Tensor("w", array),))
    np.testing.assert_array_equal(decode(encode(message), Limits()).tensors[0].array, array)


def test_what_no_frame_can_hold_is_refused_where_it_is_sent() -> None:
    texts = Tensor("names", np.array(["a"]))
    with pytest.raises(FrameError, match="'names' has dtype <U1, which no message carries"):
        encode(Message(Kind.PUSH, "trainer 0", tensors=(texts,)))
    objects = Tensor("objects", np.array([None]))
    with pytest.raises(FrameError, match="dtype object"):
        encode(Message(Kind.PUSH, "trainer 0", tensors=(objects,)))
    with pytest.raises(FrameError, match="the body holds a bytes"):
        encode(Message(Kind.OK, "server 0", body={"key": b"x"}))  # type: ignore[dict-item]
    with pytest.raises(FrameError, match="cannot be packed"):
        encode(Message(Kind.OK, "server 0", body={"key": 2**70}))
    large = Tensor("w", np.zeros(LIMITS.max_bytes + 1, np.uint8))
    with pytest.raises(FrameError, match="array 'w' is 65537, and may be 65536"):
        encode(Message(Kind.PUSH, "trainer 0", tensors=(large,)), limits=LIMITS)


EIGHT = b"\0" * 8
MALFORMED: dict[str, tuple[list[bytes], str]] = {
    "no frames": ([], "1 to 9 frames, not 0"),
    "an empty frame": ([b""], "not msgpack"),
    "not a map": ([msgpack.packb([1])], "a header is a map of"),
    "trailing bytes": ([raw() + b"\0", EIGHT], "ExtraData"),
    "another version": (
        [raw(v=PROTOCOL + 1), EIGHT],
        f"protocol {PROTOCOL + 1}, and this end uses {PROTOCOL}",
    ),
    "a version that equals one": ([raw(v=True), EIGHT], "protocol True"),
    "a field too many": ([raw(extra=1), EIGHT], "a header is a map of"),
    "an unknown kind": ([raw(kind="shell"), EIGHT], "no kind 'shell'"),
    "a kind of no text": ([raw(kind=[1]), EIGHT], "no kind"),
    "a sender of no text": ([raw(sender=1), EIGHT], "sender is text, not a int"),
    "a long sender": ([raw(sender="x" * 2000), EIGHT], "length of sender is 2000"),
    "a negative step": ([raw(step=-2), EIGHT], "step is a number from -1"),
    "a step that is a truth value": ([raw(step=True), EIGHT], "step is a number"),
    "a huge number": ([raw(number=2**64 - 1), EIGHT], "number is a number from 0"),
    "a body that is a list": ([raw(body=[1]), EIGHT], "a body is a map, not a list"),
    "a body with bytes": ([raw(body={"a": b"x"}), EIGHT], "the body holds a bytes"),
    "a body with keys of no text": ([raw(body={"a": {b"k": 1}}), EIGHT], "a key in the body"),
    "numbers as keys": ([raw(body={1: 1}), EIGHT], "not msgpack"),
    "an extension type": ([raw(body={"a": msgpack.ExtType(5, b"x")}), EIGHT], "extension type, 5"),
    "a time": ([raw(body={"a": msgpack.Timestamp(1)}), EIGHT], "the body holds a Timestamp"),
    "text that is not text": ([raw(sender="???").replace(b"???", b"\xff" * 3), EIGHT], "Unicode"),
    "a key twice": ([raw().replace(b"\xa4step", b"\xa4kind"), EIGHT], "a key twice"),
    "an array too many": ([raw(), EIGHT, EIGHT], "does not name the 2 arrays"),
    "an array too few": ([raw()], "does not name the 0 arrays"),
    "too many frames": ([raw()] + [EIGHT] * 9, "1 to 9 frames, not 10"),
    "arrays that are no list": ([raw(tensors="x"), EIGHT], "does not name"),
    "half a description": ([raw(tensors=[["w", "float32"]]), EIGHT], "name, dtype and shape"),
    "a long name": ([raw(tensors=[["w" * 2000, "float32", [2]]]), EIGHT], "array's name is 2000"),
    "an object dtype": ([raw(tensors=[["w", "object", [1]]]), EIGHT], "dtype 'object'"),
    "a dtype of no text": ([raw(tensors=[["w", {}, [1]]]), EIGHT], "dtype {}"),
    "a structured dtype": ([raw(tensors=[["w", "f4,f4", [1]]]), EIGHT], "dtype 'f4,f4'"),
    "a shape of no list": ([raw(tensors=[["w", "float32", 2]]), EIGHT], "shape of at most 32"),
    "too many axes": ([raw(tensors=[["w", "int8", [1] * 33]]), EIGHT], "shape of at most 32"),
    "a negative size": ([raw(tensors=[["w", "float32", [-2]]]), EIGHT], "a size of 'w'"),
    "a size and a half": ([raw(tensors=[["w", "float32", [2.0]]]), EIGHT], "a size of 'w'"),
    "sizes that overflow": ([raw(tensors=[["w", "int8", [2**32, 2**32]]]), EIGHT], "may be 65536"),
    "an overflow behind 0": ([raw(tensors=[["w", "int8", [0, 2**62]]]), b""], "may be 65536"),
    "too few bytes": ([raw(), b"\0" * 7], "'w' is 8 bytes, and 7 came"),
    "too many bytes": ([raw(), b"\0" * 9], "'w' is 8 bytes, and 9 came"),
    "truth values of 2": ([raw(tensors=[["w", "bool", [8]]]), b"\2" * 8], "truth values"),
    "a body too large": ([raw(body={"a": "x" * 20000}), EIGHT], "the header is"),
    "a message too large": ([raw(), b"\0" * (1 << 18)], "a message is"),
}


@pytest.mark.parametrize("frames", MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_message_is_refused(frames: tuple[list[bytes], str]) -> None:
    with pytest.raises(FrameError, match=frames[1]):
        decode(frames[0], LIMITS)


def test_a_deep_body_is_refused() -> None:
    for depth in (20, 500, 5000):
        nested = b"\x91" * depth + b"\xc0"
        header = raw(body="????").replace(b"\xa4????", b"\x81\xa1a" + nested)
        with pytest.raises(FrameError, match=r"nested too deep|not msgpack"):
            decode([header, EIGHT], LIMITS)


def test_many_small_values_are_refused_before_they_fill_the_memory() -> None:
    header = raw(body="????").replace(
        b"\xa4????", b"\x81\xa1a\xdd\x00\x0f\x00\x00" + b"\x80" * (15 << 16)
    )
    with pytest.raises(FrameError, match="too many values"):
        decode([header, EIGHT], Limits(max_values=15 << 16, max_body_bytes=1 << 21))


def test_a_list_that_claims_more_than_came_allocates_nothing() -> None:
    header = raw(body="????").replace(b"\xa4????", b"\x81\xa1a\xdd\xff\xff\xff\xff")
    with pytest.raises(FrameError, match="not msgpack"):
        decode([header, EIGHT], LIMITS)


def test_an_error_says_which_request_it_was_about() -> None:
    with pytest.raises(FrameError) as caught:
        decode([raw(number=41, kind="shell"), EIGHT], LIMITS)
    assert caught.value.number == 41


def mutated(frames: list[Frame], draw: random.Random) -> list[bytes]:
    result = [bytearray(frame) for frame in frames]
    for _ in range(draw.randrange(1, 6)):
        frame = draw.choice(result)
        choice = draw.randrange(5)
        if choice == 0 and frame:
            frame[draw.randrange(len(frame))] = draw.randrange(256)
        elif choice == 1:
            at = draw.randrange(len(frame) + 1)
            frame[at:at] = draw.randbytes(draw.randrange(1, 5))
        elif choice == 2 and frame:
            del frame[draw.randrange(len(frame)) :]
        elif choice == 3:
            result.insert(draw.randrange(len(result) + 1), bytearray(draw.randbytes(8)))
        elif len(result) > 1:
            result.pop(draw.randrange(len(result)))
    return [bytes(frame) for frame in result]


def test_whatever_comes_is_a_message_or_refused() -> None:
    draw = random.Random(0)
    frames = encode(example())
    refused = 0
    for count in range(30_000):
        noise = [draw.randbytes(draw.randrange(60)) for _ in range(draw.randrange(4))]
        fuzz = mutated(frames, draw) if count % 3 else noise
        try:
            decode(fuzz, LIMITS)
        except FrameError:
            refused += 1
    assert refused > 20_000
