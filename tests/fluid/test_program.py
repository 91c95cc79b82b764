"""Programs: blocks, copies, pruning, text, and caches."""

import cProfile

import pytest

from jaxfleet import fluid
from jaxfleet.errors import ProgramError
from jaxfleet.fluid import layers
from jaxfleet.fluid.framework.to_ir import ir_program
from tests.fluid.nets import built, fresh

LAYERS = 100


def classifier() -> tuple[fluid.Variable, fluid.Variable]:
    """Builds the net of Paddle's test of pruning; returns its output and its loss."""
    x, label = layers.data("x", [4]), layers.data("label", [1], dtype="int64")
    y = layers.fc(x, 3, act="softmax", bias_attr="b")
    return y, layers.mean(layers.cross_entropy(y, label))


def types(program: fluid.Program) -> list[str]:
    return [op.type for op in program.global_block().ops]


def test_block_numbers_grow_across_rollbacks() -> None:
    program = fluid.Program()

    def current() -> tuple[int, int]:
        return program.current_block().idx, program.current_block().parent_idx

    program._create_block()
    assert current() == (1, 0)
    program._create_block()
    assert current() == (2, 1)
    program._rollback()
    assert current() == (1, 0)
    program._create_block()
    assert current() == (3, 1)
    program._rollback()
    assert current() == (1, 0)
    assert program.num_blocks == 4


def test_parameters_of_a_layer_have_fluids_names() -> None:
    with fresh() as (main, _):
        layers.fc(layers.data("x", [13]), 1)
    assert [p.name for p in main.all_parameters()] == ["fc_0.w_0", "fc_0.b_0"]


def test_pruning_keeps_the_operators_that_targets_need() -> None:
    with fresh() as (main, _):
        y, loss = classifier()
        layers.fc(layers.data("z", [2]), 2)
    whole = ["mul", "elementwise_add", "softmax", "cross_entropy2", "mean"]
    assert types(main._prune(loss)) == types(main._prune([loss])) == whole
    assert types(main._prune_with_input([y.name, "label"], [loss])) == ["cross_entropy2", "mean"]
    assert types(main._prune(main.global_block().ops[1])) == ["mul", "elementwise_add"]
    pruned = main._prune_with_input([y.name, "label"], [loss])
    assert {v.name for v in pruned.list_vars()}.isdisjoint({"x", "z", "b"})
    with pytest.raises(ValueError, match="pruned to Variables and Operators, not to a NoneType"):
        main._prune_with_input([], None)
    with pytest.raises(ValueError, match="names of what is fed, not by a int"):
        main._prune_with_input([2, 3, 4], [loss])
    with pytest.raises(ValueError, match="no operator makes 'x'"):
        main._prune("x")


def test_a_random_seed_that_is_not_an_int_is_refused() -> None:
    with pytest.raises(ValueError, match="a random seed is an int, not str"):
        fluid.Program().random_seed = "seed"  # type: ignore[assignment]


def test_a_seed_of_the_process_is_that_of_new_programs() -> None:
    program = fluid.Program()
    try:
        program.global_seed(102)
        assert program.random_seed == fluid.Program().random_seed == 102
    finally:
        program.global_seed()
    assert fluid.Program().random_seed == 0


def test_pruning_to_gradients_keeps_no_update_unless_it_is_asked_for() -> None:
    with fresh() as (main, _):
        _, loss = classifier()
        updates, pairs = fluid.optimizer.SGD(0.1).minimize(loss)
    gradient = pairs[0][1]
    assert "sgd" not in types(main._prune([gradient, loss]))
    assert types(main._prune(updates[0])).count("sgd") == 1
    assert types(main._prune([*updates])).count("sgd") == 2


def test_pruning_to_a_parameter_keeps_it_and_the_updates_that_are_asked_for() -> None:
    with fresh() as (main, _):
        _, loss = classifier()
        updates, _ = fluid.optimizer.SGD(0.1).minimize(loss)
    assert types(main._prune("b")) == []
    assert main._prune("b").global_block().has_var("b")
    assert types(main._prune(["b", *updates])).count("sgd") == 2
    weight = next(op for op in updates if op.input("Param") == ["fc_0.w_0"])
    kept = main._prune(["b", weight])
    assert [op.input("Param") for op in kept.global_block().ops if op.type == "sgd"] == [
        ["fc_0.w_0"]
    ]


