"""Push and pull of an array between two processes, against raw sockets on loopback.

    python benchmarks/transport.py [--quick] [--sockets]

An array goes to another process, and one of the same size comes back, with the same bytes on both
sides of the comparison. Raw is a blocking TCP socket: `sendall` from one buffer, `recv_into` into
another, both preallocated. Ours is `ZmqNetwork`: messages are encoded, sent, received and decoded
into checked arrays with names, dtypes and shapes. Between processes of one machine they are in
shared memory, copied once; with `--sockets` nothing is shared, and they stay where ZeroMQ received
them (up to 16 MB), or in aligned memory. Rounds alternate, and the result is the median of raw over
ours. The bar is 0.7 of the raw goodput from 1 MB on, so raw/ours must not exceed 1/0.7; 64 KB,
where the fixed cost of a message shows, is printed for the curious.
"""

import argparse
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

import numpy as np
from common import Bar, print_bars, print_table

from jaxfleet.errors import ClosedError
from jaxfleet.transport.messages import Connections, Kind, Listener, Message, Tensor
from jaxfleet.transport.zmq.network import ZmqNetwork

SIZES = {"64 KB": 1 << 16, "1 MB": 1 << 20, "8 MB": 8 << 20, "64 MB": 64 << 20}
BARRED = 1 << 20  # smallest size with a bar
LEAST_SHARE = 0.7  # of the raw goodput
BYTES_A_TIMING = 1 << 27
LONGEST_S = 60.0
HEADS = ("", "raw, GB/s", "ours, GB/s", "ours/raw", "raw/itself")

Trip = Callable[[int], None]  # a round trip of this many bytes


def main() -> None:
    parser = argparse.ArgumentParser(description="The benchmark transport.")
    parser.add_argument("--quick", action="store_true", help="few rounds: a look, not a verdict")
    parser.add_argument("--sockets", action="store_true", help="share no memory")
    parser.add_argument("--answer", type=int, help="be the other process; this is its raw port")
    arguments = parser.parse_args()
    if arguments.answer is not None:
        answer(arguments.answer)
        return
    with trips(share_memory=not arguments.sockets) as (raw, ours):
        rows, bars = [], []
        for name, size in SIZES.items():
            row, share = measure(name, size, raw, ours, rounds=5 if arguments.quick else 15)
            rows.append(row)
            if size >= BARRED:
                bars.append(Bar(f"{name}: raw goodput over ours", 1 / share, 1 / LEAST_SHARE))
    print_table(HEADS, rows)
    print_bars("transport", bars)


@contextmanager
def trips(*, share_memory: bool) -> Iterator[tuple[Trip, Trip]]:
    """Starts the other process; yields both kinds of round trip."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(LONGEST_S)
        port = str(server.getsockname()[1])
        other = subprocess.Popen([sys.executable, __file__, "--answer", port])
        try:
            raw, _ = server.accept()
            raw.settimeout(None)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            zmq_port = int.from_bytes(raw.recv(8), "little")
            network = ZmqNetwork(share_memory=share_memory)  # the listener does as its peers do
            with raw, closing(network.connect([f"127.0.0.1:{zmq_port}"])) as lines:
                yield raw_trip(raw), our_trip(lines)
        finally:
            other.kill()
            other.wait(LONGEST_S)


def raw_trip(connection: socket.socket) -> Trip:
    sent = {size: np.ones(size, np.uint8) for size in SIZES.values()}
    received = {size: np.ones(size, np.uint8) for size in SIZES.values()}

    def trip(size: int) -> None:
        connection.sendall(size.to_bytes(8, "little"))
        connection.sendall(sent[size].data)
        fill(connection, received[size])

    return trip


def our_trip(lines: Connections) -> Trip:
    arrays = {size: np.ones(size // 4, np.float32) for size in SIZES.values()}

    def trip(size: int) -> None:
        lines.send(0, Message(Kind.PUSH, "trainer 0", 1, 1, {}, (Tensor("w", arrays[size]),)))
        arrived = lines.receive(LONGEST_S)
        if arrived is None or arrived[1].tensors[0].array.nbytes != size:
            raise RuntimeError("the answer is not what was asked for")

    return trip


def fill(connection: socket.socket, array: np.ndarray) -> bool:
    """Receives an array; False at the end of the stream."""
    memory, at = array.data, 0
    while at < len(memory):
        got = connection.recv_into(memory[at:])
        if not got:
            return False
        at += got
    return True


def answer(port: int) -> None:
    """Answers ours in a thread and raw in this one; the idle one sleeps."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection, closing(ZmqNetwork().listen("127.0.0.1:0")) as listener:
        ours = int(listener.endpoint.rpartition(":")[2])
        connection.sendall(ours.to_bytes(8, "little"))
        threading.Thread(target=answer_ours, args=(listener,), daemon=True).start()
        answer_raw(connection)


def answer_raw(connection: socket.socket) -> None:
    arrays = {size: np.ones(size, np.uint8) for size in SIZES.values()}
    head = np.empty(8, np.uint8)
    while fill(connection, head):
        array = arrays[int.from_bytes(head.tobytes(), "little")]
        fill(connection, array)
        connection.sendall(array.data)


def answer_ours(listener: Listener) -> None:
    arrays = {size: np.ones(size // 4, np.float32) for size in SIZES.values()}
    with suppress(ClosedError):
        while True:
            if (arrived := listener.receive(LONGEST_S)) is not None:
                peer, message = arrived
                # A new array each time, as in a step: the same one is lent without a copy.
                array = arrays[message.tensors[0].array.nbytes].view()
                listener.send(
                    peer, Message(Kind.VALUES, "server 0", 1, 1, {}, (Tensor("w", array),))
                )


def measure(
    name: str, size: int, raw: Trip, ours: Trip, *, rounds: int
) -> tuple[tuple[str, ...], float]:
    """Times raw, ours and raw again in rounds; returns a row of the table, and ours over raw."""
    trips_a_timing = max(2, min(100, BYTES_A_TIMING // (2 * size)))
    sides = (raw, ours, raw)
    for side in sides:
        seconds(side, size, 2)
    took: list[list[float]] = [[], [], []]
    for count in range(rounds):
        for index in [(count + turn) % 3 for turn in range(3)]:
            took[index].append(seconds(sides[index], size, trips_a_timing) / trips_a_timing)
    base, candidate, again = took
    share = statistics.median(b / c for b, c in zip(base, candidate, strict=True))
    itself = [b / a for b, a in zip(base, again, strict=True)]
    goodputs = [f"{2e-9 * size / statistics.median(times):.2f}" for times in (base, candidate)]
    shown = f"{min(itself):.2f} to {max(itself):.2f}"
    return (name, *goodputs, f"{share:.2f}", shown), share


def seconds(trip: Trip, size: int, count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        trip(size)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
