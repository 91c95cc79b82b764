"""A server goes on with another process of a trainer."""

import json
from typing import Any

import numpy as np
import pytest

from jaxfleet.ps.server import ServerOptions
from jaxfleet.tables import Sgd, TableSpec
from jaxfleet.transport.messages import Kind, Message
from tests.ps.server.common import Bench, error_of, hello
from tests.ps.server.table_programs import USERS, initial, table_program

WAITS = ServerOptions(lost_after_s=5, step_timeout_s=600, trainer_return_s=60.0)
ROWS = TableSpec(name="rows", dim=1, optimizer=Sgd(1.0))
_HEAD = (
    'communication="async", endpoint="127.0.0.1:7001", endpoints=["127.0.0.1:7001"], '
    'holds=[], pserver_id=0, role="pserver", slices=[["v", [1]], ["w", [1]]], staleness=9, '
    "trainers=2"
)
PARAMS = f"""
program p.pserver0 {{{_HEAD}}}
  data  v@GRAD: f32[1]
  data  w@GRAD: f32[1]
  param v: f32[1]
  param w: f32[1]
  block 0
    rpc
      listen_and_serv(X=[v@GRAD, w@GRAD]) {{Fanin=2, combine_block_id=-1, distributed_mode=1, grad_to_block_id=["v@GRAD:1", "w@GRAD:2"], lr_decay_block_id=-1, optimize_blocks=[^1, ^2], part_block_ids=[], pserver_id=0}}
  block 1
    optimize
      v = jax.add(v, v@GRAD)
  block 2
    optimize
      w = jax.add(w, w@GRAD)
"""  # noqa: E501
BOTH = PARAMS.replace("trainers=2}", f"tables=[{json.dumps(ROWS.to_text())}], trainers=2}}")
ORDER: dict[str, Any] = {
    "version": 1, "samples": 8, "batch_size": 4, "seed": 0, "shuffle": 0, "drop_last": 0,
    "done": 0, "epochs": 1, "rows": 2, "chunks": 1,
}  # fmt: skip


def grads(*names: str) -> dict[str, np.ndarray]:
    return {f"{name}@GRAD": np.ones(1, np.float32) for name in names or ("v", "w")}


def started(text: str = PARAMS) -> Bench:
    bench = Bench(WAITS)
    for trainer in range(2):
        bench.one(trainer, Kind.HELLO, body=hello(trainer, session=f"first {trainer}"))
    bench.one(0, Kind.DEFINE, body={"program": text})
    state = {name: np.zeros(1, np.float32) for name in ("v", "w")}
    assert bench.one(0, Kind.ASSIGN, 0, {"replace": False}, state).kind is Kind.OK
    return bench


def returned(bench: Bench, *, run: bool = True) -> Message:
    """Lets another process of trainer 1 come; returns its welcome."""
    body = hello(1, session="second", life=1)
    answers = bench.send(1, Kind.HELLO, body=body, peer=b"second", run=run)
    return next(message for _, message in answers if message.kind is Kind.WELCOME)


def pulled(bench: Bench, step: int) -> list[float]:
    answers = bench.send(1, Kind.PULL, step, {"names": ["v", "w"]}, peer=b"second")
    return [float(t.array[0]) for _, message in answers for t in message.tensors]


def duplicates(bench: Bench) -> int:
    found = bench.one(0, Kind.STATS).body["duplicates"]
    assert isinstance(found, int)
    return found


def test_what_came_of_an_incomplete_step_is_dropped() -> None:
    # The former process merged steps 1 to 3, and only one of its two messages came.
    bench = started()
    bench.send(1, Kind.PUSH, 3, {}, grads("v"))
    assert returned(bench).body["step"] == 0
    for step in (1, 2, 3):
        bench.send(1, Kind.PUSH, step, {}, grads(), peer=b"second")
    assert pulled(bench, 3) == [3.0, 3.0]


def test_steps_that_came_count_once() -> None:
    bench = started()
    for step in (1, 2, 3):
        bench.send(1, Kind.PUSH, step, {}, grads())
    welcome = returned(bench)
    assert (welcome.body["seen"], welcome.body["step"]) == (3, 3)
    assert welcome.body["takes_pushes"] is True
    for step in (3, 4):
        bench.send(1, Kind.PUSH, step, {}, grads(), peer=b"second")
    late = bench.one(1, Kind.PUSH, 5, {}, grads())  # of the former process
    assert late.body["error"] == "stranger"
    assert pulled(bench, 4) == [4.0, 4.0]