def test_a_copy_shares_nothing_that_changes() -> None:
    with fresh() as (main, _):
        layers.piecewise_decay([1], [0.1, 0.2])
        classifier()
        main.all_parameters()[0].optimize_attr["learning_rate"] = 2.0
    text = str(main)
    copy = main.clone()
    assert str(copy) == text
    assert [p.trainable for p in copy.all_parameters()] == [True, True]
    inner = next(op for op in copy.global_block().ops if op.type == "conditional_block")
    assert inner._block_attr("sub_block") is copy.block(1)
    copy.global_block().ops[-1]._set_attr("op_role", 256)
    copy.global_block()._rename_var("x", "renamed")
    copy.all_parameters()[0].optimize_attr["learning_rate"] = 3.0
    copy._endpoints.append("a:1")
    assert str(main) == text
    assert main.all_parameters()[0].optimize_attr == {"learning_rate": 2.0}
    assert main._endpoints == []


def test_a_rate_of_its_own_is_the_copys_own() -> None:
    with fresh() as (main, _):
        classifier()
        rate = layers.create_global_var([1], 0.5, "float32", name="rate")
    for parameter in main.all_parameters():
        parameter.optimize_attr["learning_rate"] = rate
    copy = main.clone()
    own = copy.global_block().var("rate")
    assert all(p.optimize_attr["learning_rate"] is own for p in copy.all_parameters())
    assert all(p.optimize_attr["learning_rate"] is rate for p in main.all_parameters())


def test_a_copy_keeps_the_lines_of_the_script() -> None:
    main, _ = built("fc1", "sgd")
    for op, copy in zip(main.global_block().ops, main.clone().global_block().ops, strict=True):
        assert copy.source == op.source
        assert copy.source.file.endswith("nets.py")
        assert "nets.py" in copy.attr("op_callstack")[0]


def test_a_copy_of_a_servers_program_runs_blocks_of_its_own() -> None:
    with fresh() as (main, _):
        fluid.optimizer.SGD(0.1).minimize(classifier()[1])
        transpiler = fluid.DistributeTranspiler()
        transpiler.transpile(0, main, pservers="a:1", trainers=1)
    copy = transpiler.get_pserver_program("a:1").clone()
    (serve,) = copy.global_block().ops
    assert serve.attr("optimize_blocks") == copy.blocks[1:]
    assert serve.all_attrs()["optimize_blocks"] == copy.blocks[1:]  # scripts read b.idx
    assert "optimize_blocks=[1, 2]" in str(serve)
    assert [len(block.ops) for block in copy._prune(serve).blocks] == [1, 3, 3]


def test_copying_a_program_costs_calls_in_proportion_to_its_operators() -> None:
    few, many = (calls_of_a_copy(layers) for layers in (LAYERS, 4 * LAYERS))
    assert many < 4.2 * few
    assert many < 60 * 4 * LAYERS  # 49 for an operator and its variable


def calls_of_a_copy(layers: int) -> int:
    """Returns the number of function calls for copying a chain of that many operators."""
    with fresh() as (main, _):
        block = main.global_block()
        block.create_var(name="x0", shape=[4])
        for number in range(layers):
            block.create_var(name=f"x{number + 1}", shape=[4])
            block.append_op("relu", {"X": f"x{number}"}, {"Out": f"x{number + 1}"})
    profile = cProfile.Profile()
    profile.runcall(main.clone)
    return sum(entry.callcount for entry in profile.getstats())


def test_what_a_transpiler_says_of_a_program_goes_with_it() -> None:
    main, _ = built("fc1", "sgd")
    assert main._facts == {}
    main._facts.update(role="trainer", trainers=2, endpoints=("a:1", "b:2"))
    main._endpoints, main._is_chief = ["a:1", "b:2"], True
    copy = main.clone()
    said = {"role": "trainer", "trainers": 2, "endpoints": ("a:1", "b:2")}
    assert dict(ir_program(copy).attrs) == said
    copy._facts["trainers"] = 3
    assert main._facts["trainers"] == 2
    other = fluid.Program()
    other._copy_dist_param_info_from(copy)
    assert (other._endpoints, other._is_chief, other._is_distributed) == (
        ["a:1", "b:2"],
        True,
        False,
    )


