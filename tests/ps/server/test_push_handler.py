"""A server's computations: merged gradients, updates, schedules, and exchanges between servers."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfleet.transport.buffers import aligned_copy
from jaxfleet.transport.messages import Kind, Message, Tensor
from tests.ps.server.common import (
    MOMENTUM,
    SGD,
    SGD_SHAPES,
    Bench,
    clipping,
    drawn,
    error_of,
    hello,
    sgd_after,
    sgd_grads,
    sgd_state,
)

NAMES = tuple(SGD_SHAPES)


def test_steps_are_those_of_numpy() -> None:
    bench = Bench().started(SGD, sgd_state())
    for step in (1, 2, 3):
        for trainer in (0, 1):
            assert not bench.push(trainer, step, sgd_grads(trainer, step))
    values = bench.pull(0, 3, *NAMES)
    for name, wanted in sgd_after(3).items():
        np.testing.assert_array_equal(values[name], wanted)


def test_a_pull_is_answered_block_by_block() -> None:
    bench = Bench().started(SGD, sgd_state())
    assert not bench.send(0, Kind.PULL, 1, {"names": list(NAMES)}, number=77)
    first, second = sgd_grads(0, 1), sgd_grads(1, 1)
    bench.push(0, 1, first)
    ((peer, message),) = bench.push(1, 1, {"b@GRAD": second.pop("b@GRAD")})
    assert (peer, message.kind, message.number, message.step) == (b"0", Kind.VALUES, 77, 1)
    assert [tensor.name for tensor in message.tensors] == ["b"]
    replies = bench.push(1, 1, second)
    assert [t.name for _, m in replies for t in m.tensors] == ["w.block0", "w.block1"]


def test_a_state_that_was_assigned_is_pulled_before_the_first_step() -> None:
    bench = Bench()
    bench.one(0, Kind.HELLO, body=hello(0))
    bench.one(1, Kind.HELLO, body=hello(1))
    assert not bench.send(1, Kind.PULL, 0, {"names": ["b", "key"]})
    bench.one(0, Kind.DEFINE, body={"program": SGD})
    extra = {"key": np.arange(4, dtype=np.uint32)}
    replies = bench.send(0, Kind.ASSIGN, 0, {"replace": False}, {**sgd_state(), **extra})
    values = [m for _, m in replies if m.kind is Kind.VALUES]
    assert [tensor.name for tensor in values[0].tensors] == ["b", "key"]


def test_a_push_that_comes_again_changes_nothing() -> None:
    bench = Bench().started(SGD, sgd_state())
    for step in (1, 2):
        bench.push(0, step, sgd_grads(0, step))
        bench.push(0, step, sgd_grads(0, step + 7))
        bench.push(1, step, sgd_grads(1, step))
        bench.push(1, step, sgd_grads(1, step))
    values = bench.pull(1, 2, *NAMES)
    for name, wanted in sgd_after(2).items():
        np.testing.assert_array_equal(values[name], wanted)
    assert bench.one(0, Kind.STATS).body["duplicates"] == 12


ALONE = """
program p.pserver0 {endpoint="127.0.0.1:7001", endpoints=["127.0.0.1:7001"], pserver_id=0, role="pserver", slices=[["w", [2]]], trainers=2}
  data  w@GRAD.trainer_0: f32[2]
  param w: f32[2]
  block 0
    rpc
      listen_and_serv(X=w@GRAD.trainer_0) {combine_block_id=-1, grad_to_block_id=["w@GRAD:1"], lr_decay_block_id=-1, optimize_blocks=[^1], part_block_ids=[]}
  block 1
    optimize
      Out=w@GRAD: f32[2] = sum(X=w@GRAD.trainer_0)
      w = jax.sub(w, w@GRAD)
"""  # noqa: E501


def test_what_one_trainer_changes_alone_waits_for_who_has_still_to_ask_for_it() -> None:
    """If all compute the whole batch the first trainer's gradients count; it may be ahead."""
    bench = Bench().started(ALONE, {"w": np.zeros(2, np.float32)})
    for step in (1, 2):
        bench.push(0, step, {"w@GRAD": np.ones(2, np.float32)})
        assert bench.core.step == step - 1  # trainer 1 has not requested anything of it
        np.testing.assert_array_equal(bench.pull(1, step - 1, "w")["w"], np.full(2, 1.0 - step))
        bench.push(1, step, {})
        np.testing.assert_array_equal(bench.pull(0, step, "w")["w"], np.full(2, -float(step)))


