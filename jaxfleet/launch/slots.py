"""Slots: the ranks that one machine may have, without those that were lost."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Slots:
    """The slots of a machine, one for each rank of a first start, with that rank's GPUs.

    A start has one rank for each slot that is left, numbered in their order. There are never fewer
    ranks than `least`: slots that were lost longest ago are used again then. So a job whose least
    number is its most starts again with all.

    >>> slots = Slots(most=4, least=2).without([1])
    >>> slots.left, slots.without([2]).left, slots.without([2, 0]).left
    ((0, 2, 3), (0, 2), (1, 2))
    """

    most: int
    least: int
    lost: tuple[int, ...] = ()  # by the time of their loss

    @property
    def left(self) -> tuple[int, ...]:
        """The slot of each rank of a start."""
        return tuple(slot for slot in range(self.most) if slot not in self.lost)

    def without(self, ranks: Iterable[int]) -> "Slots":
        """Returns the slots after the loss of ranks of a start, by their numbers on the machine."""
        left = self.left
        lost = (*self.lost, *(left[rank] for rank in ranks))
        return replace(self, lost=lost[max(0, len(lost) - (self.most - self.least)) :])


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How a rank of a failed start ended.

    Attributes:
        was_killed: by SIGKILL, which the launch had not sent.
        is_first: whether it was the first to fail on its machine.
        lacks_peer: whether it reported the loss of another rank.
    """

    was_killed: bool = False
    is_first: bool = False
    lacks_peer: bool = False


def lost_ranks(ends: Iterable[RankEnd]) -> tuple[int, ...]:
    """Returns the ranks that were lost, by their position among `ends`.

    Those are the ones that were killed, as by the kernel for lack of memory, and the first to fail
    for a reason of its own. The others failed for want of a lost one, or were stopped.

    >>> lost_ranks([RankEnd(), RankEnd(is_first=True), RankEnd(was_killed=True)])
    (1, 2)
    >>> lost_ranks([RankEnd(is_first=True, lacks_peer=True), RankEnd(lacks_peer=True)])
    ()
    """
    return tuple(
        at for at, end in enumerate(ends) if end.was_killed or (end.is_first and not end.lacks_peer)
    )
