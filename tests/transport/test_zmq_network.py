"""Messages between ends that start in any order, leave, and meet attackers."""

import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import numpy as np
import pytest
import zmq

from jaxfleet.errors import ClosedError, ConnectError, StrategyError
from jaxfleet.transport.codec import FrameError, encode
from jaxfleet.transport.framing import CHUNK_BYTES, WHOLE_BYTES, Reassembler, split_message
from jaxfleet.transport.messages import Connections, Kind, Limits, Message, Network, Tensor
from jaxfleet.transport.zmq.network import ZmqNetwork
from jaxfleet.transport.zmq.server import ZmqListener
from jaxfleet.transport.zmq.sockets import Timing, ipc_name
from tests.transport.test_codec import mutated, same

ANYWHERE = "127.0.0.1:0"
SMALL = Limits(max_tensors=8, max_bytes=1 << 20, max_message_bytes=1 << 22, max_body_bytes=1 << 16)
QUICK = Timing(handshake_s=1.0, probe_s=0.2, half_open_s=0.6, silent_s=0.6, linger_s=0.2)
SECRET = b"0123456789abcdef"


@contextmanager
def echoing(network: Network, endpoint: str = ANYWHERE) -> Iterator[ZmqListener]:
    """Echoes messages until the block ends."""
    listener = network.listen(endpoint)
    assert isinstance(listener, ZmqListener)

    def serve() -> None:
        try:
            while True:
                if (arrived := listener.receive(10.0)) is not None:
                    listener.send(arrived[0], replace(arrived[1], sender="server 0"))
        except ClosedError:
            return

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener
    finally:
        listener.close()
        thread.join(10)
        assert not thread.is_alive()


def ask(
    lines: Connections, number: int = 1, *, timeout_s: float = 10.0, size: int = 10
) -> Message | None:
    array = np.arange(size, dtype=np.float32)
    asked = Message(Kind.PUSH, "server 0", 1, number, {}, (Tensor("w", array),))
    lines.send(0, asked)
    answer = lines.receive(timeout_s)
    if answer is None:
        return None
    assert answer[0] == 0
    assert same(asked, answer[1])
    return answer[1]


@contextmanager
def lines_to(network: Network, *endpoints: str) -> Iterator[Connections]:
    lines = network.connect(endpoints)
    try:
        yield lines
    finally:
        lines.close()


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def free_endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as made:
        return f"127.0.0.1:{made.getsockname()[1]}"


@pytest.mark.parametrize("size", [0, 1, 20_000, 3 << 20, (9 << 20) + 5])
def test_a_message_goes_there_and_back(size: int) -> None:
    network = ZmqNetwork()
    with echoing(network) as listener, lines_to(network, listener.endpoint) as lines:
        for number in range(3):
            assert ask(lines, number, size=size) is not None
        assert listener.rejected == 0


@pytest.mark.parametrize("size", [1, 1 << 17])  # packed; in shared memory
@pytest.mark.parametrize("more", [0, 1])
def test_a_message_holds_as_many_arrays_as_the_limits_say(more: int, size: int) -> None:
    network, roomy = ZmqNetwork(limits=SMALL), replace(SMALL, max_tensors=SMALL.max_tensors + more)
    arrays = [Tensor(f"w{n}", np.zeros(size, np.uint8)) for n in range(roomy.max_tensors)]
    with (
        echoing(network) as listener,
        lines_to(ZmqNetwork(limits=roomy), listener.endpoint) as lines,
    ):
        lines.send(0, Message(Kind.PUSH, "trainer 0", 1, 1, {}, tuple(arrays)))
        answer = lines.receive(10.0)
        assert answer is not None
        assert answer[1].kind is (Kind.ERROR if more else Kind.PUSH)
        assert listener.rejected == more


def test_several_servers_are_waited_for_together() -> None:
    network = ZmqNetwork()
    with (
        echoing(network) as one,
        echoing(network) as other,
        lines_to(network, one.endpoint, other.endpoint) as lines,
    ):
        for server in (0, 1, 1, 0):
            lines.send(server, Message(Kind.PULL, "trainer 0", number=server))
        answers = [lines.receive(10.0) for _ in range(4)]
        assert sorted((a[0], a[1].number) for a in answers if a) == [(0, 0), (0, 0), (1, 1), (1, 1)]
        assert lines.receive(0) is None


