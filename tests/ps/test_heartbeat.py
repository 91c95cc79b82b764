"""Heartbeats report live peers, and survive failures of the network."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from jaxfleet.errors import ClosedError, ConnectError
from jaxfleet.ps.client.heartbeat import Heartbeat, Pulse
from jaxfleet.transport.memory_network import MemoryNetwork
from jaxfleet.transport.messages import Connections, Kind, Listener, Message, Network, Plain
from jaxfleet.transport.zmq.network import ZmqNetwork

PLACE = "127.0.0.1:6174"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def answer(listener: Listener, heard: list[str], *, beats: int) -> None:
    while len(heard) < beats:
        if (arrived := listener.receive(5.0)) is not None:
            peer, message = arrived
            heard.append(str(message.body["doing"]))
            step = len(heard)
            body: dict[str, Plain] = {
                "doing": f"step {step}",
                "incarnation": 7,
                "step": step,
                "lost": ["trainer 1"],
            }
            listener.send(
                peer, Message(Kind.HEARTBEAT, "server 0", number=message.number, body=body)
            )


def on_memory(network: MemoryNetwork) -> Heartbeat:
    return Heartbeat(
        network,
        [PLACE],
        sender="trainer 0",
        clock=network.clock,
        thread=False,
    )


def test_a_server_says_what_it_does_and_is_silent_when_it_ends() -> None:
    network = MemoryNetwork()
    heart = on_memory(network)
    heard: list[str] = []
    seen: list[tuple[float, Pulse]] = []

    def watch() -> None:
        heart.doing("compiling")
        for _ in range(2):
            network.sleep(4.5)
            seen.append((heart.silent_s(0), heart.pulse(0)))
        network.sleep(10.0)
        seen.append((heart.silent_s(0), heart.pulse(0)))
        heart.close()

    listener = network.listen(PLACE)
    network.run(
        {"server": partial(answer, listener, heard, beats=6), "trainer": watch, "heart": heart.run}
    )
    assert heard == ["compiling"] * 6
    last = Pulse(last_heard_s=5.0, doing="step 6", incarnation=7, step=6, lost=("trainer 1",))
    assert [silent_s for silent_s, _ in seen] == pytest.approx([0.5, 4.0, 14.0])
    before = Pulse(4.0, "step 5", 7, 5, ("trainer 1",))
    assert [pulse for _, pulse in seen] == [before, last, last]


def test_progress_is_forgotten_until_a_later_heartbeat_is_answered() -> None:
    network = MemoryNetwork()
    heart, seen = on_memory(network), list[Pulse]()

    def watch() -> None:
        network.sleep(0.2)
        seen.append(heart.pulse(0))
        heart.forget_progress()
        seen.append(heart.pulse(0))
        network.sleep(1.0)
        seen.append(heart.pulse(0))
        heart.close()

    listener = network.listen(PLACE)
    network.run(
        {"server": partial(answer, listener, [], beats=2), "trainer": watch, "heart": heart.run}
    )
    assert [(pulse.step, pulse.doing) for pulse in seen] == [
        (1, "step 1"),
        (-1, "step 1"),
        (2, "step 2"),
    ]


def test_a_server_that_was_never_there_is_silent_from_the_start() -> None:
    network = MemoryNetwork()
    heart = on_memory(network)

    def watch() -> None:
        network.sleep(2.5)
        assert heart.silent_s(0) == pytest.approx(2.5)
        network.sleep(1.0)
        assert heart.silent_s(0) == pytest.approx(3.5)
        assert heart.pulse(0) == Pulse()
        heart.close()

    network.run({"heart": heart.run, "trainer": watch})


def test_a_process_that_stood_still_does_not_take_its_servers_for_lost() -> None:
    network = MemoryNetwork()
    offset_s = 0.0
    heart = Heartbeat(
        network,
        [PLACE],
        sender="trainer 0",
        clock=lambda: network.clock() + offset_s,
        thread=False,
    )

    def watch() -> None:
        nonlocal offset_s
        network.sleep(2.5)
        offset_s = 1000.0
        network.sleep(1.0)
        assert 3.0 < heart.silent_s(0) < 6.0
        heart.close()

    network.run({"heart": heart.run, "trainer": watch})


def test_it_beats_in_a_thread_of_its_own() -> None:
    network: Network = ZmqNetwork()
    listener = network.listen("127.0.0.1:0")
    heard: list[str] = []
    serving = threading.Thread(target=answer, args=(listener, heard), kwargs={"beats": 5})
    serving.start()
    heart = Heartbeat(network, [listener.endpoint], sender="trainer 0", every_s=0.05)
    heart.doing("step 812")
    serving.join(10)
    until(lambda: heart.pulse(0).step == 5)
    assert heart.pulse(0).doing == "step 5"
    assert heard[-1] == "step 812"
    assert heart.silent_s(0) < 5
    heart.close()
    heart.close()
    listener.close()
    assert not [t for t in threading.enumerate() if t.name == "jaxfleet-heartbeat"]


class Failing:
    """A network that fails for a while."""

    def __init__(self, inner: Network, failures: int) -> None:
        self.inner = inner
        self.failures = failures

    def connect(self, endpoints: Sequence[str]) -> Connections:
        self.failures -= 1
        if self.failures >= 0:
            raise ConnectError("not yet")
        return self.inner.connect(endpoints)

    def listen(self, endpoint: str) -> Listener:
        return self.inner.listen(endpoint)


def test_it_outlives_what_fails_under_it() -> None:
    network = Failing(ZmqNetwork(), failures=3)
    listener = network.listen("127.0.0.1:0")
    heart = Heartbeat(network, [listener.endpoint], sender="trainer 0", every_s=0.02)
    answer(listener, [], beats=3)
    assert network.failures == -1
    until(lambda: heart.pulse(0).step == 3)
    heart.close()
    with pytest.raises(ClosedError):
        _close_then_receive(listener)


def _close_then_receive(listener: Listener) -> None:
    listener.close()
    listener.receive(0)


def test_a_heartbeat_carries_a_bounded_report_of_scalars() -> None:
    network = MemoryNetwork()
    heart = on_memory(network)
    heart.scalars = lambda: (7, {f"{'x' * 200}{number}": 1.0 for number in range(100)} | {"y": 2.0})
    bodies: list[dict[str, Plain]] = []
    listener = network.listen(PLACE)

    def hear() -> None:
        arrived = listener.receive(5.0)
        assert arrived is not None
        bodies.append(dict(arrived[1].body))
        heart.close()

    network.run({"server": hear, "heart": heart.run})
    (body,) = bodies
    assert body["scalar_step"] == 7
    scalars = body["scalars"]
    assert isinstance(scalars, dict)
    assert len(scalars) == 32  # all different, though they begin alike
    assert all(name.startswith("x" * 90) and len(name) < 110 for name in scalars)
    assert isinstance(body["resident"], int)
    assert body["resident"] > 1 << 20
