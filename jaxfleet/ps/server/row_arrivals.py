"""Follows rows of tables that trainers send without waiting for each other: each push alone."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxfleet.ps.server.table_progress import RowPush


@dataclass
class RowArrivals:
    """What came for a server's tables; it is applied in the order in which it came.

    Attributes:
        applied: is told of a table, a trainer and a step of its that is applied.
        duplicates: pushes that came again.
    """

    applied: Callable[[str, int, int], None]
    duplicates: int = 0
    _waiting: deque[tuple[str, RowPush]] = field(default_factory=deque)
    _running: dict[str, deque[RowPush]] = field(default_factory=dict)
    _newest: dict[tuple[str, int], int] = field(default_factory=dict)  # by table and trainer
    _seen: dict[tuple[str, int], int] = field(default_factory=dict)  # those that were refused, too

    @property
    def queued_bytes(self) -> int:
        """Of what waits to be applied."""
        return sum(push.bytes for _, push in self._waiting)

    @property
    def is_under_way(self) -> bool:
        """Whether a push was handed out, and not applied yet."""
        return any(self._running.values())

    def restart(self) -> None:
        """Forgets what waits."""
        self._waiting.clear()
        self._newest.clear()
        self._seen.clear()

    def seen(self, table: str, trainer: int) -> int:
        """Returns the last step of a trainer that came for a table since it was restarted."""
        return self._seen.get((table, trainer), -1)

    def push(self, table: str, push: RowPush, *, done: int) -> None:
        """Takes what a trainer pushed; what came before changes nothing.

        Args:
            table: its name.
            push: it.
            done: the last step of that trainer that is applied to the table.
        """
        step, known = push.request.step, (table, push.request.trainer)
        if step <= max(done, self._newest.get(known, -1)):
            self.duplicates += 1
            return
        self._newest[known] = self._seen[known] = step
        self._waiting.append((table, push))

    def hand_out(self) -> list[tuple[str, Sequence[RowPush]]]:
        """Returns what may be applied now, in order."""
        found: list[tuple[str, Sequence[RowPush]]] = []
        while self._waiting:
            table, push = self._waiting.popleft()
            self._running.setdefault(table, deque()).append(push)
            found.append((table, [push]))
        return found

    def ran(self, table: str) -> None:
        """Notes that the first of what was handed out of a table is applied."""
        push = self._running[table].popleft()
        self.applied(table, push.request.trainer, push.request.step)

    def take_back(self, table: str, step: int) -> None:
        """Notes that the first of what was handed out of a table could not be applied."""
        del step  # tables count by another
        push = self._running[table].popleft()
        self._newest[table, push.request.trainer] = push.request.step - 1
