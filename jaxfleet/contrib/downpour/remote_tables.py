"""The tables of a Downpour job on its servers, and their joint administration by all workers.

Every table on a server stores rows by key; a dense table's rows are pieces of its parameters.
Servers hold the sum of the updates (the value is `begun + row`), and trainer 0 sends the initial
values at the first step. A table of counts and sums starts with its values, since pushes are added
to it.

Administrative calls are collective: all workers call them, the first one executes the call, and all
return when it is done, or all raise.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxfleet.contrib.downpour.descriptions import TableParameter
from jaxfleet.contrib.downpour.local_tables import Push, described_rule, flat, scores, shaped
from jaxfleet.errors import CheckpointError, JaxfleetError, ProgramError
from jaxfleet.fluid.npz_files import file_of
from jaxfleet.fluid.pserver.checkpoint_notify import save_table
from jaxfleet.fluid.pserver.connections import Connection
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.remote_tables import RemoteTables, refill, shrink
from jaxfleet.runtime.pserver_checkpoint import meet
from jaxfleet.tables import Constant, Summary, TableSpec
from jaxfleet.transport.messages import Kind, Plain, Tensor

_PIECE = 64  # elements of a dense table per row
BEGUN = ".begun"  # suffix of the table that holds a dense table's initial values
_NONE = np.zeros(0, np.int64)


def dense_specs(table: TableParameter) -> list[TableSpec]:
    """Specs of a dense table as rows on servers; its update rule must be one of theirs."""
    rule, name = described_rule(table), dense_name(table.table_id or 0)
    made = [TableSpec(name=name, dim=_PIECE, initializer=Constant(0.0), optimizer=rule)]
    if not isinstance(rule, Summary):
        kept = Summary(keep=1.0)
        made.append(
            TableSpec(name=name + BEGUN, dim=_PIECE, initializer=Constant(0.0), optimizer=kept)
        )
    return made


def dense_name(table_id: int) -> str:
    """Name of a dense table on servers."""
    return f"dense.{table_id}"


class ServerTables:
    """A worker's view of tables on servers; `LiveTables` documents the methods.

    With `is_lockstep`, all workers push before any looks up again.
    """

    def __init__(
        self, client: Client, specs: Sequence[TableSpec], *, is_lockstep: bool = True
    ) -> None:
        self.client, self._is_lockstep = client, is_lockstep
        self._specs = {spec.name: spec for spec in specs}
        self._tables = RemoteTables(client, specs)
        self._sizes: dict[int, int] = {}
        self._begun: dict[int, np.ndarray] = {}
        self._first: dict[str, Push] = {}
        self._is_begun = False
        client.next_step(1)

    @property
    def step(self) -> int:
        return self.client.step

    def declare(self, table_id: int, name: str, dim: int, *, shows: bool) -> None:
        """Checks that servers have a sparse table with such rows."""
        del table_id, shows
        known = self._specs.get(name)
        if known is None or known.dim != dim:
            what = f"servers have no table '{name}' with rows of {dim}"
            raise ProgramError(what, hint="servers are given the same programs as workers")

    def begin_dense(self, table_id: int, values: Sequence[np.ndarray]) -> None:
        """Sets a dense table's initial values, if this is trainer 0 and no step has run."""
        if table_id in self._sizes:
            return
        whole = flat(values)
        self._sizes[table_id] = whole.size
        name = dense_name(table_id)
        given = name + BEGUN if name + BEGUN in self._specs else name
        if self.client.me.trainer == 0:
            self._first[given] = _pieces(whole)

    def look_up(self, name: str, keys: np.ndarray) -> np.ndarray:
        self.begin()
        return self._tables.look_up(name, keys)

    def peek(self, name: str, keys: np.ndarray) -> np.ndarray:
        self.begin()
        return self._tables.peek(name, keys)

    def pull_dense(
        self, table_id: int, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, np.ndarray]:
        self.begin()
        name, size = dense_name(table_id), self._sizes[table_id]
        whole = self._whole(name, size)
        if name + BEGUN in self._specs:
            if table_id not in self._begun:
                self._begun[table_id] = self._whole(name + BEGUN, size).copy()
            whole = self._begun[table_id] + whole
        return shaped(whole, shapes)

    def push(self, rows: Mapping[str, Push], dense: Mapping[int, Sequence[np.ndarray]]) -> None:
        pieces = {dense_name(number): _pieces(flat(grads)) for number, grads in dense.items()}
        self._push({**rows, **pieces})

    def begin(self) -> None:
        """Runs the first step of all workers, in which trainer 0 sends the initial values."""
        if not self._is_begun:
            self._is_begun = True
            self._push(self._not_there_yet())
            if not self._is_lockstep:
                self.settle()  # on trainer 0 these are the initial values
                meet(self.client, "train")

    def _not_there_yet(self) -> dict[str, Push]:
        """Initial values that servers lack; loaded ones take precedence."""
        if not self._first:
            return {}
        counted = self._tables.stats()
        have = {name for name, of_table in counted.items() if of_table.get("rows")}
        return {name: push for name, push in self._first.items() if name not in have}

    def forget(self) -> None:
        """Drops cached initial values, after servers loaded others."""
        self._begun.clear()

    def add_dense(self, changes: Mapping[int, Sequence[np.ndarray]]) -> None:
        """Adds changes to dense tables whatever their rules, in a step of all workers."""
        self.begin()
        pieces = {dense_name(number): _pieces(flat(each)) for number, each in changes.items()}
        self._push(pieces, adds=True)

    def stats(self) -> dict[str, dict[str, Any]]:
        return self._tables.stats()

    @property
    def names(self) -> tuple[str, ...]:
        """All tables, including those of dense parameters."""
        return tuple(self._specs)

    def settle(self) -> None:
        """Waits until servers have applied this worker's pushes."""
        servers, step = range(len(self.client.me.endpoints)), self.client.step - 1
        body: dict[str, Plain] = {"names": []}
        asked = [self.client.request(s, Kind.PULL, step=step, body=body) for s in servers]
        self.client.wait(asked)

    def _push(self, given: Mapping[str, Push], *, adds: bool = False) -> None:
        send = self._tables.add if adds else self._tables.push
        for name, spec in self._specs.items():
            keys, grads = given.get(name, (_NONE, np.zeros((0, spec.dim), np.float32)))
            send(name, keys, grads, **scores(spec, keys, given))
        self.client.next_step(1)

    def _whole(self, name: str, size: int) -> np.ndarray:
        keys = np.arange(-(-size // _PIECE), dtype=np.int64)
        return self._tables.look_up(name, keys).reshape(-1)[:size]


def _pieces(whole: np.ndarray) -> Push:
    """Splits an array into rows by key; the last is zero-padded."""
    count = -(-whole.size // _PIECE)
    rows = np.zeros((count, _PIECE), np.float32)
    rows.reshape(-1)[: whole.size] = whole
    return np.arange(count, dtype=np.int64), rows


def specs_of(tables: Iterable[TableParameter], sparse: Iterable[TableSpec]) -> list[TableSpec]:
    """Specs of all tables of a job on servers: sparse ones, and dense ones as rows."""
    dense = [spec for t in tables if t.type == "PS_DENSE_TABLE" for spec in dense_specs(t)]
    return [*sparse, *dense]


class TableAdmin:
    """Saves, loads, clears and shrinks a job's tables from a worker."""

    def __init__(self, connection: Connection, tables: ServerTables) -> None:
        self._connection, self.tables = connection, tables
        self._times = 0

    def save(self, folder: Path, names: Iterable[str] | None = None) -> None:
        """Makes servers write tables (all unless named), one checkpoint each.

        Raises:
            CheckpointError: a table cannot be written; an earlier save is left intact.
        """
        wanted = self._wanted(names)

        def work(_: int) -> int:
            for name in wanted:
                save_table(self._connection, name, folder, step=self._done)
            return len(wanted)

        self._together(f"save {folder}", work)

    def load(self, folder: Path, names: Iterable[str] | None = None) -> None:
        """Makes servers replace the rows of tables by saved ones."""
        places = {name: str(file_of(folder, name).absolute()) for name in self._wanted(names)}
        self._refill(f"load {folder}", places)

    def clear(self, names: Iterable[str] | None = None) -> int:
        return self._refill("clear tables", dict.fromkeys(self._wanted(names), ""))

    def shrink(self, names: Iterable[str]) -> int:
        """Evicts rows by the tables' policies; returns their number."""
        wanted, client = self._wanted(names), self._connection.client

        def work(step: int) -> int:
            return sum(shrink(client, name, step=step) for name in wanted)

        return self._together("shrink tables", work)

    def meet(self, what: str) -> None:
        self._together(what, lambda _: 0)

    def _refill(self, what: str, places: dict[str, str]) -> int:
        client = self._connection.client

        def work(step: int) -> int:
            for place in filter(None, places.values()):
                if not Path(place).is_dir():
                    raise CheckpointError(f"{place} is not there", hint="save the model first")
            return sum(refill(client, name, at, step=step) for name, at in places.items())

        count = self._together(what, work)
        self.tables.forget()
        return count

    def _wanted(self, names: Iterable[str] | None) -> Sequence[str]:
        self._connection.check()
        self.tables.begin()
        return self.tables.names if names is None else tuple(names)

    @property
    def _done(self) -> int:
        return self._connection.client.step - 1

    def _together(self, what: str, work: Callable[[int], int]) -> int:
        """Runs `work` on the first worker while the others wait; returns its result on all.

        `what` names it in errors; `work` receives the step that all workers have completed.
        """
        client = self._connection.client
        client.doing(what)
        self.tables.begin()
        self.tables.settle()
        self._times += 1
        slowest = -self._greatest(f"begin to {what}", [-self._done])[0]
        error: JaxfleetError | None = None
        count = 0
        if client.me.trainer == 0:
            try:
                count = work(slowest)
            except JaxfleetError as found:
                error = found
        failed, found_of_first = self._greatest(what, [int(error is not None), count])
        if error is not None:
            raise error
        if failed:
            raise CheckpointError(
                f"trainer 0 could not {what}", hint="its own error has the reason"
            )
        return found_of_first

    def _greatest(self, what: str, told: Sequence[int]) -> list[int]:
        """Elementwise maximum over all workers."""
        came: list[int] = []

        def take(answer: Sequence[Tensor]) -> None:
            came.extend(int(value) for tensor in answer for value in tensor.array)

        client = self._connection.client
        body: dict[str, Plain] = {"key": f"{self._times}: {what}", "how": "max"}
        tensors = [Tensor("told", np.asarray(told, np.int64))]
        more: dict[str, Any] = {"tensors": tensors, "wants": ["told"], "sink": take}
        # Workers may be at different steps, but their calls meet at the same point of the script.
        client.wait([client.request(0, Kind.REDUCE, step=self._times, body=body, **more)])
        return came
