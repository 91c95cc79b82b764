"""A connection that ZeroMQ gave up is detected; open and connecting ones stay."""

from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from jaxfleet.transport.messages import Kind, Message
from jaxfleet.transport.zmq.client import ConnectionMonitor
from jaxfleet.transport.zmq.network import ZmqNetwork
from jaxfleet.transport.zmq.sockets import SocketGroup, Timing, make_socket
from tests.transport.test_zmq_network import ask, echoing, free_endpoint, lines_to, until

QUICK = Timing(
    handshake_s=1.0, reconnect_s=0.05, probe_s=0.2, half_open_s=0.6, silent_s=0.6, linger_s=0.2
)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def watched() -> Iterator[tuple["zmq.Socket[bytes]", ConnectionMonitor, Clock]]:
    end, clock = SocketGroup("a test's line is"), Clock()
    line = make_socket(end.context, zmq.DEALER, QUICK)
    end.watch(line)
    try:
        yield line, ConnectionMonitor(line, end, QUICK, clock), clock
    finally:
        end.close()


def test_a_line_on_which_nothing_is_tried_is_given_up() -> None:
    with watched() as (_, watch, clock):
        assert not watch.is_given_up
        clock.now = 2.0
        assert watch.is_given_up
        watch.start_again()
        assert not watch.is_given_up


def test_a_line_that_is_tried_again_and_again_is_not() -> None:
    with watched() as (line, watch, clock):
        line.connect(f"tcp://{free_endpoint()}")  # no listener
        for tried in range(3):
            until(lambda: bool(watch._events.poll(10)))  # noqa: SLF001
            clock.now = 10.0 * tried
            assert not watch.is_given_up


def test_an_open_line_may_be_silent_for_long() -> None:
    with echoing(ZmqNetwork(timing=QUICK)) as listener, watched() as (line, watch, clock):
        line.connect(f"tcp://{listener.endpoint}")

        def is_open() -> bool:
            return not watch.is_given_up and watch._is_open  # noqa: SLF001

        until(is_open)
        clock.now = 1000.0
        assert not watch.is_given_up


def test_waiting_in_vain_on_an_open_line_is_silence_and_computing_is_not() -> None:
    with echoing(ZmqNetwork(timing=QUICK)) as listener, watched() as (line, watch, clock):
        line.connect(f"tcp://{listener.endpoint}")
        until(lambda: not watch.is_given_up and watch._is_open)  # noqa: SLF001

        def wait(seconds: float) -> bool:
            for _ in range(round(seconds * 10)):
                clock.now += 0.1
                watch.count_wait()
            return watch.is_silent

        assert not wait(10.0)  # nothing was sent
        watch.sent()
        assert not wait(0.3)
        watch.received()
        assert not wait(10.0)
        watch.sent()
        assert wait(0.8)
        watch.start_again()
        watch._is_open = True  # noqa: SLF001  connected anew
        watch.sent()
        assert not wait(1.0)  # twice as patient
        assert wait(0.4)
        watch.received()
        watch.sent()
        assert not wait(1.0)  # for a while
        watch.received()
        clock.now += 20.0
        watch.count_wait()
        watch.sent()
        assert not wait(1.0)
        watch.received()  # after a second, so the next may take two
        watch.sent()
        assert not wait(1.8)
        watch.received()
        watch.sent()
        watch.received()
        watch.sent()
        assert wait(0.8)

        watch.received()
        watch._patience_s = 30.0  # noqa: SLF001
        watch.sent()
        clock.now += 600.0
        watch.count_wait()
        assert not watch.is_silent


def test_a_line_that_is_open_and_mute_is_connected_anew() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as mute:
        mute.setsockopt(zmq.LINGER, 0)
        port = mute.bind_to_random_port("tcp://127.0.0.1")
        with lines_to(ZmqNetwork(timing=QUICK), f"127.0.0.1:{port}") as lines:
            lines.send(0, Message(Kind.PULL, "trainer 0"))
            until(lambda: lines.receive(0.1) is None and 0 in lines.renewed())
            lines.send(0, Message(Kind.PULL, "trainer 0"))
            peers = {mute.recv_multipart()[0] for _ in range(2) if mute.poll(10_000)}
            assert len(peers) == 2


def test_lines_that_were_given_up_are_connected_anew() -> None:
    endpoint = free_endpoint()
    with lines_to(ZmqNetwork(timing=QUICK), endpoint) as lines:
        sockets = lines._sockets  # type: ignore[attr-defined]  # noqa: SLF001
        sockets[0].disconnect(lines._addresses[0])  # type: ignore[attr-defined]  # noqa: SLF001
        with echoing(ZmqNetwork(), endpoint):
            until(lambda: lines.receive(0.3) is None and bool(sockets[0].poll(0, zmq.POLLOUT)))
            lines.send(0, Message(Kind.PULL, "trainer 0"))
            assert lines.receive(10.0) is not None
            assert ask(lines) is not None
