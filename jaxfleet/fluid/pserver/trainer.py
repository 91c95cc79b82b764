"""A trainer's run: its computation, and its exchange of rows, values and deltas with servers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from jaxfleet.analysis.placement.sliced_layout import Slice, placement_of, slices_of
from jaxfleet.errors import FeedError
from jaxfleet.fluid.pserver.connections import Connection
from jaxfleet.fluid.pserver.normalization import TrainerProgram
from jaxfleet.fluid.pserver.row_programs import PADDING, RowTable, TablePart
from jaxfleet.ir import Kind as VariableKind
from jaxfleet.ir import Program
from jaxfleet.lower import ExecutableCache, bind_sizes
from jaxfleet.ops import Array
from jaxfleet.passes.fluid.local_training import PUSH_EVERY, delta_name
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.remote_tables import RemoteTables
from jaxfleet.ps.client.trainer_executor import TrainerExecutor
from jaxfleet.ps.gradient_encoding import row_tensors
from jaxfleet.runtime.compiled_program import read_before_written
from jaxfleet.runtime.scope import Scope
from jaxfleet.runtime.trainer_timing import TrainerTimer
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
    """A prepared trainer's program for given feeds and fetches; `timer` times it for its dump."""

    def __init__(
        self,
        plain: TrainerProgram,
        connection: Connection,
        cache: ExecutableCache,
        timer: TrainerTimer | None = None,
    ) -> None:
        self._timer = timer
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
        if self._timer is not None:
            self._timer.before_step(program, sizes, fed)
        if self._plain.is_step:
            client.next_step(0)  # batch sizes may differ between trainers
        client.doing(f"step {client.step}" if self._plain.is_step else "startup")
        try:
            with client.spans.span("step" if self._plain.is_step else "startup", step=client.step):
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


@dataclass
class GeoExchange:
    """The exchanges of GEO-SGD, in which trainers update locally, of one trainer.

    Every `every` steps the trainer sends the change of its parameters since the last exchange,
    divided by the number of trainers, and receives the servers' values, which include the changes
    of all trainers. Of sparse tables it sends the rows that it looked up.

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
