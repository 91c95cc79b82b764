"""GEO-SGD: exchange of parameter deltas between trainers that update locally.

At a fixed interval of steps a trainer sends the change of its parameters since the last exchange,
divided by the number of trainers, and receives the servers' values, which include the changes of
all trainers. Of sparse tables it sends the rows that it looked up.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfleet.analysis.placement.sliced_layout import Slice, placement_of, slices_of
from jaxfleet.fluid.pserver.connections import Connection
from jaxfleet.fluid.pserver.trainer import pull_whole
from jaxfleet.ir import Program
from jaxfleet.passes.fluid.geo_sgd import delta_name
from jaxfleet.ps.gradient_encoding import row_tensors
from jaxfleet.runtime.scope import Scope
from jaxfleet.transport.messages import Tensor

PUSH_EVERY = "push_every"


@dataclass
class GeoExchange:
    """The exchanges of one trainer, at intervals of `every` steps.

    `placement` has the endpoint of each slice, and `tables` those whose rows are sent.
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
        """Returns the exchanges that a trainer's program specifies."""
        every, listed = program.attrs[PUSH_EVERY], program.attrs.get("prefetched", ())
        assert isinstance(every, int)
        assert isinstance(listed, tuple)
        tables = frozenset(map(str, listed))
        return cls(connection, every, slices_of(program), placement_of(program), tables)

    def begin(self, scope: Scope) -> None:
        """Stores the servers' values as the base of the first deltas."""
        self._receive(scope)

    def step(self, ids: Iterable[tuple[str, Any]], scope: Scope) -> None:
        """Counts a step, with the ids looked up in tables, and exchanges deltas when due."""
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
        """Returns the sorted rows that were looked up since the last exchange."""
        touched = self._touched.get(table, [])
        rows = np.unique(np.concatenate(touched)) if touched else np.empty(0, np.int64)
        return rows[(rows >= 0) & (rows < count)]

    def _receive(self, scope: Scope) -> None:
        """Adds the changes on the servers since the last exchange to the parameters."""
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
    """Returns a slice's part of a delta as tensors of a message."""
    name = delta_name(cut.name)
    if rows is None:
        part = delta if cut.is_whole else delta[cut.start : cut.start + cut.rows]
        return [Tensor(name, np.ascontiguousarray(part))]
    first, last = np.searchsorted(rows, (cut.start, cut.start + cut.rows))
    numbers = (rows[first:last] - cut.start).astype(np.int32)
    return row_tensors(name, numbers, np.ascontiguousarray(delta[first:last]))
