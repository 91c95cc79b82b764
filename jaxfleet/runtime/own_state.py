"""The trainers' own state, kept on server 0 so that a process can take a lost trainer's place."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxfleet.errors import PeerLostError
from jaxfleet.lower.host_transfer import to_device
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.server_session import PendingRequest
from jaxfleet.runtime.checkpointing import on_host
from jaxfleet.runtime.remote_state import RemoteState
from jaxfleet.transport.messages import Kind, Tensor


class OwnStateKeeper:
    """Sends the leaves that trainers hold and change themselves, from trainer 0 to server 0.

    In the relaxed modes each trainer has leaves of its own. One that returns receives those of
    trainer 0, as one that restores a checkpoint.

    Args:
        served: the locations of leaves.
        waits: the job waits for lost trainers; otherwise nothing is sent.
        is_sync: trainers wait for each other at every step.
    """

    def __init__(self, served: RemoteState, *, waits: bool, is_sync: bool = True) -> None:
        self._served, self._waits, self._is_sync = served, waits, is_sync
        self._mine = {variable.name: variable for variable in served.mine}
        self._sent: dict[str, Any] = {}
        self._request: PendingRequest | None = None

    def begin_step(self, client: Client) -> None:
        """Waits until server 0 has what was sent, if the next step's messages imply that."""
        if self._is_sync:
            self.settle(client)

    def end_step(self, client: Client, leaves: Sequence[Any]) -> None:
        """Sends the leaves that have changed, if this step's gradients were sent, too."""
        if self._is_sync or client.has_pushed(client.step):
            self.keep(client, leaves)

    def keep(self, client: Client, leaves: Sequence[Any]) -> None:
        """Sends the leaves that have changed since the last time, without waiting."""
        if not self._waits or client.me.trainer != 0 or not self._mine:
            return
        held = self._served.held(leaves)
        changed = {n: held[n] for n in self._mine if held[n] is not self._sent.get(n)}
        self.settle(client)
        self._request = client.keep([Tensor(n, on_host(value)) for n, value in changed.items()])
        self._sent.update(changed)

    def settle(self, client: Client) -> None:
        """Waits until server 0 has what was sent.

        No message of the next step may be earlier: whoever sees one counts on this state.
        """
        if self._request is not None:
            client.wait([self._request])
            self._request = None

    def recall(self, client: Client) -> dict[str, Any]:
        """Returns the leaves as they were after the client's step, by name, on the device.

        In the relaxed modes, those that trainer 0 has sent last if its steps are others.

        Raises:
            PeerLostError: server 0 has lost some of them.
        """
        if not self._mine:
            return {}
        client.doing(f"receiving the state after step {client.step}")
        asked = client.request(0, Kind.RECALL, body={} if self._is_sync else {"newest": True})
        client.wait([asked])
        assert asked.answer is not None
        arrays = {tensor.name: np.array(tensor.array) for tensor in asked.answer.tensors}
        if missing := self._mine.keys() - arrays.keys():
            what = f"{client.me.server_name(0)} lacks {', '.join(sorted(missing))}"
            hint = "start the job again from its last checkpoint"
            raise PeerLostError(f"{what} after step {client.step}", hint=hint)
        found = {n: to_device(arrays[n], of.dtype)[0] for n, of in self._mine.items()}
        if client.me.trainer == 0:
            self._sent = dict(found)
            if not self._is_sync:
                client.own.note(client.step, [Tensor(name, arrays[name]) for name in found])
        return found
