"""The trainers' own state, kept on server 0 so that a process can take a lost trainer's place."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxfleet.errors import PeerLostError
from jaxfleet.lower.host_transfer import to_device
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.pending_request import PendingRequest
from jaxfleet.runtime.checkpointing import on_host
from jaxfleet.runtime.remote_state import RemoteState
from jaxfleet.transport.messages import Kind, Plain, Tensor

_TRAINED = "@TRAINED@"  # the number of steps that kept leaves include; no leaf has this name
_AGAIN = "start the job again from its last checkpoint"


class OwnStateKeeper:
    """Sends the leaves that trainers hold and change themselves, from trainer 0 to server 0.

    In the relaxed modes each trainer has leaves of its own. One that returns receives those of
    trainer 0, as one that restores a checkpoint. Only where trainers wait for each other at
    exchanges (`fl`) does each send its own, with the number of its steps, which servers do not
    learn otherwise.

    Args:
        served: the locations of leaves.
        waits: the job waits for lost trainers; otherwise nothing is sent.
        is_sync: trainers wait for each other at every step.
        at_exchanges: they wait for each other at exchanges.

    Attributes:
        trained: of the leaves that were received last, the number of steps that they include.
    """

    def __init__(
        self,
        served: RemoteState,
        *,
        waits: bool,
        is_sync: bool = True,
        at_exchanges: bool = False,
    ) -> None:
        self._served, self._waits, self._is_sync = served, waits, is_sync
        self._at_exchanges, self.trained = at_exchanges, 0
        self._mine = {variable.name: variable for variable in served.mine}
        self._sent: dict[str, Any] = {}
        self._request: PendingRequest | None = None

    @property
    def own(self) -> frozenset[str]:
        """The leaves that an exchange keeps."""
        return frozenset(self._mine if self._waits and self._at_exchanges else ())

    def begin_step(self, client: Client) -> None:
        """Waits until server 0 has what was sent, if the next step's messages imply that."""
        if self._is_sync:
            self.settle(client)

    def end_step(self, client: Client, leaves: Sequence[Any]) -> None:
        """Sends the leaves that have changed, if this step's gradients were sent, too."""
        if self._at_exchanges:
            return  # between two, a step is this trainer's alone
        if self._is_sync or client.has_pushed(client.step):
            self.keep(client, leaves)

    def begin_exchange(self, client: Client) -> None:
        """Waits until server 0 has what was sent, which the messages of an exchange imply."""
        self.settle(client)

    def end_exchange(self, client: Client, values: Mapping[str, Any], trained: int) -> None:
        """Sends the leaves after an exchange, and the number of this trainer's steps before it."""
        if self._waits:
            self._send(client, values, [Tensor(_TRAINED, np.asarray(trained, np.int64))])

    def keep(self, client: Client, leaves: Sequence[Any], trained: int = 0) -> None:
        """Sends the leaves that have changed since the last time, without waiting."""
        held = self._served.held(leaves)
        if self._at_exchanges:
            self.end_exchange(client, held, trained)
        elif self._waits and client.me.trainer == 0 and self._mine:
            self._send(client, held)

    def _send(self, client: Client, held: Mapping[str, Any], more: Sequence[Tensor] = ()) -> None:
        changed = {n: held[n] for n in self._mine if held[n] is not self._sent.get(n)}
        self.settle(client)
        tensors = [Tensor(n, on_host(value)) for n, value in changed.items()]
        self._request = client.keep([*tensors, *more], each=self._at_exchanges)
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

        In the relaxed modes, those that trainer 0 has sent last if its steps are others. Where
        trainers wait for each other at exchanges, the client's steps are those.

        Raises:
            PeerLostError: server 0 has lost some of them.
        """
        wanted = {*self._mine, _TRAINED} if self._at_exchanges else set(self._mine)
        if not wanted:
            return {}
        client.doing(f"receiving the state after step {client.step}")
        asked = client.request(0, Kind.RECALL, body=self._which())
        client.wait([asked])
        assert asked.answer is not None
        arrays = {tensor.name: np.array(tensor.array) for tensor in asked.answer.tensors}
        if missing := wanted - arrays.keys():
            raise self._lost(client, missing)
        if self._at_exchanges:
            self.trained = int(arrays[_TRAINED])
        found = {n: to_device(arrays[n], of.dtype)[0] for n, of in self._mine.items()}
        if client.me.trainer == 0 or self._at_exchanges:
            self._sent = dict(found)
            if not self._is_sync and not self._at_exchanges:
                client.own.note(client.step, [Tensor(name, arrays[name]) for name in found])
        return found

    def _which(self) -> dict[str, Plain]:
        if self._at_exchanges:
            return {"each": True}
        return {} if self._is_sync else {"newest": True}

    def _lost(self, client: Client, missing: Collection[str]) -> PeerLostError:
        """Returns the error for leaves that server 0 lacks; reports it to all, if it is final."""
        what = f"{client.me.server_name(0)} lacks {', '.join(sorted(missing))}"
        if self._at_exchanges:  # only the former process had them
            what = (
                f"{client.me.name} cannot return: {client.me.server_name(0)} was started again "
                f"too, and lacks what this trainer had after exchange {client.step}"
            )
            servers = range(len(client.servers))
            client.wait([client.request(at, Kind.ERROR, body={"what": what}) for at in servers])
            return PeerLostError(what, hint=_AGAIN)
        return PeerLostError(f"{what} after step {client.step}", hint=_AGAIN)
