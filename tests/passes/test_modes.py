"""A step's programs in each mode: the text of a trainer's program, and of a server's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxfleet.ir import Program, parse, verify
from jaxfleet.passes import InsertSendRecv
from tests.passes.jobs import placed

DOCS = Path(__file__).resolve().parents[2] / "docs" / "relaxed-modes.md"
STEP = """
program p
  data  x: f32[b,3]
  param w: f32[3]
  block 0
    backward
      w@GRAD: f32[3] = jax.reduce_sum(x) {axes=[0]} for (w, w@GRAD)
    optimize
      w = jax.sub(w, w@GRAD)
"""
CHOSEN: dict[str, dict[str, Any]] = {
    "async": {"staleness": 4},
    "geo": {"staleness": 8, "k_steps": 2},
    "dc_asgd": {"staleness": 4, "compensation": 0.5},
    "fl": {"k_steps": 2},
}

TRAINERS = {
    "async": """
program p.trainer0 {communication="async", endpoints=["s:1"], role="trainer", staleness=4, trainers=2}
  data  x: f32[b,3]
  param w: f32[3]
  block 0
    backward
      w@GRAD: f32[3] = jax.reduce_sum(x) {axes=[0]} for (w, w@GRAD)
    rpc
      send(X=w@GRAD) {epmap=["s:1"]} for (w, w@GRAD)
      Out=w = recv() {epmap=["s:1"], trainer_id=0}
""",  # noqa: E501  # an operator is a line
    "geo": """
program p.trainer0 {communication="geo", endpoints=["s:1"], k_steps=2, role="trainer", staleness=8, trainers=2}
  data  x: f32[b,3]
  param w: f32[3]
  state w@OLD: f32[3]
  block 0
    backward
      w@GRAD: f32[3] = jax.reduce_sum(x) {axes=[0]} for (w, w@GRAD)
    optimize
      w = jax.sub(w, w@GRAD)
    dist
      w@HERE: f32[3] = assign(w)
      w@MOVED: f32[3] = jax.sub(w, w@OLD)
      w.delta: f32[3] = jax.mul(w@MOVED, 0.5:f32)
      w@OLD = jax.add(w@OLD, w.delta)
    rpc
      send(X=w.delta) {epmap=["s:1"]}
      Out=w = recv() {epmap=["s:1"], trainer_id=0}
    dist
      w@MOVED = jax.sub(w, w@OLD)
      w@OLD = assign(w)
      w = jax.add(w@HERE, w@MOVED)
""",  # noqa: E501  # an operator is a line
    "fl": """
program p.trainer0 {communication="fl", endpoints=["s:1"], k_steps=2, role="trainer", trainers=2}
  data  x: f32[b,3]
  param w: f32[3]
  block 0
    backward
      w@GRAD: f32[3] = jax.reduce_sum(x) {axes=[0]} for (w, w@GRAD)
    optimize
      w = jax.sub(w, w@GRAD)
    dist
      w.opti.trainer_0: f32[3] = assign(w)
    rpc
      send(X=w.opti.trainer_0) {epmap=["s:1"]}
      send_barrier() {endpoints=["s:1"], trainer_id=0}
      Out=w = recv() {epmap=["s:1"], trainer_id=0}
      fetch_barrier() {endpoints=["s:1"], trainer_id=0}
""",  # one operator per line
}

SERVERS = {
    "async": """
program p.pserver0 {communication="async", endpoint="s:1", endpoints=["s:1"], holds=[], pserver_id=0, role="pserver", slices=[["w", [3]]], staleness=4, trainers=2}
  data  w@GRAD: f32[3]
  param w: f32[3]
  block 0
    rpc
      listen_and_serv(X=w@GRAD) {Fanin=2, combine_block_id=-1, distributed_mode=1, endpoint="s:1", grad_to_block_id=["w@GRAD:1"], lr_decay_block_id=-1, optimize_blocks=[^1], part_block_ids=[], pserver_id=0}
  block 1
    optimize
      w = jax.sub(w, w@GRAD)
""",  # noqa: E501  # an operator is a line
    "geo": """
program p.pserver0 {communication="geo", endpoint="s:1", endpoints=["s:1"], holds=[], k_steps=2, pserver_id=0, role="pserver", slices=[["w", [3]]], staleness=8, trainers=2}
  data  w.delta: f32[3]
  param w: f32[3]
  block 0
    rpc
      listen_and_serv(X=w.delta) {Fanin=2, combine_block_id=-1, distributed_mode=3, endpoint="s:1", grad_to_block_id=["w.delta:1"], lr_decay_block_id=-1, optimize_blocks=[^1], part_block_ids=[], pserver_id=0}
  block 1
    optimize
      Out=w = sum(X=[w, w.delta])
