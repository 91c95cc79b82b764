"""Two hosts of this machine, as network namespaces on a bridge, and a small disk.

Root and iproute2 are needed. All traffic of the hosts stays between them: no route leads elsewhere.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

COUNT = 2
_ENDS_S = 20.0  # until a killed process is gone
_DISABLED, _FORWARDING = "0", "3"  # states of a port of a bridge
_CHUNK = b"\0" * 4096


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


class Hosts:
    """The hosts; a context, at whose end no process runs on them."""

    def __init__(self) -> None:
        self._names = [f"faults{os.getpid()}h{host}" for host in range(COUNT)]
        self._bridge = f"faults{os.getpid()}b"

    def __enter__(self) -> Self:
        try:
            _run("ip", "netns", "add", self._bridge)
            _run("ip", "-n", self._bridge, "link", "add", "br0", "type", "bridge")
            _run("ip", "-n", self._bridge, "link", "set", "br0", "up")
            for host, name in enumerate(self._names):
                _run("ip", "netns", "add", name)
                _run("ip", "-n", self._bridge, "link", "add", f"port{host}", "type", "veth",
                     "peer", "name", "eth0", "netns", name)  # fmt: skip
                _run("ip", "-n", self._bridge, "link", "set", f"port{host}", "master", "br0", "up")
                _run("ip", "-n", name, "addr", "add", f"{address(host)}/24", "dev", "eth0")
                _run("ip", "-n", name, "link", "set", "eth0", "up")
                _run("ip", "-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()
        for name in (*self._names, self._bridge):
            with suppress(RuntimeError):  # it may not have been made
                _run("ip", "netns", "del", name)

    def on(self, host: int) -> list[str]:
        """Returns the words that go before a command that is to run on a host."""
        return ["ip", "netns", "exec", self._names[host]]

    def pids(self) -> list[int]:
        """Returns the processes on the hosts."""
        found = []
        for name in self._names:
            listed = _run("ip", "netns", "pids", name)
            found += [int(word) for word in listed.split()]
        return found

    def kill_all(self) -> None:
        """Kills every process on the hosts with SIGKILL, and waits until there is none."""
        deadline = time.monotonic() + _ENDS_S
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {pids} have not ended within {_ENDS_S:g} s")
            time.sleep(0.05)

    @contextmanager
    def line_cut(self, host: int) -> Iterator[None]:
        """Context in which the bridge drops all packets from and to a host, without a word."""
        port = ["bridge", "-n", self._bridge, "link", "set", "dev", f"port{host}", "state"]
        _run(*port, _DISABLED)
        try:
            yield
        finally:
            _run(*port, _FORWARDING)


class SmallDisk:
    """A file system in memory; a context, at whose end it is gone.

    Args:
        folder: an empty folder, where it is mounted.
        size: as tmpfs spells it.
    """

    def __init__(self, folder: Path, size: str = "64m") -> None:
        self._folder, self._size = folder, size

    def __enter__(self) -> Self:
        _run("mount", "-t", "tmpfs", "-o", f"size={self._size}", "tmpfs", str(self._folder))
        return self

    def __exit__(self, *_: object) -> None:
        _run("umount", "--lazy", str(self._folder))

    @contextmanager
    def full(self) -> Iterator[None]:
        """Context in which a file takes all space, what others free included."""
        path, over = self._folder / "filler", threading.Event()
        thread = threading.Thread(target=_fill, args=(path, over))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            path.unlink()


def _fill(path: Path, over: threading.Event) -> None:
    with path.open("wb", buffering=0) as file:
        while not over.is_set():
            with suppress(OSError):
                while file.write(_CHUNK):
                    pass
            over.wait(0.002)


def _run(*words: str) -> str:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"'{' '.join(words)}' failed: {done.stderr.strip()}; root is needed")
    return done.stdout
