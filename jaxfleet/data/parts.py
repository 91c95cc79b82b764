"""Part: which rows of a batch a process reads."""

from typing import NamedTuple

from jaxfleet.cluster import rank, size
from jaxfleet.cluster.ranks import cluster_of_process, is_server
from jaxfleet.errors import FeedError, StrategyError


class Part(NamedTuple):
    """One process among those that share a batch.

    Attributes:
        number: of the process, from 0.
        of: the number of processes.
    """

    number: int
    of: int

    def cut(self, rows: range) -> range:
        """Returns this process's rows, which are contiguous, as a trainer takes them.

        Raises:
            FeedError: the processes cannot share them equally.
        """
        own, rest = divmod(len(rows), self.of)
        if rest:
            what = f"a batch of {len(rows)} samples cannot be shared by {self.of} processes"
            hint = "make batch_size a multiple of their number, and drop_last=True"
            raise FeedError(what, hint=hint)
        start = rows.start + own * self.number
        return range(start, start + own)


def check_part(part: tuple[int, int]) -> Part:
    """Returns the part of a process given by its number and their count.

    Raises:
        StrategyError: there is no such process.
    """
    number, of = part
    if not 0 <= number < of:
        what = f"part is {tuple(part)}"
        raise StrategyError(what, hint="write (number, of): the process, from 0, and their number")
    return Part(number, of)


def own_part() -> Part:
    """Returns this process's part; a server, which trains nothing, makes its example as trainer 0.

    Raises:
        StrategyError: the environment contradicts itself.
    """
    cluster = cluster_of_process() if is_server() else None
    return Part(rank(), size()) if cluster is None else Part(0, cluster.trainers)
