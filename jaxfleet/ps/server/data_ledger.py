"""DataLedger: which samples a relaxed job has trained on, and which trainers have leased.

Trainers that do not wait for each other take different numbers of steps, so no step number tells
which samples were read. Server 0 hands out leases of positions instead, as in the dynamic data
sharding of DLRover ("DLRover: Cloud Resource Optimization for Deep Recommendation Models", 2023).
There a shard is done when its worker reports it; here the push that contains the effect of a lease
acknowledges it, so that a server's checkpoint has both or neither.

A position counts the samples of all epochs in the loader's order; sample k of epoch e has position
`e * rows + k`. Sets of positions are intervals, and closed epochs only counts, so the memory
depends on the number of leases, not on that of samples.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from jaxfleet.ps.server.position_set import PositionSet
from jaxfleet.transport.messages import Plain

_SHOWN_EPOCHS = 16  # closed epochs that are counted one by one
NOTHING = PositionSet()


@dataclass(frozen=True)
class DataOrder:
    """The order of a loader's samples: all that determines what a position means."""

    version: int
    samples: int
    batch_size: int
    seed: int
    shuffle: int
    drop_last: int

    @property
    def rows(self) -> int:
        """The positions of an epoch: its samples, less an incomplete last batch if dropped."""
        return self.samples - (self.samples % self.batch_size if self.drop_last else 0)

    @property
    def steps(self) -> int:
        """The number of batches of the whole job in an epoch."""
        return -(-self.rows // self.batch_size)

    @classmethod
    def read(cls, plain: Mapping[str, object]) -> Self:
        """Returns the order in plain data, which may have other fields.

        Raises:
            ValueError: a field is missing or not a number.
        """
        found: dict[str, int] = {}
        for each in fields(cls):
            value = plain.get(each.name)
            if type(value) is not int or value < 0:
                raise ValueError(f"'{each.name}' of the loader's order is {value!r}")
            found[each.name] = value
        order = cls(**found)
        if order.batch_size < 1 or order.rows < 1:
            raise ValueError(f"{order.samples} samples in batches of {order.batch_size}")
        return order

    def difference(self, other: "DataOrder") -> str | None:
        """Describes the first field in which another order differs, if any."""
        here, there = asdict(self), asdict(other)
        name = next((name for name in here if here[name] != there[name]), None)
        return None if name is None else f"{name}={there[name]} instead of {here[name]}"


@dataclass(frozen=True)
class SampleCounts:
    """How many samples of some epochs were trained on once, twice or more often, and never."""

    once: int = 0
    twice: int = 0
    never: int = 0

    def __add__(self, other: "SampleCounts") -> "SampleCounts":
        return SampleCounts(
            self.once + other.once, self.twice + other.twice, self.never + other.never
        )


@dataclass
class DataLedger:
    """The leases of a job, and the positions whose effect is applied.

    Attributes:
        order: of the loader.
        epoch: the first epoch that is not closed; all later sets are of this one or later.
        next: the first position that was never leased.
        returned: positions before it that are free again.
        done: positions whose effect is applied.
        again: those of them that were applied more than once.
        left_out: rests of epochs that are smaller than a batch, with `drop_last`.
        leased: positions by trainer.
        pushed: positions by trainer and step, whose effect arrived and is not applied.
        counts: of the last closed epochs, the newest last.
        earlier: of all closed epochs before these.
    """

    order: DataOrder
    epoch: int = 0
    next: int = 0
    returned: PositionSet = NOTHING
    done: PositionSet = NOTHING
    again: PositionSet = NOTHING
    left_out: PositionSet = NOTHING
    leased: dict[int, PositionSet] = field(default_factory=dict)
    pushed: dict[int, dict[int, PositionSet]] = field(default_factory=dict)
    counts: deque[SampleCounts] = field(default_factory=deque)
    earlier: SampleCounts = SampleCounts()

    @classmethod
    def after(cls, order: DataOrder, step: int) -> Self:
        """Returns the ledger of a job whose first `step` batches, of the whole job, are done."""
        epoch, into = divmod(step, order.steps)
        start = epoch * order.rows
        position = start + into * order.batch_size
        past = SampleCounts(epoch * order.rows, 0, epoch * (order.samples - order.rows))
        done = PositionSet.of([(start, position)])
        return cls(order, epoch, position, done=done, earlier=past)

    # Leases.

    def lease(self, trainer: int, rows: int, epochs: int | None) -> PositionSet:
        """Leases free positions of one epoch, the earliest first; none if there are no more.

        A lease has `rows` positions. At the end of an epoch it may have fewer; with `drop_last`
        those are left out, once no other lease of the epoch may still return.
        """
        epoch = self.epoch
        while epochs is None or epoch < epochs:
            within = self._span(epoch)
            free = self._free(within)
            if free and (len(free) >= rows or not self.order.drop_last):
                found = free.first(rows)
                self._take(found)
                self.leased[trainer] = self.leased.get(trainer, NOTHING) | found
                return found
            if free and not self._outstanding() & within:
                self._take(free)
                self.left_out |= free
                self._close()
            epoch += 1
        return NOTHING

    def left(self, epochs: int | None) -> int | None:
        """Returns the number of free positions; None if the epochs have no end."""
        if epochs is None:
            return None
        return len(self.returned) + max(epochs * self.order.rows - self.next, 0)

    def _span(self, epoch: int) -> PositionSet:
        rows = self.order.rows
        return PositionSet(((epoch * rows, (epoch + 1) * rows),))

    def _free(self, within: PositionSet) -> PositionSet:
        start, stop = within.spans[0]
        return (self.returned & within) | PositionSet.of([(max(self.next, start), stop)])

    def _take(self, positions: PositionSet) -> None:
        """Removes positions from the free ones; those before them stay free."""
        if positions:
            stop = positions.spans[-1][1]
            self.returned |= PositionSet.of([(self.next, stop)])
            self.next = max(self.next, stop)
        self.returned -= positions

    def _outstanding(self) -> PositionSet:
        steps = (of_step for by_step in self.pushed.values() for of_step in by_step.values())
        return PositionSet.of(
            span for positions in (*self.leased.values(), *steps) for span in positions.spans
        )

    def adopt(self, trainer: int, positions: PositionSet, *, alone: bool = False) -> None:
        """Records leases that a trainer has from an earlier life of this server.

        If `alone`, without those that another trainer has.
        """
        if held := positions - self.done - (self._outstanding() if alone else NOTHING):
            self._take(held)
            self.leased[trainer] = self.leased.get(trainer, NOTHING) | held

    def release(self, trainer: int) -> PositionSet:
        """Frees the leases of a trainer; returns those that are to be leased again."""
        steps = self.pushed.pop(trainer, {}).values()
        held = PositionSet.of(
            span
            for positions in (self.leased.pop(trainer, NOTHING), *steps)
            for span in positions.spans
        )
        rows, others = self.order.rows, self._outstanding()
        closed = PositionSet.of([(0, self.epoch * rows)])
        found = held - self.done - closed - others - self.left_out
        self.returned |= found
        return found

    # Acknowledgements.

    def push(self, trainer: int, step: int, positions: PositionSet) -> None:
        """Records the positions whose effect the push of a step contains."""
        self._take(positions)
        self.pushed.setdefault(trainer, {})[step] = positions
        self.leased[trainer] = self.leased.get(trainer, NOTHING) - positions

    def settle(self, trainer: int, step: int) -> None:
        """Acknowledges the positions of the pushes that are applied up to a step."""
        by_step = self.pushed.get(trainer, {})
        for known in sorted(known for known in by_step if known <= step):
            self._apply(by_step.pop(known))
        self._close()

    def _apply(self, positions: PositionSet) -> None:
        closed = PositionSet.of([(0, self.epoch * self.order.rows)])
        self._count_again(positions & closed)
        fresh = positions - closed
        self.again |= fresh & self.done
        self.done |= fresh
        self.left_out -= fresh

    def _count_again(self, positions: PositionSet) -> None:
        """Counts positions of closed epochs, which were applied before."""
        first = self.epoch - len(self.counts)
        for at in range(len(self.counts)):
            twice = min(len(positions & self._span(first + at)), self.counts[at].once)
            self.counts[at] += SampleCounts(-twice, twice)
        before = PositionSet.of([(0, first * self.order.rows)])
        twice = min(len(positions & before), self.earlier.once)
        self.earlier += SampleCounts(-twice, twice)

    def _close(self) -> None:
        """Closes epochs whose positions are all done or left out, in order."""
        while len((self.done | self.left_out) & (span := self._span(self.epoch))) == len(span):
            self.counts.append(self._counted(self.epoch))
            if len(self.counts) > _SHOWN_EPOCHS:
                self.earlier += self.counts.popleft()
            self.epoch += 1
            self.done, self.again = self.done - span, self.again - span
            self.left_out -= span

    def has_ended(self, epochs: int | None) -> bool:
        """Whether all samples of all epochs are accounted for."""
        return epochs is not None and self.epoch >= epochs

    # Counts and the position.

    def _counted(self, epoch: int) -> SampleCounts:
        span = self._span(epoch)
        twice, done = len(self.again & span), len(self.done & span)
        return SampleCounts(done - twice, twice, self.order.samples - done)

    def stats(self) -> dict[str, Plain]:
        """Returns counts of samples by epoch, and the number that is leased."""
        open_epochs = -(-max(self.next - self.epoch * self.order.rows, 0) // self.order.rows)
        shown = range(self.epoch, self.epoch + min(open_epochs, _SHOWN_EPOCHS))
        of_epochs = [*self.counts, *(self._counted(epoch) for epoch in shown)]
        first = self.epoch - len(self.counts)
        listed: list[Plain] = [
            {"epoch": first + at, **asdict(counts)} for at, counts in enumerate(of_epochs)
        ]
        earlier: Plain = {"epochs": first, **asdict(self.earlier)}
        return {"epochs": listed, "earlier": earlier, "leased": len(self._outstanding())}

    def holders(self) -> list[int]:
        """Returns the trainers that have leases, or pushes that are not applied."""
        pushing = {trainer for trainer, by_step in self.pushed.items() if by_step}
        return sorted(pushing | {trainer for trainer, held in self.leased.items() if held})

    def position(self) -> dict[str, Plain]:
        """Returns what is done as plain data, for a checkpoint; leases are not part of it."""
        ledger: dict[str, Plain] = {
            "epoch": self.epoch,
            "done": _plain(self.done),
            "again": _plain(self.again),
            "left_out": _plain(self.left_out),
            "counts": [[c.once, c.twice, c.never] for c in (self.earlier, *self.counts)],
        }
        return {**asdict(self.order), "ledger": ledger}

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Self:
        """Returns the ledger of a position, which may be that of a loader in steps.

        Raises:
            ValueError: it is neither.
        """
        order, ledger, step = DataOrder.read(plain), plain.get("ledger"), plain.get("step")
        if ledger is None and type(step) is int and step >= 0:
            return cls.after(order, step)
        try:
            assert isinstance(ledger, dict)
            sets = (ledger["done"], ledger["again"], ledger["left_out"])
            done, again, left_out = (PositionSet.of((int(a), int(b)) for a, b in x) for x in sets)
            earlier, *counts = (SampleCounts(*map(int, each)) for each in ledger["counts"])
            epoch = int(ledger["epoch"])
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the position has no valid ledger: {error!r}") from error
        start, known = epoch * order.rows, done | left_out
        following = known.spans[-1][1] if known.spans else start
        free = PositionSet.of([(start, following)]) - known
        return cls(order, epoch, following, free, done, again, left_out,
                   counts=deque(counts), earlier=earlier)  # fmt: skip


def _plain(positions: PositionSet) -> list[Plain]:
    return [list(span) for span in positions.spans]
