"""The peer's cases of `memory_optimize` and `release_memory`."""

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid import layers
from tests.fluid.nets import fresh

SQUARE = {key: [4, 4] for key in "xabcde"}


def program(shapes: dict[str, list[int]], ops: str, **dtypes: str) -> fluid.Program:
    """Returns a program of operators `out=in,in`; `x` is fed, `w` is persistable."""
    with fresh() as (main, _):
        block = main.global_block()
        for name, shape in shapes.items():
            block.create_var(
                name=name,
                shape=shape,
                dtype=dtypes.get(name, "float32"),
                is_data=name == "x",
                persistable=name == "w",
            )
        for out, read in (op.split("=") for op in ops.split()):
            block._insert_op_without_sync(
                len(block.ops), "sum", inputs={"X": read.split(",")}, outputs={"Out": [out]}
            )
    return main


def renamed(main: fluid.Program, **options: object) -> str:
    """Optimizes a program; returns the reuses of memory, in order."""
    before = [name for op in main.global_block().ops for name in op.output_arg_names]
    assert fluid.memory_optimize(main, **options) is None  # type: ignore[call-overload]
    assert main._is_mem_optimized
    after = [name for op in main.global_block().ops for name in op.output_arg_names]
    pairs = zip(before, after, strict=True)
    return " ".join(f"{old}=>{new}" for old, new in pairs if old != new)


def regression(units: int = 1) -> tuple[fluid.Program, fluid.Program, str, str]:
    """Returns a regression with its startup program, and the names of its output and its cost."""
    with fresh() as (main, startup):
        x, y = fluid.data("x", [None, 13]), fluid.data("y", [None, 1])
        predicted = layers.fc(x, units)
        predicted = layers.reshape(layers.reshape(predicted, [-1, 1, units]), [-1, units])
        predicted = layers.fc(predicted, 1) if units > 1 else predicted
        cost = layers.mean(layers.square_error_cost(predicted, y))
        fluid.optimizer.SGD(0.1).minimize(cost)
    return main, startup, predicted.name, cost.name


def arguments(main: fluid.Program) -> set[str]:
    """Returns the names that operators read and write."""
    ops = main.global_block().ops
    return {name for op in ops for name in (*op.input_arg_names, *op.output_arg_names)}


def test_memory_optimize_leaves_a_regression_fewer_names() -> None:
    main, *_ = regression()
    before = arguments(main)
    assert fluid.memory_optimize(main) is None
    assert arguments(main) < before


def test_skipped_names_stay_while_others_are_shared() -> None:
    main, _, predicted, cost = regression()
    before = arguments(main)
    fluid.memory_optimize(main, skip_opt_set={cost, main.global_block().var(predicted)})
    assert {predicted, cost} <= arguments(main) < before


def test_a_fetch_reads_the_name_that_took_the_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with fresh() as (main, _):
        block = main.global_block()
        for name in ("a0", "b0"):
            fluid.data(name, [-1, 1, 2, 2])
        for name in ("a", "b", "d", "cost"):
            block.create_var(name=name, shape=[-1, 1, 2, 2], dtype="float32")
        block.append_op("abs", inputs={"X": "a0"}, outputs={"Out": "a"})
        block.append_op("abs", inputs={"X": "b0"}, outputs={"Out": "b"})
        block.append_op("elementwise_sub", inputs={"X": "a", "Y": "b"}, outputs={"Out": "d"})
        block.append_op("square", inputs={"X": "d"}, outputs={"Out": "cost"})
    assert renamed(main, print_log=True) == "cost=>a"
    line = "!!! 0,  cost[-1, 1, 2, 2] => a[-1, 1, 2, 2], cache idx 0, pool size 2\n"
    assert capsys.readouterr().out == line
    feed = {"a0": -np.ones((3, 1, 2, 2), np.float32), "b0": np.full((3, 1, 2, 2), 3, np.float32)}
    cost, difference = fluid.Executor().run(main, feed, ["cost", "d"])
    np.testing.assert_array_equal(cost, np.full((3, 1, 2, 2), 4))
    np.testing.assert_array_equal(difference, np.full((3, 1, 2, 2), -2))
    with pytest.raises(ValueError, match="'a' is fetched, and memory_optimize gave its memory"):
        fluid.Executor().run(main, feed, ["a"])


def test_a_chain_of_operators_needs_two_names(capsys: pytest.CaptureFixture[str]) -> None:
    main = program(SQUARE, "a=x b=a c=b d=c e=d")
    assert renamed(main, print_log=True) == "c=>a d=>b e=>a"
    assert capsys.readouterr().out.count("cache idx 0, pool size 1\n") == 3
    assert set(main.global_block().vars) == set("xabcde")


def test_a_skipped_name_in_a_chain_is_not_reused() -> None:
    assert renamed(program(SQUARE, "a=x b=a c=b d=c e=d"), skip_opt_set={"b"}) == "c=>a e=>a"


def test_the_smallest_free_name_that_is_large_enough_is_taken() -> None:
    shapes = {"x": [8, 8], "a": [8, 8], "b": [4, 4], "c": [3, 3], "d": [2, 2], "e": [2, 2]}
    assert renamed(program(shapes, "a=x b=x c=a,b d=c e=d"), level=1) == "d=>b e=>c"


def test_a_batch_sized_name_is_not_given_to_a_fixed_size() -> None:
    shapes = {"x": [-1, 8], "a": [-1, 8], "b": [64, 8], "c": [-1, 4], "d": [-1, 2]}
    assert renamed(program(shapes, "a=x b=a c=b d=c"), level=1) == "c=>a"


def test_a_name_of_another_dtype_is_not_taken(capsys: pytest.CaptureFixture[str]) -> None:
    main = program({key: [4] for key in "xwabcd"}, "a=x b=a,w c=b d=c", b="int64")
    assert renamed(main, print_log=True) == "c=>a"
    assert capsys.readouterr().out.endswith("\nx_dtype and cache_dtype are different\n")


def test_release_memory_deletes_after_the_last_reader() -> None:
    main = program({key: [4] for key in "xwabcd"}, "a=x b=a,w c=b d=c", b="int64")
    assert fluid.release_memory(main) is None
    ops = main.global_block().ops
    assert [op.type for op in ops] == ["sum", "delete_var"] * 4
    assert [op.input("X") for op in ops[1::2]] == [["x"], ["a"], ["b"], ["c"]]
