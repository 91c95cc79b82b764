"""The ledger of leases: random histories against a model that has a number for each sample."""

import itertools
import random
from collections import Counter

import pytest

from jaxfleet.ps.server.data_ledger import DataLedger, DataOrder, SampleCounts
from jaxfleet.ps.server.position_set import PositionSet

TRAINERS = 3


def order(samples: int, batch_size: int, *, drop_last: bool = True) -> DataOrder:
    return DataOrder(1, samples, batch_size, 0, 1, int(drop_last))


def numbers(positions: PositionSet) -> set[int]:
    return {n for start, stop in positions.spans for n in range(start, stop)}


def drawn_set(draw: random.Random) -> PositionSet:
    starts = [draw.randrange(30) for _ in range(draw.randrange(5))]
    return PositionSet.of([(start, start + draw.randrange(6)) for start in starts])


@pytest.mark.parametrize("seed", range(50))
def test_sets_of_positions_are_sets(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        one, other, count = drawn_set(draw), drawn_set(draw), draw.randrange(8)
        assert len(one) == len(numbers(one))
        assert numbers(one | other) == numbers(one) | numbers(other)
        assert numbers(one & other) == numbers(one) & numbers(other)
        assert numbers(one - other) == numbers(one) - numbers(other)
        assert numbers(one.first(count)) == set(sorted(numbers(one))[:count])
        spans = (one | other).spans
        assert all(a[1] < b[0] for a, b in itertools.pairwise(spans))


class History:
    """A ledger, and a count of the applications of each position that it is told of."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.batch_size = TRAINERS * draw.randint(1, 3)
        samples = draw.randint(self.batch_size, 40)
        self.epochs = draw.randint(1, 3)
        self.ledger = DataLedger(order(samples, self.batch_size, drop_last=draw.random() < 0.5))
        self.rows = self.batch_size // TRAINERS
        self.held: dict[int, list[PositionSet]] = {n: [] for n in range(TRAINERS)}
        self.queued: dict[int, dict[int, PositionSet]] = {n: {} for n in range(TRAINERS)}
        self.steps = dict.fromkeys(range(TRAINERS), 0)
        self.applied: Counter[int] = Counter()
        self.dropped: set[int] = set()

    def lease(self, trainer: int) -> None:
        found = self.ledger.lease(trainer, self.rows, self.epochs)
        if found:
            epochs = {n // self.ledger.order.rows for n in numbers(found)}
            assert len(epochs) == 1
            assert len(found) == self.rows or not self.ledger.order.drop_last
            others = [p for by in self.held.values() for p in by]
            others += [p for by in self.queued.values() for p in by.values()]
            assert not any(found & other for other in others)
            assert not numbers(found) & self.applied.keys()
            self.held[trainer].append(found)

    def push(self, trainer: int) -> None:
        if self.held[trainer]:
            self.steps[trainer] += 1
            lease = self.held[trainer].pop(0)
            self.queued[trainer][self.steps[trainer]] = lease
            for _ in range(self.draw.randint(1, 2)):  # a push may come twice
                self.ledger.push(trainer, self.steps[trainer], lease)

    def apply(self, trainer: int) -> None:
        if self.queued[trainer]:
            step = min(self.queued[trainer])
            self.applied.update(numbers(self.queued[trainer].pop(step)))
            self.ledger.settle(trainer, step)

    def lose(self, trainer: int) -> None:
        """The trainer is lost, with what was not applied."""
        self.held[trainer].clear()
        self.queued[trainer].clear()
        self.ledger.release(trainer)

    def restart(self, trainer: int) -> None:
        """The server is restarted from its checkpoint; trainers declare, and push again."""
        del trainer
        position = self.ledger.position()
        self.ledger = DataLedger.read(position)
        assert self.ledger.position() == position
        for each in self.draw.sample(range(TRAINERS), TRAINERS):
            for lease in (*self.held[each], *self.queued[each].values()):
                self.ledger.adopt(each, lease)
        for each, by_step in self.queued.items():
            for step, lease in by_step.items():
                self.ledger.push(each, step, lease)

    def check(self) -> None:
        spans = sum(map(len, (self.ledger.done.spans, self.ledger.returned.spans)))
        leases = sum(map(len, (*self.held.values(), *self.queued.values())))
        assert spans <= 2 * (leases + 12)  # the memory depends on leases, not on samples


@pytest.mark.parametrize("seed", range(200))
def test_every_sample_is_leased_until_it_is_applied_once(seed: int) -> None:
    history = History(seed)
    draw, ledger = history.draw, history.ledger
    actions = [history.lease, history.push, history.apply, history.lose, history.restart]
    for _ in range(draw.randint(0, 150)):
        action = draw.choices(actions, [5, 4, 4, 0.4, 0.4])[0]
        action(draw.randrange(TRAINERS))
        history.check()
    while not history.ledger.has_ended(history.epochs):
        for trainer in range(TRAINERS):
            history.lease(trainer)
            history.push(trainer)
            history.apply(trainer)
    ledger = history.ledger
    assert set(history.applied.values()) == {1}
    found = SampleCounts()
    for counts in (ledger.earlier, *ledger.counts):
        found += counts
    all_samples = history.epochs * ledger.order.samples
    assert found == SampleCounts(len(history.applied), 0, all_samples - len(history.applied))
    left = history.epochs * ledger.order.rows - len(history.applied)
    assert left < history.epochs * history.rows if ledger.order.drop_last else left == 0


def test_a_lease_of_a_trainer_that_was_taken_for_lost_counts_twice_if_both_apply_it() -> None:
    ledger = DataLedger(order(8, 4))
    slow = ledger.lease(0, 4, 1)
    assert ledger.release(0) == slow
    assert ledger.lease(1, 4, 1) == slow
    ledger.push(1, 1, slow)
    ledger.settle(1, 1)
    ledger.push(0, 1, slow)
    ledger.settle(0, 1)
    assert ledger.stats()["epochs"] == [{"epoch": 0, "once": 0, "twice": 4, "never": 4}]


def test_a_late_push_of_a_free_lease_is_not_leased_again() -> None:
    ledger = DataLedger(order(8, 4))
    slow = ledger.lease(0, 4, 1)
    ledger.release(0)
    ledger.push(0, 1, slow)
    assert not ledger.lease(1, 4, 1) & slow
    ledger.settle(0, 1)
    assert ledger.stats()["epochs"] == [{"epoch": 0, "once": 4, "twice": 0, "never": 4}]


def test_a_late_push_of_a_closed_epoch_counts_twice_there() -> None:
    ledger = DataLedger(order(4, 4))
    slow = ledger.lease(0, 4, None)
    ledger.release(0)
    for step in range(1, 40):
        again = ledger.lease(1, 4, None)
        ledger.push(1, step, again)
        ledger.settle(1, step)
    assert ledger.epoch == 39
    assert len(ledger.counts) == 16  # earlier ones are counted together
    ledger.push(0, 1, slow)
    ledger.settle(0, 1)
    assert ledger.earlier == SampleCounts(22 * 4, 4, 0)


def test_a_rest_of_an_epoch_waits_for_leases_that_may_return() -> None:
    ledger = DataLedger.after(order(8, 4), 0)
    ledger.lease(0, 2, 1)
    ledger.lease(1, 2, 1)
    third = ledger.lease(0, 2, 1)
    ledger.push(0, 1, third)
    ledger.settle(0, 1)
    assert not ledger.lease(2, 3, 1)  # two positions are free, and trainers 0 and 1 have four
    ledger.release(1)
    assert len(ledger.lease(2, 3, 1)) == 3


def test_a_ledger_goes_on_from_the_position_of_a_job_that_counted_steps() -> None:
    position = {"step": 5, "version": 1, "samples": 10, "batch_size": 4, "seed": 0, "shuffle": 1,
                "drop_last": 1}  # fmt: skip
    ledger = DataLedger.read(position)
    assert ledger.lease(0, 2, None).spans == ((20, 22),)
    assert ledger.earlier == SampleCounts(16, 0, 4)
    assert ledger.stats()["epochs"] == [{"epoch": 2, "once": 4, "twice": 0, "never": 6}]


@pytest.mark.parametrize("damage", [{"samples": -1}, {"ledger": {}}, {"ledger": {"done": 3}}])
def test_a_damaged_position_is_refused(damage: dict[str, object]) -> None:
    position = DataLedger(order(8, 4)).position() | damage
    with pytest.raises(ValueError, match=r"order|ledger"):
        DataLedger.read(position)
