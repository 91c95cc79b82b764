"""Slicing of parameters."""

from math import ceil, prod

import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfleet.analysis.optimizer_groups import find_optimizer_groups
from jaxfleet.analysis.placement.policies import (
    block_sizes,
    exact_rows,
    reasons_for_whole,
    slice_rows,
)
from jaxfleet.analysis.placement.sliced_layout import slices_of
from jaxfleet.errors import PassError
from jaxfleet.ir import Program, parse
from jaxfleet.passes import SliceVar
from jaxfleet.pipeline import parse_pipeline, pipeline_text
from tests.analysis.groups_steps import on_gradients, step_of

SHAPES = ((3, 5), (1024,), (28, 784), (8, 1020), (800, 10), (6, 33, 33, 33))
BY_1K = ((15,), (1024,), (2352,) * 9 + (784,), (2040,) * 4, (1150,) * 6 + (1100,))
BY_8K = ((15,), (1024,), (10976,) * 2, (8160,), (8000,), (35937,) * 6)
ROWS = [
    ((1000, 1000), 2, 8192, (500, 500)),
    ((1000, 1000), 2, 1048576, (1000,)),
    ((1000, 1000), 3, 8192, (334, 334, 332)),
    ((1000, 1000), 4, 8192, (250,) * 4),
    ((1000, 1000), 1, 8192, (1000,)),
    ((1000,), 2, 8192, (1000,)),
    ((16384,), 2, 8192, (8192, 8192)),
    ((16383,), 2, 8192, (16383,)),
    ((100000,), 4, 8192, (25000,) * 4),
    ((10000, 8), 2, 8192, (5000, 5000)),
    ((10000, 1), 2, 8192, (10000,)),
    ((128, 128), 2, 8192, (64, 64)),
    ((9, 8192), 4, 8192, (3, 3, 3)),
    ((5, 8192), 4, 8192, (2, 2, 1)),
    ((10, 16384), 4, 8192, (3, 3, 3, 1)),
    ((2048, 1000), 3, 8192, (683, 683, 682)),
    ((3, 100000), 4, 8192, (1, 1, 1)),
    ((1, 100000), 4, 8192, (1,)),
    ((784, 513), 2, 8192, (392, 392)),
    ((513, 257), 4, 8192, (129, 129, 129, 126)),
    ((10001, 16), 3, 16384, (3334, 3334, 3333)),
    ((429, 400), 2, 8192, (215, 214)),
    ((5,), 3, 1, (2, 2, 1)),
    ((5, 1), 7, 1, (1,) * 5),
    ((), 2, 1, ()),
    ((0,), 2, 1, (0,)),
    ((4, 0), 2, 1, (4,)),
    ((0, 4), 2, 1, (0,)),
]


