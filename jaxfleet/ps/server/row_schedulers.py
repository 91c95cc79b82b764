"""Schedulers of table updates, for synchronous and asynchronous trainers."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.ps.server.outbox import Request
from jaxfleet.ps.server.staleness import ReceivedRows

_PER_PUSH = 1024  # bytes of a push besides its arrays, which may be empty


@dataclass(frozen=True, eq=False)
class RowPush:
    """One trainer's push to one table at one step, possibly empty.

    Attributes:
        request: its message, for an error reply.
        learning_rate: overrides the optimizer's, if given.
        adds: they are changes of rows instead of gradients.
        received: the rows as its sender received them, if gradients are compensated.
        shows: float32[n], impressions of each key, if given.
        clicks: float32[n], clicks on each key, if given.
    """

    request: Request
    keys: np.ndarray
    grads: np.ndarray
    learning_rate: float | None = None
    adds: bool = False
    received: ReceivedRows | None = None
    shows: np.ndarray | None = None
    clicks: np.ndarray | None = None

    @property
    def bytes(self) -> int:
        scores = sum(x.nbytes for x in (self.shows, self.clicks) if x is not None)
        return self.keys.nbytes + self.grads.nbytes + scores + _PER_PUSH


Pushes = Mapping[int, RowPush]


@dataclass
class SyncRowScheduler:
    """Progress of a server's tables. Every trainer pushes to every table at every step.

    Attributes:
        done: by table, the last applied step.
        handed: by table, the last started step.
    """

    tables: Collection[str]
    trainers: int
    left: AbstractSet[int]
    done: dict[str, int] = field(default_factory=dict)
    handed: dict[str, int] = field(default_factory=dict)
    queued_bytes: int = 0
    duplicates: int = 0
    _pushed: dict[int, dict[str, dict[int, RowPush]]] = field(default_factory=dict)

    def restart(self, step: int) -> None:
        """Sets the applied step; pushes of later steps are kept."""
        self.done = dict.fromkeys(self.tables, step)
        self.handed = dict(self.done)
        self._pushed = {later: pushes for later, pushes in self._pushed.items() if later > step}
        self.queued_bytes = sum(push.bytes for push in self._waiting())

    def push(self, table: str, push: RowPush) -> None:
        """Queues a push; duplicates and late pushes are ignored."""
        step = push.request.step
        trainer = push.request.trainer
        if step <= self.handed.get(table, -1) or trainer in self._of(table, step):
            self.duplicates += 1
            return
        self._pushed.setdefault(step, {}).setdefault(table, {})[trainer] = push
        self.queued_bytes += push.bytes

    def hand_out(self, step: int) -> Iterator[tuple[str, Sequence[RowPush]]]:
        """Yields the tables that can apply a step, with its pushes in the trainers' order."""
        for table in self.tables:
            if self.handed.get(table, -1) < step and self._has_all(table, step):
                pushes = self._pushed[step].pop(table)
                self.handed[table] = step
                self.queued_bytes -= sum(push.bytes for push in pushes.values())
                yield table, [pushes[trainer] for trainer in sorted(pushes)]

    def take_back(self, table: str, step: int) -> None:
        """Records that a step failed for a table, which is unchanged."""
        self.handed[table] = step - 1

    def has(self, table: str, step: int) -> bool:
        return self.done.get(table, -1) >= step

    def has_begun(self, step: int) -> bool:
        """Whether a step has started or can start for some table."""
        handed = any(self.handed.get(table, -1) >= step for table in self.tables)
        return handed or any(self._has_all(table, step) for table in self.tables)

    def is_done(self, step: int) -> bool:
        return all(self.has(table, step) for table in self.tables)

    def forget(self, step: int) -> None:
        self._pushed.pop(step, None)

    def missing(self, step: int) -> dict[str, list[str]]:
        """Returns the trainers that delay a step, with the tables that they have not pushed to."""
        found: dict[str, list[str]] = {}
        for table in self.tables:
            if self.handed.get(table, -1) < step:
                for trainer in self._awaited() - self._of(table, step).keys():
                    found.setdefault(f"trainer {trainer}", []).append(f"rows of '{table}'")
        return found

    def _has_all(self, table: str, step: int) -> bool:
        """Whether all awaited trainers have pushed, and at least one has."""
        came = self._of(table, step)
        return bool(came) and came.keys() >= self._awaited()

    def _of(self, table: str, step: int) -> Pushes:
        return self._pushed.get(step, {}).get(table, {})

    def _awaited(self) -> set[int]:
        return {trainer for trainer in range(self.trainers) if trainer not in self.left}

    def _waiting(self) -> Iterator[RowPush]:
        for tables in self._pushed.values():
            for pushes in tables.values():
                yield from pushes.values()


@dataclass
class AsyncRowScheduler:
    """Pushes to a server's tables, applied in order of arrival.

    Attributes:
        applied: called with the table, trainer and step of each applied push.
    """

    applied: Callable[[str, int, int], None]
    duplicates: int = 0
    _waiting: deque[tuple[str, RowPush]] = field(default_factory=deque)
    _running: dict[str, deque[RowPush]] = field(default_factory=dict)
    _newest: dict[tuple[str, int], int] = field(default_factory=dict)  # by table and trainer
    _seen: dict[tuple[str, int], int] = field(default_factory=dict)  # includes rejected pushes

    @property
    def queued_bytes(self) -> int:
        return sum(push.bytes for _, push in self._waiting)

    @property
    def is_under_way(self) -> bool:
        return any(self._running.values())

    def restart(self) -> None:
        self._waiting.clear()
        self._newest.clear()
        self._seen.clear()

    def seen(self, table: str, trainer: int) -> int:
        """Returns a trainer's last received step for a table since the restart."""
        return self._seen.get((table, trainer), -1)

    def push(self, table: str, push: RowPush, *, done: int) -> None:
        step, known = push.request.step, (table, push.request.trainer)
        if step <= max(done, self._newest.get(known, -1)):
            self.duplicates += 1
            return
        self._newest[known] = self._seen[known] = step
        self._waiting.append((table, push))

    def hand_out(self) -> list[tuple[str, Sequence[RowPush]]]:
        found: list[tuple[str, Sequence[RowPush]]] = []
        while self._waiting:
            table, push = self._waiting.popleft()
            self._running.setdefault(table, deque()).append(push)
            found.append((table, [push]))
        return found

    def ran(self, table: str) -> None:
        """Records that the first started push of a table is applied."""
        push = self._running[table].popleft()
        self.applied(table, push.request.trainer, push.request.step)

    def take_back(self, table: str, step: int) -> None:
        """Records that the first started push of a table failed."""
        del step  # tables count by another number
        push = self._running[table].popleft()
        self._newest[table, push.request.trainer] = push.request.step - 1
