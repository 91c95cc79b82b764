"""Exchanges of a trainer that updates parameters itself."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from jaxfleet.ir import parse
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.communicator import CommunicationMode
from jaxfleet.ps.client.periodic_exchange import PeriodicExchange, StateKeeper
from jaxfleet.ps.client.trainer_executor import TrainerExecutor

PROGRAM = parse("program p\n  param w: f32[]\n  state w@OLD: f32[]\n  block 0\n")
TRAINERS = 2


class Server:
    """A server of one value, which another trainer changes, too."""

    program = PROGRAM

    def __init__(self) -> None:
        self.value, self.others = 0.0, 0.0

    def run(
        self, held: Mapping[str, float], _data: object, _sizes: object
    ) -> tuple[dict[str, float], list[Any]]:
        """Exchanges as docs/relaxed-modes.md has it: `d = (w - old)/T`, `w += s - old`."""
        delta = (held["w"] - held["w@OLD"]) / TRAINERS
        self.value += delta + self.others
        self.others = 0.0
        moved = self.value - (held["w@OLD"] + delta)
        return {"w": held["w"] + moved, "w@OLD": self.value}, []

    def receive(self) -> dict[str, float]:
        return {"w": self.value}


def test_values_that_are_received_anew_contain_those_of_the_exchange_before() -> None:
    server = Server()
    client = SimpleNamespace(step=1, clock=1, doing=lambda _: None, restart_clock=lambda: None,
                             repeats_a_message=lambda: False)  # fmt: skip
    mode = CommunicationMode("geo", staleness=4)
    trainer = PeriodicExchange(
        cast(Client, client), mode, cast(TrainerExecutor, server),
        cast(StateKeeper, SimpleNamespace(own=())),
    )  # fmt: skip
    trainer.restart({"w": 0.0})
    server.others = 10.0
    assert trainer.end({"w": 2.0}, rows=1) == {"w": 12.0}  # its own 2, of which it sent 1
    server.value += 5.0
    trainer.refresh()
    assert trainer.take() == {"w": 17.0}
    trainer.end({"w": 17.0}, rows=1)
    assert server.value == 16.5  # half of what it had not sent yet
