"""The samples that a trainer has leased, until their effect is applied.

A lease passes from `held`, while its batch is read and waits, to `taken` by the script, `trained`
by a step, and `pushed` with the next push to server 0, which names it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxfleet.transport.messages import Plain

Lease = tuple[tuple[int, int], ...]  # positions, as intervals [start, stop)


@dataclass
class LeaseLog:
    """A trainer's leases.

    Attributes:
        until_saved: server 0 may be restarted: a lease is kept until its checkpoint has it.
        order: of the loader, and what is done when the job begins; empty before there is one.
        held: leases whose batches the script has not taken.
        taken: those that it has, since its last step.
        trained: those of steps whose effect was not pushed.
        answered: returns leases that have arrived, and that the loader has not looked at.
        generation: how often all leases became void, since a checkpoint was restored.
    """

    until_saved: bool
    order: Mapping[str, Plain] = field(default_factory=dict)
    held: list[Lease] = field(default_factory=list)
    taken: list[Lease] = field(default_factory=list)
    trained: list[Lease] = field(default_factory=list)
    answered: Callable[[], Sequence[Lease]] = tuple
    generation: int = 0
    _pushed: dict[int, list[Lease]] = field(default_factory=dict)  # by step

    def take(self, lease: Lease) -> None:
        """Records that the script has taken the batch of a lease."""
        self.held.remove(lease)
        self.taken.append(lease)

    def train(self) -> None:
        """Records that a step trains on all that the script has taken since the last one."""
        self.trained += self.taken
        self.taken.clear()

    def push(self, step: int) -> list[Plain]:
        """Returns what the pushes of a step to server 0 acknowledge."""
        if not self.until_saved:
            self.saved(step - 1)
        if self.trained:
            self._pushed.setdefault(step, []).extend(self.trained)
            self.trained.clear()
        return _plain(self._pushed.get(step, ()))

    def saved(self, step: int) -> None:
        """Forgets what a checkpoint of server 0 after a step contains."""
        for known in [known for known in self._pushed if known <= step]:
            del self._pushed[known]

    def declared(self) -> dict[str, Plain]:
        """Returns the leases for a restarted server: intervals, each with the step of its push."""
        holds: list[Plain] = []
        unsent = (*self.answered(), *self.held, *self.taken, *self.trained)
        for step, leases in ((-1, unsent), *self._pushed.items()):
            holds += [[start, stop, step] for lease in leases for start, stop in lease]
        return {**self.order, "holds": holds}

    def clear(self) -> None:
        """Forgets all leases: the servers have returned to a checkpoint."""
        self.generation += 1
        for leases in (self.held, self.taken, self.trained, self._pushed):
            leases.clear()


def _plain(leases: Iterable[Lease]) -> list[Plain]:
    return [list(span) for lease in leases for span in lease]
