"""Order of a trainer's operators: few waits for servers, and no use before definition."""

from collections.abc import Iterator
from functools import cache

import pytest

import jaxfleet as jf
from jaxfleet.analysis.flow import OuterUses
from jaxfleet.errors import PassError
from jaxfleet.ir import Program, parse, verify
from jaxfleet.lower.partition import runs_on_host
from jaxfleet.passes import MergeSends, ScheduleSends
from jaxfleet.runtime.pserver_job import JobPrograms, job_programs
from tests.exact.common import prepared
from tests.passes.jobs import placed, server_of, trainer_of
from tests.tiers import by_default
from tests.zoo import having

ENDPOINTS = ("s:1", "s:2", "s:3")
PROGRAMS = [
    *(entry.name for entry in having("core")),
    *("lamb", "adafactor", "gan", "nnx_regularised", "grad_norm_metric", "loss_scaling", "freeze"),
]
FEW = ("mlp", "cnn_batchnorm", "dropout", "clipping", "schedule", "gan", "adafactor", "freeze")


@cache
def job(name: str, *, trainers: int = 2, cuts: int = 1) -> JobPrograms:
    """Returns the programs of a job on a program of the zoo, small slices included."""
    strategy = jf.DistributedStrategy(
        mode="pserver", min_block_size=16, max_imbalance=0, send_cuts=cuts
    )
    captured = prepared(name).captured
    program = captured.at(captured.signature.rows).program
    return job_programs(
        program, strategy, trainer=trainers - 1, trainers=trainers, endpoints=ENDPOINTS
    )


def phases(program: Program) -> list[list[str]]:
    """Returns the types of consecutive operators of the host, in order."""
    found: list[list[str]] = [[]]
    for op in program.root.ops:
        if runs_on_host(op):
            found[-1].append(op.type)
        elif found[-1]:
            found.append([])
    return [phase for phase in found if phase]


def facts(program: Program) -> Iterator[tuple[object, ...]]:
    """Yields the reads and writes of every operator: the version of a name, and its reads.

    Two orders of the same operators with the same facts compute the same.
    """
    uses, writes = OuterUses(program), dict[str, int]()
    reads: dict[tuple[str, int], int] = {}
    for op in program.root.ops:
        used = uses.of(op)
        read = tuple(sorted((name, writes.get(name, 0)) for name in used.reads))
        for each in read:
            reads[each] = reads.get(each, 0) + 1
        for name in used.writes:
            writes[name] = writes.get(name, 0) + 1
        yield str(op), read, tuple(sorted((name, writes[name]) for name in used.writes))
    yield "reads", tuple(sorted(reads.items())), ()


@pytest.mark.parametrize("cuts", [1, 3])
@pytest.mark.parametrize("name", by_default(PROGRAMS, *FEW))
def test_every_operator_reads_what_it_read_before(name: str, cuts: int) -> None:
    before = job(name).dumps["insert_send_recv"].after
    after = ScheduleSends(cuts=cuts).run(before)
    assert sorted(map(str, facts(after))) == sorted(map(str, facts(before)))


@pytest.mark.few(4)
@pytest.mark.parametrize("trainers", by_default([1, 2], 2))
@pytest.mark.parametrize("name", by_default(PROGRAMS, *FEW))
def test_the_text_of_every_program_is_the_program(name: str, trainers: int) -> None:
    found = job(name, trainers=trainers)
    for program in (found.trainer, *found.servers):
        verify(program)
        assert parse(str(program)) == program


@pytest.mark.parametrize("name", ["mlp", "clipping", "schedule", "dropout"])
def test_a_step_waits_once_where_nothing_but_gradients_and_metrics_cross(name: str) -> None:
    (only,) = phases(job(name).trainer)
    assert only[0] in {"split_byref", "send"}
    assert [kind for kind in only if kind.startswith("c_")]  # the loss, with everything else
    assert only[-1] in {"fetch", "concat"}


def test_a_batch_norm_waits_once_forward_and_twice_backward() -> None:
    found = phases(job("cnn_batchnorm").trainer)  # it has two
    assert len(found) == 2 * (1 + 2) + 1
    for phase in found[:-1]:
        assert not {"recv", "send_barrier", "fetch_barrier"} & set(phase)


