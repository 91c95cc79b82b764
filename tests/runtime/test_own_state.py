"""What a trainer that takes a lost one's place keeps of the state that it receives."""

from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import numpy as np
import pytest

from jaxfleet.errors import PeerLostError
from jaxfleet.ir import Variable
from jaxfleet.ps.client.request_sender import KeptLeaves
from jaxfleet.runtime.own_state import OwnStateKeeper
from jaxfleet.transport.messages import Kind, Tensor

MOMENTUM = Variable("m", "f32", (2,))


class Client:
    """Server 0 answers every request at once, with the same state."""

    step = 3

    def __init__(self, trainer: int) -> None:
        self.me = SimpleNamespace(trainer=trainer)
        self.kept: list[list[str]] = []
        self.own = KeptLeaves()
        self.pushed = -1

    def has_pushed(self, step: int) -> bool:
        return self.pushed >= step

    def request(self, _server: int, kind: Kind, body: dict[str, Any]) -> Any:
        assert kind is Kind.RECALL
        assert body in ({}, {"newest": True})
        return SimpleNamespace(answer=SimpleNamespace(tensors=(Tensor("m", np.ones(2, "f4")),)))

    def keep(self, tensors: list[Tensor], *, each: bool) -> None:
        assert not each
        self.kept.append([tensor.name for tensor in tensors])

    def wait(self, _: Any) -> None: ...

    def doing(self, _: str) -> None: ...


def keeper(*, is_sync: bool = True) -> OwnStateKeeper:
    served: Any = SimpleNamespace(mine=(MOMENTUM,), held=lambda leaves: {"m": leaves[0]})
    return OwnStateKeeper(served, waits=True, is_sync=is_sync)


def test_where_trainers_do_not_wait_the_state_goes_with_gradients() -> None:
    client, own = Client(0), keeper(is_sync=False)
    own.end_step(cast("Any", client), [np.zeros(2)])
    client.pushed = 3
    own.end_step(cast("Any", client), [np.zeros(2)])
    assert client.kept == [["m"]]


@pytest.mark.parametrize(("is_sync", "step"), [(True, -1), (False, 3)])
def test_what_trainer_0_has_received_is_sent_to_a_server_that_lacks_it(
    is_sync: bool, step: int
) -> None:
    client = Client(0)
    keeper(is_sync=is_sync).recall(cast("Any", client))
    assert client.own.step == step
    assert list(client.own.leaves) == ([] if is_sync else ["m"])


def test_trainer_0_does_not_send_back_what_it_has_received() -> None:
    client, own = Client(0), keeper()
    found = own.recall(cast("Any", client))
    own.keep(cast("Any", client), [found["m"]])
    own.keep(cast("Any", client), [found["m"] + 1])
    assert client.kept == [[], ["m"]]


@pytest.mark.parametrize("trainer", [0, 1])
def test_only_the_trainer_that_sends_the_state_keeps_what_it_has_received(trainer: int) -> None:
    own = keeper()
    found = own.recall(cast("Any", Client(trainer)))
    received = ref(found.pop("m"))
    assert (received() is None) == (trainer == 1)


def test_what_server_0_lost_with_a_federated_trainer_is_reported_to_all() -> None:
    asked: list[tuple[int, Kind]] = []

    class Servers(Client):
        servers = (None, None)

        def __init__(self) -> None:
            super().__init__(1)
            self.me.name, self.me.server_name = "trainer 1", lambda at: f"server {at}"

        def request(self, server: int, kind: Kind, body: dict[str, Any]) -> Any:
            asked.append((server, kind))
            assert kind is Kind.ERROR or body == {"each": True}
            return SimpleNamespace(answer=SimpleNamespace(tensors=()))

    served: Any = SimpleNamespace(mine=(MOMENTUM,))
    own = OwnStateKeeper(served, waits=True, is_sync=False, at_exchanges=True)
    with pytest.raises(PeerLostError, match=r"server 0 was started again too, .* exchange 3"):
        own.recall(cast("Any", Servers()))
    assert asked == [(0, Kind.RECALL), (0, Kind.ERROR), (1, Kind.ERROR)]
