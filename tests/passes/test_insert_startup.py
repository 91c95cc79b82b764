"""Startup programs as text: transfers of the state's slices, and rejections."""

import pytest

from jaxfleet.errors import PassError
from jaxfleet.ir import Program, parse, verify
from jaxfleet.passes import InsertStartup
from jaxfleet.passes.pserver.insert_startup import trainer_startup
from tests.passes.jobs import placed, trainer_of

TRAINER = """
program mlp.trainer1.startup {endpoints=["s:1", "s:2"], role="trainer", trainers=2}
  param b1: f32[2]
  param w1: f32[4,3]
  state count: i32[]
  block 0
    rpc
      Out=b1 = recv() {epmap=["s:1"], trainer_id=1}
      Out=[w1.block0: f32[2,3], w1.block1: f32[2,3]] = recv() {epmap=["s:2", "s:1"], trainer_id=1}
      Out=count = recv() {epmap=["s:1"], trainer_id=1}
      fetch_barrier() {endpoints=["s:1", "s:2"], trainer_id=1}
    dist
      Out=w1 = concat(X=[w1.block0, w1.block1]) {axis=0}
"""

SERVER = """
program mlp.pserver0.startup {endpoint="s:1", endpoints=["s:1", "s:2"], holds=[["w1.block1", "w1", 2], ["m.block1", "m", 2]], pserver_id=0, role="pserver", trainers=2}
  param b1: f32[2]
  param w1.block1: f32[2,3]
  state count: i32[]
  state m.block1: f32[2,3]
  block 0
    rpc
      Out=[b1, w1.block1, count, m.block1] = recv() {endpoint="s:1", trainer_id=0}
"""  # noqa: E501  # a program's attributes are one line

# A server with two slices of `w`, and so two copies of the associated scalar `n`.
COPIES = """
program p.pserver0.startup {endpoint="s:1", endpoints=["s:1"], holds=[["w.block0", "w", 0], ["n.block0", "n", -1], ["w.block1", "w", 2], ["n.block1", "n", -1]], pserver_id=0, role="pserver", trainers=1}
  param w.block0: f32[2]
  param w.block1: f32[2]
  state n.block0: i32[]
  state n.block1: i32[]
  block 0
    rpc
      Out=[w.block0, w.block1, n.block0, n.block1] = recv() {endpoint="s:1", trainer_id=0}
"""  # noqa: E501  # a program's attributes are one line
TAKES_COPIES = """
program p.trainer0 {endpoints=["s:1"], role="trainer", trainers=1}
  param w: f32[4]
  state n: i32[]
  block 0
"""
GIVES_COPIES = """
program p.trainer0.startup {endpoints=["s:1"], role="trainer", trainers=1}
  param w: f32[4]
  state n: i32[]
  block 0
    dist
      Out=[w.block0: f32[2], w.block1: f32[2]] = split_byref(X=w) {sections=[2, 2]}
    rpc
      send(X=[w.block0, w.block1]) {epmap=["s:1", "s:1"]}
    dist
      Out=n.block0: i32[] = assign(X=n)
      Out=n.block1: i32[] = assign(X=n)
    rpc
      send(X=[n.block0, n.block1]) {epmap=["s:1", "s:1"]}
      send_barrier() {endpoints=["s:1"], trainer_id=0}
      Out=[w.block0, w.block1] = recv() {epmap=["s:1", "s:1"], trainer_id=0}
      Out=n.block0 = recv() {epmap=["s:1"], trainer_id=0}
      fetch_barrier() {endpoints=["s:1"], trainer_id=0}
    dist
      Out=w = concat(X=[w.block0, w.block1]) {axis=0}
      Out=n = assign(X=n.block0)
"""


def startup(trainer: int = 0, *, server: int = -1) -> Program:
    made = InsertStartup(trainer, server, trainers=2).run(placed())
    verify(made)
    assert parse(str(made)) == made
    return made


def test_a_trainer_receives_what_its_program_reads() -> None:
    assert str(startup(1)).strip() == TRAINER.strip()


def test_a_server_receives_the_variables_of_its_program() -> None:
    assert str(startup(server=0)).strip() == SERVER.strip()


def test_operators_come_in_fluids_order() -> None:
    types = [op.type for op in startup().root.ops]
    found = [kind for at, kind in enumerate(types) if kind not in types[:at]]
    assert found == ["send", "split_byref", "send_barrier", "recv", "fetch_barrier", "concat"]
    assert types.index("send_barrier") == len(types) - types[::-1].index("send")
    assert [op.type for op in startup(1).root.ops] == [*["recv"] * 3, "fetch_barrier", "concat"]


def test_what_every_server_has_is_sent_to_all_and_received_from_one() -> None:
    ops = startup().root.ops
    (sent,) = [op for op in ops if op.type == "send" and "count" in op.reads]
    assert (sent.reads, sent.attrs["epmap"]) == (("count", "count"), ("s:1", "s:2"))
    (received,) = [op for op in ops if op.type == "recv" and "count" in op.writes]
    assert received.attrs["epmap"] == ("s:1",)


def test_every_slice_gets_its_copy_of_what_is_not_cut() -> None:
    step, servers = parse(TAKES_COPIES), [parse(COPIES)]
    made = trainer_startup(step, step, servers, trainer_id=0)
    verify(made)
    assert str(made).strip() == GIVES_COPIES.strip()


def test_operators_say_which_pass_made_them() -> None:
    programs = (startup(), startup(server=1))
    made = {op.source.made_by for program in programs for op in program.root.ops}
    assert made == {"insert_startup"}


def test_a_program_of_a_trainer_is_refused() -> None:
    with pytest.raises(PassError, match="already a trainer's"):
        InsertStartup().run(trainer_of(placed()))


def test_a_server_that_there_is_not_is_refused() -> None:
    with pytest.raises(PassError, match="server 2 of 2"):
        InsertStartup(server=2).run(placed())
