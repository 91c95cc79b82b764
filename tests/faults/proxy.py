"""A TCP proxy that harms the data it forwards."""

import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

RESET = struct.pack("ii", 1, 0)  # SO_LINGER that closes by a reset


class Proxy:
    """Forwards connections to a server, and does harm on request.

    Args:
        target: the server's endpoint.

    Attributes:
        endpoint: where clients connect.
        harms: how often it did harm.
        bytes_per_s: how much it forwards of each connection and way; None if unlimited.
    """

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.harms = 0
        self._harm: tuple[str, str] | None = None
        self._least = 0
        self.bytes_per_s: float | None = None
        self._cut, self._pass = threading.Event(), threading.Event()
        self._pass.set()
        self._losing: tuple[float, random.Random] | None = None
        self._dead: set[socket.socket] = set()
        self._dead_to_come = 0  # connections to come on which all data is lost
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def next(self, way: str, harm: str, least: int = 64) -> None:
        """Harms the next bytes that pass.

        Args:
            way: `answer` or `request`.
            harm: `reset`, `swallow` all, `truncate` to one half, or `flip` one bit.
            least: the fewest bytes to harm.
        """
        self._least, self._harm = least, (way, harm)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Forwards nothing for a while, and closes nothing."""
        self._cut.set()
        try:
            yield
        finally:
            self._cut.clear()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Forwards nothing for a while, and then all of it, as a network that is cut does."""
        self._pass.clear()
        try:
            yield
        finally:
            self._pass.set()

    @contextmanager
    def losing(self, share: float, seed: int) -> Iterator[None]:
        """Swallows a share of what it reads, and closes nothing."""
        self._losing = share, random.Random(seed)
        try:
            yield
        finally:
            self._losing = None

    def lose_all(self, *, later: int = 0) -> None:
        """Makes connections half-open: swallows all of their data from now on.

        Args:
            later: how many of the next connections to harm besides the present ones.
        """
        self._dead_to_come = later
        self._dead.update(self._open)

    def close(self) -> None:
        self._pass.set()
        for one in [self._listener, *self._open]:
            with suppress(OSError):
                one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._open += [client, server]
                if self._dead_to_come:
                    self._dead_to_come -= 1
                    self._dead.update((client, server))
                for ends in ((client, server, "request"), (server, client, "answer")):
                    threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._pass.wait()
                if self._cut.is_set() or source in self._dead:
                    continue
                if self._losing is not None and self._losing[1].random() < self._losing[0]:
                    self.harms += 1
                    continue
                harm = None
                if self._harm is not None and self._harm[0] == way and len(data) >= self._least:
                    harm, self._harm = self._harm[1], None
                    self.harms += 1
                if harm == "reset":
                    for end in (source, sink):
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    break
                if self.bytes_per_s is not None:
                    time.sleep(len(data) / self.bytes_per_s)
                sink.sendall(_harmed(data, harm))
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
        for end in (source, sink):
            end.close()


def _harmed(data: bytes, harm: str | None) -> bytes:
    if harm == "swallow":
        return b""
    if harm == "truncate":
        return data[: len(data) // 2]
    if harm == "flip":
        place = len(data) * 3 // 4
        return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]
    return data
