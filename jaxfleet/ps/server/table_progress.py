"""Follows the rows of tables through the steps: whose gradients came, which were applied."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.ps.server.desk import Request
from jaxfleet.ps.server.row_copies import Received

_PER_PUSH = 1024  # bytes of a push besides its arrays, which may be empty


@dataclass(frozen=True, eq=False)
class RowPush:
    """What one trainer pushed to one table at one step; maybe nothing.

    Attributes:
        request: the message that brought it, for an answer where it cannot be applied.
        keys: int64[n].
        grads: float32[n, dim].
        learning_rate: in the place of the optimizer's own, where the trainer gave one.
        adds: they are changes of rows, and no gradients.
        received: what its sender had of the rows, where gradients that come late are corrected.
        shows: float32[n], how often each key was shown; where the trainer says so.
        clicks: float32[n], how often it was clicked.
    """

    request: Request
    keys: np.ndarray
    grads: np.ndarray
    learning_rate: float | None = None
    adds: bool = False
    received: Received | None = None
    shows: np.ndarray | None = None
    clicks: np.ndarray | None = None

    @property
    def bytes(self) -> int:
        """What it costs while it waits."""
        scores = sum(x.nbytes for x in (self.shows, self.clicks) if x is not None)
        return self.keys.nbytes + self.grads.nbytes + scores + _PER_PUSH


Pushes = Mapping[int, RowPush]


@dataclass
class TableProgress:
    """Where a server's tables are in its steps. Every trainer pushes to every table at every step.

    Attributes:
        tables: their names.
        trainers: how many push.
        left: those of them that are not waited for any more.
        done: by table, the last step that was applied to it.
        handed: by table, the last step that was handed out to be applied.
        queued_bytes: of what waits.
        duplicates: pushes that came again.
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
        """Takes a step as applied, whatever was before; what came of later ones stays."""
        self.done = dict.fromkeys(self.tables, step)
        self.handed = dict(self.done)
        self._pushed = {later: pushes for later, pushes in self._pushed.items() if later > step}
        self.queued_bytes = sum(push.bytes for push in self._waiting())

    def push(self, table: str, push: RowPush) -> None:
        """Takes what a trainer pushed; what came before, or too late, changes nothing."""
        step = push.request.step
        trainer = push.request.trainer
        if step <= self.handed.get(table, -1) or trainer in self._of(table, step):
            self.duplicates += 1
            return
        self._pushed.setdefault(step, {}).setdefault(table, {})[trainer] = push
        self.queued_bytes += push.bytes

    def hand_out(self, step: int) -> Iterator[tuple[str, Sequence[RowPush]]]:
        """Yields the tables that a step may be applied to now, with its pushes in their order."""
        for table in self.tables:
            if self.handed.get(table, -1) < step and self._has_all(table, step):
                pushes = self._pushed[step].pop(table)
                self.handed[table] = step
                self.queued_bytes -= sum(push.bytes for push in pushes.values())
                yield table, [pushes[trainer] for trainer in sorted(pushes)]

    def take_back(self, table: str, step: int) -> None:
        """Notes that a step could not be applied to a table, which is as it was."""
        self.handed[table] = step - 1

    def has(self, table: str, step: int) -> bool:
        """Tells whether a step was applied to a table."""
        return self.done.get(table, -1) >= step

    def has_begun(self, step: int) -> bool:
        """Tells whether a step may start for what some table got."""
        handed = any(self.handed.get(table, -1) >= step for table in self.tables)
        return handed or any(self._has_all(table, step) for table in self.tables)

    def is_done(self, step: int) -> bool:
        """Tells whether a step was applied to all tables."""
        return all(self.has(table, step) for table in self.tables)

    def forget(self, step: int) -> None:
        """Forgets a step that was applied."""
        self._pushed.pop(step, None)

    def missing(self, step: int) -> dict[str, list[str]]:
        """Returns which trainers hold a step up, with the tables that they did not push to."""
        found: dict[str, list[str]] = {}
        for table in self.tables:
            if self.handed.get(table, -1) < step:
                for trainer in self._awaited() - self._of(table, step).keys():
                    found.setdefault(f"trainer {trainer}", []).append(f"rows of '{table}'")
        return found

    def _has_all(self, table: str, step: int) -> bool:
        """Tells whether all pushed who still do; where nobody did, there is no such step."""
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
