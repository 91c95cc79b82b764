"""When a trainer's step begins and ends, and what it exchanges with servers meanwhile."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxfleet.ir import Program
from jaxfleet.lower import ExecutableCache
from jaxfleet.ps.client import Client
from jaxfleet.ps.communicator import Communicator
from jaxfleet.ps.geo_tables import GeoTables
from jaxfleet.ps.halves import exchange_of, step_of
from jaxfleet.ps.manner import Manner
from jaxfleet.ps.mean_tables import MeanTables
from jaxfleet.ps.rounds import Rounds
from jaxfleet.ps.tables import RemoteTables
from jaxfleet.ps.trainer import Trainer
from jaxfleet.ps.trainer_tables import TrainerTables
from jaxfleet.tables import TableSpec
from jaxfleet.tables.access import TableAccess


class Pace:
    """What a trainer waits for at each step, as its program says.

    Args:
        program: the trainer's.
        cache: where executables are kept.

    Attributes:
        manner: how it goes together with servers; None where all wait for each other.
    """

    def __init__(self, program: Program, cache: ExecutableCache) -> None:
        self._program, self._cache = program, cache
        self.manner = Manner.of(program)
        self._communicator: Communicator | None = None
        self._rounds: Rounds | None = None
        self._tables: GeoTables | MeanTables | None = None

    def open(self, client: Client) -> None:
        """Begins, with lines to servers that have answered."""
        if self.manner is None:
            return
        if self.manner.updates_here:
            exchange = exchange_of(self._program)
            trainer = Trainer(exchange, client, self._cache, ahead=self.manner.ahead)
            self._rounds = Rounds(client, self.manner, trainer)
        else:
            self._communicator = Communicator(client, self.manner)

    def tables(self, remote: RemoteTables, specs: Sequence[TableSpec]) -> TableAccess:
        """Returns what a step looks rows up in: servers' tables, or rows that this trainer updates.

        Gradients that are averaged before they go to servers are those of rows, too.
        """
        if self.manner is None or not specs:
            return remote
        if self.manner.averages:
            self._tables = MeanTables(remote)
            assert self._communicator is not None
            self._communicator.send_rows = self._tables.send
            return self._tables
        if not self.manner.updates_here:
            return remote
        trainers, k_steps = remote.trainers, self.manner.k_steps
        self._tables = GeoTables(remote, specs, k_steps=k_steps, trainers=trainers)
        return self._tables

    @property
    def is_sync(self) -> bool:
        """Whether all wait for each other at every step."""
        return self.manner is None

    def trainer(
        self, program: Program, client: Client, tables: TrainerTables | None = None
    ) -> Trainer:
        """Returns what runs a step of a program that goes at this pace."""
        if self.manner is None:
            return Trainer(program, client, self._cache, tables=tables)
        program = step_of(program) if self.manner.updates_here else program
        return Trainer(
            program,
            client,
            self._cache,
            tables=tables,
            communicator=self._communicator,
            ahead=self.manner.ahead,
        )

    def begin(self, client: Client, rows: int) -> dict[str, Any]:
        """Begins a step, once it may; returns the values that came since the last.

        Args:
            client: the lines to the servers.
            rows: of the whole batch.
        """
        inner = self._inner()
        fresh = inner.begin() if inner is not None else {}
        if self._rounds is None or not self._rounds.counts_exchanges:
            client.next_step(rows if self.is_sync else 0)
        return fresh

    def end(self, values: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """Ends a step that made values; returns those that servers gave since.

        Args:
            values: of the state.
            rows: that this trainer trained on.
        """
        return self._rounds.end(values, rows) if self._rounds is not None else {}

    def flush(self) -> None:
        """Makes servers have all that this trainer has done."""
        if isinstance(self._tables, GeoTables):
            self._tables.flush()
        inner = self._inner()
        if inner is not None:
            inner.flush()

    def take(self) -> dict[str, Any]:
        """Returns values that came since the last step ended."""
        if self._communicator is not None:
            return self._communicator.take()
        return self._rounds.take() if self._rounds is not None else {}

    def restart(self, values: Mapping[str, Any]) -> None:
        """Begins anew with values that servers have too, as all trainers do."""
        if self._communicator is not None:
            self._communicator.restart()
        if self._rounds is not None:
            self._rounds.restart(values)
        if self._tables is not None:
            self._tables.restart()

    def stats(self) -> dict[str, Any]:
        """Returns how old the values were that steps computed with."""
        inner = self._inner()
        return {} if inner is None else {"staleness": inner.stats()}

    def _inner(self) -> Communicator | Rounds | None:
        return self._communicator if self._communicator is not None else self._rounds
