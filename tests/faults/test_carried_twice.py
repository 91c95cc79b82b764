"""A duplicate counts once, whichever message it is."""

from collections.abc import Callable

import pytest

from jaxfleet.runtime.simulated_job import Twin
from jaxfleet.transport.memory_network import MemoryNetwork
from jaxfleet.transport.messages import Kind, Message
from tests.faults import training
from tests.faults.cluster import check_same
from tests.faults.conftest import Undisturbed
from tests.faults.memory_jobs import CACHE
from tests.faults.memory_training import captured
from tests.ps.server.common import SGD, Bench, sgd_after, sgd_grads, sgd_state

STEPS = 5


def everything(_: str, __: Message) -> int:
    return 2


def pushes(_: str, message: Message) -> int:
    return 3 if message.kind is Kind.PUSH else 1


def collectives(_: str, message: Message) -> int:
    return 2 if message.kind in {Kind.REDUCE, Kind.REDUCED, Kind.PARTS, Kind.VALUES} else 1


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["plain", "clip", "norm"])
@pytest.mark.parametrize("faults", [everything, pushes, collectives])
def test_messages_that_arrive_twice_change_nothing(
    kind: str, faults: Callable[[str, Message], int], undisturbed: Undisturbed
) -> None:
    state, data = training.start(kind), list(training.batches(STEPS))
    strategy = training.strategy(training.arguments([]))
    twin = Twin(captured(kind), strategy=strategy, servers=2, trainers=2, cache=CACHE)
    result = twin.run(state, data, network=MemoryNetwork(faults=faults))
    check_same([training.named(one) for one in result.states], undisturbed(kind, STEPS))


def test_gradients_of_a_later_step_may_come_before_those_of_this_one() -> None:
    bench = Bench().started(SGD, sgd_state())
    bench.push(1, 2, sgd_grads(1, 2))
    assert not bench.pull(0, 2, "b")
    for trainer, step in [(1, 1), (0, 2), (0, 1), (1, 1), (1, 2)]:
        bench.push(trainer, step, sgd_grads(trainer, step))
    assert bench.core.step == 2
    assert (bench.pull(1, 2, "b")["b"] == sgd_after(2)["b"]).all()