def test_a_step_without_gradients_makes_up_for_rows_that_were_lost() -> None:
    bench = started(BOTH)
    keys: dict[str, np.ndarray] = {"keys": np.arange(1), "grads": np.ones((1, 1), np.float32)}
    bench.send(1, Kind.PUSH_ROWS, 1, {"table": "rows", "after": -1}, keys)
    bench.send(1, Kind.PUSH, 1, {"after": -1}, grads())
    bench.send(1, Kind.PUSH, 2, {"after": 1}, grads())  # the rows of step 2 were lost
    assert returned(bench).body["step"] == 1
    bench.send(1, Kind.PUSH, 2, {"idle": True, "after": -1}, peer=b"second")
    assert pulled(bench, 2) == [2.0, 2.0]
    before = duplicates(bench)
    bench.send(1, Kind.PUSH, 2, {"idle": True, "after": -1}, peer=b"second")
    assert duplicates(bench) == before + 1


@pytest.mark.parametrize("is_applied", [True, False])
def test_a_former_process_leases_return_once_what_it_sent_is_applied(is_applied: bool) -> None:
    bench = started()
    leased = bench.one(1, Kind.LEASE, 0, {**ORDER, "chunks": 2}).body["leases"]
    assert leased == [[[0, 2]], [[2, 4]]]
    bench.send(1, Kind.PUSH, 1, {"leases": [[0, 2]]}, grads(), run=is_applied)
    returned(bench, run=False)
    asked = bench.send(1, Kind.LEASE, 1, ORDER, peer=b"second", run=False)
    assert bool(asked) == is_applied
    answers = [message for _, message in (*asked, *bench.core.run_tasks())]
    assert [message.body["leases"] for message in answers if "leases" in message.body] == [
        [[[2, 4]]]
    ]


def sync_tables() -> Bench:
    """Returns a server with a table, on which all trainers wait for each other."""
    bench = Bench(WAITS)
    for trainer in range(2):
        bench.one(trainer, Kind.HELLO, body=hello(trainer, session=f"first {trainer}"))
    bench.one(0, Kind.DEFINE, body={"program": str(table_program())})
    assert bench.one(0, Kind.ASSIGN, 0, {"replace": False}).kind is Kind.OK
    return bench


def push(bench: Bench, trainer: int, step: int, keys: list[int], **more: Any) -> None:
    grads = np.ones((len(keys), 3), np.float32)
    arrays: dict[str, np.ndarray] = {"keys": np.array(keys, np.int64), "grads": grads}
    bench.send(trainer, Kind.PUSH_ROWS, step, {"table": "users"}, arrays, **more)


def look_up(bench: Bench, step: int, keys: list[int], **body: Any) -> Message:
    arrays = {"keys": np.array(keys, np.int64)}
    peer = b"second" if bench.core.trainers.by_id[1].session == "second" else None
    return bench.one(1, Kind.LOOK_UP, step, {"table": "users", **body}, arrays, peer=peer)


def test_a_welcome_has_the_last_step_whose_rows_came() -> None:
    bench = sync_tables()
    assert returned(bench).body["rows"] == 0
    push(bench, 1, 1, [4, 2], peer=b"second")
    assert returned(bench).body["rows"] == 1
    push(bench, 0, 1, [])
    assert returned(bench).body["rows"] == 1
    assert "rows" in started().one(0, Kind.HELLO, body=hello(0, session="first 0")).body
    assert returned(started()).body["rows"] is None  # nobody waits there


def test_rows_before_the_last_update_are_kept_for_a_trainer_that_returns() -> None:
    bench, keys = sync_tables(), [9, 2, 4, -7]
    for step in (1, 2):
        before = look_up(bench, step, keys).tensors[0].array.copy()
        push(bench, 0, step, [2, -7])
        push(bench, 1, step, [9, 2])
    returned(bench)
    after = look_up(bench, 3, keys, again=True).tensors[0].array
    again = look_up(bench, 2, keys, again=True).tensors[0].array
    np.testing.assert_array_equal(again, before)
    changed = (after != before).any(axis=1)
    assert changed.tolist() == [True, True, False, True]
    fresh = look_up(bench, 2, [100], again=True).tensors[0].array
    np.testing.assert_array_equal(fresh, initial(USERS, np.array([100])))


def test_rows_that_are_no_longer_kept_are_named() -> None:
    bench = sync_tables()
    for step in (1, 2):
        push(bench, 0, step, [2])
        push(bench, 1, step, [9])
    returned(bench)
    answer = look_up(bench, 1, [2], again=True)
    code, text = error_of(answer)
    assert code == "failed"
    assert "the rows of table 'users' before step 1 are no longer kept" in text
    assert "start the job again from its last checkpoint" in text
