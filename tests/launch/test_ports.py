"""Two launches never share a port."""

import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from jaxfleet.errors import StrategyError
from jaxfleet.launch import CollectiveJob, Nodes, launch
from jaxfleet.launch.placement import Ports, RankPlaces
from tests.launch.jobs import job

SERVES = """
import os, socket, time
host, _, port = os.environ["PADDLE_CURRENT_ENDPOINT"].rpartition(":")
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind((host, int(port)))
server.listen()
time.sleep(60)
"""
REACHES = """
import os, socket, time
for endpoint in os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(","):
    host, _, port = endpoint.rpartition(":")
    while True:
        try:
            socket.create_connection((host, int(port))).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
time.sleep(0.5)
"""


def listening(endpoint: str) -> socket.socket:
    host, _, port = endpoint.rpartition(":")
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((host, int(port)))
        server.listen()
    except OSError:
        server.close()
        raise
    return server


def test_two_launches_at_once_get_different_ports() -> None:
    one, other = Ports(20), Ports(20)
    try:
        assert len({*one.endpoints, *other.endpoints}) == 40
    finally:
        one.close()
        other.close()


def test_a_server_can_listen_where_its_port_is_held_and_again_after_its_end() -> None:
    ports = Ports(1)
    try:
        for _ in range(2):
            ports.give(0)
            listening(ports.endpoints[0]).close()
    finally:
        ports.close()


def test_another_start_on_one_machine_goes_elsewhere_where_its_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        for nodes, start, is_refused in (("127.0.0.1", 0, True), ("127.0.0.1,b", 1, True),
                                         ("127.0.0.1", 1, False)):  # fmt: skip
            names = tuple(nodes.split(","))
            nodes_of_job = Nodes(names, names[0])
            job = CollectiveJob(
                command=("x",), port=taken - start, nodes=nodes_of_job, insecure=True
            )
            with closing(RankPlaces(job)) as places:
                if is_refused:
                    with pytest.raises(StrategyError, match=f"port {taken} of 127.0.0.1 cannot"):
                        places.move(start)
                    continue
                places.move(start)
                assert places.endpoints[0] != f"127.0.0.1:{taken}"


def test_ports_that_are_asked_for_follow_each_other() -> None:
    free = Ports(1)
    free.close()
    first = int(free.endpoints[0].rpartition(":")[2])
    if first > 65533:
        pytest.skip("no room above it")
    try:
        ports = Ports(2, first=first)
    except StrategyError:
        pytest.skip("somebody has the next one")
    ports.close()
    assert ports.endpoints == (f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}")


def test_a_port_that_somebody_listens_at_is_refused_by_name() -> None:
    free = Ports(1)
    free.close()
    server = listening(free.endpoints[0])
    port = server.getsockname()[1]
    with server, pytest.raises(StrategyError, match=f"port {port} of 127.0.0.1 cannot be had"):
        Ports(1, first=port)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port is let go for its server")
def test_a_port_stays_held_between_a_servers_lives() -> None:
    ports = Ports(1)
    port = int(ports.endpoints[0].rpartition(":")[2])
    try:
        ports.give(0)
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
    finally:
        ports.close()


@pytest.mark.grid
@pytest.mark.processes
def test_two_launches_at_once_both_go_well(capsys: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(2) as both:
        launches = [both.submit(launch, job(REACHES, SERVES, servers=2)) for _ in range(2)]
        assert [each.result() for each in launches] == [0, 0]
    assert "started again" not in capsys.readouterr().err
