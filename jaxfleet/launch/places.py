"""Which servers and trainers of a job are on this machine, and where all servers listen."""

from types import TracebackType
from typing import Self

from jaxfleet.launch.job import Job
from jaxfleet.launch.ports import Ports

FIRST_PORT = 6170  # of jobs on several machines, where a free one of each would have to be told


class Places:
    """Holds the ports of the servers that are here.

    Attributes:
        endpoints: of all servers of the job, here and elsewhere.
        servers: the numbers of those that are here.
        trainers: likewise.

    Raises:
        StrategyError: somebody else has a port that was asked for.
    """

    def __init__(self, job: Job) -> None:
        nodes = job.nodes
        shares = [nodes.share(job.servers, node) for node in range(len(nodes.names))]
        self.servers = shares[nodes.index]
        self.trainers = nodes.share(job.trainers, nodes.index)
        first = job.port or (FIRST_PORT if nodes.several else 0)
        # Whoever says where servers listen need not say it as this machine knows it.
        held = 0 if job.server_endpoints else len(self.servers)
        self._ports = Ports(held, first=first, host=nodes.own)
        if job.server_endpoints:
            self.endpoints = job.server_endpoints
        elif nodes.several:
            self.endpoints = nodes.endpoints([len(share) for share in shares], first)
        else:
            self.endpoints = tuple(self._ports.endpoints)

    def give(self, server: int) -> None:
        """Makes room for the server that is about to listen."""
        if self._ports.endpoints:
            self._ports.give(self.servers.index(server))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ports.close()
