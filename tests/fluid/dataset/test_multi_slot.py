"""MultiSlot text: numbers are parsed as by Python, and errors name the line."""

import numpy as np
import pytest

from jaxfleet.errors import FeedError
from jaxfleet.fluid.dataset.multi_slot import parse
from jaxfleet.fluid.dataset.slots import Samples, Slot
from tests.fluid.dataset.files import line

LABEL = Slot("label", "int64", (1,), is_sequence=False)
IDS = Slot("ids", "int64", (1,), is_sequence=True)
DENSE = Slot("dense", "float32", (2,), is_sequence=False)
SLOTS = (LABEL, IDS, DENSE)


def test_values_go_to_their_slots() -> None:
    found = parse(b"1 0 3 7 8 9 2 0.5 -2\n\n  1 1 1 4 2 1e-3 +3.\r\n", SLOTS, "f")
    assert len(found) == 2
    feed = found.feed()
    np.testing.assert_array_equal(feed["label"], [[0], [1]])
    np.testing.assert_array_equal(np.asarray(feed["ids"]), [[7], [8], [9], [4]])
    assert feed["ids"].recursive_sequence_lengths() == [[3, 1]]
    np.testing.assert_array_equal(feed["dense"], np.array([[0.5, -2], [1e-3, 3]], np.float32))


@pytest.mark.parametrize("key", [0, -1, 2**31, 2**63 - 1, -(2**63), 10**18])
def test_a_key_of_any_int64_arrives_as_it_is(key: int) -> None:
    (ids,) = parse(f"1 {key}\n".encode(), (IDS,), "f").values
    assert ids.tolist() == [key]


def test_a_key_of_uint64_is_the_int64_of_the_same_bits() -> None:
    (ids,) = parse(f"1 {2**64 - 1}\n".encode(), (IDS,), "f").values
    assert ids.tolist() == [-1]


def test_numbers_with_points_are_what_python_reads_to_a_bit_of_float32() -> None:
    drawn = np.random.default_rng(3)
    numbers = drawn.standard_normal(5000) * 10.0 ** drawn.integers(-30, 30, 5000)
    text = "".join(f"2 {float(x)!r} {x:.6f}\n" for x in numbers).encode()
    (found,) = parse(text, (DENSE,), "f").values
    wanted = np.array([[float(x), float(f"{x:.6f}")] for x in numbers], np.float32).reshape(-1)
    np.testing.assert_array_max_ulp(found, wanted, maxulp=1)  # digits after the 18th are dropped


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("x 1 1 5 2 1 1", "slot 'label' does not begin with how many values it has"),
        ("1 0 -1 5 2 1 1", "slot 'ids' does not begin with how many"),
        ("1 0 0 2 1 1", "slot 'ids' has 0 values"),
        ("1 0 1 5 2 0.5", "slot 'dense' has fewer values than its count"),
        ("1 0 1 5", "slot 'dense' has fewer values than its count, or is missing"),
        ("1 0 1 5 2 0.5 x", "slot 'dense' has a value that is no number"),
        ("1 0 1 5 2 0.5 nan", "slot 'dense' has a value that is no number"),
        ("1 0 1 5 2 0.5 1e", "slot 'dense' has a value that is no number"),
        ("1 0 1 5.5 2 1 1", "slot 'ids' has a value that is no whole number"),
        ("1 0 1 18446744073709551616 2 1 1", "slot 'ids' has a value that does not fit 64 bits"),
        ("1 0 1 -9223372036854775809 2 1 1", "slot 'ids' has a value that does not fit 64 bits"),
        ("1 0 1 5 2 1 1 3", "slot 'dense' is the last, and more follows it"),
        ("1 0 1 5 3 1 1 1", "slot 'dense' has 3 values, and is declared with 2"),
    ],
)
def test_a_malformed_line_is_named_with_its_file(bad: str, said: str) -> None:
    text = f"1 0 1 5 2 1 1\n\n{bad}\n1 0 1 5 2 1 1\n".encode()
    with pytest.raises(FeedError) as caught:
        parse(text, SLOTS, "part-7", first_line=11)
    assert str(caught.value).startswith(f"part-7, line 13: {said}"), caught.value
    assert bad[:20] in str(caught.value)


def test_samples_in_another_order_are_the_same_samples() -> None:
    drawn = np.random.default_rng(0)
    samples = [([i % 2], drawn.integers(0, 99, 1 + i % 4).tolist(), [i, -i]) for i in range(20)]
    found = parse("\n".join(line(*x) for x in samples).encode(), SLOTS, "f")
    order = drawn.permutation(20)
    wanted = parse("\n".join(line(*samples[i]) for i in order).encode(), SLOTS, "f")
    mixed = found.in_order(order)
    assert [x.tolist() for x in mixed.values] == [x.tolist() for x in wanted.values]
    np.testing.assert_array_equal(mixed.counts, wanted.counts)


def test_parts_of_samples_joined_are_the_whole() -> None:
    whole = parse(
        "\n".join(line([i], [i] * (i + 1), [i, i]) for i in range(9)).encode(), SLOTS, "f"
    )
    joined = Samples.joined([whole.part(0, 4), whole.part(4, 5), whole.part(5, 100)])
    assert [x.tolist() for x in joined.values] == [x.tolist() for x in whole.values]
    np.testing.assert_array_equal(joined.counts, whole.counts)