def test_a_client_may_start_first() -> None:
    endpoint = free_endpoint()
    with lines_to(ZmqNetwork(), endpoint) as lines:
        assert ask(lines, timeout_s=0.2) is None
        with echoing(ZmqNetwork(), endpoint):
            assert lines.receive(10.0) is not None


def test_a_server_that_comes_back_is_found_soon() -> None:
    network = ZmqNetwork()
    with echoing(network) as listener, lines_to(network, listener.endpoint) as lines:
        endpoint = listener.endpoint
        assert ask(lines) is not None
        listener.close()
        time.sleep(0.5)
        with echoing(network, endpoint):
            started = time.monotonic()
            assert ask(lines, 2) is not None
            assert time.monotonic() - started < 10


def test_a_taken_port_is_named() -> None:
    network = ZmqNetwork()
    with echoing(network) as listener, pytest.raises(ConnectError) as caught:
        network.listen(listener.endpoint)
    assert f"cannot listen at {listener.endpoint}" in str(caught.value)
    assert "another process listens there" in caught.value.__notes__[0]
    with echoing(network, listener.endpoint):
        pass


@pytest.mark.parametrize("endpoint", ["0.0.0.0:0", "[::]:0"])
def test_other_machines_are_let_in_with_a_secret_alone(endpoint: str) -> None:
    with pytest.raises(StrategyError, match="the job has no secret"):
        ZmqNetwork().listen(endpoint)


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(ConnectError, match=r"cannot listen at 192\.0\.2\.1:0"):
        ZmqNetwork(secret=SECRET).listen("192.0.2.1:0")


@pytest.mark.parametrize(
    "endpoint", ["", "6174", "host", "host:", ":1", "host:70000", "host:-1", "host:x"]
)
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(StrategyError, match="is not an endpoint"):
        ZmqNetwork().listen(endpoint)
    with pytest.raises(StrategyError, match="is not an endpoint"):
        ZmqNetwork().connect([endpoint])


def test_a_host_that_cannot_be_is_named() -> None:
    with pytest.raises(ConnectError, match="not a host"):
        ZmqNetwork().connect(["not a host:1"])
    with pytest.raises(ConnectError, match="the host 'not a host' is not known"):
        ZmqNetwork().listen("not a host:1")


def test_localhost_is_an_endpoint_too() -> None:
    network = ZmqNetwork()
    with echoing(network, "localhost:0") as listener, lines_to(network, listener.endpoint) as lines:
        assert listener.endpoint.startswith("localhost:")
        assert ask(lines) is not None


def test_who_knows_the_secret_is_answered() -> None:
    network = ZmqNetwork(secret=SECRET)
    with echoing(network, "0.0.0.0:0") as listener:
        port = listener.endpoint.rpartition(":")[2]
        with lines_to(ZmqNetwork(secret=SECRET), f"127.0.0.1:{port}") as lines:
            assert ask(lines, size=1 << 18) is not None


@pytest.mark.parametrize("secret", [b"another secret of 26 bytes", None])
def test_who_has_another_secret_or_none_hears_nothing(secret: bytes | None) -> None:
    with (
        echoing(ZmqNetwork(secret=SECRET)) as listener,
        lines_to(ZmqNetwork(secret=secret, timing=QUICK), listener.endpoint) as stranger,
        lines_to(ZmqNetwork(secret=SECRET), listener.endpoint) as friend,
    ):
        assert ask(stranger, timeout_s=0.5) is None
        assert ask(friend) is not None


def test_a_line_outlives_a_stranger_on_the_port() -> None:
    endpoint = free_endpoint()
    with lines_to(ZmqNetwork(timing=QUICK), endpoint) as lines:
        with echoing(ZmqNetwork(secret=SECRET), endpoint):
            for _ in range(10):
                assert ask(lines, timeout_s=0.1) is None
        # Messages sent while ZeroMQ still rejects the attacker are lost with that connection.
        with echoing(ZmqNetwork(), endpoint):
            until(lambda: ask(lines, timeout_s=1.0) is not None)


def test_a_server_without_a_secret_answers_nobody_with_one() -> None:
    with (
        echoing(ZmqNetwork()) as listener,
        lines_to(ZmqNetwork(secret=SECRET, timing=QUICK), listener.endpoint) as lines,
    ):
        assert ask(lines, timeout_s=0.5) is None