def test_a_wait_names_who_has_not_begun_the_step() -> None:
    bench = Bench().started(ALONE, {"w": np.zeros(2, np.float32)})
    bench.push(0, 1, {"w@GRAD": np.ones(2, np.float32)})
    assert not bench.send(0, Kind.PULL, 1, {"names": ["w"]})
    code, what = error_of(bench.wait(bench.core.options.step_timeout_s + 1))
    assert (code, what.count("trainer 1"), what.count("its step 1")) == ("peer_lost", 1, 1), what


def test_gradients_of_later_steps_wait_for_theirs() -> None:
    bench = Bench().started(SGD, sgd_state())
    for step in (3, 1, 2):
        bench.push(0, step, sgd_grads(0, step))
    assert bench.core.step == 0
    for step in (2, 3, 1):
        bench.push(1, step, sgd_grads(1, step))
    assert bench.core.step == 3
    values = bench.pull(1, 3, *NAMES)
    for name, wanted in sgd_after(3).items():
        np.testing.assert_array_equal(values[name], wanted)


def test_an_array_that_is_not_aligned_is_copied_once_and_never_on_its_way_out() -> None:
    bench = Bench().started(SGD, sgd_state())
    before = bench.one(0, Kind.STATS).body
    for step in (1, 2):
        for trainer in (0, 1):
            bench.push(trainer, step, _unaligned(sgd_grads(trainer, step)))
    bench.pull(0, 2, *NAMES)
    after = bench.one(0, Kind.STATS).body
    assert after["received"] - before["received"] == 12  # type: ignore[operator]
    assert after["copies_in"] - before["copies_in"] == 12  # type: ignore[operator]
    assert after["copies_out"] == 0


def test_an_aligned_array_is_not_copied_at_all() -> None:
    bench = Bench().started(SGD, sgd_state())
    before = bench.one(0, Kind.STATS).body
    for trainer in (0, 1):
        aligned = {name: aligned_copy(array) for name, array in sgd_grads(trainer, 1).items()}
        bench.push(trainer, 1, aligned)
    after = bench.one(0, Kind.STATS).body
    assert after["received"] - before["received"] == 6  # type: ignore[operator]
    assert after["copies_in"] == before["copies_in"]


