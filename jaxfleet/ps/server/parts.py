"""Parts of a step that cross from server to server: those that come, and this server's own."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxfleet.ps.messages import Message, Plain, Tensor
from jaxfleet.ps.server.desk import Desk, RefusedError, tensors_bytes
from jaxfleet.ps.server.held import Held
from jaxfleet.ps.server.identity import Identity
from jaxfleet.ps.server.links import Links, parts_message

_MOST_AHEAD = 1 << 16  # steps that another server may be ahead


@dataclass
class Parts:
    """What crosses.

    Attributes:
        held: makes parts, and waits for those of others.
        desk: knows the server's name.
        links: to the other servers.
        me: who this server is.
        most_bytes: the most that may wait for later steps.
        clock: tells the time in seconds.
    """

    held: Held
    desk: Desk
    links: Links
    me: Identity
    most_bytes: int
    clock: Callable[[], float]

    def take(self, message: Message) -> None:
        """Takes what another server sent for a step.

        Raises:
            RefusedError: it has no such parts, or is too far ahead.
        """
        plan, progress = self.held.plan, self.held.progress
        for tensor in message.tensors:
            server = plan.exchange.there.get(tensor.name) if plan.exchange is not None else None
            wanted = plan.types.get(tensor.name)
            if f"server {server}" != message.sender or wanted is None:
                raise RefusedError("bad_message", f"'{tensor.name}' is no part of {message.sender}")
            if (tensor.array.dtype, tensor.array.shape) != (wanted.dtype, wanted.shape):
                raise RefusedError("bad_message", f"part '{tensor.name}' has another type")
        if progress.queued_bytes + tensors_bytes(message) > self.most_bytes:
            what = f"too much waits for later steps than {progress.applied}"
            raise RefusedError("bad_message", what)
        if message.step > progress.step + _MOST_AHEAD:
            what = f"step {message.step} is far from {progress.applied}"
            raise RefusedError("bad_message", what)
        progress.take_parts(message.step, message.tensors)

    def send_made(self, step: int, made: Collection[str]) -> None:
        """Sends this server's parts of a step where the last of them was just made."""
        exchange, progress = self.held.plan.exchange, self.held.progress
        if exchange is None or not any(name in made for name in exchange.here):
            return
        makers, server = {self.held.plan.makers[name] for name in exchange.here}, -1
        if all(progress.has_made(maker, step, server) for maker in makers):
            tensors = [Tensor(name, self.held.host[name]) for name in exchange.here]
            self.links.send(self._message(step, tensors), self.clock())

    def keep(self, parts: Mapping[int, Mapping[str, np.ndarray]]) -> None:
        """Keeps parts that were sent in an earlier life, by step and name."""
        for step, arrays in parts.items():
            tensors = (Tensor(name, array) for name, array in arrays.items())
            self.links.keep(self._message(step, tensors))

    def _message(self, step: int, tensors: Iterable[Tensor]) -> Message:
        body: dict[str, Plain] = {"program": self.me.program, "incarnation": self.me.incarnation}
        return parts_message(self.desk.name, step, tensors, body)