def test_who_knows_the_servers_key_alone_hears_nothing() -> None:
    network = ZmqNetwork(secret=SECRET, timing=QUICK)
    keys = network._keys  # noqa: SLF001  what such a stranger would know
    assert keys is not None
    public, secret = zmq.curve_keypair()
    network._keys = replace(keys, client_public=public, client_secret=secret)  # noqa: SLF001
    with (
        echoing(ZmqNetwork(secret=SECRET)) as listener,
        lines_to(network, listener.endpoint) as lines,
    ):
        assert ask(lines, timeout_s=0.5) is None


def test_closing_ends_a_wait() -> None:
    network = ZmqNetwork()
    listener, lines = network.listen(ANYWHERE), network.connect([free_endpoint()])
    for end, receive in ((listener, listener.receive), (lines, lines.receive)):
        threading.Timer(0.2, end.close).start()
        started = time.monotonic()
        with pytest.raises(ClosedError, match="closed"):
            receive(30.0)
        assert time.monotonic() - started < 15
        end.close()
        with pytest.raises(ClosedError):
            receive(0)


def test_closing_does_not_hang_on_what_nobody_takes() -> None:
    lines = ZmqNetwork(timing=QUICK).connect([free_endpoint()])
    for _ in range(10):
        lines.send(0, Message(Kind.PUSH, "trainer 0", tensors=(Tensor("w", np.ones(1 << 20)),)))
    started = time.monotonic()
    lines.close()
    assert time.monotonic() - started < 15


def test_waking_ends_a_wait() -> None:
    listener = ZmqNetwork().listen(ANYWHERE)
    for _ in range(3):
        threading.Timer(0.05, listener.wake).start()
        started = time.monotonic()
        assert listener.receive(30.0) is None
        assert time.monotonic() - started < 10
    assert listener.receive(0) is None
    listener.close()
    listener.wake()


def test_what_is_sent_to_a_connection_that_is_gone_is_no_error() -> None:
    listener = ZmqNetwork().listen(ANYWHERE)
    listener.send(b"nobody", Message(Kind.OK, "server 0"))
    listener.close()


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])  # with a Unix socket, and by TCP
def test_the_end_of_a_connection_is_noticed(secret: bytes | None, host: str) -> None:
    network = ZmqNetwork(secret=secret)
    listener = network.listen(f"{host}:0")
    peers = []
    with closing(listener), lines_to(network, listener.endpoint) as other:
        for _ in range(3):  # the next connection gets the descriptor of the last
            with lines_to(network, listener.endpoint) as lines:
                for each in (lines, other):
                    each.send(0, Message(Kind.HELLO, "trainer 0"))
                    found = listener.receive(10.0)
                    assert found is not None
                    listener.trust(found[0])
                    if each is lines:
                        peers.append(found[0])
                assert listener.ended() == []
            ended: list[bytes] = []
            deadline = time.monotonic() + 2.0
            while not ended and time.monotonic() < deadline:
                ended += listener.ended()
                time.sleep(0.01)
            assert ended == peers[-1:]
        assert len(set(peers)) == 3


def test_what_a_peer_would_drop_is_refused_where_it_is_sent() -> None:
    network = ZmqNetwork(limits=SMALL)
    large = Tensor("w", np.zeros(SMALL.max_bytes + 1, np.uint8))
    with lines_to(network, ANYWHERE) as lines, pytest.raises(FrameError, match="array 'w' is"):
        lines.send(0, Message(Kind.PUSH, "trainer 0", tensors=(large,)))


def test_a_peer_that_accepts_and_says_nothing_is_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        mute.settimeout(10)
        endpoint = f"127.0.0.1:{mute.getsockname()[1]}"
        with lines_to(ZmqNetwork(timing=QUICK), endpoint):
            first, _ = mute.accept()
            second, _ = mute.accept()  # the first was given up, and the client tries again
            first.close()
            second.close()


