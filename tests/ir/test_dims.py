"""Sizes: arithmetic against numbers, text, and agreement with jax."""

import operator
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import export

from jaxfleet.errors import ProgramError, TextError
from jaxfleet.ir import Dim, Size, evaluate, letter, parse_size
from jaxfleet.ir.dims import CALLS, call, divide_exactly, letters, substitute
from jaxfleet.testing.programs import sizes
from tests.drawing import at_most

Meaning = Callable[[int, int], int]  # of a size: its value for given b and n

B, N = letter("b"), letter("n")
NUMBERS = st.integers(1, 50)
ARITHMETIC: dict[str, Callable[..., int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    **CALLS,
}


@st.composite
def computed(draw: st.DrawFn, depth: int = 3) -> tuple[Size, Meaning]:
    """Draws a size of b and n, and a function that computes the same with plain numbers."""
    how = draw(st.sampled_from(("b", "n", "number", *ARITHMETIC))) if depth else "b"
    if how == "b":
        return B, lambda b, _: b
    if how == "n":
        return N, lambda _, n: n
    number = draw(st.integers(-5, 20))
    if how == "number":
        return number, lambda *_: number
    x, x_meaning = draw(computed(depth - 1))
    if how in {"floordiv", "mod"}:  # a divisor must not be zero
        divisor = abs(number) + 1
        return call(how, x, divisor), lambda b, n: CALLS[how](x_meaning(b, n), divisor)
    y, y_meaning = draw(computed(depth - 1))
    size: Size = call(how, x, y) if how in CALLS else ARITHMETIC[how](x, y)
    return size, lambda b, n: ARITHMETIC[how](x_meaning(b, n), y_meaning(b, n))


@at_most(400)
@given(computed(), NUMBERS, NUMBERS)
def test_a_computed_size_is_what_numbers_give(drawn: tuple[Size, Meaning], b: int, n: int) -> None:
    size, meaning = drawn
    assert evaluate(size, {"b": b, "n": n}) == meaning(b, n)


@at_most(300)
@given(computed(), computed(), computed())
def test_sizes_obey_the_laws_of_a_ring(
    first: tuple[Size, Meaning], second: tuple[Size, Meaning], third: tuple[Size, Meaning]
) -> None:
    x, y, z = first[0], second[0], third[0]
    assert x + y == y + x
    assert x * y == y * x
    assert (x + y) + z == x + (y + z)
    assert (x * y) * z == x * (y * z)
    assert x * (y + z) == x * y + x * z
    assert x + 0 == x * 1 == x
    assert x - x == x * 0 == 0


@at_most(400)
@given(sizes())
def test_a_size_reads_back_from_its_text(size: Size) -> None:
    assert parse_size(str(size)) == size


@at_most(200)
@given(computed(), NUMBERS, NUMBERS)
def test_jax_prints_a_size_that_reads_back_with_the_same_values(
    drawn: tuple[Size, Meaning], b: int, n: int
) -> None:
    size, meaning = drawn
    (jax_size,) = export.symbolic_shape(str(size))
    assert evaluate(parse_size(str(jax_size)), {"b": b, "n": n}) == meaning(b, n)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2*b + 1", 15),
        ("floordiv(b, 2)", 3),
        ("mod(b, 3)", 1),
        ("max(b, 2)", 7),
        ("b^2", 49),
        ("-1*b + 4", -3),
        ("- b + 4", -3),
        ("(b + 1)*(b - 1)", 48),
        ("4*floordiv(b - 1, 2) - b*min(b, 2)^2", -16),
    ],
)
def test_a_size_as_jax_prints_it_can_be_read(text: str, value: int) -> None:
    assert evaluate(parse_size(text), {"b": 7}) == value


@at_most(200)
@given(computed(), computed(depth=2), NUMBERS, NUMBERS)
def test_substituting_a_size_for_a_letter_and_evaluating_can_be_swapped(
    drawn: tuple[Size, Meaning], other: tuple[Size, Meaning], b: int, n: int
) -> None:
    replaced = substitute(drawn[0], {"b": other[0]})
    value = evaluate(other[0], {"b": b, "n": n})
    if isinstance(drawn[0], Dim) and value > 0:  # a letter stands for a positive number
        assert evaluate(replaced, {"b": b, "n": n}) == evaluate(drawn[0], {"b": value, "n": n})


@at_most(200)
@given(computed(), computed(depth=2), NUMBERS, NUMBERS)
def test_an_exact_division_undoes_a_product(
    drawn: tuple[Size, Meaning], other: tuple[Size, Meaning], b: int, n: int
) -> None:
    x, y = drawn[0], other[0]
    quotient = divide_exactly(x, y)
    if quotient is not None and y != 0:
        assert quotient * y == x
    values = {"b": b, "n": n}
    if isinstance(y, Dim) and len(y.terms) == 1:
        assert evaluate(divide_exactly(x * y, y) or 0, values) == evaluate(x, values)


def test_equal_sizes_print_alike() -> None:
    assert str(N * B + 1 + B * B) == str(1 + B * B + B * N) == "b*n+b^2+1"
    assert str(B * 2 - B * 3) == "-b"


def test_what_divides_without_a_rest_is_divided() -> None:
    assert str(call("floordiv", B * 8, 4)) == "2*b"
    assert call("floordiv", B, B) == 1
    assert call("mod", B * 8, 4) == 0
    assert str(call("floordiv", B, 4)) == "floordiv(b,4)"


def test_a_maximum_of_equal_sizes_is_that_size() -> None:
    assert call("max", B, B) == B
    assert str(call("min", B, 2)) == "min(b,2)"


def test_the_letters_of_a_size_include_those_inside_calls() -> None:
    assert letters((3, B * 2, call("mod", N, 4))) == {"b", "n"}


def test_evaluating_names_the_letter_that_has_no_value() -> None:
    with pytest.raises(KeyError, match=r"size b\*n: no value for n"):
        evaluate(B * N, {"b": 1})


def test_a_letter_must_be_a_name() -> None:
    with pytest.raises(ProgramError, match="'2b' cannot name a size"):
        letter("2b")


@pytest.mark.parametrize(
    "text",
    ["", "2*", "b+", "(b", "b)", "b b", "floordiv(b)", "sqrt(b)", "b^n", "b^999", "3.5", "²"],
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(TextError, match="is not a size"):
        parse_size(text)


def test_a_division_by_zero_is_refused() -> None:
    with pytest.raises(TextError, match=r"'floordiv\(4,0\)' divides by zero"):
        parse_size("floordiv(4,0)")
