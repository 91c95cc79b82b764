"""Cases of fluid's own tests on slices and dispatchers; `peer_cases.md` lists them."""

import zlib

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid.transpiler import (
    HashName,
    PSDispatcher,
    RoundRobin,
    VarBlock,
    same_or_split_var,
    slice_variable,
)

A, B = "127.0.0.1:6174", "127.0.0.1:6175"


def blocks(shapes: list[tuple[int, ...]], count: int, least: int) -> list[list[int]]:
    """Returns the elements of each block of variables of these shapes."""
    block = fluid.Program().global_block()
    variables = [block.create_var(name=f"v{i}", shape=s) for i, s in enumerate(shapes)]
    found: dict[str, list[int]] = {}
    for text in slice_variable(variables, count, least):
        name, index, size = text.split(":")
        held = found.setdefault(name, [])
        assert int(index) == len(held)
        held.append(int(size))
    return [found[v.name] for v in variables]


def test_variables_are_cut_into_slices_of_at_least_1024_elements() -> None:
    made = blocks([(3, 5), (1024,), (28, 784), (8, 1020), (800, 10)], 10, 1024)
    assert made == [[15], [1024], [2352] * 9 + [784], [2040] * 4, [1150] * 6 + [1100]]


def test_variables_are_cut_into_slices_of_at_least_8192_elements() -> None:
    shapes = [(3, 5), (1024,), (28, 784), (8, 1020), (800, 10), (6, 33, 33, 33)]
    made = blocks(shapes, 10, 8192)
    assert made == [[15], [1024], [10976] * 2, [8160], [8000], [35937] * 6]


@pytest.mark.parametrize(
    ("shape", "count", "least", "wanted"),
    [
        pytest.param((1000, 1000), 2, 8192, [500000] * 2, id="two servers"),
        pytest.param((1000, 1000), 2, 1048576, [1000000], id="below the least size"),
        pytest.param((9, 8192), 4, 8192, [24576] * 3, id="rows of one slice"),
        pytest.param((10, 16384), 4, 8192, [49152] * 3 + [16384], id="a rest of one row"),
        pytest.param((5, 8192), 4, 8192, [16384, 16384, 8192], id="five rows"),
        pytest.param((16384,), 2, 8192, [8192, 8192], id="just enough for two"),
        pytest.param((16383,), 2, 8192, [16383], id="one element too few"),
        pytest.param((1, 100000), 4, 8192, [100000], id="one row"),
        pytest.param((10000, 8), 2, 8192, [40000, 40000], id="80,000 elements"),
        pytest.param((10000, 1), 2, 8192, [10000], id="10,000 elements"),
        pytest.param((2048, 1000), 3, 8192, [683000, 683000, 682000], id="three servers"),
        pytest.param((1000, 1000), 1, 8192, [1000000], id="one server"),
    ],
)
def test_a_shape_is_cut_by_whole_rows_into_large_enough_slices(
    shape: tuple[int, ...], count: int, least: int, wanted: list[int]
) -> None:
    assert blocks([shape], count, least) == [wanted]


def test_round_robin_continues_where_it_stopped() -> None:
    one, two = [VarBlock("a", 0, 1)], [VarBlock("b", 0, 1), VarBlock("c", 0, 1)]
    dispatcher = RoundRobin([A, B])
    assert dispatcher.eps == [A, B]
    assert [dispatcher.dispatch(one), dispatcher.dispatch(two)] == [[A], [B, A]]
    dispatcher.reset()
    assert dispatcher.dispatch(one) == [A]


def test_a_dispatcher_without_dispatch_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="PSDispatcher does not say"):
        PSDispatcher([A]).dispatch([VarBlock("a", 0, 1)])


def test_hash_name_is_the_same_in_every_process() -> None:
    """Fluid's raised TypeError with real variables, and Python's hash differs between processes."""
    block = fluid.Program().global_block()
    variables = [block.create_var(name=f"w{i}", shape=[4]) for i in range(64)]
    placed = HashName([A, B]).dispatch(variables)
    assert placed == [(A, B)[zlib.crc32(v.name.encode()) % 2] for v in variables]
    assert 16 < placed.count(A) < 48


class Grandchild(RoundRobin):
    """Derives from PSDispatcher over another class."""


def test_any_descendant_of_psdispatcher_is_a_split_method() -> None:
    """Fluid accepted only direct children, for no stated reason."""
    config = fluid.DistributeTranspilerConfig()
    config.split_method = Grandchild
    assert fluid.DistributeTranspiler(config).config.split_method is Grandchild
    config.split_method = int  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="must derive from PSDispatcher"):
        fluid.DistributeTranspiler(config)


def test_a_block_reads_as_fluids() -> None:
    assert str(VarBlock("w", 1, 40)) == "w:1:40"
    assert same_or_split_var("w", "w")
    assert same_or_split_var("w.block1", "w")
    assert not same_or_split_var("w2", "w")


def test_slices_of_a_numpy_like_shape() -> None:
    block = fluid.Program().global_block()
    variable = block.create_var(name="w", shape=np.zeros((6, 4)).shape)
    assert slice_variable([variable], 3, 1) == ["w:0:8", "w:1:8", "w:2:8"]
