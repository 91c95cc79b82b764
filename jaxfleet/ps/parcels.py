"""Gradients on their way to servers: several travel in one message, up to a size."""

from dataclasses import dataclass, field

from jaxfleet.ps.client import Client
from jaxfleet.ps.messages import Plain, Tensor

_MOST_BYTES = 8 << 20  # a server may begin with what is in one while the next is on its way
_MOST_ARRAYS = 1024  # a message may hold 4096 unless its limits say otherwise


@dataclass
class Parcel:
    """Gradients that go to a server in one message.

    Attributes:
        tensors: they.
        bytes: of their arrays.
        encoded: method and shape of those that were made smaller.
    """

    tensors: list[Tensor] = field(default_factory=list)
    bytes: int = 0
    encoded: dict[str, Plain] = field(default_factory=dict)

    def takes(self, tensor: Tensor) -> bool:
        """Tells whether there is room; there is for any array alone."""
        has_room = self.bytes + tensor.array.nbytes <= _MOST_BYTES
        return not self.tensors or (has_room and len(self.tensors) < _MOST_ARRAYS)

    def add(self, tensor: Tensor, how: Plain) -> None:
        """Takes one more, and how it is encoded; None where it is not."""
        self.tensors.append(tensor)
        self.bytes += tensor.array.nbytes
        if how is not None:
            self.encoded[tensor.name] = how


@dataclass
class Parcels:
    """Gradients that are still to be sent, by server.

    Attributes:
        client: the lines to the servers.
    """

    client: Client
    _waiting: dict[int, Parcel] = field(default_factory=dict)

    def add(self, server: int, tensor: Tensor, how: Plain) -> None:
        """Puts a gradient into the parcel of its server, which is sent when it is full."""
        parcel = self._waiting.setdefault(server, Parcel())
        if not parcel.takes(tensor):
            self.client.push(server, parcel.tensors, parcel.encoded)
            self._waiting[server] = parcel = Parcel()
        parcel.add(tensor, how)

    def send(self) -> None:
        """Sends what waits."""
        for server, parcel in self._waiting.items():
            self.client.push(server, parcel.tensors, parcel.encoded)
        self._waiting.clear()
