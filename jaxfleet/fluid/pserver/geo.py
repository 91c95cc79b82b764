"""Exchanges what has changed between trainers that update their own parameters: GEO-SGD.

Every so many steps a trainer sends what its parameters have changed by since the last exchange,
divided by the number of trainers, and takes what servers then have: its own changes and those that
others sent. Of sparse tables it sends the rows that it looked up.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfleet.analysis.slices import Slice, placement_of, slices_of
from jaxfleet.fluid.pserver.connections import Connection
from jaxfleet.fluid.pserver.served_values import pull_whole
from jaxfleet.ir import Program
from jaxfleet.passes._fluid_averages import delta_name
from jaxfleet.ps.messages import Tensor
from jaxfleet.ps.row_gradients import row_gradient
from jaxfleet.runtime.scope import Scope

PUSH_EVERY = "push_every"


@dataclass
class GeoExchange:
    """The exchanges of one trainer.

    Attributes:
        connection: the lines to its servers.
        every: steps from one to the next.
        slices: of all parameters.
        placement: the endpoint of each slice.
        tables: those whose rows are sent.
        steps: since the trainer began.
        exchanges: how many there were.
    """

    connection: Connection
    every: int
    slices: tuple[Slice, ...]
    placement: Mapping[str, str]
    tables: frozenset[str]
    steps: int = 0
    exchanges: int = 0
    _old: dict[str, np.ndarray] = field(default_factory=dict)
    _touched: dict[str, list[np.ndarray]] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, connection: Connection) -> "GeoExchange":
        """Returns the exchanges that a trainer's program says."""
        every, listed = program.attrs[PUSH_EVERY], program.attrs.get("prefetched", ())
        assert isinstance(every, int)
        assert isinstance(listed, tuple)
        tables = frozenset(map(str, listed))
        return cls(connection, every, slices_of(program), placement_of(program), tables)

    def begin(self, scope: Scope) -> None:
        """Takes what servers have as that from which changes count."""
        self._receive(scope)

    def step(self, ids: Iterable[tuple[str, Any]], scope: Scope) -> None:
        """Notes a step; exchanges when it is time.

        Args:
            ids: tables, with the ids that were looked up in them.
            scope: has the parameters, and gets them.

        Raises:
            PeerLostError: a server went, or takes too long.
        """
        for table, looked_up in ids:
            self._touched.setdefault(table, []).append(np.unique(np.asarray(looked_up)))
        self.steps += 1
        if self.steps % self.every == 0:
            self._send(scope)
            self._receive(scope)
            self.exchanges += 1

    def _send(self, scope: Scope) -> None:
        self.connection.check()
        client = self.connection.client
        client.next_step(0)
        for param in dict.fromkeys(cut.param for cut in self.slices):
            now, old = np.asarray(scope.peek(param)), self._old[param]
            rows = self._rows(param, len(now)) if param in self.tables else None
            delta = ((now - old) if rows is None else (now[rows] - old[rows])) / np.float32(
                client.me.trainers
            )
            if rows is None:
                old += delta
            else:
                old[rows] += delta
            for cut in (cut for cut in self.slices if cut.param == param):
                client.push(self._server(cut), _of_slice(cut, delta, rows))
        self._touched.clear()

    def _rows(self, table: str, count: int) -> np.ndarray:
        """Returns the rows that were looked up since the last exchange, in order."""
        touched = self._touched.get(table, [])
        rows = np.unique(np.concatenate(touched)) if touched else np.empty(0, np.int64)
        return rows[(rows >= 0) & (rows < count)]

    def _receive(self, scope: Scope) -> None:
        """Moves parameters by what servers have that this trainer has not."""
        parts: dict[str, list[tuple[str, str]]] = {}
        for cut in self.slices:
            parts.setdefault(cut.param, []).append((cut.name, self.placement[cut.name]))
        there = pull_whole(self.connection, parts)
        for param, value in there.items():
            old = self._old.get(param)
            now = value if old is None else np.asarray(scope.peek(param)) + (value - old)
            scope.keep({param: jnp.array(now, copy=True)})
            self._old[param] = np.array(value)

    def _server(self, cut: Slice) -> int:
        return self.connection.client.me.endpoints.index(self.placement[cut.name])


def _of_slice(cut: Slice, delta: np.ndarray, rows: np.ndarray | None) -> list[Tensor]:
    """Returns a slice's part of a change as it travels."""
    name = delta_name(cut.name)
    if rows is None:
        part = delta if cut.is_whole else delta[cut.start : cut.start + cut.rows]
        return [Tensor(name, np.ascontiguousarray(part))]
    first, last = np.searchsorted(rows, (cut.start, cut.start + cut.rows))
    numbers = (rows[first:last] - cut.start).astype(np.int32)
    return row_gradient(name, numbers, np.ascontiguousarray(delta[first:last]))
