"""Cases of fluid's own tests on dividing ids among servers and merging their rows."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import FeedError
from jaxfleet.fluid import layers
from tests.fluid.pserver.jobs import Script
from tests.fluid.pserver.memory import Job


def program_of(op_type: str, inputs: dict[str, list[str]], outputs: list[str]) -> fluid.Program:
    program = fluid.Program()
    for name in [*(name for names in inputs.values() for name in names), *outputs]:
        program.global_block().create_var(name=name)
    program.global_block().append_op(type=op_type, inputs=inputs, outputs={"Out": outputs})
    return program


def column(ids: Sequence[int]) -> np.ndarray:
    return np.array(ids, np.int64)[:, None]


def test_split_ids_divides_ids_by_their_remainder() -> None:
    given = ([0, 2, 2, 3, 5, 5, 6], [6, 2, 3, 3, 5, 2, 6], [2, 2, 2, 3, 5, 5, 6])
    fed = {f"ids{n}": column(ids) for n, ids in enumerate(given)}
    outs = [f"out{n}" for n in range(3)]
    program = program_of("split_ids", {"Ids": list(fed)}, outs)
    scope = fluid.Scope()
    found = fluid.Executor().run(program, feed=fed, fetch_list=outs, scope=scope)
    assert [array.reshape(-1).tolist() for array in found] == [[0, 3, 6], [], [2, 5]]
    assert np.array(scope["out2"]).tolist() == [[2], [5]]


def test_split_ids_keeps_the_order_of_sparse_rows() -> None:
    rows, scope = [0, 5, 7, 4, 9], fluid.Scope()
    given = scope.var("X").get_selected_rows()
    given.set_height(20)
    given.set_rows(rows)
    given.get_tensor().set(np.array([[row, row + 1] for row in rows], np.float32))
    outs = [f"out{n}" for n in range(3)]
    program, exe = program_of("split_ids", {"Ids": ["X"]}, outs), fluid.Executor()
    for _ in range(3):
        exe.run(program, scope=scope)
        for out, wanted in zip(outs, ([0, 9], [7, 4], [5]), strict=True):
            variable = scope.find_var(out)
            made = scope.var(out).get_selected_rows()
            assert variable is not None
            assert made.rows() == wanted
            assert made.height() == 20
            values = [[row, row + 1] for row in wanted]
            np.testing.assert_array_equal(np.array(made.get_tensor()), values)


def merged(ids: Sequence[int]) -> list[np.ndarray]:
    fed = {
        "ids0": column(ids), "ids1": column([0, 2, 2, 3]),
        "rows0": column([0, 2]), "rows1": column([3, 5]), "rows2": column([6]),
        "x0": np.array([[0.1, 0.2], [0.2, 0.3]], np.float32),
        "x1": np.array([[0.3, 0.4], [0.4, 0.5]], np.float32),
        "x2": np.array([[0.5, 0.6]], np.float32),
    }  # fmt: skip
    inputs = {
        "Ids": ["ids0", "ids1"], "Rows": ["rows0", "rows1", "rows2"], "X": ["x0", "x1", "x2"],
    }  # fmt: skip
    program = program_of("merge_ids", inputs, ["out0", "out1"])
    found: list[np.ndarray] = fluid.Executor().run(program, feed=fed, fetch_list=["out0", "out1"])
    return found


def test_merge_ids_returns_rows_in_the_order_of_ids() -> None:
    first, second = merged([0, 2, 5, 6])
    wanted = np.array([0.1, 0.2, 0.4, 0.5], np.float32)
    np.testing.assert_allclose(first, np.stack([wanted, wanted + 0.1], 1), rtol=1e-6)
    wanted = np.array([0.1, 0.2, 0.2, 0.3], np.float32)
    np.testing.assert_allclose(second, np.stack([wanted, wanted + 0.1], 1), rtol=1e-6)


def test_an_id_without_a_row_is_said() -> None:
    with pytest.raises(FeedError, match="no row came for id 4"):
        merged([0, 4])


def look_up() -> fluid.Variable:
    """Returns a loss over sequences of ids, looked up in a table whose rows are their numbers."""
    begins = fluid.initializer.NumpyArrayInitializer(
        np.repeat(np.arange(10.0, dtype=np.float32)[:, None], 8, 1)
    )
    ids = layers.data("ids", [1], dtype="int64", lod_level=1)
    attr = fluid.ParamAttr("emb", initializer=begins)
    rows = layers.embedding(ids, [10, 8], is_sparse=True, param_attr=attr)
    pooled = layers.sequence_pool(rows, "sum")
    loss = layers.mean(pooled)
    fluid.optimizer.SGD(0.0).minimize(loss)
    return loss


def test_rows_come_from_a_server_with_the_lengths_of_their_ids() -> None:
    endpoint = "127.0.0.1:7601"
    script = Script(Job(), look_up, [endpoint], 1)

    def trainer() -> fluid.LoDTensor:
        transpiler, startup, _ = script.transpiled()
        main, exe, scope = transpiler.get_trainer_program(), script.executor(), fluid.Scope()
        (asks,) = [op for op in main.global_block().ops if op.type == "distributed_lookup_table"]
        exe.run(startup, scope=scope)
        ids = fluid.create_lod_tensor(column([1, 2, 5]), [[1, 1, 1]], fluid.CPUPlace())
        fetch = asks.output("Outputs")
        (found,) = exe.run(main, {"ids": ids}, fetch, scope=scope, return_numpy=False)
        exe.close()
        return found

    people: dict[str, Any] = {"server": partial(script.serve, 0, fluid.Scope()), "trainer": trainer}
    found = script.job.run(people)["trainer"]
    np.testing.assert_array_equal(np.array(found), np.repeat([[1.0], [2.0], [5.0]], 8, 1))
    assert found.recursive_sequence_lengths() == [[1, 1, 1]]
