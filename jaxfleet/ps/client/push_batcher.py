"""Batches gradients into push messages of limited size."""

from dataclasses import dataclass, field

from jaxfleet.ps.client.client import Client
from jaxfleet.transport.messages import Plain, Tensor

_MOST_BYTES = 8 << 20  # a server can process one while the next is in flight
_MOST_ARRAYS = 1024  # default limit of a message: 4096


@dataclass
class PushBatch:
    """Gradients sent to a server in one message."""

    tensors: list[Tensor] = field(default_factory=list)
    bytes: int = 0
    encoded: dict[str, Plain] = field(default_factory=dict)

    def takes(self, tensor: Tensor) -> bool:
        """Whether there is room; an empty batch takes any array."""
        has_room = self.bytes + tensor.array.nbytes <= _MOST_BYTES
        return not self.tensors or (has_room and len(self.tensors) < _MOST_ARRAYS)

    def add(self, tensor: Tensor, how: Plain) -> None:
        """Adds a gradient and its encoding, None if not encoded."""
        self.tensors.append(tensor)
        self.bytes += tensor.array.nbytes
        if how is not None:
            self.encoded[tensor.name] = how


@dataclass
class PushBatcher:
    """Gradients still to be sent, by server."""

    client: Client
    _waiting: dict[int, PushBatch] = field(default_factory=dict)

    def add(self, server: int, tensor: Tensor, how: Plain) -> None:
        """Adds a gradient to its server's batch, which is sent when full."""
        parcel = self._waiting.setdefault(server, PushBatch())
        if not parcel.takes(tensor):
            self.client.push(server, parcel.tensors, parcel.encoded)
            self._waiting[server] = parcel = PushBatch()
        parcel.add(tensor, how)

    def send(self) -> None:
        for server, parcel in self._waiting.items():
            self.client.push(server, parcel.tensors, parcel.encoded)
        self._waiting.clear()
