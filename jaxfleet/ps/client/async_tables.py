"""Row tables of asynchronous trainers: averaged pushes, and GEO-SGD with local updates.

`AveragedTables` sends the mean of several steps' gradients: a step without a key counts as one with
gradient 0, as when a whole parameter is averaged.

With `GeoTables` a trainer has its own row `w`, and `old`, the last value on which it and the server
agreed. At an exchange it sends `d = (w - old) / trainers` of the rows it touched, which the server
adds, and `old += d`; at its next look-up of a row it receives the server's `s`: `w += s - old`,
`old = s`. So the division does not lose the updates to a row that no other trainer has: the rest is
sent with later exchanges.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from jaxfleet.ps.client.remote_tables import RemoteTables
from jaxfleet.tables import TableSpec, TableStore
from jaxfleet.tables.access import TableAccess
from jaxfleet.tables.merge_pushes import PendingScores, merge


class AveragedTables(TableAccess):
    """Tables of a trainer that sends the mean of several gradients."""

    def __init__(self, remote: RemoteTables) -> None:
        self._remote = remote
        self._waiting: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}  # by table
        self._scores: dict[str, PendingScores] = {}

    def look_up_all(self, keys: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return self._remote.look_up_all(keys)

    def push(
        self,
        table: str,
        keys: np.ndarray,
        grads: np.ndarray,
        *,
        shows: np.ndarray | None = None,
        clicks: np.ndarray | None = None,
    ) -> None:
        """Queues a step's gradients for `send`, and its scores, which are summed."""
        self._waiting.setdefault(table, []).append((keys, grads))
        self._scores.setdefault(table, PendingScores()).add(keys, shows, clicks)

    def send(self, steps: int) -> None:
        """Sends the means of the queued gradients of `steps` steps."""
        for table, pushes in self._waiting.items():
            keys, grads = pushes[0] if steps == 1 else merge(pushes)
            mean = grads if steps == 1 else grads / np.float32(steps)
            scores = self._scores[table]
            given = (
                dict(zip(("shows", "clicks"), scores.take(keys).T, strict=True)) if scores else {}
            )
            self._remote.push(table, keys, mean, **given)
        self._waiting.clear()

    def restart(self) -> None:
        """Discards the queue: servers resume from another state."""
        self._waiting.clear()
        self._scores.clear()


Scores = Mapping[str, np.ndarray | None]


@dataclass
class GeoWindow:
    """A trainer's copy of a table.

    Attributes:
        old: the rows as last agreed on with the servers.
        keys: keys fetched since the last exchange, by look-up.
        known: all of these, sorted.
    """

    rows: TableStore
    old: TableStore
    keys: list[np.ndarray] = field(default_factory=list)
    known: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    steps: int = 0
    scores: PendingScores = field(default_factory=PendingScores)

    def lacks(self, keys: np.ndarray) -> np.ndarray:
        if not len(self.known):
            return keys
        at = np.minimum(np.searchsorted(self.known, keys), len(self.known) - 1)
        lacking: np.ndarray = keys[self.known[at] != keys]
        return lacking

    def take(self, keys: np.ndarray, fresh: np.ndarray) -> None:
        """Applies the servers' changes to rows since their last exchange."""
        self.rows.look_up(keys)  # initializes a new row, as in `old` and on its server
        came = fresh - self.old.look_up(keys)
        self.rows.add(keys, came)
        self.old.add(keys, came)
        self.keys.append(keys)
        self.known = np.sort(np.concatenate([self.known, keys]))

    def changes(self, scale: np.float32) -> tuple[np.ndarray, np.ndarray, Scores]:
        """Returns the keys, deltas and scores of changed rows, and starts a new window."""
        keys = np.concatenate([np.empty(0, np.int64), *self.keys])
        deltas = (self.rows.look_up(keys) - self.old.look_up(keys)) * scale
        has_scores = bool(self.scores)
        scores = self.scores.take(keys)
        changed = deltas.any(axis=1) | scores.any(axis=1)
        self.old.add(keys[changed], deltas[changed])
        self.keys.clear()
        self.known, self.steps = self.known[:0], 0
        shows, clicks = (scores[changed, at] if has_scores else None for at in (0, 1))
        return keys[changed], deltas[changed], {"shows": shows, "clicks": clicks}


class GeoTables(TableAccess):
    """Tables of a trainer that updates rows locally."""

    def __init__(
        self, remote: RemoteTables, specs: Iterable[TableSpec], *, k_steps: int, trainers: int
    ) -> None:
        self._remote, self._k_steps = remote, k_steps
        self._scale = np.float32(1.0 / trainers)
        # Servers decide on admission and eviction.
        bare = [replace(spec, admission=None, evictions=()) for spec in specs]
        self._bare = bare
        self._windows = self._new()

    def take_over(self, other: "GeoTables") -> None:
        """Goes on with the rows of another place in the job, whose changes were sent."""
        self._windows = other._windows  # noqa: SLF001  # of its own class

    def look_up_all(self, keys: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns rows of several tables; fetches those not fetched since the last exchange."""
        lacking = {table: self._windows[table].lacks(some) for table, some in keys.items()}
        asked = {table: some for table, some in lacking.items() if len(some)}
        for table, rows in self._remote.look_up_all(asked).items():
            self._windows[table].take(asked[table], rows)
        return {table: self._windows[table].rows.look_up(some) for table, some in keys.items()}

    def push(
        self,
        table: str,
        keys: np.ndarray,
        grads: np.ndarray,
        *,
        shows: np.ndarray | None = None,
        clicks: np.ndarray | None = None,
    ) -> None:
        """Updates rows locally, and sends the changes when an exchange is due."""
        window = self._windows[table]
        if len(keys):
            window.rows.update(keys, grads)
            window.scores.add(keys, shows, clicks)
        window.steps += 1
        if window.steps >= self._k_steps or self._remote.repeats_a_message():
            self._send(table)

    def flush(self) -> None:
        for table, window in self._windows.items():
            if window.steps:
                self._send(table)

    def restart(self) -> None:
        """Discards local changes: servers resume from another state."""
        self._windows = self._new()

    def _new(self) -> dict[str, GeoWindow]:
        return {spec.name: GeoWindow(TableStore(spec), TableStore(spec)) for spec in self._bare}

    def _send(self, table: str) -> None:
        keys, deltas, scores = self._windows[table].changes(self._scale)
        self._remote.add(table, keys, deltas, **scores)
