"""Programs of trainers and servers for a step, as text, and rejections."""

from typing import Any

import pytest

from jaxfleet.errors import PassError
from jaxfleet.ir import Kind, Operator, Program, parse
from jaxfleet.passes import InsertSendRecv
from tests.passes.jobs import STEP, UNDIVIDED, placed, server_of, trainer_of

TRAINER = """
program mlp.trainer0 {endpoints=["s:1", "s:2"], role="trainer", trainers=2}
  data  x: f32[b,3]
  param b1: f32[2]
  param w1: f32[4,3]
  state count: i32[]
  block 0
    forward
      total: f32[] = jax.reduce_sum(x) {axes=[0, 1]}
      total = c_allreduce_sum(total) {endpoint="s:2"}
    backward
      b1@GRAD.trainer_0: f32[2] = jax.broadcast_in_dim(total) {broadcast_dimensions=[], shape=[2], sharding=none}
    rpc
      send(X=b1@GRAD.trainer_0) {epmap=["s:1"]} for (b1, b1@GRAD)
    backward
      row: f32[3] = jax.reduce_sum(x) {axes=[0]}
      w1@GRAD: f32[4,3] = jax.broadcast_in_dim(row) {broadcast_dimensions=[1], shape=[4, 3], sharding=none}
    dist
      Out=[w1@GRAD.block0.trainer_0: f32[2,3], w1@GRAD.block1.trainer_0: f32[2,3]] = split_byref(X=w1@GRAD) {sections=[2, 2]}
    rpc
      send(X=[w1@GRAD.block0.trainer_0, w1@GRAD.block1.trainer_0]) {epmap=["s:2", "s:1"]} for (w1, w1@GRAD)
    lr_sched
      count = jax.add(count, 1:i32)
    rpc
      send_barrier() {endpoints=["s:1", "s:2"], trainer_id=0}
      Out=b1 = recv() {epmap=["s:1"], trainer_id=0}
      Out=[w1.block0: f32[2,3], w1.block1: f32[2,3]] = recv() {epmap=["s:2", "s:1"], trainer_id=0}
      fetch_barrier() {endpoints=["s:1", "s:2"], trainer_id=0}
    dist
      Out=w1 = concat(X=[w1.block0, w1.block1]) {axis=0}
    optimize
      fetch(total)
"""  # noqa: E501  # an operator is a line

SERVER = """
program mlp.pserver0 {endpoint="s:1", endpoints=["s:1", "s:2"], holds=[["w1.block1", "w1", 2], ["m.block1", "m", 2]], pserver_id=0, role="pserver", slices=[["b1", [2]], ["w1", [2, 2]]], trainers=2}
  data  b1@GRAD.trainer_0: f32[2]
  data  b1@GRAD.trainer_1: f32[2]
  data  w1@GRAD.block1.trainer_0: f32[2,3]
  data  w1@GRAD.block1.trainer_1: f32[2,3]
  param b1: f32[2]
  param w1.block1: f32[2,3]
  state count: i32[]
  state m.block1: f32[2,3]
  block 0
    temp  rate: f32[]
    rpc
      listen_and_serv(X=[b1@GRAD.trainer_0, b1@GRAD.trainer_1, w1@GRAD.block1.trainer_0, w1@GRAD.block1.trainer_1]) {Fanin=2, combine_block_id=-1, distributed_mode=0, endpoint="s:1", grad_to_block_id=["b1@GRAD:2", "w1@GRAD.block1:3"], lr_decay_block_id=1, optimize_blocks=[^1, ^2, ^3], part_block_ids=[], pserver_id=0}
  block 1
    lr_sched
      count = jax.add(count, 1:i32)
      rate = jax.convert_element_type(count) {new_dtype=f32, sharding=none, weak_type=false}
  block 2 in 1
    optimize
      Out=b1@GRAD: f32[2] = sum(X=[b1@GRAD.trainer_0, b1@GRAD.trainer_1])
      b1s: f32[2] = jax.mul(b1@GRAD, rate)
      b1 = jax.sub(b1, b1s)
  block 3 in 1
    optimize
      Out=w1@GRAD.block1: f32[2,3] = sum(X=[w1@GRAD.block1.trainer_0, w1@GRAD.block1.trainer_1])
      m.block1 = jax.add(m.block1, w1@GRAD.block1)
      w1s: f32[2,3] = jax.mul(m.block1, rate)
      w1.block1 = jax.sub(w1.block1, w1s)
"""  # noqa: E501  # an operator is a line


def types(program: Program, block: int = 0) -> list[str]:
    return [op.type for op in program.blocks[block].ops]


def ops_of(program: Program, op_type: str) -> list[Operator]:
    return [op for block in program.blocks for op in block.ops if op.type == op_type]


def test_a_trainers_program_is_the_step_without_its_optimizer() -> None:
    assert str(trainer_of(placed())).strip() == TRAINER.strip()


def test_a_servers_program_has_a_block_for_each_slice() -> None:
    assert str(server_of(placed())).strip() == SERVER.strip()