def test_variables_become_what_another_programs_are() -> None:
    with fresh() as (main, _):
        classifier()
    bare = fluid.Program()
    for variable in main.list_vars():
        bare.global_block().create_var(name=variable.name, shape=variable.shape)
    assert not bare.all_parameters()
    main.all_parameters()[1].trainable = False
    bare._copy_param_info_from(main)
    bare._copy_data_info_from(main)
    assert [(p.name, p.trainable) for p in bare.all_parameters()] == [
        ("fc_0.w_0", True),
        ("b", False),
    ]
    assert [v.name for v in bare.list_vars() if v.is_data] == ["x", "label"]
    for take in (bare._copy_param_info_from, bare._copy_data_info_from,
                 bare._copy_dist_param_info_from):  # fmt: skip
        with pytest.raises(TypeError, match="a program is of type str, not Program"):
            take("main")  # type: ignore[arg-type]


def test_a_program_that_is_used_has_no_reader() -> None:
    with fresh() as (main, _):
        block = main.global_block()
        block.create_var(name="queue", type=fluid.core.VarDesc.VarType.READER)
        x = block.create_var(name="x", shape=[4])
        block.append_op("read", {"Reader": "queue"}, {"Out": x})
        layers.dropout(x, 0.5)
    used = main._inference_optimize()
    assert types(used) == ["dropout"]
    assert used.global_block().ops[0].attr("is_test") is True
    assert not used.global_block().has_var("queue")
    assert types(main._inference_optimize(prune_read_op=False)) == ["read", "dropout"]
    assert types(main) == ["read", "dropout"]


def test_text_says_more_where_it_is_asked_to() -> None:
    with fresh() as (main, _):
        classifier()
        main.global_block().create_var(name="unknown")
    text = main.to_string(throw_on_error=False)
    assert "data" not in text
    assert "parameter fc_0.w_0: float32[4,3]" in text
    details = main.to_string(throw_on_error=False, with_details=True)
    assert "'learning_rate': 1.0" in details
    assert "is_data=True" in details
    with pytest.raises(ValueError, match="the shape of 'unknown' is not known"):
        main.to_string(throw_on_error=True)
    for given in ({"throw_on_error": 1}, {"throw_on_error": False, "with_details": "yes"}):
        with pytest.raises(TypeError, match=r"is of type \w+, not bool"):
            main.to_string(**given)


def test_a_wrong_role_is_named() -> None:
    with fresh() as (main, _):
        x = layers.data("x", [1])
        with main.role(3), pytest.raises(ProgramError, match="3 is no role"):
            layers.relu(x)
        for role in (0, 1, 2, 4, 8, 16, 18, 256, 257, 4096):
            with main.role(role):
                layers.relu(x)
    roles = [op.attr("op_role") for op in main.global_block().ops]
    assert roles == [0, 1, 2, 4, 8, 16, 18, 256, 257, 4096]


def test_a_printed_program_shows_the_attributes_that_are_not_the_usual_ones() -> None:
    with fresh() as (main, _):
        x = layers.data("x", [4])
        layers.scale(layers.scale(x), scale=7.0)
    first, second = str(main).splitlines()[-2:]
    assert first.endswith("scale(X=['x'])")
    assert second.endswith("scale(X=['scale_0.tmp_0']) {scale=7.0}")


def test_a_rank_s_startup_program_prints() -> None:
    config = fluid.DistributeTranspilerConfig()
    config.mode, config.wait_port = "nccl2", False
    with fresh() as (main, startup):
        fluid.optimizer.SGD(0.1).minimize(layers.mean(layers.fc(layers.data("x", [4]), 1)))
        ranks = "127.0.0.1:6174,127.0.0.1:6175"
        made = fluid.DistributeTranspiler(config)
        made.transpile(0, main, trainers=ranks, current_endpoint="127.0.0.1:6174")
    assert "NCCLID: float32[?]" in startup.to_string(throw_on_error=True)
