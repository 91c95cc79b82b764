"""Real sockets through a proxy that resets, swallows, truncates and flips."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import numpy as np
import pytest

from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.trainer_identity import TrainerIdentity
from jaxfleet.ps.server import Server, ServerCore, ServerOptions
from jaxfleet.ps.timeouts import Timeouts
from jaxfleet.transport.messages import Kind, Plain, Tensor
from jaxfleet.transport.zmq.network import ZmqNetwork
from jaxfleet.transport.zmq.sockets import Timing
from tests.faults.proxy import Proxy
from tests.ps.server.common import CACHE, SGD, sgd_after, sgd_grads, sgd_state

QUICK = Timing(handshake_s=1.0, probe_s=0.2, half_open_s=0.6, linger_s=0.2)
SECRET = b"0123456789abcdef"
LIMIT_S = 60.0  # far less than a trainer waits before it gives up


class Trainers:
    """Two trainers of one server, each behind a proxy; by default the first is harmed."""

    def __init__(self, network: ZmqNetwork, proxies: Sequence[Proxy]) -> None:
        self.proxy, self.other_proxy = proxies
        self.ends = []
        for trainer, proxy in enumerate(proxies):
            me = TrainerIdentity("job", trainer, 2, (self.proxy.endpoint,), "hash", [(SGD, {})])
            self.ends.append(Client(network.connect([proxy.endpoint]), me, timeouts=Timeouts()))

    def start(self) -> None:
        """Gives the server its program and its state."""
        for end in self.ends:
            end.open()
        tensors = [Tensor(name, value) for name, value in sgd_state().items()]
        first = self.ends[0]
        first.wait([first.request(0, Kind.ASSIGN, step=0, tensors=tensors)], LIMIT_S)

    def push(self) -> None:
        """Sends the gradients of the next step."""
        for trainer, end in enumerate(self.ends):
            end.next_step(8)
            end.push(0, [Tensor(n, grad) for n, grad in sgd_grads(trainer, end.step).items()])

    def pull(self) -> None:
        """Waits for the values of the step, and checks them.

        Both trainers wait, as in a job: a trainer repeats its own pushes while it waits, and a
        loaded machine may break any of the connections.
        """
        with ThreadPoolExecutor(len(self.ends)) as pool:
            for found in pool.map(_pulled, self.ends):
                for name, value in sgd_after(self.ends[0].step).items():
                    np.testing.assert_array_equal(found[name], value)

    def close(self) -> None:
        for end in reversed(self.ends):
            end.close()


def _pulled(end: Client) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    names = list(sgd_state())

    def take(tensors: Sequence[Tensor]) -> None:
        found.update({tensor.name: tensor.array.copy() for tensor in tensors})

    body: dict[str, Plain] = {"names": list(names)}
    end.wait([end.request(0, Kind.PULL, body=body, wants=names, sink=take)], LIMIT_S)
    return found


@contextmanager
def job(secret: bytes | None = None, timing: Timing = QUICK) -> Iterator[Trainers]:
    """Yields trainers that have trained a step."""
    network = ZmqNetwork(secret=secret, timing=timing)
    listener = network.listen("127.0.0.1:0")
    # No heartbeat runs beside the clients: a trainer is silent while its connection is cut, and the
    # other may be the first to ask for a result.
    patient = ServerOptions(server=0, lost_after_s=2 * LIMIT_S)
    core = ServerCore(listener.endpoint, CACHE, time.monotonic, patient)
    server = Server(core, listener, connect=network.connect)
    thread = threading.Thread(target=server.serve)
    thread.start()
    proxies = [Proxy(listener.endpoint) for _ in range(2)]
    try:
        with closing(Trainers(network, proxies)) as trainers:
            trainers.start()
            trainers.push()
            trainers.pull()
            yield trainers
    finally:
        server.stop()
        thread.join(30)
        for proxy in proxies:
            proxy.close()
        assert not thread.is_alive()


@pytest.mark.parametrize("harm", ["reset", "swallow", "truncate"])
@pytest.mark.parametrize("way", ["request", "answer"])
def test_bytes_that_are_lost_with_a_connection_are_asked_for_again(way: str, harm: str) -> None:
    with job() as trainers:
        if way == "answer":
            trainers.push()
        trainers.proxy.next(way, harm)
        if way == "request":
            trainers.push()
        trainers.pull()
        assert trainers.proxy.harms == 1
        trainers.push()
        trainers.pull()


def test_a_push_that_is_lost_on_its_way_does_not_hold_up_the_other_trainer() -> None:
    with job() as trainers:
        trainers.other_proxy.next("request", "reset")
        trainers.push()
        trainers.pull()
        assert trainers.other_proxy.harms == 1


@pytest.mark.parametrize("way", ["request", "answer"])
def test_a_bit_that_is_flipped_under_curve_costs_a_connection_and_no_more(way: str) -> None:
    with job(SECRET) as trainers:
        if way == "answer":
            trainers.push()
        trainers.proxy.next(way, "flip")
        if way == "request":
            trainers.push()
        trainers.pull()
        assert trainers.proxy.harms == 1
        trainers.push()
        trainers.pull()


def test_a_cut_may_last_longer_than_a_connection() -> None:
    with job() as trainers:
        with trainers.proxy.cut():
            trainers.push()
            time.sleep(1.5)
        trainers.pull()


@pytest.mark.grid
def test_a_cut_of_45_s_ends_no_wait() -> None:
    with job(timing=Timing()) as trainers:
        with trainers.proxy.cut():
            trainers.push()
            time.sleep(45.0)
        trainers.pull()


@pytest.mark.grid
@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("way", ["request", "answer"])
@pytest.mark.parametrize("harm", ["reset", "swallow", "truncate", "flip"])
def test_harm_at_any_place_is_made_good(harm: str, way: str, secret: bytes | None) -> None:
    if harm == "flip" and secret is None:
        pytest.skip("nothing but the secret protects a bit")
    with job(secret) as trainers:
        for least in (1, 20, 64, 200, 1000):
            trainers.proxy.next(way, harm, least)
            trainers.push()
            trainers.pull()
