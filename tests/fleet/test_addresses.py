"""Endpoints that processes agree on, independent of the launcher."""

import socket
from typing import Any

import pytest

from jaxfleet.cluster.roles import scheduler
from jaxfleet.cluster.roles.scheduler import all_endpoints, all_ips, drawn_port
from jaxfleet.errors import StrategyError


class Said:
    """A rendezvous in which the others' values are given by a test."""

    def __init__(self, *others: Any) -> None:
        self._others = others

    def gather(self, group: str, value: Any, what: str) -> list[Any]:
        del group, what
        return [value, *self._others]

    def close(self) -> None:
        pass


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    ips = ["10.0.0.1", "10.0.0.1", "10.0.0.2"]
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        taken = held.getsockname()[1]
        monkeypatch.setattr(scheduler, "drawn_port", lambda _: taken)
        found = all_endpoints(Said(7, 8), ips, [0, 1, 2], 0)
    port = int(found[0].partition(":")[2])
    assert port > taken
    assert (port - taken) % 2 == 0  # the odd ones belong to the machine's other process
    assert found[1:] == ["10.0.0.1:7", "10.0.0.2:8"]


def test_the_port_is_the_one_that_fluid_draws() -> None:
    assert all(60001 <= drawn_port(number) <= 64000 for number in range(1, 100))
    assert drawn_port(2) == drawn_port(2) != drawn_port(3)


def test_one_machine_needs_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    here = socket.gethostname()
    assert all_ips(Said((here, ""))) == ["127.0.0.1", "127.0.0.1"]
    with pytest.raises(StrategyError, match=f"of machine {here} cannot be found"):
        all_ips(Said(("elsewhere", "10.0.0.2")))


def test_an_address_that_others_do_not_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "10.0.0.1")
    assert all_ips(Said(("elsewhere", "10.0.0.2"))) == ["10.0.0.1", "10.0.0.2"]
    with pytest.raises(StrategyError, match=r"machine elsewhere is 127.0.1.1, which no other"):
        all_ips(Said(("elsewhere", "127.0.1.1")))
