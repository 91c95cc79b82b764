"""Trainers that replace different leaves of the state: rejected at once, with a hint."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxfleet.cluster.group_view import Termination
from jaxfleet.errors import ProgramError
from jaxfleet.ps.server import ServerOptions
from jaxfleet.runtime.simulated_job import Twin
from jaxfleet.runtime.trainer_step import TrainerStep
from jaxfleet.transport.memory_network import MemoryNetwork
from jaxfleet.transport.messages import Kind
from tests.faults import training
from tests.ps.server.common import SGD, SGD_GRADS, Bench, error_of, sgd_grads, sgd_state

Change = Callable[[int, Any], Any]


def on_the_first(trainer: int, state: Any) -> Any:
    params, opt, running = state
    return (params | {"b": np.ones_like(params["b"])}, opt, running) if trainer == 0 else state


def on_each_another(trainer: int, state: Any) -> Any:
    """Replaces a different parameter on each trainer."""
    params, opt, running = state
    name = "bd"[trainer]
    return params | {name: np.ones_like(params[name])}, opt, running


@pytest.mark.few(1)
@pytest.mark.parametrize("change", [on_the_first, on_each_another])
def test_both_trainers_are_told_at_once(change: Change) -> None:
    start, (first, second) = training.start("plain"), list(training.batches(2))
    errors: dict[int, ProgramError] = {}

    def script(step: TrainerStep) -> tuple[Any, tuple[Any, ...]]:
        state, _ = step(start, first)
        trainer = step.client.me.trainer
        with pytest.raises(ProgramError) as raised:
            step(change(trainer, state), second)
        errors[trainer] = raised.value
        return step.pull(state) if trainer > 1 else None, ()

    strategy = training.strategy(training.arguments(["--step-timeout=600"]))
    network = MemoryNetwork()
    Twin(training.make_step("plain"), (start, first), strategy).play(script, network=network)
    assert sorted(errors) == [0, 1]
    for error in errors.values():
        assert "replaced other leaves of the state than each other after step 1" in str(error)
        assert "trainer 0 gave 'state/0/b'" in str(error)
        assert "nnx.jit" in str(error.__notes__)
        assert "{**state, 'epoch': n}" in str(error.__notes__)
    assert network.clock() < 5.0


def test_a_trainer_that_pushed_for_the_next_step_will_bring_no_state_after_this_one() -> None:
    bench = Bench().started(SGD, sgd_state())
    bench.push(1, 1, sgd_grads(1, 1))
    assert bench.send(0, Kind.ASSIGN, 0, {"replace": True}, {"b": sgd_state()["b"]}) == []
    replies = bench.wait(1.0)
    for to, message in replies:
        code, text = error_of(message)
        assert code == "refused"
        assert text.endswith("after step 0: trainer 0 gave 'b'; trainer 1 gave none")
        assert to in (b"0", b"1")
    assert len(replies) == 2


def test_a_trainer_that_is_only_slower_is_waited_for() -> None:
    bench = Bench(ServerOptions(lost_after_s=600)).started(SGD, sgd_state())
    body: dict[str, Any] = {"replace": True}
    assert bench.send(0, Kind.ASSIGN, 0, body, {"b": sgd_state()["b"]}) == []
    assert bench.wait(60.0) == []
    replies = bench.send(1, Kind.ASSIGN, 0, body, {"b": sgd_state()["b"]})
    assert [message.kind for _, message in replies] == [Kind.OK, Kind.OK]
    assert bench.push(0, 1, {SGD_GRADS["b"]: np.zeros(2, np.float32)}) == []


def test_ranks_are_told_the_way_out_too() -> None:
    at = "rank 0 is at 'comparing the state that was changed: state/epoch', and rank 1 runs p"
    error = Termination(0, at, differs=True).error(3)
    assert isinstance(error, ProgramError)
    assert "replace the same leaves of the state on every rank" in str(error.__notes__)
    other = Termination(0, "rank 0 runs p with 8 rows, and rank 1 p with 4", differs=True).error(3)
    assert isinstance(other, ProgramError)
    assert "run the same script" in str(other.__notes__)