@pytest.mark.parametrize(("shape", "sizes"), [*zip(SHAPES, BY_1K, strict=False)])
def test_blocks_of_at_least_a_thousand_elements(
    shape: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    assert block_sizes(shape, 10, 1024) == sizes


@pytest.mark.parametrize(("shape", "sizes"), [*zip(SHAPES, BY_8K, strict=True)])
def test_blocks_of_at_least_eight_thousand_elements(
    shape: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    assert block_sizes(shape, 10, 8192) == sizes


@pytest.mark.parametrize(("shape", "servers", "smallest", "rows"), ROWS)
def test_rows_go_by_fluids_rule(
    shape: tuple[int, ...], servers: int, smallest: int, rows: tuple[int, ...]
) -> None:
    assert slice_rows(shape, servers, smallest) == rows


@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    servers=st.integers(1, 9),
    smallest=st.integers(1, 3000),
)
def test_blocks_are_equal_whole_rows_but_for_the_last(
    shape: list[int], servers: int, smallest: int
) -> None:
    rows = slice_rows(shape, servers, smallest)
    sizes = block_sizes(shape, servers, smallest)
    assert sum(rows) == shape[0]
    assert sum(sizes) == prod(shape)
    assert 1 <= len(rows) <= servers
    assert set(rows[:-1]) <= {rows[0]}
    assert 1 <= rows[-1] <= rows[0]
    assert sizes == tuple(count * prod(shape[1:]) for count in rows)
    assert len(rows) <= max(1, prod(shape) // smallest)
    if len(shape) == 1:
        count = min(servers, max(1, shape[0] // smallest))
        assert rows[0] == ceil(shape[0] / count)


@pytest.mark.parametrize(
    ("shape", "servers", "rows"),
    [
        ((5,), 7, (3, 2)),  # fluid: five slices of one
        ((16,), 7, (3, 3, 3, 3, 4)),  # fluid: a single last one
        ((2,), 2, (2,)),
        ((3, 8), 3, (1, 1, 1)),  # a row has more than one element
        ((5, 1), 3, (3, 2)),
        ((1,), 2, (1,)),
        ((), 2, ()),
    ],
)
def test_no_block_is_left_with_one_element_alone(
    shape: tuple[int, ...], servers: int, rows: tuple[int, ...]
) -> None:
    assert exact_rows(shape, servers, 1) == rows


@pytest.mark.parametrize(("servers", "smallest"), [(0, 1), (1, 0), (-2, 1)])
def test_the_rule_takes_positive_numbers(servers: int, smallest: int) -> None:
    with pytest.raises(PassError, match="must be at least 1"):
        slice_rows((4, 4), servers, smallest)
    with pytest.raises(PassError, match=r"slice_var: .* must be at least 1"):
        SliceVar(servers=servers, min_block_size=smallest)


WEIGHTS = {
    "b": np.zeros(16, np.float32),
    "s": np.float32(0),
    "w": np.zeros((9, 16), np.float32),
}


def cut(tx: optax.GradientTransformation) -> Program:
    """Returns a sliced step around an optimizer."""
    program = SliceVar(min_block_size=32).run(step_of(tx, WEIGHTS))
    assert parse(str(program)) == program
    return program


def test_slices_are_in_the_programs_text() -> None:
    text = str(cut(optax.adam(1e-3))).splitlines()[0]
    assert 'slices=[["params/b", [16]], ["params/s", []], ["params/w", [5, 4]]]' in text


def test_slices_are_named_and_know_their_rows() -> None:
    b, s, first, second = slices_of(cut(optax.adam(1e-3)))
    assert (b.name, b.rows, b.shape, b.numel, b.is_whole) == ("params/b", 16, (16,), 16, True)
    assert (s.name, s.rows, s.shape, s.numel) == ("params/s", 0, (), 1)
    assert (first.name, first.param, first.index) == ("params/w.block0", "params/w", 0)
    assert (first.start, first.rows, first.shape, first.numel) == (0, 5, (5, 16), 80)
    assert (second.start, second.rows, second.shape, second.numel) == (5, 4, (4, 16), 64)
    assert not first.is_whole


def test_what_stays_whole_says_why_with_the_users_line() -> None:
    program = cut(on_gradients(lambda gradient: gradient / gradient.sum()))
    whole = reasons_for_whole(program, find_optimizer_groups(program))
    assert whole["params/b"] == "fits one block (min_block_size, slice_var, number of servers)"
    assert whole["params/s"] == "a scalar has no rows"
    assert whole["params/w"].startswith("reduces its rows by jax.reduce_sum (")
    assert "test_slice_var.py:" in whole["params/w"]


@pytest.mark.parametrize("tx", [optax.lamb(1e-3), optax.adafactor(1e-3)], ids=["lamb", "adafactor"])
def test_an_optimizer_that_reduces_rows_keeps_its_parameters_whole(
    tx: optax.GradientTransformation,
) -> None:
    assert all(part.is_whole for part in slices_of(cut(tx)))


def test_nothing_is_cut_where_slicing_is_off_or_there_is_one_server() -> None:
    program = step_of(optax.sgd(0.1), WEIGHTS)
    assert all(x.is_whole for x in slices_of(SliceVar(slice=False, min_block_size=1).run(program)))
    assert all(x.is_whole for x in slices_of(SliceVar(servers=1, min_block_size=1).run(program)))


TWICE = """
program p
  data  x: f32[8,4]
  param w: f32[8,4]
  block 0
    backward
      w@GRAD: f32[8,4] = jax.neg(x) for (w, w@GRAD)
      w@GRAD~1: f32[{shape}] = jax.{op} for (w, w@GRAD~1)
    optimize
      w = jax.sub(w, w@GRAD)
      w = jax.sub(w, {second})
"""


def test_a_parameter_with_two_gradients_is_cut_once_with_both() -> None:
    program = parse(TWICE.format(shape="8,4", op="abs(x)", second="w@GRAD~1"))
    assert find_optimizer_groups(program).group("w").gradients == ("w@GRAD", "w@GRAD~1")
    cut_program = SliceVar(min_block_size=1).run(program)
    assert [part.rows for part in slices_of(cut_program)] == [4, 4]


def test_a_gradient_of_another_shape_keeps_the_parameter_whole() -> None:
    text = TWICE.format(shape="", op="reduce_sum(x) {axes=[0, 1]}", second="w@GRAD~1")
    program = SliceVar(min_block_size=1).run(parse(text))
    (whole,) = slices_of(program)
    assert whole.is_whole
    why = reasons_for_whole(program, find_optimizer_groups(program))["w"]
    assert why == "its gradient 'w@GRAD~1: f32[]' has another shape than its own, f32[8,4]"


def test_a_program_is_cut_once() -> None:
    with pytest.raises(PassError, match="program 'step' is already cut"):
        SliceVar().run(cut(optax.sgd(0.1)))


def test_a_program_without_parameters_is_refused() -> None:
    with pytest.raises(PassError, match="program 'p' has no parameters"):
        SliceVar().run(parse("program p\n  data  x: f32[4]\n  block 0\n"))


def test_a_program_that_was_not_cut_says_what_to_run() -> None:
    with pytest.raises(PassError, match="has no attribute 'slices'") as caught:
        slices_of(step_of(optax.sgd(0.1), WEIGHTS))
    assert "  hint: run slice_var first" in caught.value.__notes__


@pytest.mark.parametrize(
    ("slices", "why"),
    [
        ('"w"', "it is not a list"),
        ('["w"]', "'w' is not a parameter and the rows of its slices"),
        ('[["w", [4, -4, 8]]]', "is not a parameter and the rows"),
        ('[["w", [4, 1.5]]]', "is not a parameter and the rows"),
        ('[["v", [8]]]', "'v' is not a variable of it"),
        ('[["w", [4, 3]]]', r"\[4, 3\] are not the rows of 'w: f32\[8,4\]'"),
        ('[["w", []]]', r"\[\] are not the rows"),
    ],
)
def test_slices_that_are_not_the_programs_are_refused(slices: str, why: str) -> None:
    program = parse(f"program p {{slices={slices}}}\n  param w: f32[8,4]\n  block 0\n")
    with pytest.raises(PassError, match=f"attribute 'slices' of program 'p' is wrong: .*{why}"):
        slices_of(program)


def test_a_size_that_is_not_known_is_refused() -> None:
    text = """
    program p {batch=<b>}
      data  x: f32[b]
      param w: f32[b]
      block 0
        backward
          w@GRAD: f32[b] = jax.neg(x) for (w, w@GRAD)
        optimize
          w = jax.sub(w, w@GRAD)
    """
    with pytest.raises(PassError, match="the size of 'w: f32\\[b\\]' is not known"):
        SliceVar().run(parse(text))


def test_options_read_as_text() -> None:
    text = "slice_var{servers=3,min_block_size=1024,slice=false}"
    (pass_,) = parse_pipeline(text)
    assert pass_ == SliceVar(servers=3, min_block_size=1024, slice=False)
    assert pipeline_text([pass_]) == text


def test_a_parameter_whose_blocks_would_have_a_users_name_stays_whole() -> None:
    program = parse("""
program p
  data  x: f32[8,4]
  param w: f32[8,4]
  param w.block1: f32[8,4]
  block 0
    backward
      w@GRAD: f32[8,4] = jax.neg(x) for (w, w@GRAD)
      w.block1@GRAD: f32[8,4] = jax.neg(x) for (w.block1, w.block1@GRAD)
    optimize
      w = jax.sub(w, w@GRAD)
      w.block1 = jax.sub(w.block1, w.block1@GRAD)
""")
    cut = SliceVar(min_block_size=16).run(program)
    assert [each.name for each in slices_of(cut)] == ["w", "w.block1.block0", "w.block1.block1"]
