"""Placement of processes on machines, GPUs and ports; ports are held until they are used."""

import errno
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxfleet.env import read_visible_gpus, wants_gpus
from jaxfleet.errors import AssertedError, StrategyError
from jaxfleet.launch.job_spec import LOOPBACK, CollectiveJob, Job

# On Linux a port may be bound a second time while no socket listens on it, if both sockets request
# that, as ZeroMQ and gRPC do. So it stays held for the whole job, also while its server restarts.
# Elsewhere it must be released for the process.
_HELD_ALONG = sys.platform == "linux"


class Ports:
    """Holds ports of this machine.

    Args:
        count: the number of ports.
        first: the first port, the others follow; 0 picks free ones.
        host: this machine's name in the job. If it is not an address of a local network card, for
            example because another machine forwards to this one, its ports are not held.

    Raises:
        StrategyError: a requested port is taken.
    """

    def __init__(self, count: int, *, first: int = 0, host: str = LOOPBACK) -> None:
        self._sockets: list[socket.socket] = []
        address = _address(host)
        try:
            for at in range(count):
                self._sockets.append(_bound(address, first + at if first else 0))
        except BaseException:
            self.close()
            raise
        ports = [first + at if first else self._port(at) for at in range(count)]
        self.endpoints: Sequence[str] = tuple(f"{host}:{port}" for port in ports)

    def _port(self, at: int) -> int:
        port: int = self._sockets[at].getsockname()[1]
        return port

    def give(self, index: int) -> None:
        """Releases a port, if needed, for the process that is about to listen."""
        if not _HELD_ALONG:
            self._sockets[index].close()

    def free(self, index: int) -> None:
        """Releases a port for good."""
        self._sockets[index].close()

    def close(self) -> None:
        for each in self._sockets:
            each.close()


def _address(host: str) -> tuple[socket.AddressFamily, str] | None:
    """Returns the address to bind for a host, None if its name does not resolve to this machine."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
    except OSError:
        return None
    family, _, _, _, (address, *_) = found[0]
    return family, str(address)


def _bound(address: tuple[socket.AddressFamily, str] | None, port: int) -> socket.socket:
    """Returns a socket that has the port and does not listen, so connections to it are refused."""
    holder = socket.socket(socket.AF_INET if address is None else address[0])
    if address is None:
        return holder
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address[1], port))
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return holder
        holder.close()
        what = f"port {port} of {address[1]} cannot be had: {error.strerror}"
        raise StrategyError(
            what, hint="ask for another one, or for none: free ones are found"
        ) from None
    return holder


FIRST_PORT = 6170  # for several machines, which cannot exchange free ports


class Places:
    """Holds the ports of this machine's servers."""

    def __init__(self, job: Job) -> None:
        nodes = job.nodes
        shares = [nodes.share(job.servers, node) for node in range(len(nodes.names))]
        self.servers = shares[nodes.index]
        self.trainers = nodes.share(job.trainers, nodes.index)
        first = job.port or (FIRST_PORT if nodes.several else 0)
        # Given endpoints need not be addresses of local network cards.
        held = 0 if job.server_endpoints else len(self.servers)
        ports = Ports(held, first=first, host=nodes.own)
        self._held = [(ports, at) for at in range(held)]  # of this machine's servers
        if job.server_endpoints:
            self.endpoints = job.server_endpoints
        elif nodes.several:
            self.endpoints = nodes.endpoints([len(share) for share in shares], first)
        else:
            self.endpoints = tuple(ports.endpoints)

    def add(self, ports: Ports) -> range:
        """Places more servers at ports of this machine, the only one; returns their numbers."""
        before = len(self.endpoints)
        self._held += [(ports, at) for at in range(len(ports.endpoints))]
        self.endpoints = (*self.endpoints, *ports.endpoints)
        self.servers = range(len(self.endpoints))
        return range(before, len(self.endpoints))

    def cut(self, count: int) -> None:
        """Keeps the places of the first servers, and frees the ports of the others."""
        for ports, at in self._held[count:]:
            ports.free(at)
        self._held = self._held[:count]
        self.endpoints = self.endpoints[:count]
        self.servers = range(count)

    def give(self, server: int) -> None:
        if self._held:
            ports, at = self._held[self.servers.index(server)]
            ports.give(at)

    def close(self) -> None:
        for ports, _ in self._held:
            ports.close()


_PORTS = 65536


class RankPlaces:
    """Holds the ports of this machine's ranks.

    Every start uses new ports: a rank left over from the last one, on any machine, reaches no
    process of this one.
    """

    def __init__(self, job: CollectiveJob) -> None:
        self._job = job
        self.ranks = range(0)
        self.endpoints: tuple[str, ...] = ()
        self._ports: Ports | None = None

    @property
    def meeting_endpoint(self) -> str:
        """Where the launches of several machines agree on a start."""
        job = self._job
        return f"{job.nodes.names[0]}:{job.port or FIRST_PORT}"

    def move(self, start: int, ranks: Mapping[str, int] | None = None) -> None:
        """Places the ranks of a start; `ranks` is their number on each machine that it has."""
        job, nodes = self._job, self._job.nodes
        counts = [job.nproc if ranks is None else ranks.get(name, 0) for name in nodes.names]
        own = counts[nodes.index]
        before = sum(counts[: nodes.index])
        self.ranks = range(before, before + own)
        first = job.port or (FIRST_PORT if nodes.several else 0)
        if first:
            first += job.meets
            starts = (_PORTS - first) // job.nproc  # each with its own ports
            first += start % starts * job.nproc
        ports = self._taken(own, first, start)
        self.close()  # only now, so that no new port is an old one
        self._ports = ports
        self.endpoints = tuple(ports.endpoints)
        if nodes.several:
            self.endpoints = nodes.endpoints(counts, first)

    def _taken(self, count: int, first: int, start: int) -> Ports:
        """Returns ports from a number on; on one machine, a restart may take others."""
        nodes = self._job.nodes
        try:
            return Ports(count, first=first, host=nodes.own)
        except StrategyError:
            if not start or nodes.several:
                raise
            return Ports(count, host=nodes.own)

    def give(self, rank: int) -> None:
        assert self._ports is not None
        self._ports.give(self.ranks.index(rank))

    def close(self) -> None:
        if self._ports is not None:
            self._ports.close()


_DEVICES = Path("/dev")


def seen_gpus() -> tuple[int, ...]:
    """Returns the GPUs visible to jax, by its numbers for them: from 0 on."""
    if not wants_gpus():
        return ()
    named = read_visible_gpus()
    if named is None:
        devices = [path.name for path in _DEVICES.glob("nvidia*")]
        named = tuple(name for name in devices if re.fullmatch(r"nvidia\d+", name))
    return tuple(range(len(named)))


def selected_gpus(words: str) -> tuple[int, ...]:
    """Converts a user's GPU numbers, those of `CUDA_VISIBLE_DEVICES` (`4,5`), to jax's."""
    asked = [word.strip() for word in words.split(",") if word.strip()]
    visible = read_visible_gpus() or ()
    for word in asked:
        if visible and word not in visible:
            hint = f"CUDA_VISIBLE_DEVICES has {','.join(visible)}"
            raise AssertedError(f"GPU {word} is not among the visible ones", hint=hint)
        if not visible and not word.isdecimal():
            raise AssertedError(f"GPU {word!r} is not a number", hint="write 0,1")
    return tuple(visible.index(word) if visible else int(word) for word in asked)
