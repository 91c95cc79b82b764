"""Parts of the transpilers for scripts that rewrite programs themselves."""

import io

import pytest

from jaxfleet import fluid
from jaxfleet.errors import ProgramError
from jaxfleet.fluid.transpiler import details
from jaxfleet.fluid.transpiler.details import VarDistributed, VarsDistributed, VarStruct
from tests.fluid.nets import fresh

WHOLE = VarStruct("fc_w", (1000, 10), "float32", "lod_tensor", 0, persistable=True)
SLICES = [
    VarStruct(f"fc_w.block{at}", (500, 10), "float32", "lod_tensor", 0, persistable=True)
    for at in range(2)
]
BIAS = VarStruct("fc_b", (10,), "float32", "lod_tensor", 0, persistable=True)


def line() -> fluid.Program:
    """Returns a program with a product and a sum."""
    with fresh() as (main, _):
        fluid.layers.fc(fluid.data("x", [None, 2]), 1, param_attr="w", bias_attr="b")
    return main


def registry() -> VarsDistributed:
    """Returns two slices of a matrix on two servers, and a bias on the first."""
    made = VarsDistributed()
    for at, one in enumerate(SLICES):
        made.add_distributed_var(
            WHOLE, one, block_id=at, offset=at * 5000, vtype="Param", endpoint=f"ps{at}:1"
        )
    made.add_distributed_var(BIAS, BIAS, vtype="Optimizer", endpoint="ps0:1")
    return made


def test_operators_are_found_by_what_they_read_and_write() -> None:
    block = line().global_block()
    (out,) = block.ops[1].output("Out")
    assert details.find_op_by_input_arg(block, "w") == 0
    assert details.find_op_by_input_arg(block, "b") == 1
    assert details.find_op_by_output_arg(block, out) == 1
    assert details.find_op_by_output_arg(block, "w") == -1
    assert details.find_op_by_input_arg(block, "nothing") == -1


def test_of_several_writers_the_first_or_the_last_is_found() -> None:
    with fresh() as (main, _):
        x = fluid.layers.fill_constant([1], "float32", 1.0)
        fluid.layers.assign(fluid.layers.scale(x, 2.0), x)
    block = main.global_block()
    assert details.find_op_by_output_arg(block, x.name) == 0
    assert details.find_op_by_output_arg(block, x.name, reverse=True) == 2


def test_operators_are_deleted_all_or_none() -> None:
    block = line().global_block()
    strange = line().global_block().ops[0]
    with pytest.raises(ProgramError, match="block 0 has no such operator"):
        details.delete_ops(block, [block.ops[1], strange])
    assert len(block.ops) == 2
    details.delete_ops(block, [block.ops[1]])
    assert [op.type for op in block.ops] == ["mul"]


def test_a_program_is_printed_where_one_asks(capsys: pytest.CaptureFixture[str]) -> None:
    main, written = line(), io.StringIO()
    details.program_to_code(main, fout=written)
    details.program_to_code(main)
    assert written.getvalue() == capsys.readouterr().out
    assert "mul" in written.getvalue()


def test_sets_grow_together() -> None:
    sets = details.UnionFind(["a", "b", "c", "d"])
    assert not sets.is_connected("a", "b")
    sets.union("a", "b")
    sets.union("c", "d")
    assert sets.is_connected("b", "a")
    assert not sets.is_connected("a", "d")
    sets.union("b", "c")
    assert len({sets.find(x) for x in "abcd"}) == 1
    assert sets.find("e") is None
    assert not sets.is_connected("e", "e")
    sets.union("e", "a")
    assert sets.is_connected("e", "d")


def test_a_slice_knows_that_it_is_one_by_its_shape() -> None:
    assert VarDistributed(WHOLE, SLICES[1]).is_slice
    assert not VarDistributed(BIAS, BIAS).is_slice
    assert VarDistributed.equal(BIAS, BIAS)
    assert not VarDistributed.equal(*SLICES)
    weight = line().global_block().var("w")
    assert VarDistributed.equal(weight, VarStruct.of(weight))


def test_slices_are_found_by_name_server_and_type() -> None:
    made = registry()
    second = made.get_distributed_var_by_slice("fc_w.block1")
    assert second is not None
    assert (second.offset, second.endpoint) == (5000, "ps1:1")
    assert made.get_distributed_var_by_slice("fc_w") is None
    assert made.get_distributed_var_by_origin_and_ep("fc_w", "ps1:1") is second
    assert made.get_distributed_var_by_origin_and_ep("fc_b", "ps1:1") is None
    assert [v.slice.name for v in made.get_distributed_vars_by_ep("ps0:1")] == [
        "fc_w.block0",
        "fc_b",
    ]
    assert [v.slice.name for v in made.get_distributed_vars_by_ep("ps0:1", "Optimizer")] == ["fc_b"]
    grouped = made.get_distributed_vars_by_vtypes(["Param", "Optimizer"], groupby=True)
    assert isinstance(grouped, dict)
    assert {name: len(found) for name, found in grouped.items()} == {"fc_w": 2, "fc_b": 1}
    assert len(made.get_distributed_vars_by_vtypes(["Param"])) == 2
    assert made.overview().splitlines()[1] == (
        "Param fc_w[1000, 10]: fc_w.block1[500, 10] from element 5000 at ps1:1"
    )


def test_a_servers_program_says_how_many_threads_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLAGS_rpc_get_thread_num", "5")
    with fresh() as (main, _):
        loss = fluid.layers.mean(fluid.layers.fc(fluid.data("x", [None, 2]), 1))
        fluid.optimizer.SGD(0.1).minimize(loss)
        transpiler = fluid.DistributeTranspiler()
        transpiler.transpile(0, main, pservers="a:1", trainers=1)
    (serve,) = transpiler.get_pserver_program("a:1").global_block().ops
    found = [serve.attr(f"rpc_{what}_thread_num") for what in ("send", "get", "prefetch")]
    assert found == [12, 5, 12]
