"""Values of attributes and operands, and their equality."""

import enum
import math
from typing import Any

import numpy as np
import pytest

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Attrs, BlockRef, Literal, Operands, Struct, Word
from jaxfleet.ir.attributes import map_attr
from jaxfleet.ir.naming import unique

NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other"), [(1, 1.0), (1, True), (0.0, -0.0), (0, False), ("1", 1), ((1,), (True,))]
)
def test_values_that_python_holds_equal_are_told_apart(one: Any, other: Any) -> None:
    assert Attrs({"a": one}) != Attrs({"a": other})
    assert Attrs({"a": Struct("s", Attrs({"b": (one,)}))}) != Attrs(
        {"a": Struct("s", Attrs({"b": (other,)}))}
    )


def test_a_nan_equals_itself() -> None:
    assert Attrs({"a": (NAN,)}) == Attrs({"a": (NAN,)})
    assert Literal.of(NAN, "f32") == Literal.of(NAN, "f32")


def test_attributes_are_sorted_whatever_order_they_come_in() -> None:
    assert list(Attrs({"b": 1, "a": 2})) == ["a", "b"]
    assert hash(Attrs({"b": 1, "a": 2})) == hash(Attrs({"a": 2, "b": 1}))


def test_what_is_almost_data_is_stored_as_data() -> None:
    class Mode(enum.IntEnum):
        CLIP = 3

    class Side(enum.StrEnum):
        LEFT = "left"

    given: Any = {"a": [1, [2]], "b": np.float32(0.5), "c": Mode.CLIP, "d": Side.LEFT}
    stored = Attrs(given)
    assert stored == Attrs({"a": (1, (2,)), "b": 0.5, "c": 3, "d": "left"})
    assert [type(value) for value in stored.values()] == [tuple, float, int, str]


@pytest.mark.parametrize("value", [print, {"a": 1}, {1}, b"bytes", 1j, np.zeros(2), object])
def test_what_is_not_data_is_refused(value: Any) -> None:
    with pytest.raises(ProgramError, match=r"attribute 'a' holds .*, which is not data"):
        Attrs({"a": (value,)})


@pytest.mark.parametrize("text", ["", "a b", "true", "none", "inf", "1x", "a{", "key<a b>", "x\n"])
def test_a_word_must_read_back_as_one(text: str) -> None:
    with pytest.raises(ProgramError, match="is not a word"):
        Word(text)


def test_a_block_reference_counts_from_zero() -> None:
    with pytest.raises(ProgramError, match="-1 is not a block's index"):
        BlockRef(-1)


def test_block_references_are_found_however_deep_they_are() -> None:
    attrs = Attrs({"b": BlockRef(3), "a": (Struct("s", Attrs({"x": BlockRef(1)})), 2)})
    assert attrs.block_refs == (BlockRef(1), BlockRef(3))


def test_a_mapping_reaches_every_leaf() -> None:
    value = (1, Struct("s", Attrs({"x": (2, "y")})))
    doubled = map_attr(value, lambda leaf: leaf * 2 if isinstance(leaf, int) else leaf)
    assert doubled == (2, Struct("s", Attrs({"x": (4, "y")})))


@pytest.mark.parametrize(
    "value",
    [True, 3, -(2**70), 0.1, -0.0, 1e-300, math.inf, 1e20 - 2e-20j, complex(NAN, -math.inf)],
)
def test_a_literal_gives_back_its_number(value: complex) -> None:
    back = Literal.of(value, "f32").value
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_a_literal_takes_numpy_scalars() -> None:
    assert Literal.of(np.float64(1.5), "f64") == Literal("1.5", "f64")
    assert Literal.of(np.bool_(1), "bool") == Literal("true", "bool")


@pytest.mark.parametrize("text", ["", "x", "1 ", "1+2", "True", "0x10"])
def test_a_literal_must_be_a_number(text: str) -> None:
    with pytest.raises(ProgramError, match="is not a literal's value"):
        Literal(text, "f32")


def test_unnamed_operands_share_a_slot_which_goes_first() -> None:
    operands = Operands([("X", ("a",)), ("", ("b",)), ("Y", ()), ("", ("c",))])
    assert operands.slots == (("", ("b", "c")), ("X", ("a",)), ("Y", ()))
    assert tuple(operands) == ("b", "c", "a")
    assert "a" in operands


def test_operands_can_be_renamed_replaced_and_joined() -> None:
    operands = Operands.named(X=["a", "b"], Y=Literal("1", "i32"))
    assert operands.names == ("a", "b")
    assert operands.renamed({"b": "c"}).slot("X") == ("a", "c")
    assert operands.renamed({"z": "c"}) is operands
    assert operands.replaced(["p", "q", "r"]) == Operands.named(X=["p", "q"], Y="r")
    assert (operands + Operands.named(X="d")).slot("X") == ("a", "b", "d")


def test_a_name_that_is_taken_gets_a_number() -> None:
    assert unique("x", {"y"}) == "x"
    assert unique("x", ["x", "x~1"]) == "x~2"