""",  # noqa: E501  # an operator is a line
    "dc_asgd": """
program p.pserver0 {backups=[["w", "w.trainer_0_bak"], ["w", "w.trainer_1_bak"]], communication="dc_asgd", compensation=0.5, endpoint="s:1", endpoints=["s:1"], holds=[], pserver_id=0, role="pserver", slices=[["w", [3]]], staleness=4, trainers=2}
  data  w@GRAD: f32[3]
  data  w.trainer_0_bak: f32[3]
  data  w.trainer_1_bak: f32[3]
  data  "@TRAINER_ID@": i32[]
  param w: f32[3]
  block 0
    rpc
      listen_and_serv(X=w@GRAD) {Fanin=2, combine_block_id=-1, dc_asgd=true, distributed_mode=1, endpoint="s:1", grad_to_block_id=["w@GRAD:1"], lr_decay_block_id=-1, optimize_blocks=[^1], part_block_ids=[], pserver_id=0}
  block 1
    optimize
      Out=w.local_bak: f32[3] = ref_by_trainer_id(TrainerId="@TRAINER_ID@", X=[w.trainer_0_bak, w.trainer_1_bak])
      w.moved: f32[3] = jax.sub(w, w.local_bak)
      w.once: f32[3] = jax.mul(w.moved, w@GRAD)
      w.twice: f32[3] = jax.mul(w.once, w@GRAD)
      w.scaled: f32[3] = jax.mul(w.twice, 0.5:f32)
      w@GRAD.compensated: f32[3] = jax.add(w@GRAD, w.scaled)
      w = jax.sub(w, w@GRAD.compensated)
""",  # noqa: E501  # an operator is a line
    "fl": """
program p.pserver0 {communication="fl", endpoint="s:1", endpoints=["s:1"], holds=[], k_steps=2, pserver_id=0, role="pserver", slices=[["w", [3]]], trainers=2}
  data  w.opti.trainer_0: f32[3]
  data  w.opti.trainer_1: f32[3]
  param w: f32[3]
  block 0
    rpc
      listen_and_serv(X=[w.opti.trainer_0, w.opti.trainer_1]) {Fanin=2, combine_block_id=-1, distributed_mode=0, endpoint="s:1", grad_to_block_id=["w.opti:1"], lr_decay_block_id=-1, optimize_blocks=[^1], part_block_ids=[], pserver_id=0}
  block 1
    optimize
      Out=w.opti: f32[3] = sum(X=[w.opti.trainer_0, w.opti.trainer_1])
      Out=w = scale(X=w.opti) {scale=0.5}
""",  # noqa: E501  # an operator is a line
}


def inserting(mode: str) -> InsertSendRecv:
    return InsertSendRecv(trainers=2, mode=mode, **CHOSEN[mode])


def run(passed: InsertSendRecv) -> Program:
    made = passed.run(placed(STEP, ("s:1",)))
    verify(made)
    assert parse(str(made)) == made
    return made


@pytest.mark.parametrize("mode", TRAINERS)
def test_a_trainer(mode: str) -> None:
    assert str(run(inserting(mode))).strip() == TRAINERS[mode].strip()


@pytest.mark.parametrize("mode", SERVERS)
def test_a_server(mode: str) -> None:
    assert str(run(replace(inserting(mode), server=0))).strip() == SERVERS[mode].strip()


@pytest.mark.parametrize(
    ("mode", "changed"),
    [
        ("half_async", {"merge": 2}),  # the trainer's host computes the mean
        ("dc_asgd", {"compensation": 1.0}),  # servers correct
    ],
)
def test_trainers_that_send_gradients_have_programs_that_differ_in_what_they_say(
    mode: str, changed: dict[str, Any]
) -> None:
    made = run(InsertSendRecv(trainers=2, mode=mode, staleness=4, merge=2))
    plain = run(inserting("async"))
    assert made.root == plain.root
    assert made.attrs == plain.attrs.updated(communication=mode, **changed)


def test_the_documentation_shows_what_is_made() -> None:
    text = DOCS.read_text()
    for shown in (STEP, TRAINERS["geo"], SERVERS["dc_asgd"]):
        assert f"```text\n{shown.strip()}\n```" in text
