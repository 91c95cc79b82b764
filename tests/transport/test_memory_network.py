"""The in-process network: deterministic, and independent of wall-clock time."""

import time
from functools import partial

import numpy as np
import pytest

from jaxfleet.errors import ClosedError, ConnectError
from jaxfleet.transport.codec import FrameError
from jaxfleet.transport.memory_network import MemoryListener, MemoryNetwork
from jaxfleet.transport.messages import Connections, Kind, Listener, Message, Network, Tensor

PLACE = "127.0.0.1:6174"


def serve(listener: Listener, requests: int) -> list[str]:
    senders: list[str] = []
    while len(senders) < requests:
        if (arrived := listener.receive(10.0)) is not None:
            peer, message = arrived
            senders.append(f"{message.sender}/{message.number}")
            listener.send(peer, Message(Kind.OK, "server 0", number=message.number))
    return senders


def ask(lines: Connections, sender: str, times: int) -> int:
    for number in range(times):
        lines.send(0, Message(Kind.PULL, sender, number=number))
        answer = lines.receive(10.0)
        assert answer is not None
        assert answer[1].number == number
    return times


def test_it_is_a_network() -> None:
    network: Network = MemoryNetwork()
    listener = network.listen("127.0.0.1:0")
    assert listener.endpoint == "127.0.0.1:1"
    assert network.listen("127.0.0.1:0").endpoint == "127.0.0.1:2"
    assert listener.rejected == 0


def test_participants_take_turns_in_one_order_always() -> None:
    def once() -> list[str]:
        network = MemoryNetwork()
        results = network.run(
            {
                "trainer 0": lambda: ask(network.connect([PLACE]), "trainer 0", 3),
                "server 0": lambda: serve(network.listen(PLACE), 6),
                "trainer 1": lambda: ask(network.connect([PLACE]), "trainer 1", 3),
            }
        )
        senders: list[str] = results["server 0"]
        return senders

    first = once()
    assert sorted(first) == [f"trainer {t}/{n}" for t in range(2) for n in range(3)]
    assert all(once() == first for _ in range(20))


def test_a_timeout_takes_no_time() -> None:
    network = MemoryNetwork()
    lines = network.connect([PLACE])

    def wait() -> float:
        assert lines.receive(3600.0) is None
        return network.clock()

    started = time.monotonic()
    assert network.run({"trainer 0": wait}) == {"trainer 0": 3600.0}
    assert time.monotonic() - started < 60


def test_the_first_deadline_comes_first() -> None:
    network = MemoryNetwork()
    order: list[tuple[str, float]] = []

    def wait(name: str, seconds: float) -> None:
        network.sleep(seconds)
        order.append((name, network.clock()))

    seconds = {"a": 3, "b": 1, "c": 2}
    network.run({name: partial(wait, name, time_s) for name, time_s in seconds.items()})
    assert order == [("b", 1.0), ("c", 2.0), ("a", 3.0)]


def test_polling_ends_too() -> None:
    network = MemoryNetwork()
    lines = network.connect([PLACE])

    def poll() -> None:
        while network.clock() < 1:
            assert lines.receive(0) is None

    network.run({"trainer 0": poll, "trainer 1": poll})


def test_the_first_failure_ends_all_and_is_raised() -> None:
    network = MemoryNetwork()
    ended: list[str] = []

    def wait() -> None:
        try:
            network.connect([PLACE]).receive(1000.0)
        except ClosedError:
            ended.append("trainer 0")
            raise

    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        network.run({"trainer 0": wait, "trainer 1": fail, "trainer 2": lambda: ended.append("2")})
    assert ended == ["trainer 0"]


def test_a_network_runs_again_after_a_failure() -> None:
    network = MemoryNetwork()

    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        network.run({"trainer 0": fail})
    assert network.run({"trainer 0": lambda: 3}) == {"trainer 0": 3}


def test_a_participant_that_never_waits_is_named() -> None:
    network = MemoryNetwork()
    with pytest.raises(ConnectError, match="still ran: trainer 0"):
        network.run({"trainer 0": lambda: time.sleep(0.5)}, longest_s=0.05)
    time.sleep(0.6)


def test_waking_ends_a_wait_once() -> None:
    network = MemoryNetwork()
    listener = network.listen(PLACE)

    def wait() -> float:
        assert listener.receive(50.0) is None
        return network.clock()

    assert network.run({"server 0": wait, "other": listener.wake}) == {
        "server 0": 0.0,
        "other": None,
    }
    assert network.run({"server 0": wait}) == {"server 0": 50.0}


def test_closing_ends_a_wait() -> None:
    network = MemoryNetwork()
    listener = network.listen(PLACE)
    with pytest.raises(ClosedError, match=r"listener at .* is closed"):
        network.run({"server 0": lambda: listener.receive(50.0), "other": listener.close})


def test_a_message_waits_for_its_server_and_a_closed_one_loses_what_it_had() -> None:
    network = MemoryNetwork()
    lines = network.connect([PLACE])
    lines.send(0, Message(Kind.PULL, "trainer 0", number=1))
    first = network.listen(PLACE)
    with pytest.raises(ConnectError, match="is taken"):
        network.listen(PLACE)
    first.close()
    lines.send(0, Message(Kind.PULL, "trainer 0", number=2))
    second = network.listen(PLACE)
    arrived = second.receive(0)
    assert arrived is not None
    assert arrived[1].number == 2
    assert second.receive(0) is None


def carry(network: MemoryNetwork, message: Message) -> tuple[MemoryListener, Message]:
    listener = network.listen(PLACE)
    network.connect([PLACE]).send(0, message)
    arrived = listener.receive(0)
    assert arrived is not None
    return listener, arrived[1]


def test_arrays_are_shared_and_read_only() -> None:
    array = np.arange(4.0)
    message = Message(Kind.PUSH, "trainer 0", tensors=(Tensor("w", array),))
    _, arrived = carry(MemoryNetwork(), message)
    assert np.shares_memory(arrived.tensors[0].array, array)
    assert not arrived.tensors[0].array.flags.writeable
    assert array.flags.writeable


def test_through_the_wire_nothing_is_shared() -> None:
    array = np.arange(4.0)
    message = Message(Kind.PUSH, "trainer 0", tensors=(Tensor("w", array),))
    _, arrived = carry(MemoryNetwork(through_wire=True), message)
    assert not np.shares_memory(arrived.tensors[0].array, array)
    np.testing.assert_array_equal(arrived.tensors[0].array, array)
    with pytest.raises(FrameError, match="the body holds a set"):
        carry(MemoryNetwork(through_wire=True), Message(Kind.OK, "t", body={"a": {1}}))  # type: ignore[dict-item]


def test_faults_lose_and_repeat_messages() -> None:
    def faults(endpoint: str, message: Message) -> int:
        assert endpoint == PLACE
        return message.number

    network = MemoryNetwork(faults=faults)
    listener = network.listen(PLACE)
    lines = network.connect([PLACE])
    for number in range(3):
        lines.send(0, Message(Kind.PUSH, "trainer 0", number=number))
    assert [item[1].number for item in iter(lambda: listener.receive(0), None)] == [1, 2, 2]
