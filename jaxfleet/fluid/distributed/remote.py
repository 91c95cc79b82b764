"""The tables of a Downpour job on servers, as one of its workers sees them.

All are tables of rows by key. A dense table's rows are pieces of its parameters. Servers have what
was added to them (`begun + row`), and trainer 0 says at the first step what they began with; a
table of counts and sums begins with them at once, since what is pushed is added to it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.fluid.distributed.descriptions import DenseSGDRuleParameter, TableParameter
from jaxfleet.fluid.distributed.live import Push, flat, scores, shaped
from jaxfleet.ps.client import Client
from jaxfleet.ps.messages import Kind, Plain
from jaxfleet.ps.tables import RemoteTables
from jaxfleet.runtime.job_saving import meet
from jaxfleet.tables import Constant, DownpourAdam, Sgd, Summary, TableSpec
from jaxfleet.tables.spec import Part

_PIECE = 64  # elements of a dense table that are a row
BEGUN = ".begun"  # ends the name of a table that holds what a dense one began with
_NONE = np.zeros(0, np.int64)


def dense_specs(table: TableParameter) -> list[TableSpec]:
    """Returns what a dense table is to servers of rows.

    Raises:
        ProgramError: no rule is said, or one that servers do not have.
    """
    rule, name = _rule(table), dense_name(table.table_id or 0)
    made = [TableSpec(name=name, dim=_PIECE, initializer=Constant(0.0), optimizer=rule)]
    if not isinstance(rule, Summary):
        kept = Summary(keep=1.0)
        made.append(
            TableSpec(name=name + BEGUN, dim=_PIECE, initializer=Constant(0.0), optimizer=kept)
        )
    return made


def dense_name(table_id: int) -> str:
    """Returns what servers call a dense table."""
    return f"dense.{table_id}"


def _rule(table: TableParameter) -> Part:
    said = table.accessor.dense_sgd_param if table.accessor else None
    match said:
        case DenseSGDRuleParameter(name="adam") if said.adam is not None:
            adam = said.adam
            return DownpourAdam(
                adam.learning_rate or 0.0,
                adam.ada_decay_rate or 0.0,
                adam.mom_decay_rate or 0.0,
                adam.ada_epsilon or 0.0,
            )
        case DenseSGDRuleParameter(name="naive") if said.naive is not None:
            return Sgd(said.naive.learning_rate or 0.0)
        case DenseSGDRuleParameter(name="summary") if said.summary is not None:
            return Summary(said.summary.summary_decay_rate or 0.0)
    what = f"a dense table is updated by {said.name if said else None!r}, of which nothing is said"
    raise ProgramError(what, hint="adam, naive and summary are there, each with its numbers")


class ServedTables:
    """A worker's view of tables on servers; see `LiveTables` for what it does.

    Args:
        client: the worker's lines, open.
        specs: all tables of the job.
        is_lockstep: all workers push before any looks up again.
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
        """The present step."""
        return self.client.step

    def declare(self, table_id: int, name: str, dim: int, *, shows: bool) -> None:
        """Checks that servers have a sparse table of such rows.

        Raises:
            ProgramError: they have not.
        """
        del table_id, shows
        known = self._specs.get(name)
        if known is None or known.dim != dim:
            what = f"servers have no table '{name}' with rows of {dim}"
            raise ProgramError(what, hint="servers are given the same programs as workers")

    def begin_dense(self, table_id: int, values: Sequence[np.ndarray]) -> None:
        """Gives a dense table its first values, if this is trainer 0 and nobody has stepped."""
        if table_id in self._sizes:
            return
        whole = flat(values)
        self._sizes[table_id] = whole.size
        name = dense_name(table_id)
        given = name + BEGUN if name + BEGUN in self._specs else name
        if self.client.me.trainer == 0:
            self._first[given] = _pieces(whole)

    def look_up(self, name: str, keys: np.ndarray) -> np.ndarray:
        """Returns the rows of a sparse table."""
        self.begin()
        return self._tables.look_up(name, keys)

    def pull_dense(
        self, table_id: int, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, np.ndarray]:
        """Returns the parameters of a dense table by name."""
        self.begin()
        name, size = dense_name(table_id), self._sizes[table_id]
        whole = self._whole(name, size)
        if name + BEGUN in self._specs:
            if table_id not in self._begun:
                self._begun[table_id] = self._whole(name + BEGUN, size).copy()
            whole = self._begun[table_id] + whole
        return shaped(whole, shapes)

    def push(self, rows: Mapping[str, Push], dense: Mapping[int, Sequence[np.ndarray]]) -> None:
        """Pushes a step's gradients, and goes on to the next step."""
        pieces = {dense_name(number): _pieces(flat(grads)) for number, grads in dense.items()}
        self._push({**rows, **pieces})

    def begin(self) -> None:
        """Makes the first step of all workers, in which trainer 0 says how parameters begin."""
        if not self._is_begun:
            self._is_begun = True
            self._push(self._not_there_yet())
            if not self._is_lockstep:
                self.settle()  # of trainer 0 these are the first values
                meet(self.client, "train")

    def _not_there_yet(self) -> dict[str, Push]:
        """Returns the first values that servers lack: what they loaded goes before."""
        if not self._first:
            return {}
        counted = self._tables.stats()
        have = {name for name, of_table in counted.items() if of_table.get("rows")}
        return {name: push for name, push in self._first.items() if name not in have}

    def forget(self) -> None:
        """Forgets what dense tables began with: servers have taken up something else."""
        self._begun.clear()

    def add_dense(self, changes: Mapping[int, Sequence[np.ndarray]]) -> None:
        """Adds changes to dense tables, whatever their rules: a step, which all workers do."""
        self.begin()
        pieces = {dense_name(number): _pieces(flat(each)) for number, each in changes.items()}
        self._push(pieces, adds=True)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Returns what servers counted of each table."""
        return self._tables.stats()

    @property
    def names(self) -> tuple[str, ...]:
        """All tables, those of dense parameters included."""
        return tuple(self._specs)

    def settle(self) -> None:
        """Waits until servers have applied what this worker pushed."""
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
    """Returns an array as rows by key, the last filled with zeros."""
    count = -(-whole.size // _PIECE)
    rows = np.zeros((count, _PIECE), np.float32)
    rows.reshape(-1)[: whole.size] = whole
    return np.arange(count, dtype=np.int64), rows


def specs_of(tables: Iterable[TableParameter], sparse: Iterable[TableSpec]) -> list[TableSpec]:
    """Returns all tables of a job as servers have them: sparse ones, and dense ones as rows."""
    dense = [spec for t in tables if t.type == "PS_DENSE_TABLE" for spec in dense_specs(t)]
    return [*sparse, *dense]
