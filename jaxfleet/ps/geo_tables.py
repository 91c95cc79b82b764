"""Tables that a trainer updates itself, whose changes it exchanges every some steps: GEO-SGD.

A trainer has a row `w` of its own, and `old`, what it and the server agreed on. At an exchange it
sends `d = (w - old) / trainers` of the rows it touched, which the server adds, and `old += d`; when
it next looks a row up, the server's `s` comes: `w += s - old`, `old = s`. So what a trainer made of
a row that no other has is not lost by the division: the rest of it goes with later exchanges.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from jaxfleet.ps.tables import RemoteTables
from jaxfleet.tables import TableSpec, TableStore
from jaxfleet.tables.scores import WaitingScores

Scores = Mapping[str, np.ndarray | None]


@dataclass
class Window:
    """What a trainer has of a table.

    Attributes:
        rows: its own, with the state of its optimizer.
        old: what of them it and the servers agreed on.
        keys: by look-up since the last exchange, those that were fetched.
        known: all that were fetched, in order.
        steps: how many were pushed.
        scores: shows and clicks since the last exchange.
    """

    rows: TableStore
    old: TableStore
    keys: list[np.ndarray] = field(default_factory=list)
    known: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    steps: int = 0
    scores: WaitingScores = field(default_factory=WaitingScores)

    def lacks(self, keys: np.ndarray) -> np.ndarray:
        """Returns those of the keys that are still to be fetched."""
        if not len(self.known):
            return keys
        at = np.minimum(np.searchsorted(self.known, keys), len(self.known) - 1)
        lacking: np.ndarray = keys[self.known[at] != keys]
        return lacking

    def take(self, keys: np.ndarray, fresh: np.ndarray) -> None:
        """Takes in what servers made of rows since the last exchange of them."""
        self.rows.look_up(keys)  # a row that is new begins as it does in `old` and on its server
        came = fresh - self.old.look_up(keys)
        self.rows.add(keys, came)
        self.old.add(keys, came)
        self.keys.append(keys)
        self.known = np.sort(np.concatenate([self.known, keys]))

    def changes(self, scale: np.float32) -> tuple[np.ndarray, np.ndarray, Scores]:
        """Returns the keys of rows that changed, what is sent and scores, and begins anew."""
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


class GeoTables:
    """Is `TableAccess` for a trainer that updates rows itself.

    Args:
        remote: the servers' tables.
        specs: what the tables are.
        k_steps: steps from one exchange to the next.
        trainers: how many there are.
    """

    def __init__(
        self, remote: RemoteTables, specs: Iterable[TableSpec], *, k_steps: int, trainers: int
    ) -> None:
        self._remote, self._k_steps = remote, k_steps
        self._scale = np.float32(1.0 / trainers)
        # Servers say which keys are admitted, and which rows go.
        bare = [replace(spec, admission=None, evictions=()) for spec in specs]
        self._bare = bare
        self._windows = self._new()

    def look_up(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Returns rows as this trainer has them, as `TableAccess.look_up` says."""
        return self.look_up_all({table: keys})[table]

    def look_up_all(self, keys: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns rows of several tables; fetches those that did not come since an exchange."""
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
        """Updates rows here, and sends what changed of them where an exchange is due."""
        window = self._windows[table]
        if len(keys):
            window.rows.update(keys, grads)
            window.scores.add(keys, shows, clicks)
        window.steps += 1
        if window.steps >= self._k_steps:
            self._send(table)

    def flush(self) -> None:
        """Sends all that changed since the last exchange."""
        for table, window in self._windows.items():
            if window.steps:
                self._send(table)

    def restart(self) -> None:
        """Forgets what changed here: servers go on from something else."""
        self._windows = self._new()

    def _new(self) -> dict[str, Window]:
        return {spec.name: Window(TableStore(spec), TableStore(spec)) for spec in self._bare}

    def _send(self, table: str) -> None:
        keys, deltas, scores = self._windows[table].changes(self._scale)
        self._remote.add(table, keys, deltas, **scores)
