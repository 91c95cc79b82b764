"""DC-ASGD of several asynchronous trainers, replicated by numpy event by event.

Every trainer sleeps its own time before each step, so these times alone determine the order in
which a server receives messages. The first trainer brings the state; the others begin with the
current one. The formula is that of Zheng et al. (2017), with `c` for lambda and the gradient's
square for the curvature; `w'` is a trainer's last received value.
"""

from typing import Any

import numpy as np
import pytest

from jaxfleet.transport.memory_network import MemoryNetwork
from tests.modes.linear import CLOSE, RATE, ROWS, batch, first, gradient, start, twin

SLEEPS = (1.0, 1.7, 2.9)  # the first few sums are all different
STEPS = 4


def rows(number: int, trainers: int) -> Any:
    """Returns a whole batch, divisible among the trainers."""
    data = batch(number)
    return {name: array[: ROWS - ROWS % trainers] for name, array in data.items()}


def order(trainers: int) -> list[tuple[int, int]]:
    """Returns the trainer and number of each step, in the order of time."""
    ends = [(step * SLEEPS[t], t, step) for t in range(trainers) for step in range(1, STEPS + 1)]
    return [(trainer, step - 1) for _, trainer, step in sorted(ends)]


def oracle(trainers: int, c: float) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns each trainer's last received value, and the server's final one."""
    w, received = first(), [first() for _ in range(trainers)]
    for trainer, number in order(trainers):
        if number == 0:
            received[trainer] = w
        g = gradient(received[trainer], rows(number, trainers), trainer, trainers)
        w = w - RATE * (g + c * g * g * (w - received[trainer]))
        received[trainer] = w
    return received, w


def played(trainers: int, c: float) -> tuple[list[np.ndarray], np.ndarray]:
    """Trains in the order of `order`; returns the same as `oracle`."""
    network = MemoryNetwork()

    def script(step: Any) -> Any:
        state, me = start(), step.client.me.trainer
        for number in range(STEPS):
            network.sleep(SLEEPS[me])
            state, _ = step(state, rows(number, trainers))
        received = np.asarray(state["w"])
        network.sleep(100.0)  # until all are done
        return np.asarray(step.pull(state)["w"]), (received,)

    options: Any = {"trainers": trainers, "staleness": STEPS, "delay_compensation": c}
    result = twin("dc_asgd", **options).play(script, network=network)
    for state in result.states:
        np.testing.assert_array_equal(state, result.states[0])
    return [received for (received,) in result.metrics], result.states[0]


@pytest.mark.parametrize("trainers", [2, 3])
@pytest.mark.parametrize("c", [1.0, 0.04])
def test_a_gradient_is_corrected_by_what_its_trainer_received_last(trainers: int, c: float) -> None:
    (received, last), (want_received, want_last) = played(trainers, c), oracle(trainers, c)
    np.testing.assert_allclose(last, want_last, **CLOSE)
    for found, wanted in zip(received, want_received, strict=True):
        np.testing.assert_allclose(found, wanted, **CLOSE)


def test_the_correction_is_no_rounding() -> None:
    # Otherwise the test above would pass without any.
    apart = np.abs(oracle(3, 1.0)[1] - oracle(3, 0.0)[1]).max()
    assert apart > 100 * CLOSE["atol"]
