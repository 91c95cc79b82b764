"""A trainer's run: its computation, and its exchange of rows and values with servers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from jaxfleet.errors import FeedError
from jaxfleet.fluid.pserver.connections import Connection
from jaxfleet.fluid.pserver.normalization import TrainerProgram
from jaxfleet.fluid.pserver.row_programs import PADDING, RowTable, TablePart
from jaxfleet.ir import Kind as VariableKind
from jaxfleet.lower import ExecutableCache, bind_sizes
from jaxfleet.ops import Array
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.remote_tables import RemoteTables
from jaxfleet.ps.client.trainer_executor import TrainerExecutor
from jaxfleet.ps.gradient_encoding import row_tensors
from jaxfleet.runtime.compiled_program import read_before_written
from jaxfleet.runtime.scope import Scope
from jaxfleet.transport.messages import Kind, Tensor

_LEAST = 8  # the smallest padded number of rows


@dataclass
class RowExchange:
    """The row requests of one trainer for its tables."""

    tables: Sequence[RowTable]
    client: Client
    _keys: dict[str, np.ndarray] = field(default_factory=dict)  # ids of the run, by gradient

    def __post_init__(self) -> None:
        self._by_gradient = {table.gradient: table for table in self.tables}
        specs = [table.spec for table in self.tables if table.spec is not None]
        self._remote = RemoteTables(self.client, specs)

    def look_up(self, fed: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns the rows and places to feed instead of tables, as left by the last step."""
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
            for part, at in _cut_rows(table, keys):
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
        """Sends the rows of a gradient to the servers of the table."""
        table, keys = self._by_gradient[gradient], self._keys[gradient]
        if table.spec is not None:
            self._remote.push(table.name, keys, rows[: len(keys)])
        for part, at in _cut_rows(table, keys):
            local = (keys[at] - part.start).astype(np.int32)
            self.client.push(self._server(part), row_tensors(part.gradient, local, rows[at]))

    def _server(self, part: TablePart) -> int:
        return self.client.me.endpoints.index(part.endpoint)


def _take(rows: np.ndarray, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        np.copyto(rows, tensor.array)


def _places(
    table: RowTable, ids: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns the sorted unique ids to request, and the position of each id."""
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


def _cut_rows(table: RowTable, keys: np.ndarray) -> list[tuple[TablePart, slice]]:
    """Returns the range of sorted keys in each part."""
    found = []
    for part in table.parts:
        start, stop = np.searchsorted(keys, (part.start, part.start + part.rows))
        found.append((part, slice(int(start), int(stop))))
    return found


def _padded(count: int) -> int:
    return max(_LEAST, 1 << max(count - 1, 0).bit_length())


Parts: TypeAlias = Mapping[str, Sequence[tuple[str, str]]]  # slices of variables with endpoints


def pull_whole(connection: Connection, parts: Parts) -> dict[str, np.ndarray]:
    """Returns whole variables from servers after this trainer's last step.

    `parts` has the slices of each variable in the order of their rows, with the endpoint of each.
    """
    connection.check()
    client, found = connection.client, dict[tuple[int, str], np.ndarray]()
    numbers = {endpoint: n for n, endpoint in enumerate(client.me.endpoints)}
    asked: dict[int, list[str]] = {}
    for slices in parts.values():
        for name, endpoint in slices:
            asked.setdefault(numbers[endpoint], []).append(name)

    def take(server: int, tensors: Sequence[Tensor]) -> None:
        found.update({(server, tensor.name): tensor.array.copy() for tensor in tensors})

    client.wait([
        client.request(
            server,
            Kind.PULL,
            body={"names": list(names)},
            wants=names,
            sink=partial(take, server),
        )
        for server, names in asked.items()
    ])  # fmt: skip
    return {
        whole: _joined([found[numbers[endpoint], name] for name, endpoint in slices])
        for whole, slices in parts.items()
    }


def _joined(slices: Sequence[np.ndarray]) -> np.ndarray:
    return slices[0] if len(slices) == 1 else np.concatenate(slices)


class TrainerRun:
    """A prepared trainer's program for given feeds and fetches."""

    def __init__(
        self, plain: TrainerProgram, connection: Connection, cache: ExecutableCache
    ) -> None:
        self.program, self.connection = plain.program, connection
        self._plain, self.fetched = plain, plain.fetched
        needed, program = read_before_written(plain.program), plain.program
        self._rows = RowExchange(plain.tables, connection.client)
        self._fed = tuple(v.name for v in program.of_kind(VariableKind.DATA) if v.name in needed)
        made = {name for table in plain.tables for name in (table.rows, *table.places.values())}
        ids = (name for table in plain.tables for name in table.places)
        self.data = tuple(dict.fromkeys((*ids, *(n for n in self._fed if n not in made))))
        persistable = program.of_kind(VariableKind.PARAM, VariableKind.STATE)
        self._state = tuple(v.name for v in persistable if v.name in needed)
        self._trainer = TrainerExecutor(program, connection.client, cache, self._rows.push)

    def run(self, data: Mapping[str, Any], scope: Scope) -> dict[str, Array]:
        """Runs the program; returns the fetched values by name, and stores others in the scope.

        Raises:
            FeedError: an input is neither fed nor in the scope, or has another shape.
            PeerLostError: a server or another trainer left or timed out.
            ClosedError: this trainer has closed, or failed.
        """
        self.connection.check()
        program, client = self.program, self.connection.client
        state = self._held(scope)
        given = {**data, **self._rows.look_up(data)}
        fed = {name: given[name] for name in self._fed}
        sizes = bind_sizes((program.variables[name], value.shape) for name, value in fed.items())
        if self._plain.is_step:
            client.next_step(0)  # batch sizes may differ between trainers
        client.doing(f"step {client.step}" if self._plain.is_step else "startup")
        try:
            _, values = self._trainer.run(state, fed, sizes)
        except Exception as error:
            self._failed(error)
            raise
        made = dict(zip(self._plain.wanted, values, strict=True))
        scope.keep({name: made[name] for name in self._plain.outliving})
        for name in self._plain.outliving:
            _ = scope[name]  # may be a server's memory, which no run may take for its results
        return made

    def _held(self, scope: Scope) -> dict[str, Array]:
        for name in self._state:
            if name not in scope:
                found = self.program.variables[name].type
                what = f"'{name}' ({found}) is not in the scope, and the trainer's program reads it"
                raise FeedError(what, hint="run the startup program first, in the same scope")
        return {name: scope.peek(name) for name in self._state}

    def _failed(self, error: Exception) -> None:
        """Allows a retry of a step that has not sent anything; otherwise ends the connection."""
        client = self.connection.client
        if not self._plain.is_step:
            return
        if client.has_pushed(client.step):
            self.connection.fail(error)
        else:
            client.step -= 1
