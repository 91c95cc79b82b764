"""A program of ranks runs on one device per rank, with separate rows, state and results."""

import numpy as np
import pytest

from jaxfleet.errors import FeedError, StrategyError
from jaxfleet.ir import Program, parse
from jaxfleet.runtime import Executor, Scope

TRAIN = parse("""
program p {nranks=2, rank=0, role="collective"}
  data  x: f32[b,2]
  data  by: f32[]
  param w: f32[2]
  state seen: f32[1,2]
  state root: f32[]
  block 0
    forward
      Out=mine: f32[1,2] = reduce_sum(X=x) {dim=[0], keep_dim=true}
      Out=all: f32[1,2] = assign(X=mine)
      Out=all = c_allreduce_sum(X=all) {ring_id=0, use_calc_stream=false}
      Out=seen = elementwise_add(X=seen, Y=mine)
      Out=root = assign(X=by)
      Out=root = c_broadcast(X=root) {ring_id=0, root=1, use_calc_stream=false}
      Out=w = reduce_sum(X=all) {dim=[0], keep_dim=false}
""")
ROWS = np.arange(8, dtype=np.float32).reshape(4, 2)


def begun() -> Scope:
    scope = Scope()
    scope.update({"w": np.zeros(2, np.float32), "seen": np.zeros((1, 2), np.float32)})
    return scope


def run(
    executor: Executor, scope: Scope, by: object = 1.0, rows: np.ndarray = ROWS
) -> list[np.ndarray]:
    feed = {"x": rows, "by": by}
    return executor.run(TRAIN, feed=feed, fetch=["mine", "all", "w", "root"], scope=scope)


def test_what_is_fetched_is_every_ranks_in_order() -> None:
    mine, all_, w, root = run(Executor(), begun(), by=np.array([5.0, 7.0], np.float32))
    assert mine.tolist() == [[2.0, 4.0], [10.0, 12.0]]
    assert all_.tolist() == [[12.0, 16.0]] * 2
    assert w.tolist() == [12.0, 16.0] * 2
    assert root.tolist() == [7.0, 7.0]


def test_a_scope_shows_rank_0s_state_and_every_rank_goes_on_with_its_own() -> None:
    executor, scope = Executor(), begun()
    run(executor, scope)
    assert scope["seen"].tolist() == [[2.0, 4.0]]
    run(Executor(), scope)  # ranks' values belong to the scope, not to an executor
    assert scope["seen"].tolist() == [[4.0, 8.0]]
    own = scope.of_ranks("seen")
    assert own is not None
    assert np.asarray(own.whole).tolist() == [[4.0, 8.0], [20.0, 24.0]]


def test_what_is_set_in_a_scope_is_all_ranks() -> None:
    executor, scope = Executor(), begun()
    run(executor, scope)
    scope["seen"] = np.full((1, 2), 100.0, np.float32)
    assert scope.of_ranks("seen") is None
    run(executor, scope)
    own = scope.of_ranks("seen")
    assert own is not None
    assert np.asarray(own.whole).tolist() == [[102.0, 104.0], [110.0, 112.0]]


def test_rows_that_ranks_cannot_share() -> None:
    with pytest.raises(FeedError, match="'x' is fed 3 rows, which 2 ranks cannot share"):
        run(Executor(), begun(), rows=ROWS[:3])
    with pytest.raises(FeedError, match=r"'w' .* is not in the scope"):
        Executor().run(reads("w"), fetch=["y"])
    with pytest.raises(FeedError, match="'z' is fetched"):
        Executor().run(TRAIN, fetch=["z"])


def test_more_ranks_than_devices() -> None:
    with pytest.raises(StrategyError, match="rank 1 of 99, and this process has 8 devices"):
        Executor().run(reads("w", "nranks=99, rank=1"), fetch=["y"])


def reads(name: str, facts: str = "nranks=2, rank=0") -> Program:
    return parse(f"""
program p {{{facts}, role="collective"}}
  param {name}: f32[2]
  block 0
    forward
      Out=y: f32[2] = assign(X={name})
""")


@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        ("c_allreduce_sum(X=x) {}", [[5, 7]] * 2),
        ("c_allreduce_max(X=x) {}", [[4, 5]] * 2),
        ("c_allreduce_min(X=x) {}", [[1, 2]] * 2),
        ("c_allreduce_prod(X=x) {}", [[4, 10]] * 2),
        ("c_broadcast(X=x) {root=1}", [[4, 5]] * 2),
        ("c_broadcast(X=x) {root=0}", [[1, 2]] * 2),
        ("c_sync_calc_stream(X=x) {}", [[1, 2], [4, 5]]),
        ("c_sync_comm_stream(X=x) {ring_id=1}", [[1, 2], [4, 5]]),
    ],
)
def test_operators_between_ranks(op: str, wanted: list[list[int]]) -> None:
    program = parse(f"""
program p {{nranks=2, rank=0, role="collective"}}
  data  x: i32[b,2]
  block 0
    forward
      Out=x = {op}
""")
    rows = np.array([[1, 2], [4, 5]], np.int32)
    (found,) = Executor().run(program, feed={"x": rows}, fetch=["x"])
    assert found.tolist() == wanted
