"""What servers keep for a process that takes a lost trainer's place."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxfleet.ps.server import ServerOptions
from jaxfleet.ps.server.own_state import OwnState
from jaxfleet.transport.messages import Kind, Tensor
from tests.ps.server.common import SGD, Bench, error_of, hello, sgd_grads, sgd_state

WAITS = ServerOptions(lost_after_s=5, step_timeout_s=600, trainer_return_s=60.0)


def leaf(name: str, value: float) -> Tensor:
    return Tensor(name, np.asarray([value], np.float32))


def values(state: OwnState, step: int) -> dict[str, float]:
    return {name: float(array[0]) for name, array in state.after(step).items()}


def test_the_last_two_versions_of_every_leaf_are_kept() -> None:
    state = OwnState()
    state.keep(0, [leaf("mean", 0.0), leaf("constant", 7.0)])
    for step in range(1, 6):
        state.keep(step, [leaf("mean", step)])
    assert values(state, 5) == {"mean": 5.0, "constant": 7.0}
    assert values(state, 4) == {"mean": 4.0, "constant": 7.0}
    assert sum(map(len, state.versions.values())) == 3
    assert (state.is_past(3), state.is_past(4)) == (True, False)


def test_a_leaf_that_is_replaced_after_a_step_counts_and_a_late_duplicate_does_not() -> None:
    state = OwnState()
    state.keep(3, [leaf("mean", 3.0)])
    state.keep(4, [leaf("mean", 4.0)])
    state.keep(4, [leaf("mean", 40.0)])
    state.keep(1, [leaf("mean", 1.0)])
    assert (values(state, 3), values(state, 4)) == ({"mean": 3.0}, {"mean": 40.0})


def test_a_recall_waits_until_the_state_is_kept() -> None:
    bench = Bench(WAITS).started(SGD, sgd_state())
    assert bench.send(1, Kind.RECALL, 1) == []
    arrays = {"mean": np.asarray([2.0], np.float32)}
    found = [message for _, message in bench.send(0, Kind.KEEP, 1, None, arrays)]
    assert [message.kind for message in found] == [Kind.OK, Kind.VALUES]
    assert [tensor.array.tolist() for tensor in found[1].tensors] == [[2.0]]


def test_a_trainer_at_other_steps_recalls_the_nearest_state() -> None:
    bench = Bench(WAITS).started(SGD, sgd_state())
    assert bench.send(1, Kind.RECALL, 9, {"newest": True}) == []
    told = bench.send(0, Kind.KEEP, 2, None, {"mean": np.asarray([2.0], np.float32)})
    bench.send(0, Kind.KEEP, 3, None, {"mean": np.asarray([3.0], np.float32)})
    found = [told[1][1], *(bench.one(1, Kind.RECALL, n, {"newest": True}) for n in (0, 2, 9))]
    values = [message.tensors[0].array.tolist() for message in found]
    assert values == [[2.0], [3.0], [2.0], [3.0]]


def test_only_trainer_0_keeps_state() -> None:
    bench = Bench(WAITS).started(SGD, sgd_state())
    answer = bench.one(1, Kind.KEEP, 1, None, {"mean": np.asarray([2.0], np.float32)})
    assert error_of(answer) == ("bad_message", "trainer 1 keeps no state; trainer 0 does")


def test_of_each_trainer_its_own_state_is_kept_and_returned_at_once() -> None:
    bench = Bench(WAITS).started(SGD, sgd_state())
    each = {"each": True}
    for trainer in (0, 1):
        arrays = {"mean": np.asarray([trainer], np.float32)}
        assert bench.one(trainer, Kind.KEEP, 1, each, arrays).kind is Kind.OK
    found = [bench.one(trainer, Kind.RECALL, 1, each) for trainer in (0, 1)]
    assert [message.tensors[0].array.tolist() for message in found] == [[0.0], [1.0]]
    lacking = bench.one(1, Kind.RECALL, 2, each)  # nobody else could send it later
    assert (lacking.kind, lacking.tensors) == (Kind.VALUES, ())


def test_own_state_beyond_the_limit_is_refused_with_a_way_out() -> None:
    options = replace(WAITS, queued_bytes=1000)
    bench = Bench(options).started(SGD, sgd_state())
    arrays = {"mean": np.zeros(150, np.float32)}
    assert bench.one(0, Kind.KEEP, 1, None, arrays).kind is Kind.OK
    answer = bench.one(0, Kind.KEEP, 2, None, arrays)
    code, text = error_of(answer)
    assert code == "bad_message"
    assert "has 600 bytes already, and with 600 more of step 2 exceeds the limit of 1000" in text
    assert 'on_trainer_lost="fail"' in str(answer.body["hint"])


@pytest.mark.parametrize("life", [1, 0, -1, "1", True, None])
def test_only_a_later_life_takes_the_place_of_a_process_that_is_not_lost(life: Any) -> None:
    bench = Bench(WAITS).started(SGD, sgd_state())
    bench.push(1, 1, sgd_grads(1, 1))
    body = hello(1, session="new", life=life)
    answer = bench.one(1, Kind.HELLO, body=body, peer=b"another connection")
    if life == 1 and not isinstance(life, bool):
        assert answer.kind is Kind.WELCOME
        assert (answer.body["seen"], answer.body["base"], answer.body["restored"]) == (1, 0, False)
    else:
        assert error_of(answer)[0] == "refused"


def test_values_before_the_last_step_are_kept_for_a_job_that_waits() -> None:
    for options, kinds in ((WAITS, [Kind.VALUES]), (ServerOptions(), [Kind.ERROR])):
        bench = Bench(options).started(SGD, sgd_state())
        for trainer in range(2):
            bench.push(trainer, 1, sgd_grads(1, trainer))
        replies = bench.send(0, Kind.PULL, 0, {"names": ["b"]})
        assert [message.kind for _, message in replies] == kinds
        if options is WAITS:
            ((_, message),) = replies
            np.testing.assert_array_equal(message.tensors[0].array, sgd_state()["b"])
