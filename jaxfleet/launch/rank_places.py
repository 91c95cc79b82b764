"""Where the ranks of a job listen, each time that they are started."""

from types import TracebackType
from typing import Self

from jaxfleet.errors import StrategyError
from jaxfleet.launch.job import CollectiveJob
from jaxfleet.launch.places import FIRST_PORT
from jaxfleet.launch.ports import Ports

_PORTS = 65536


class RankPlaces:
    """Holds the ports of the ranks that are here.

    Every start has ports of its own: whoever is left of the last one, on any machine, reaches
    nobody of this one.

    Attributes:
        ranks: the numbers of those that are here.
        endpoints: of all ranks, here and elsewhere.
    """

    def __init__(self, job: CollectiveJob) -> None:
        self._job = job
        first = job.nodes.index * job.nproc
        self.ranks = range(first, first + job.nproc)
        self.endpoints: tuple[str, ...] = ()
        self._ports: Ports | None = None

    def move(self, start: int) -> None:
        """Takes the ports of a start, which are counted from 0.

        Raises:
            StrategyError: somebody else has a port that was asked for.
        """
        job, nodes = self._job, self._job.nodes
        first = job.port or (FIRST_PORT if nodes.several else 0)
        if first:
            starts = (_PORTS - first) // job.nproc  # of which each has ports of its own
            first += start % starts * job.nproc
        ports = self._taken(first, start)
        self.close()  # after that, so that no new port is an old one
        self._ports = ports
        self.endpoints = tuple(ports.endpoints)
        if nodes.several:
            self.endpoints = nodes.endpoints([job.nproc] * len(nodes.names), first)

    def _taken(self, first: int, start: int) -> Ports:
        """Returns ports from a number on; for another start of one machine, other ones if need be.

        Raises:
            StrategyError: somebody else has one that others count on.
        """
        job, nodes = self._job, self._job.nodes
        try:
            return Ports(job.nproc, first=first, host=nodes.own)
        except StrategyError:
            if not start or nodes.several:
                raise
            return Ports(job.nproc, host=nodes.own)

    def give(self, rank: int) -> None:
        """Makes room for the rank that is about to listen."""
        assert self._ports is not None
        self._ports.give(self.ranks.index(rank))

    def close(self) -> None:
        """Lets all ports go."""
        if self._ports is not None:
            self._ports.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
