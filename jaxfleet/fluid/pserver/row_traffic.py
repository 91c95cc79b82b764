"""Asks servers for the rows that a batch needs, and sends them the rows of gradients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from jaxfleet.fluid.pserver.row_programs import PADDING, Part, RowTable
from jaxfleet.ps.client import Client
from jaxfleet.ps.messages import Kind, Tensor
from jaxfleet.ps.row_gradients import row_gradient
from jaxfleet.ps.tables import RemoteTables

_LEAST = 8  # rows that are padded for at the least


@dataclass
class RowTraffic:
    """The rows of tables, of one trainer.

    Attributes:
        tables: they.
        client: the lines to the servers.
    """

    tables: Sequence[RowTable]
    client: Client
    _keys: dict[str, np.ndarray] = field(default_factory=dict)  # of the run, by gradient

    def __post_init__(self) -> None:
        self._by_gradient = {table.gradient: table for table in self.tables}
        specs = [table.spec for table in self.tables if table.spec is not None]
        self._remote = RemoteTables(self.client, specs)

    def look_up(self, fed: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns what the program is fed in the place of tables, as the last step left them.

        Args:
            fed: has the ids.

        Raises:
            PeerLostError: a server went, or takes too long.
        """
        found: dict[str, np.ndarray] = {}
        requests = []
        for table in self.tables:
            ids = {name: np.asarray(fed[name]) for name in table.places}
            keys, places = _places(table, ids)
            rows = np.zeros((_padded(len(keys)), table.dim), np.float32)
            found |= {table.places[name]: place for name, place in places.items()}
            found[table.rows] = rows
            self._keys[table.gradient] = keys
            if table.spec is not None:
                rows[: len(keys)] = self._remote.look_up(table.name, keys)
            for part, at in _cut(table, keys):
                if at.start == at.stop:
                    continue
                local = (keys[at] - part.start).astype(np.int32)
                requests.append(
                    self.client.request(
                        self._server(part),
                        Kind.PULL,
                        body={"names": [part.name]},
                        tensors=[Tensor(part.name, local)],
                        wants=[part.name],
                        sink=partial(_take, rows[at]),
                    )
                )
        if requests:
            self.client.wait(requests)
        return found

    def push(self, gradient: str, rows: np.ndarray) -> None:
        """Sends the rows of a gradient to the servers that hold the table's."""
        table, keys = self._by_gradient[gradient], self._keys[gradient]
        if table.spec is not None:
            self._remote.push(table.name, keys, rows[: len(keys)])
        for part, at in _cut(table, keys):
            local = (keys[at] - part.start).astype(np.int32)
            self.client.push(self._server(part), row_gradient(part.gradient, local, rows[at]))

    def _server(self, part: Part) -> int:
        return self.client.me.endpoints.index(part.endpoint)


def _take(rows: np.ndarray, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        np.copyto(rows, tensor.array)


def _places(
    table: RowTable, ids: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the rows that are asked for, each once and in order, and where each id's is."""
    flat = np.concatenate([array.reshape(-1) for array in ids.values()]).astype(np.int64)
    is_there = table.has(flat)
    is_padding = (flat == table.padding) & (table.padding >= 0)
    asked = is_there & ~is_padding
    keys, inverse = np.unique(flat[asked], return_inverse=True)
    places = np.full(len(flat), -1, np.int32)
    places[asked] = inverse
    places[is_padding] = PADDING
    ends = np.cumsum([array.size for array in ids.values()])[:-1]
    cut = np.split(places, ends)
    shaped = {n: p.reshape(ids[n].shape) for n, p in zip(ids, cut, strict=True)}
    return keys, shaped


def _cut(table: RowTable, keys: np.ndarray) -> list[tuple[Part, slice]]:
    """Returns which of the keys, which are in order, each part has."""
    found = []
    for part in table.parts:
        start, stop = np.searchsorted(keys, (part.start, part.start + part.rows))
        found.append((part, slice(int(start), int(stop))))
    return found


def _padded(count: int) -> int:
    return max(_LEAST, 1 << max(count - 1, 0).bit_length())
