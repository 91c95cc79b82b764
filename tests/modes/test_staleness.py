"""The staleness of values is counted and never exceeds the bound."""

from typing import Any

import pytest

from jaxfleet.errors import StrategyError
from jaxfleet.ps.server.staleness import TrainerClocks
from jaxfleet.transport.memory_network import MemoryNetwork
from tests.modes.linear import batch, start, twin

STEPS = 12


def paced(how: str, bound: int, **options: Any) -> list[Any]:
    """Trains with one trainer that is slower than the others; returns the staleness of values."""
    network = MemoryNetwork()

    def script(step: Any) -> Any:
        state, me = start(), step.client.me.trainer
        for number in range(STEPS):
            network.sleep(5.0 if me == 0 else 0.01)
            state, _ = step(state, batch(number))
        return None, (step.stats()["trainer"]["staleness"],)

    job = twin(how, trainers=2, staleness=bound, **options)
    return [stats for (stats,) in job.play(script, network=network).metrics]


@pytest.mark.few(5)
@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("how", ["async", "dc_asgd", "half_async"])
def test_who_is_ahead_waits(how: str, bound: int) -> None:
    slow, fast = paced(how, bound)
    assert fast["max"] == fast["bound"] == bound  # it reached the bound, and did not exceed it
    assert slow["max"] <= bound
    assert sum(fast["histogram"].values()) == STEPS


@pytest.mark.parametrize("bound", [3, 5, 8])
def test_who_is_ahead_waits_with_all_that_travels_seldom(bound: int) -> None:
    for how, options in (("geo", {"k_steps": 4}), ("half_async", {"merge": 4})):
        slow, fast = paced(how, bound, **options)
        assert slow["max"] <= bound
        assert fast["max"] <= bound


def test_merged_gradients_do_not_pass_the_bound() -> None:
    slow, fast = paced("async", 3, merge=4)
    assert slow["max"] <= 3
    assert fast["max"] == 3


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("how", "options", "bound"),
    [
        ("async", {}, 3),
        ("half_async", {"merge": 2}, 5),
        ("geo", {"k_steps": 2}, 5),
        ("dc_asgd", {}, 3),
    ],
)
def test_nobody_passes_the_bound_while_a_trainer_is_stopped(
    how: str, options: Any, bound: int
) -> None:
    network, stop_s, came, ends = MemoryNetwork(), 300.0, 4, dict[int, float]()

    def script(step: Any) -> Any:
        state, me = start(), step.client.me.trainer
        for number in range(1, 2 * STEPS + 1):
            network.sleep(0.01 if me == 1 else 0.001)
            state, _ = step(state, batch(number))
            if me == 1:
                ends[number] = network.clock()
            elif number == came:
                network.sleep(stop_s)
        return None, (step.stats()["trainer"]["staleness"],)

    job = twin(how, trainers=2, staleness=bound, **options)
    stats = [lags for (lags,) in job.play(script, network=network).metrics]
    done = max(number for number, end in ends.items() if end < stop_s)
    # A step needs all of the stopped one's, which are `came`, up to `bound + 1` before itself; an
    # exchange of several steps needs them for its last step.
    period = max(options.values(), default=1)
    assert came + bound - period < done <= came + bound + 1
    assert ends[2 * STEPS] > stop_s  # it waited, and continued
    assert max(lags["max"] for lags in stats) <= bound


@pytest.mark.parametrize("options", [{"communication": "geo", "k_steps": 4},
                                     {"communication": "async", "merge": 4}])  # fmt: skip
def test_a_bound_that_nobody_can_keep_is_refused(options: Any) -> None:
    with pytest.raises(StrategyError, match="staleness is 2") as caught:
        twin(options.pop("communication"), staleness=2, **options)
    assert "at least 3" in "\n".join(caught.value.__notes__)


def test_clocks_wait_for_those_who_stay() -> None:
    clocks = TrainerClocks(3, bound=2)
    clocks.restart(4)
    clocks.advance(0, 7)
    assert list(clocks.behind(7)) == [1, 2]
    assert not clocks.allow(0, 7)
    clocks.advance(1, 5)
    clocks.left.add(2)
    assert clocks.allow(0, 7)
    assert not clocks.allow(0, 7, until=8)
    assert clocks.least() == 5
