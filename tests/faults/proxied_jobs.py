"""Two clients of one server over real sockets, each behind a proxy, and numpy's results."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np

from jaxfleet.observability import NO_SPANS
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.connected_client import connected_client
from jaxfleet.ps.client.trainer_identity import TrainerIdentity
from jaxfleet.ps.server import Server, ServerCore, ServerOptions
from jaxfleet.ps.timeouts import Timeouts
from jaxfleet.transport.messages import Kind, Plain, Tensor
from jaxfleet.transport.zmq.network import ZmqNetwork
from jaxfleet.transport.zmq.sockets import Timing
from tests.faults.proxy import Proxy
from tests.ps.server.common import CACHE, SGD, SGD_GRADS, SGD_SHAPES, drawn

QUICK = Timing(handshake_s=1.0, probe_s=0.2, half_open_s=0.6, silent_s=0.6, linger_s=0.2)
LIMIT_S = 60.0  # far less than a trainer waits before it gives up


@dataclass(frozen=True)
class Model:
    """Parameters that a server updates by gradient descent with a rate of 0.5."""

    program: str
    shapes: Mapping[str, tuple[int, ...]]
    grads: Mapping[str, str]

    def start(self) -> dict[str, np.ndarray]:
        return {name: drawn(name, 0, shape) for name, shape in self.shapes.items()}

    def grads_of(self, trainer: int, step: int) -> dict[str, np.ndarray]:
        pairs = self.shapes.items()
        return {self.grads[n]: drawn(n, 10 * step + trainer + 1, shape) for n, shape in pairs}

    def after(self, steps: int) -> dict[str, np.ndarray]:
        """Returns the parameters computed by numpy."""
        state = self.start()
        for step in range(1, steps + 1):
            first, second = (self.grads_of(trainer, step) for trainer in range(2))
            for name, grad in self.grads.items():
                state[name] = state[name] - np.float32(0.5) * (first[grad] + second[grad])
        return state


SMALL = Model(SGD, SGD_SHAPES, SGD_GRADS)
# 200 KB, which take longer over a slow line than a silent server is waited for
WIDE = Model(
    """
program p.pserver0 {endpoint="127.0.0.1:7001", endpoints=["127.0.0.1:7001"], pserver_id=0, role="pserver", slices=[["w", [50000]]], trainers=2}
  data  w@GRAD.trainer_0: f32[50000]
  data  w@GRAD.trainer_1: f32[50000]
  param w: f32[50000]
  block 0
    rpc
      listen_and_serv(X=[w@GRAD.trainer_0, w@GRAD.trainer_1]) {combine_block_id=-1, grad_to_block_id=["w@GRAD:1"], lr_decay_block_id=-1, optimize_blocks=[^1], part_block_ids=[]}
  block 1
    optimize
      Out=w@GRAD: f32[50000] = sum(X=[w@GRAD.trainer_0, w@GRAD.trainer_1])
      s0: f32[50000] = jax.mul(w@GRAD, 0.5:f32)
      w = jax.sub(w, s0)
""",  # noqa: E501  a program's text
    {"w": (50000,)},
    {"w": "w@GRAD"},
)


class Trainers:
    """Two trainers of one server, each behind a proxy; by default the first is harmed."""

    def __init__(
        self,
        network: ZmqNetwork,
        proxies: Sequence[Proxy],
        model: Model = SMALL,
        *,
        lost_s: float | None = None,
    ) -> None:
        self.proxy, self.other_proxy = proxies
        self.model = model
        self.ends = []
        for trainer, proxy in enumerate(proxies):
            programs: list[tuple[str, dict[str, np.ndarray]]] = [(model.program, {})]
            me = TrainerIdentity("job", trainer, 2, (self.proxy.endpoint,), "hash", programs)
            if lost_s is None:
                end = Client(network.connect([proxy.endpoint]), me, timeouts=Timeouts())
            else:
                end = connected_client(network, me, Timeouts(lost_after_s=lost_s), spans=NO_SPANS)
            self.ends.append(end)

    def start(self) -> None:
        """Gives the server its program and its state."""
        for end in self.ends:
            end.open()
        tensors = [Tensor(name, value) for name, value in self.model.start().items()]
        first = self.ends[0]
        first.wait([first.request(0, Kind.ASSIGN, step=0, tensors=tensors)], LIMIT_S)

    def push(self) -> None:
        """Sends the gradients of the next step."""
        for trainer, end in enumerate(self.ends):
            end.next_step(8)
            grads = self.model.grads_of(trainer, end.step)
            end.push(0, [Tensor(name, grad) for name, grad in grads.items()])

    def pull(self, limit_s: float = LIMIT_S) -> None:
        """Waits for the values of the step, and checks them.

        Both trainers wait, as in a job: a trainer repeats its own pushes while it waits, and a
        loaded machine may break any of the connections.
        """
        with ThreadPoolExecutor(len(self.ends)) as pool:
            wanted = self.model.after(self.ends[0].step)
            for found in pool.map(lambda end: _pulled(end, [*wanted], limit_s), self.ends):
                for name, value in wanted.items():
                    np.testing.assert_array_equal(found[name], value)

    def close(self) -> None:
        for end in reversed(self.ends):
            end.close()


def _pulled(end: Client, names: Sequence[str], limit_s: float) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}

    def take(tensors: Sequence[Tensor]) -> None:
        found.update({tensor.name: tensor.array.copy() for tensor in tensors})

    body: dict[str, Plain] = {"names": list(names)}
    end.wait([end.request(0, Kind.PULL, body=body, wants=names, sink=take)], limit_s)
    return found


@contextmanager
def job(
    secret: bytes | None = None,
    timing: Timing = QUICK,
    model: Model = SMALL,
    *,
    lost_s: float | None = None,
) -> Iterator[Trainers]:
    """Yields trainers that have trained a step.

    Args:
        secret: encrypts their connections.
        timing: of their connections.
        model: what they train.
        lost_s: silence after which a peer is lost. Then both trainers have heartbeats, and one
            proxy for all of their connections; otherwise each has a proxy of its own and none.
    """
    network = ZmqNetwork(secret=secret, timing=timing)
    listener = network.listen("127.0.0.1:0")
    # Without a heartbeat, a trainer is silent while its connection is cut, and the other may be the
    # first to ask for a result.
    options = ServerOptions(server=0, lost_after_s=2 * LIMIT_S if lost_s is None else lost_s)
    core = ServerCore(listener.endpoint, CACHE, time.monotonic, options)
    server = Server(core, listener, connect=network.connect)
    thread = threading.Thread(target=server.serve)
    thread.start()
    proxies = [Proxy(listener.endpoint) for _ in range(2 if lost_s is None else 1)]
    try:
        with closing(
            Trainers(network, [proxies[0], proxies[-1]], model, lost_s=lost_s)
        ) as trainers:
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