def _unaligned(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = {}
    for name, array in arrays.items():
        raw = np.empty(array.nbytes + 64, np.uint8)
        start = (4 - raw.ctypes.data) % 64
        view = raw[start : start + array.nbytes].view(array.dtype)
        found[name] = view.reshape(array.shape)
        found[name][...] = array
    return found


def test_values_that_are_under_way_do_not_change() -> None:
    bench = Bench().started(SGD, sgd_state())
    seen = []
    for step in (1, 2, 3):
        for trainer in (0, 1):
            bench.push(trainer, step, sgd_grads(trainer, step))
        seen.append(bench.pull(0, step, *NAMES))
    for step, values in enumerate(seen, start=1):
        for name, wanted in sgd_after(step).items():
            np.testing.assert_array_equal(values[name], wanted)


def _momentum_state() -> dict[str, np.ndarray]:
    shapes = {"w.block0": (4, 2), "w.block1": (3, 2)}
    state = {name: drawn(name, 0, shape) for name, shape in shapes.items()}
    state |= {f"m/{name}": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    return {**state, "count": np.zeros((), np.int32)}


def test_a_schedule_runs_once_a_step() -> None:
    bench = Bench().started(MOMENTUM, _momentum_state())
    wanted = _momentum_state()
    for step in (1, 2, 3):
        sent = [
            {f"w@GRAD.block{i}": drawn(f"{t}{i}", step, (4 - i, 2)) for i in (0, 1)} for t in (0, 1)
        ]
        for trainer in (1, 0):
            bench.push(trainer, step, sent[trainer])
        for i in (0, 1):
            grad = sent[0][f"w@GRAD.block{i}"] + sent[1][f"w@GRAD.block{i}"]
            wanted[f"m/w.block{i}"] = wanted[f"m/w.block{i}"] * np.float32(0.9) + grad
            rate = np.float32(1) / np.float32(step)
            wanted[f"w.block{i}"] = wanted[f"w.block{i}"] - wanted[f"m/w.block{i}"] * rate
    values = bench.pull(0, 3, "w.block0", "w.block1", "m/w.block0", "count")
    assert values["count"] == 3
    for name in ("w.block0", "w.block1", "m/w.block0"):
        np.testing.assert_allclose(values[name], wanted[name], rtol=1e-6)


def test_a_part_crosses_to_the_other_server() -> None:
    servers = ["127.0.0.1:7001", "127.0.0.1:7002"]
    benches = [Bench(endpoint=endpoint) for endpoint in servers]
    start, grads = drawn("w", 0, (6, 2)), drawn("g", 1, (6, 2))
    for i, bench in enumerate(benches):
        bench.one(0, Kind.HELLO, body=hello(0, trainers=1, servers=servers))
        bench.one(0, Kind.DEFINE, body={"program": clipping(i)})
        bench.one(0, Kind.ASSIGN, 0, {}, {f"w.block{i}": start[3 * i : 3 * i + 3]})
    for step in (1, 2):
        for i, bench in enumerate(benches):
            bench.push(0, step, {f"g{i}": grads[3 * i : 3 * i + 3] * step})
            assert bench.core.step == (step - 1 if i == 0 else step)
            carry(benches)
        start = start - grads / np.sqrt(np.sum(grads * grads))
    for i, bench in enumerate(benches):
        values = bench.pull(0, 2, f"w.block{i}")
        np.testing.assert_allclose(values[f"w.block{i}"], start[3 * i : 3 * i + 3], rtol=1e-5)


def test_a_part_that_got_lost_is_sent_again_after_a_heartbeat() -> None:
    servers = ["127.0.0.1:7001", "127.0.0.1:7002"]
    benches = [Bench(endpoint=endpoint) for endpoint in servers]
    for i, bench in enumerate(benches):
        bench.one(0, Kind.HELLO, body=hello(0, trainers=1, servers=servers))
        bench.one(0, Kind.DEFINE, body={"program": clipping(i)})
        bench.one(0, Kind.ASSIGN, 0, {}, {f"w.block{i}": np.zeros((3, 2), np.float32)})
        bench.push(0, 1, {f"g{i}": np.ones((3, 2), np.float32)})
    for bench in benches:
        bench.core.take_links()
    assert [bench.core.step for bench in benches] == [0, 0]
    for bench in benches:
        bench.now += 2
        bench.core.tick(bench.now)
    carry(benches)
    assert [bench.core.step for bench in benches] == [1, 1]


def carry(benches: list[Bench]) -> None:
    """Delivers messages between servers until none is left."""
    busy = True
    while busy:
        busy = False
        for bench in benches:
            for server, message in bench.core.take_links():
                busy = True
                benches[server].core.handle(b"s", message)
                benches[server].core.run_tasks()


def test_what_an_operator_does_wrong_ends_the_server_with_its_text() -> None:
    bench = Bench()
    for trainer in (0, 1):
        bench.one(trainer, Kind.HELLO, body=hello(trainer))
    bad = SGD.replace("jax.sub(b, s2)", "jax.sub(b, w.block0)")
    replies = bench.send(0, Kind.DEFINE, body={"program": bad})
    errors = [message for _, message in replies if message.kind is Kind.ERROR]
    assert len(errors) == 2
    assert errors[0].body["error"] == "failed"
    assert "jax.sub(b, w.block0)" in str(errors[0].body["what"])
    assert bench.core.finished
    assert bench.core.failure is not None


_MOVES = st.lists(st.tuples(st.integers(0, 1), st.sampled_from(NAMES), st.booleans()), max_size=40)


@settings(max_examples=40, deadline=None)
@given(moves=_MOVES)
def test_any_order_of_two_trainers_gives_the_same_parameters(moves: list[Any]) -> None:
    bench = Bench().started(SGD, sgd_state())
    steps, left = 3, {}
    for trainer in (0, 1):
        pushes = [(step, name) for step in range(1, steps + 1) for name in NAMES]
        left[trainer] = pushes
    sent: list[tuple[int, int, str]] = []
    for trainer, name, again in moves:
        if again and sent:
            _push(bench, *sent[len(sent) // 2])
        wanted = [push for push in left[trainer] if push[1] == name]
        if wanted:
            left[trainer].remove(wanted[0])
            sent.append((trainer, *wanted[0]))
            _push(bench, *sent[-1])
    for trainer in (1, 0):
        for step, name in left[trainer]:
            _push(bench, trainer, step, name)
    values = bench.pull(0, steps, *NAMES)
    for name, array in sgd_after(steps).items():
        np.testing.assert_array_equal(values[name], array)


def _push(bench: Bench, trainer: int, step: int, name: str) -> None:
    grad = {"b": "b@GRAD"}.get(name, name.replace("w.", "w@GRAD."))
    bench.push(trainer, step, {grad: sgd_grads(trainer, step)[grad]})


@pytest.mark.parametrize("how", ["sum", "max", "min", "prod", "gather"])
def test_a_reduction_is_over_all_trainers_in_their_order(how: str) -> None:
    bench = Bench().started(SGD, sgd_state())
    arrays = [drawn("x", trainer, (3,)) for trainer in (0, 1)]
    assert not bench.send(1, Kind.REDUCE, 1, {"key": "k", "how": how}, {"x": arrays[1]})
    replies = bench.send(0, Kind.REDUCE, 1, {"key": "k", "how": how}, {"x": arrays[0]})
    reduce: Any = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
    wanted = np.stack(arrays) if how == "gather" else reduce[how](*arrays)
    assert sorted(peer for peer, _ in replies) == [b"0", b"1"]
    for _, message in replies:
        assert message.kind is Kind.REDUCED
        np.testing.assert_array_equal(message.tensors[0].array, wanted)


def test_a_reduction_that_is_asked_for_again_gives_the_same() -> None:
    bench = Bench().started(SGD, sgd_state())
    body = {"key": "k", "how": "sum"}
    one = np.ones(2, np.float32)
    bench.send(1, Kind.REDUCE, 1, {**body}, {"x": one}, number=900)
    bench.send(0, Kind.REDUCE, 1, {**body}, {"x": one}, number=901)
    ((peer, message),) = bench.send(1, Kind.REDUCE, 1, {**body}, {"x": one * 5}, number=900)
    assert peer == b"1"
    assert message.tensors[0].array.tolist() == [2.0, 2.0]


def test_a_new_state_is_taken_when_all_trainers_sent_it() -> None:
    bench = Bench().started(SGD, sgd_state())
    for trainer in (0, 1):
        bench.push(trainer, 1, sgd_grads(trainer, 1))
    new = {"b": np.full(2, 7, np.float32)}
    assert not bench.send(0, Kind.ASSIGN, 1, {"replace": True}, new)
    assert bench.pull(1, 1, "b")["b"].tolist() == sgd_after(1)["b"].tolist()
    replies = bench.send(1, Kind.ASSIGN, 1, {"replace": True}, new)
    assert [(peer, message.kind) for peer, message in replies] == [(b"0", Kind.OK), (b"1", Kind.OK)]
    assert bench.pull(1, 1, "b")["b"].tolist() == [7.0, 7.0]


def test_messages_of_servers_need_the_job() -> None:
    bench = Bench(endpoint="127.0.0.1:7001")
    servers = ["127.0.0.1:7001", "127.0.0.1:7002"]
    bench.one(0, Kind.HELLO, body=hello(0, trainers=1, servers=servers))
    part = Tensor("part1", np.zeros((), np.float32))
    message = Message(Kind.PARTS, "server 1", 1, body={"job": "other"}, tensors=(part,))
    ((_, reply),) = bench.core.handle(b"s", message)
    assert reply.body["error"] == "refused"