EQUAL = parse("""
program p {role="trainer"}
  data  x: f32[4]
  block 0
    backward
      a: f32[4] = jax.neg(x)
    rpc
      send(X=a) {epmap=["s:1"]}
    backward
      b: f32[4] = jax.neg(a)
    rpc
      send(X=b) {epmap=["s:1"]}
    backward
      c: f32[4] = jax.neg(b)
    rpc
      send(X=c) {epmap=["s:1"]}
    backward
      d: f32[4] = jax.neg(c)
    rpc
      send(X=d) {epmap=["s:1"]}
""")


@pytest.mark.parametrize(("cuts", "groups"), [(1, [4]), (2, [2, 2]), (4, [1] * 4), (9, [1] * 4)])
def test_sends_leave_in_groups_of_as_many_bytes(cuts: int, groups: list[int]) -> None:
    assert [*map(len, phases(ScheduleSends(cuts=cuts).run(EQUAL)))] == groups


@pytest.mark.parametrize("cuts", [1, 2, 3])
def test_there_are_no_more_groups_than_asked_for(cuts: int) -> None:
    program = job("nnx", cuts=cuts).trainer
    assert 1 <= sum("send" in phase for phase in phases(program)) <= cuts


def test_sends_are_no_groups_that_make_no_sense() -> None:
    with pytest.raises(PassError, match="0 cuts") as caught:
        ScheduleSends(cuts=0).run(trainer_of(placed()))
    assert caught.value.__notes__ == ["  hint: 1 sends everything at once"]


def test_a_servers_program_is_left_alone() -> None:
    server = server_of(placed())
    assert ScheduleSends().run(server) == server
    assert MergeSends().run(server) == server


def test_what_is_received_is_overwritten_only_when_all_have_read_it() -> None:
    program = ScheduleSends(cuts=2).run(trainer_of(placed()))
    places: dict[str, list[int]] = {}
    for at, op in enumerate(program.root.ops):
        for name in op.reads:
            places.setdefault(name, []).append(at)
    for at, op in enumerate(program.root.ops):
        if op.type == "recv":
            assert all(
                max(places.get(name, [-1])) < at for name in op.writes if "block" not in name
            )


def test_scheduling_again_changes_nothing() -> None:
    once = ScheduleSends(cuts=2).run(trainer_of(placed()))
    assert ScheduleSends(cuts=2).run(once) == once


@pytest.mark.parametrize("name", ["mlp", "clipping", "nnx_regularised"])
def test_barriers_stay_around_what_is_received(name: str) -> None:
    kinds = [op.type for op in job(name).trainer.root.ops]
    last_send = len(kinds) - 1 - kinds[::-1].index("send")
    places = [last_send, *map(kinds.index, ("send_barrier", "recv", "fetch_barrier"))]
    assert places == sorted(places)


# A trainer that sends nothing: trainer 0 sends its complete gradient.
SILENT = """
program p {role="trainer", trainers=2}
  data  x: f32[4]
  param w: f32[4]
  block 0
    forward
      first: f32[] = jax.reduce_sum(x) {axes=[0]}
      first = c_allreduce_sum(first) {endpoint="s:1"}
      second: f32[] = jax.neg(first)
      second = c_allreduce_sum(second) {endpoint="s:1"}
      third: f32[] = jax.neg(second)
      w@GRAD: f32[4] = jax.mul(%s, third)
    rpc
      send_barrier() {endpoints=["s:1"], trainer_id=1}
      Out=[w.block0: f32[2], w.block1: f32[2]] = recv() {epmap=["s:1", "s:1"], trainer_id=1}
      fetch_barrier() {endpoints=["s:1"], trainer_id=1}
    dist
      Out=w = concat(X=[w.block0, w.block1]) {axis=0}
    optimize
      fetch(third)
"""


@pytest.mark.parametrize("operand", ["x", "w"])
def test_who_sends_nothing_receives_after_the_sums_that_others_send_by(operand: str) -> None:
    found = phases(ScheduleSends().run(parse(SILENT % operand)))
    collective = "c_allreduce_sum"
    kinds = [kind for phase in found for kind in phase]
    assert kinds.index("recv") > len(kinds) - 1 - kinds[::-1].index(collective)


@pytest.mark.parametrize("operand", ["x", "w"])
def test_what_is_joined_is_received_in_the_same_round(operand: str) -> None:
    found = phases(ScheduleSends().run(parse(SILENT % operand)))
    (receiving,) = [phase for phase in found if "recv" in phase]
    assert "concat" in receiving
