"""What a trainer sends and receives where its gradients are applied as they come.

A step ends when its gradients are on their way, and the next begins with the newest values that
have come by then, of all parameters at once; so a step takes as long as it computes, mostly. What
is merged and when, and what is waited for, `Manner` says; the bound holds in any case.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from jaxfleet.ir import Operator
from jaxfleet.ps.client import Client
from jaxfleet.ps.host_run import HostRun
from jaxfleet.ps.lags import Lags
from jaxfleet.ps.manner import Manner
from jaxfleet.ps.messages import Plain, Tensor
from jaxfleet.ps.parcels import Parcels

Encode: TypeAlias = Callable[[np.ndarray], tuple[Tensor, Plain]]


@dataclass
class Communicator:
    """The gradients that wait to be sent, and the values that were asked for.

    Attributes:
        client: the lines to the servers.
        manner: how they travel.
        send_rows: sends what waits of tables, of so many steps; it goes when gradients go.
        lags: how old the values were that steps computed with.
    """

    client: Client
    manner: Manner
    send_rows: Callable[[int], None] | None = None
    lags: Lags = field(init=False)
    _queue: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)  # by server and name
    _encode: dict[str, Encode] = field(default_factory=dict)  # by name
    _queued: int = 0  # steps whose gradients are in it
    _ask: Callable[[], HostRun] | None = None
    _asked: HostRun | None = None
    _newest: dict[str, Any] = field(default_factory=dict)
    _clock: int = 0  # all trainers' steps until this one are in the values that are here

    def __post_init__(self) -> None:
        self.lags = Lags(self.manner.staleness)

    def restart(self) -> None:
        """Begins anew with values that servers have as of the present step, of all trainers."""
        self._queue.clear()
        self._queued, self._asked, self._clock = 0, None, self.client.step
        self._newest.clear()
        self.client.restart_clock()

    def begin(self) -> dict[str, Any]:
        """Waits until the next step may begin; returns the values that have come since the last.

        Raises:
            PeerLostError: who is too far behind went, or takes too long.
        """
        self._take_what_came()
        if self.client.step - self._clock > self.manner.staleness:
            self.client.doing(f"waiting after step {self.client.step}")
            self.flush()
        self.lags.note(self.client.step - self._clock)
        return self.take()

    def take(self) -> dict[str, Any]:
        """Returns the values that have come since they were last taken, on the device."""
        newest, self._newest = self._newest, {}
        return newest

    def add(self, server: int, tensor: Tensor, encode: Encode) -> None:
        """Takes a part of what this step sends a server.

        Args:
            server: its number.
            tensor: the part.
            encode: makes of what is merged what travels.
        """
        queue = self._queue.setdefault(server, {})
        self._encode[tensor.name] = encode
        old = queue.get(tensor.name)
        if old is None or tensor.name in self.manner.feeds:
            queue[tensor.name] = tensor.array
        else:
            queue[tensor.name] = np.asarray(old + tensor.array)  # of f32[] numpy makes no array

    def end(self, ask: Callable[[], HostRun]) -> None:
        """Ends a step that has added all it sends.

        Args:
            ask: makes what receives the parameters.
        """
        self._ask = ask
        self._queued += 1
        self._take_what_came()
        is_full = self._queued >= self.manner.merge
        if is_full or (self._asked is None and not self.manner.averages):
            self._wait()  # one answer is under way at a time
            self._send()
        if self.manner.waits:
            self._wait()

    def flush(self) -> None:
        """Sends what waits, and waits until servers have applied all that was sent."""
        self._wait()
        self._send()
        self._wait()

    def stats(self) -> dict[str, Plain]:
        """Returns what was counted."""
        return self.lags.plain()

    def _send(self) -> None:
        """Sends what waits, and asks for what servers make of it."""
        if not self._queued or self._ask is None:
            return
        if self.send_rows is not None:
            self.send_rows(self._queued)
        parcels = Parcels(self.client)
        for server, arrays in self._queue.items():
            for name, array in arrays.items():
                parcels.add(server, *self._encode[name](self._merged(name, array)))
        parcels.send()
        self._queue.clear()
        self._queued = 0
        self._asked = self._ask()
        self._asked.ask()

    def _merged(self, name: str, array: np.ndarray) -> np.ndarray:
        """Returns the sum of what was merged, or the mean; of what is no gradient, the last."""
        if not self.manner.averages or self._queued == 1 or name in self.manner.feeds:
            return array
        return np.asarray(array / self._queued, array.dtype)

    def _take_what_came(self) -> None:
        if self._asked is not None and not self._asked.is_answered:
            self.client.poll()
        if self._asked is not None and self._asked.is_answered:
            self._wait()

    def _wait(self) -> None:
        """Takes what was asked for, once all of it is there."""
        if self._asked is not None:
            self._newest.update(self._asked.finish())
            self._asked = None
            self._clock = self.client.clock


@dataclass
class RelaxedRun(HostRun):
    """Does the operators of the host of a trainer that does not wait for the others.

    Attributes:
        communicator: takes what is sent, and receives.
    """

    communicator: Communicator | None = None

    def run(self) -> None:
        """Does them all."""
        client = self.host.client
        with client.spans.span("send", step=client.step):
            self._send_all()
        receives = [op for op in self.ops if op.type in {"recv", "concat"}]
        if receives:
            assert self.communicator is not None
            self.communicator.end(lambda: HostRun(self.host, receives, {}))
            self.values.update(self.communicator.take())

    def _send(self, op: Operator) -> None:
        assert self.communicator is not None
        bare = HostRun(self.host, (), {})  # which holds no array of this step
        for name, server in zip(op.reads, self._servers(op), strict=True):
            tensor = Tensor(self._wire_name(name), self._on_host(name))
            self.communicator.add(server, tensor, partial(bare.encoded, op, tensor.name))