def test_trainers_differ_in_the_names_of_what_they_send_and_who_they_say_they_are() -> None:
    first, second = (str(trainer_of(placed(), number)) for number in (0, 1))
    assert second == (
        first.replace("mlp.trainer0", "mlp.trainer1")
        .replace("GRAD.trainer_0", "GRAD.trainer_1")
        .replace(".block0.trainer_0", ".block0.trainer_1")
        .replace(".block1.trainer_0", ".block1.trainer_1")
        .replace("trainer_id=0", "trainer_id=1")
    )


def test_operators_come_in_fluids_order() -> None:
    program = trainer_of(placed())
    places = {op: at for at, op in enumerate(types(program))}
    sent = [op.reads for op in ops_of(program, "send")]
    ops = program.root.ops
    for at, op in enumerate(ops):
        if op.type == "send":  # right after the operator that made or split the gradient
            assert set(ops[at - 1].writes) == set(op.reads)
    assert len(sent) == 2
    order = ["send_barrier", "recv", "fetch_barrier", "concat", "fetch"]
    assert sorted(order, key=places.__getitem__) == order
    assert places["send"] < places["send_barrier"]


def test_the_servers_together_have_every_row_once() -> None:
    program = placed()
    found = [x for server in (0, 1) for x in server_of(program, server).attrs["holds"]]  # type: ignore[union-attr]
    assert sorted(map(str, found)) == sorted(
        map(
            str,
            [
                ("w1.block0", "w1", 0),
                ("m.block0", "m", 0),
                ("w1.block1", "w1", 2),
                ("m.block1", "m", 2),
            ],
        )
    )


def test_one_trainer_sends_gradients_by_their_own_names() -> None:
    program = trainer_of(placed(UNDIVIDED), trainers=1)
    assert [op.reads for op in ops_of(program, "send")] == [
        ("b1@GRAD",),
        ("w1@GRAD.block0", "w1@GRAD.block1"),
    ]
    assert ".trainer_" not in str(program)
    buffers = ops_of(server_of(placed(UNDIVIDED), trainers=1), "sum")
    assert [op.reads for op in buffers] == [
        ("b1@GRAD.trainer_0",),
        ("w1@GRAD.block1.trainer_0",),
    ]


def test_a_gradient_that_every_trainer_has_whole_comes_from_trainer_0() -> None:
    text = UNDIVIDED
    assert len(ops_of(trainer_of(placed(text), 0), "send")) == 2
    assert ops_of(trainer_of(placed(text), 1), "send") == []
    assert [op.reads for op in ops_of(server_of(placed(text)), "sum")] == [
        ("b1@GRAD.trainer_0",),
        ("w1@GRAD.block1.trainer_0",),
    ]


def test_a_server_with_nothing_has_one_empty_block() -> None:
    program = placed(endpoints=("s:1", "s:2", "s:3", "s:4"), min_block_size=100)
    server = server_of(program, 3)
    assert server.variables == {}
    assert [len(block.ops) for block in server.blocks] == [1, 0]
    assert "optimize_blocks=[^1]" in str(server)
    assert "lr_decay_block_id=-1" in str(server)


def test_the_learning_rate_is_made_once_a_server_in_a_block_of_its_own() -> None:
    server = server_of(placed())
    assert "lr_decay_block_id=1" in str(server)
    assert types(server, 1) == ["jax.add", "jax.convert_element_type"]
    assert "rate" in server.root.variables
    assert all(block.parent == 1 for block in server.blocks[2:])


# The norm of all gradients scales each of them.
CROSSING = (
    STEP.replace(
        "    lr_sched",
        """    optimize
      n1: f32[] = jax.reduce_sum(b1@GRAD) {axes=[0]}
      n2: f32[] = jax.reduce_sum(w1@GRAD) {axes=[0, 1]}
      norm: f32[] = jax.add(n1, n2)
    lr_sched""",
    )
    .replace("jax.mul(b1@GRAD, rate)", "jax.mul(b1@GRAD, norm)")
    .replace("jax.add(m, w1@GRAD)", "jax.mul(w1@GRAD, norm)")
)


def test_what_crosses_parameters_is_exchanged_by_those_who_make_it() -> None:
    program = placed(CROSSING)
    found = [ops_of(server_of(program, server), "exchange")[0] for server in (0, 1)]
    assert [str(op) for op in found] == [
        'Out=n2 = exchange(X=n1) {endpoints=["s:1", "s:2"], epmap=["s:2"]}',
        'Out=n1 = exchange(X=n2) {endpoints=["s:1", "s:2"], epmap=["s:1"]}',
    ]


def test_parts_are_made_before_they_meet_and_updates_come_after() -> None:
    server = server_of(placed(CROSSING), 1)
    serve = server.root.ops[0].attrs
    assert (serve["part_block_ids"], serve["combine_block_id"]) == ((2,), 3)
    assert types(server, 2) == ["sum", "jax.reduce_sum"]
    assert types(server, 3) == ["exchange", "jax.add"]
    assert "w1" in server.blocks[4].ops[-1].writes