@contextmanager
def dealer(endpoint: str) -> Iterator["zmq.Socket[bytes]"]:
    """An attacker's ZeroMQ socket."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as made:
        made.setsockopt(zmq.LINGER, 0)
        made.connect(f"tcp://{endpoint}")
        yield made


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.grid
def test_ten_thousand_frames_of_noise_change_nothing() -> None:
    network = ZmqNetwork(limits=SMALL)
    draw = random.Random(0)
    valid = encode(Message(Kind.PUSH, "trainer 1", 3, 1, {"a": 1}, (Tensor("w", np.ones(4)),)))
    before = peak_bytes()
    with (
        echoing(network) as listener,
        dealer(listener.endpoint) as stranger,
        lines_to(network, listener.endpoint) as lines,
    ):
        for count in range(10_000):
            noise = [draw.randbytes(draw.randrange(100)) for _ in range(draw.randrange(1, 5))]
            stranger.send_multipart(mutated(valid, draw) or [b""] if count % 2 else noise)
            while stranger.poll(0):
                stranger.recv_multipart()
            if count % 1000 == 0:
                assert ask(lines, count) is not None
        until(lambda: listener.rejected > 8_000)
        assert ask(lines, 10_000) is not None
    assert peak_bytes() - before < 200 << 20


def test_noise_on_the_port_changes_nothing() -> None:
    draw = random.Random(0)
    network = ZmqNetwork(timing=QUICK)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
    with echoing(network) as listener, lines_to(network, listener.endpoint) as lines:
        host, port = listener.endpoint.split(":")
        for count in range(200):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall((greeting if count % 2 else b"") + draw.randbytes(200))
        assert ask(lines) is not None


def test_no_message_is_answered_with_an_error() -> None:
    with echoing(ZmqNetwork()) as listener, dealer(listener.endpoint) as stranger:
        stranger.send(b"hello?")
        assert stranger.poll(10_000)
        header = stranger.recv()
        assert b"bad_message" in header
        assert listener.rejected == 1


@pytest.mark.grid
def test_a_message_of_very_many_parts_is_not_kept() -> None:
    network = ZmqNetwork(limits=SMALL)
    before = peak_bytes()
    with (
        echoing(network) as listener,
        dealer(listener.endpoint) as stranger,
        lines_to(network, listener.endpoint) as lines,
    ):
        stranger.send_multipart([b"x"] * 200_000)
        until(lambda: listener.rejected == 1)
        assert stranger.poll(10_000)
        assert b"parts" in stranger.recv()
        assert ask(lines) is not None
    assert peak_bytes() - before < 200 << 20


def large(count: int) -> Message:
    """A message that is sent in chunks."""
    arrays = [np.full(WHOLE_BYTES // 8 + i, i, np.int32) for i in range(count)]
    small = Tensor("small", np.arange(5.0))
    return Message(
        Kind.PUSH, "t", 1, 1, {}, (small, *(Tensor(f"w{i}", a) for i, a in enumerate(arrays)))
    )


def test_a_large_message_arrives_aligned() -> None:
    listener = ZmqNetwork(share_memory=False).listen(ANYWHERE)
    with lines_to(ZmqNetwork(share_memory=False), listener.endpoint) as lines:
        lines.send(0, large(3))
        arrived = listener.receive(30.0)
        assert arrived is not None
        assert same(large(3), arrived[1])
        assert all(tensor.array.ctypes.data % 64 == 0 for tensor in arrived[1].tensors)
    listener.close()


def test_two_large_messages_may_arrive_at_once() -> None:
    network = ZmqNetwork(share_memory=False)
    listener = network.listen(ANYWHERE)
    with lines_to(network, listener.endpoint) as one, lines_to(network, listener.endpoint) as two:
        for lines in (one, two):
            lines.send(0, large(2))
        arrived = [listener.receive(30.0) for _ in range(2)]
        assert all(item is not None and same(large(2), item[1]) for item in arrived)
    listener.close()


def test_pieces_that_do_not_fit_are_refused() -> None:
    limits = Limits()
    opening, *pieces = ([bytes(f) for f in parts] for parts in split_message(encode(large(3))))
    joiner = Reassembler(limits)
    mark = pieces[0][0]
    for wrong in ([mark], [mark, b"x"], [*pieces[0], b""]):
        assert joiner.add(opening) is None
        assert joiner.busy
        with pytest.raises(FrameError, match="a piece of a message"):
            joiner.add(wrong)
        with pytest.raises(FrameError, match="without what goes before it"):
            joiner.add(pieces[0])
        assert not joiner.busy
    assert joiner.add(opening) is None
    assert joiner.add([b"whole"]) == [b"whole"]  # the sender of the opening left
    assert not joiner.busy
    assert max(len(piece) for _, piece in pieces) == CHUNK_BYTES


@pytest.mark.parametrize("sizes", [b"", b"x" * 7, b"\xff" * 80, bytes(8 * 5000), b"\xff\0\0\0" * 2])
def test_an_opening_of_nonsense_is_refused(sizes: bytes) -> None:
    opening = [bytes(frame) for frame in next(iter(split_message(encode(large(3)))))]
    with pytest.raises(FrameError, match=r"a large message opens|is too large"):
        Reassembler(Limits()).add([opening[0][:2] + sizes])
    with pytest.raises(FrameError, match="a large message opens"):
        Reassembler(Limits()).add([*opening, b"more"])


def test_half_a_large_message_is_forgotten() -> None:
    listener = ZmqNetwork(timing=QUICK).listen(ANYWHERE)
    with dealer(listener.endpoint) as stranger:
        opening, *pieces = split_message(encode(large(3)))
        for parts in (opening, *pieces[:3]):
            stranger.send_multipart(parts)
        assert listener.receive(0.3) is None
        assert listener._joiners  # noqa: SLF001  what is held for it
        until(lambda: listener.receive(0.1) is None and not listener._joiners)  # noqa: SLF001
    listener.close()


BACKED_UP = """
import sys, time
from jaxfleet.transport.messages import Kind, Message
from jaxfleet.transport.zmq.network import ZmqNetwork
from jaxfleet.transport.zmq.sockets import Timing

