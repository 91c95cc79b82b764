"""What a trainer that takes a lost one's place keeps of the state that it receives."""

from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import numpy as np
import pytest

from jaxfleet.ir import Variable
from jaxfleet.runtime.own_state import OwnStateKeeper
from jaxfleet.transport.messages import Kind, Tensor

MOMENTUM = Variable("m", "f32", (2,))


class Client:
    """Server 0 answers every request at once, with the same state."""

    step = 3

    def __init__(self, trainer: int) -> None:
        self.me = SimpleNamespace(trainer=trainer)
        self.kept: list[list[str]] = []

    def request(self, _server: int, kind: Kind) -> Any:
        assert kind is Kind.RECALL
        return SimpleNamespace(answer=SimpleNamespace(tensors=(Tensor("m", np.ones(2, "f4")),)))

    def keep(self, tensors: list[Tensor]) -> None:
        self.kept.append([tensor.name for tensor in tensors])

    def wait(self, _: Any) -> None: ...

    def doing(self, _: str) -> None: ...


def keeper() -> OwnStateKeeper:
    served: Any = SimpleNamespace(mine=(MOMENTUM,), held=lambda leaves: {"m": leaves[0]})
    return OwnStateKeeper(served, waits=True)


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