def test_servers_with_nothing_take_no_part_in_an_exchange() -> None:
    program = placed(CROSSING, ("s:1", "s:2", "s:3"))
    assert ops_of(server_of(program, 2), "exchange") == []
    (exchange,) = ops_of(server_of(program, 0), "exchange")
    assert exchange.attrs["endpoints"] == ("s:1", "s:2")


def test_a_norm_of_updates_that_is_a_metric_is_received() -> None:
    text = STEP.replace("fetch(total)", "fetch(total, rows)").replace(
        "      w1 = jax.sub(w1, w1s)",
        "      w1 = jax.sub(w1, w1s)\n      rows: f32[4] = jax.reduce_sum(w1s) {axes=[1]}",
    )
    program = trainer_of(placed(text))
    received = [name for op in ops_of(program, "recv") for name in op.writes]
    # Trainers make only this update: servers always send their values, the rows.
    assert received == ["b1", "w1.block0", "w1.block1", "w1s.block0", "w1s.block1"]
    assert types(program)[-1] == "fetch"
    assert "w1s.block1" in server_of(placed(text)).root.variables


def test_what_only_trainers_know_is_sent_by_trainer_0_to_those_who_read_it() -> None:
    text = STEP.replace("  state count: i32[]", "  state count: i32[]\n  state own: f32[]").replace(
        "jax.mul(b1@GRAD, rate)", "jax.mul(b1@GRAD, own)"
    )
    first, second = (trainer_of(placed(text), number) for number in (0, 1))
    sent = [op for op in ops_of(first, "send") if op.reads == ("own",)]
    assert [op.attrs["epmap"] for op in sent] == [("s:1",)]
    assert all("own" not in op.reads for op in ops_of(second, "send"))
    merges = {op.writes: op.reads for op in ops_of(server_of(placed(text), 0), "sum")}
    assert merges["own",] == ("own.trainer_0",)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"server": 2}, "server 2 of 2"),
        ({"server": -2}, "server -2 of 2"),
        ({"trainer_id": 2, "trainers": 2}, "trainer 2 of 2"),
        ({"trainer_id": -1}, "trainer -1 of 1"),
    ],
)
def test_nobodys_program_is_refused(change: dict[str, Any], what: str) -> None:
    with pytest.raises(PassError, match=f"insert_send_recv: {what}"):
        InsertSendRecv(**change).run(placed())


def test_a_program_is_divided_once() -> None:
    for program, role in ((trainer_of(placed()), "trainer"), (server_of(placed()), "pserver")):
        with pytest.raises(PassError, match=f"the program is already a {role}'s"):
            InsertSendRecv().run(program)


def test_a_step_that_was_not_placed_says_what_to_run() -> None:
    with pytest.raises(PassError, match="endpoints") as caught:
        InsertSendRecv().run(parse(STEP))
    assert caught.value.__notes__ == ["  hint: run dispatch first"]


def test_servers_exchange_once_a_step() -> None:
    text = CROSSING.replace(
        "      fetch(total)",
        """      u1: f32[] = jax.reduce_sum(b1s) {axes=[0]}
      u2: f32[] = jax.reduce_sum(w1s) {axes=[0, 1]}
      u: f32[] = jax.add(u1, u2)
      b2: f32[2] = jax.mul(b1, u)
      b1 = jax.sub(b1, b2)
      w2: f32[4,3] = jax.mul(w1, u)
      w1 = jax.sub(w1, w2)
      fetch(total)""",
    )
    with pytest.raises(PassError, match="exchange twice in a step") as caught:
        trainer_of(placed(text))
    assert any("mode='collective'" in note for note in caught.value.__notes__)


def test_a_trainer_receives_the_optimizer_state_that_it_reads() -> None:
    text = STEP.replace("axes=[0, 1]}\n", "axes=[0, 1]}\n      peek: f32[] = jax.reduce_sum(m) {axes=[0, 1]}\n", 1)  # noqa: E501  # fmt: skip
    trainer = trainer_of(placed(text.replace("fetch(total)", "fetch(total, peek)")))
    assert trainer.variables["m"].kind is Kind.STATE
    joins = [op for op in trainer.root.ops if op.type == "concat" and op.writes == ("m",)]
    assert [op.reads for op in joins] == [("m.block0", "m.block1")]


def test_the_optimizer_cannot_read_what_trainers_make_of_its_results() -> None:
    text = STEP.replace(
        "      m = jax.add(m, w1@GRAD)",
        """    forward
      late: f32[] = jax.reduce_sum(b1) {axes=[0]}
    optimize
      m = jax.add(m, w1@GRAD)""",
    ).replace("jax.mul(m, rate)", "jax.mul(m, late)")
    with pytest.raises(PassError, match="the optimizer reads 'late'") as caught:
        trainer_of(placed(text))
    assert any("mode='collective'" in note for note in caught.value.__notes__)
