"""DC-ASGD of tables: a row's gradient is corrected by the row's change meanwhile.

Trainers look rows up, wait, and push gradients, as a step does. Their waits differ and alone
determine the order at a server, which numpy replicates.
"""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.transport.memory_network import MemoryNetwork
from tests.modes.linear import CACHE, CLOSE

VALUES, DIM, TURNS, RATE, C = 12, 3, 4, 0.3, 2.0
BEFORE, WITHIN = (0.1, 0.23, 0.37), (1.0, 1.31, 1.77)  # seconds of each trainer, around a lookup
ELSEWHERE = 1000  # keys without lookups
table = jf.embedding_table(
    "words", DIM, initializer=jf.tables.Uniform(-1.0, 1.0), optimizer=jf.tables.Sgd(RATE)
)
tx = jf.distributed_optimizer(optax.sgd(RATE))


def train_step(state: Any, batch: Any) -> Any:
    def loss_of(params: Any) -> Any:
        return table(params["words"], batch["keys"]).sum()

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = tx.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def keys_of(trainer: int, turn: int) -> np.ndarray:
    """Returns the keys of a turn: each shares some with other trainers' and other turns'."""
    return np.unique((np.arange(6) * (trainer + 1) + turn) % VALUES)


def gradient(rows: np.ndarray, trainer: int) -> np.ndarray:
    return rows * (trainer + 1) - 0.5


def oracle(trainers: int, c: float) -> np.ndarray:
    w = np.asarray(jf.tables.TableStore(table.spec).look_up(np.arange(VALUES)), np.float64)
    events = []
    for t in range(trainers):
        for turn in range(TURNS):
            begin = (turn + 1) * BEFORE[t] + turn * WITHIN[t]
            events += [(begin, t, turn, "look up"), (begin + WITHIN[t], t, turn, "push")]
    received: dict[int, np.ndarray] = {}
    for _, t, turn, what in sorted(events):
        keys = keys_of(t, turn)
        if what == "look up":
            received[t] = w[keys]
        else:
            g = gradient(received[t], t)
            w[keys] -= RATE * (g + c * g * g * (w[keys] - received[t]))
    return w


def played(trainers: int) -> np.ndarray:
    """Returns the servers' final rows."""
    network = MemoryNetwork()
    params = {"words": table.init()}
    state = {"params": params, "opt": tx.init(params)}
    opening = {"keys": np.arange(ELSEWHERE, ELSEWHERE + trainers)[:, None]}

    def script(step: Any) -> Any:
        step(state, opening)
        me = step.client.me.trainer
        for turn in range(TURNS):
            network.sleep(BEFORE[me])
            step.client.next_step(0)
            keys = keys_of(me, turn)
            rows = step.tables.look_up("words", keys)
            network.sleep(WITHIN[me])
            step.tables.push("words", keys, gradient(rows, me).astype(np.float32))
        network.sleep(100.0)  # until all are done
        return step.tables.look_up("words", np.arange(VALUES)).copy(), ()

    strategy = jf.DistributedStrategy(
        mode="pserver", communication="dc_asgd", delay_compensation=C, staleness=TURNS
    )
    twin = jf.Twin(train_step, (state, opening), strategy, trainers=trainers, cache=CACHE)
    return np.asarray(twin.play(script, network=network).states[0])


@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_a_row_is_corrected_by_what_its_trainer_looked_up(trainers: int) -> None:
    wanted = oracle(trainers, C)
    np.testing.assert_allclose(played(trainers), wanted, **CLOSE)
    apart = np.abs(wanted - oracle(trainers, 0.0)).max()
    assert (apart > 0.01) == (trainers > 1)  # a single trainer's rows did not change meanwhile