network = ZmqNetwork(timing=Timing(probe_s=0.1))
listener = network.listen(sys.argv[1])
lines = network.connect([listener.endpoint])
for _ in range(3000):
    lines.send(0, Message(Kind.PULL, "trainer 0"))
time.sleep(0.3)
lines.close()
time.sleep(0.5)
count = 0
while listener.receive(0.3) is not None:
    count += 1
listener.close()
print(count)
"""


@pytest.mark.grid
@pytest.mark.processes
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])  # with a Unix socket, and by TCP
def test_a_peer_may_end_while_the_listener_is_backed_up(host: str) -> None:
    # In a process of its own, which libzmq's heartbeats would abort.
    words = [sys.executable, "-c", BACKED_UP, f"{host}:0"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 200  # what was queued is read


VANISHED = """
import subprocess, time
from jaxfleet.transport.messages import Kind, Message
from jaxfleet.transport.zmq.network import ZmqNetwork
from jaxfleet.transport.zmq.sockets import Timing

def link(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True)

link("up")
network = ZmqNetwork(timing=Timing(probe_s=1.0, half_open_s=1.0))
listener = network.listen("127.0.0.2:0")
lines = network.connect([listener.endpoint])
lines.send(0, Message(Kind.PULL, "trainer 0"))
peer, message = listener.receive(10.0)
listener.send(peer, message)
assert lines.receive(10.0) is not None
for is_busy in (False, True):
    link("down")
    if is_busy:
        listener.send(peer, message)
    since = time.monotonic()
    while not listener.ended():
        assert time.monotonic() - since < 15.0
        time.sleep(0.05)
    link("up")
    while not lines.renewed():
        assert time.monotonic() - since < 30.0
        lines.receive(0.1)
    lines.send(0, Message(Kind.PULL, "trainer 0"))
    while (found := listener.receive(0.1)) is None:
        assert time.monotonic() - since < 30.0
    peer = found[0]
lines.close()
listener.close()
"""


def has_own_network() -> bool:
    """Whether a process may have a network of its own, and configure it."""
    words = ["unshare", "-n", "ip", "link", "set", "lo", "up"]
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.grid
@pytest.mark.processes
def test_a_network_that_vanishes_is_noticed_on_idle_and_busy_connections() -> None:
    if not has_own_network():
        pytest.skip("only root may have a network of its own")
    words = ["unshare", "-n", sys.executable, "-c", VANISHED]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr


SQUATTER = """
import os, socket, sys
os.setuid(65534)
taken = socket.socket(socket.AF_UNIX)
taken.bind(sys.argv[1].encode())
taken.listen()
print("taken", flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_who_takes_the_unix_socket_s_name_stops_nobody() -> None:
    endpoint = free_endpoint()
    name = ipc_name("127.0.0.1", int(endpoint.rpartition(":")[2]))
    words = [sys.executable, "-I", "-S", "-c", SQUATTER.replace("sys.argv[1]", repr(f"\0{name}"))]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe) as squatter:
        assert squatter.stdout is not None
        assert squatter.stdout.readline() == b"taken\n"
        network = ZmqNetwork(secret=SECRET)
        with echoing(network, endpoint), lines_to(network, endpoint) as lines:
            assert ask(lines) is not None
        squatter.terminate()
