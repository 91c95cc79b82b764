"""A trainer's connection to its servers, and the exchanges of each step."""

import atexit
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxfleet.errors import PeerLostError
from jaxfleet.ir import Program
from jaxfleet.lower import ExecutableCache
from jaxfleet.passes.pserver.local_update import exchange_program, step_program
from jaxfleet.ps.client.async_tables import AveragedTables, GeoTables
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.communicator import CommunicationMode, Communicator
from jaxfleet.ps.client.periodic_exchange import PeriodicExchange, StateKeeper
from jaxfleet.ps.client.remote_tables import RemoteTables
from jaxfleet.ps.client.trainer_executor import TrainerExecutor, TrainerTables
from jaxfleet.ps.membership import MembershipChangedError
from jaxfleet.tables import TableSpec
from jaxfleet.tables.access import TableAccess


class TrainerSync:
    """Synchronization of a trainer with its servers, as its program specifies.

    Args:
        program: the trainer's.
        cache: of executables.

    Attributes:
        mode: a relaxed communication mode; None for sync.
    """

    def __init__(self, program: Program, cache: ExecutableCache) -> None:
        self._program, self._cache = program, cache
        self.mode = CommunicationMode.of(program)
        self._communicator: Communicator | None = None
        self._rounds: PeriodicExchange | None = None
        self._tables: GeoTables | AveragedTables | None = None
        self._former_tables: GeoTables | AveragedTables | None = None

    def open(self, client: Client, keeper: StateKeeper) -> None:
        """Starts, with a client whose servers have answered; exchanges use the `keeper`."""
        if self.mode is None:
            return
        if self.mode.updates_here:
            exchange = exchange_program(self._program)
            trainer = TrainerExecutor(exchange, client, self._cache, ahead=self.mode.ahead)
            self._rounds = PeriodicExchange(client, self.mode, trainer, keeper)
        else:
            self._communicator = Communicator(client, self.mode)

    def tables(self, remote: RemoteTables, specs: Sequence[TableSpec]) -> TableAccess:
        """Returns the tables of a step: servers' tables, or rows that this trainer updates.

        Gradients that are averaged before they are sent include those of rows.
        """
        if self.mode is None or not specs:
            return remote
        if self.mode.averages:
            self._tables = AveragedTables(remote)
            assert self._communicator is not None
            self._communicator.send_rows = self._tables.send
            return self._tables
        if not self.mode.updates_here:
            return remote
        trainers, k_steps = remote.trainers, self.mode.k_steps
        self._tables = made = GeoTables(remote, specs, k_steps=k_steps, trainers=trainers)
        if isinstance(self._former_tables, GeoTables):
            made.take_over(self._former_tables)
        assert self._rounds is not None
        self._rounds.send_rows = made.flush
        return made

    @property
    def is_sync(self) -> bool:
        return self.mode is None

    @property
    def counts_exchanges(self) -> bool:
        """Whether the client's steps are exchanges, for which servers wait for all trainers."""
        return self.mode is not None and self.mode.averages_state

    def trainer(
        self, program: Program, client: Client, tables: TrainerTables | None = None
    ) -> TrainerExecutor:
        if self.mode is None:
            return TrainerExecutor(program, client, self._cache, tables=tables)
        trainer = TrainerExecutor(
            self.program_of_steps(program),
            client,
            self._cache,
            tables=tables,
            communicator=self._communicator,
            ahead=self.mode.ahead,
        )
        if self._communicator is not None:
            self._communicator.receive = trainer.receive
        return trainer

    def program_of_steps(self, program: Program) -> Program:
        """Returns the part of a trainer's program that runs in every step."""
        updates_here = self.mode is not None and self.mode.updates_here
        return step_program(program) if updates_here else program

    def begin(self, client: Client, rows: int) -> dict[str, Any]:
        """Begins a step of `rows` rows, once it may; returns the values received since the last."""
        inner = self._inner()
        fresh = inner.begin() if inner is not None else {}
        if not self.counts_exchanges:
            client.next_step(rows if self.is_sync else 0)
        return fresh

    def end(self, values: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """Ends a step on `rows` rows with new state values; returns those received since."""
        return self._rounds.end(values, rows) if self._rounds is not None else {}

    def flush(self) -> None:
        """Completes all updates of this trainer on the servers."""
        inner = self._inner()
        if inner is not None:
            inner.flush()

    def idle(self, client: Client) -> None:
        """Takes a step without gradients, after everything before it was sent."""
        client.next_step(0)
        client.doing(f"step {client.step}, without samples")
        client.idle()

    def drain(self, client: Client) -> None:
        """Completes all updates, also those of steps without gradients, on all servers."""
        self.flush()
        client.wait(client.confirm())

    def take_over(self, other: "TrainerSync", client: Client, keeper: StateKeeper) -> None:
        """Goes on in another place of the job, with its client, where the other was drained."""
        self.open(client, keeper)
        inner, former = self._inner(), other._inner()  # noqa: SLF001  # of its own class
        if isinstance(inner, Communicator) and isinstance(former, Communicator):  # noqa: SIM114  # typed apart
            inner.take_over(former)
        elif isinstance(inner, PeriodicExchange) and isinstance(former, PeriodicExchange):
            inner.take_over(former)
        self._former_tables = other._tables  # noqa: SLF001

    def take(self) -> dict[str, Any]:
        """Returns values received since the last step ended."""
        if self._communicator is not None:
            return self._communicator.take()
        return self._rounds.take() if self._rounds is not None else {}

    def steps_of(self, client: Client) -> int:
        """Returns the number of steps that the newest state includes."""
        if self._rounds is not None and self.counts_exchanges:
            return self._rounds.trained
        return client.step

    def restart(
        self, values: Mapping[str, Any], clock: int | None = None, trained: int | None = None
    ) -> None:
        """Restarts from values that servers have too, on all trainers.

        Only this trainer restarts if there is a `clock`: the values include what all trainers sent
        of their steps up to this one. `trained` is the number of steps that they include, where
        servers count exchanges; by default those so far.
        """
        if self._communicator is not None:
            self._communicator.restart(clock)
        if self._rounds is not None:
            self._rounds.restart(values, clock, trained)
        if self._tables is not None:
            self._tables.restart()

    def stats(self) -> dict[str, Any]:
        """Returns the age of the values that steps used."""
        inner = self._inner()
        return {} if inner is None else {"staleness": inner.stats()}

    def _inner(self) -> Communicator | PeriodicExchange | None:
        return self._communicator if self._communicator is not None else self._rounds


class TrainerConnection:
    """A trainer's client of the servers, and their tables.

    Args:
        connect: makes the client.
        pace: returns what is started once connected, and flushed before disconnecting.
        keeper: returns what keeps this trainer's own state at exchanges.
        specs: of the tables.

    Attributes:
        pace: what was started; None before.
        found: the servers' step when this trainer connected; -1 before, or without a state.
    """

    def __init__(
        self,
        connect: Callable[[], Client],
        pace: Callable[[], TrainerSync],
        keeper: Callable[[], StateKeeper],
        specs: Sequence[TableSpec],
    ) -> None:
        self._connect, self._new_pace, self._keeper, self._specs = connect, pace, keeper, specs
        self.pace: TrainerSync | None = None
        self._is_drained = False  # for another place
        self._client: Client | None = None
        self._tables: RemoteTables | None = None
        self._trained: TableAccess | None = None
        self._process = -1  # owner of the client: a fork only has a copy
        self.found = -1

    @property
    def client(self) -> Client:
        """The client, connected on first use."""
        if self._client is None:
            self._client = self._connect()
            self._process = os.getpid()
            atexit.register(self._at_exit)
            if not self._client.servers[0].is_open:  # a process that has joined is connected
                self.found = self._opened(self._client)
                self._client.step = max(self.found, 0) if self._client.former is None else 0
            self.pace = self._new_pace()  # of the place that it has
            self.pace.open(self._client, self._keeper())
        return self._client

    def _opened(self, client: Client) -> int:
        try:
            return client.open()
        except MembershipChangedError:
            what = f"the job of {client.me.name} goes on with other trainers"
            hint = "JAXFLEET_JOINS=1 lets a process join a job that runs"
            raise PeerLostError(what, hint=hint) from None

    @property
    def tables(self) -> RemoteTables:
        if self._tables is None:
            self._tables = RemoteTables(self.client, self._specs)
        return self._tables

    @property
    def trained(self) -> TableAccess:
        """The tables that steps look up and train."""
        if self._trained is None:
            tables = self.tables
            assert self.pace is not None  # since there is a client
            self._trained = self.pace.tables(tables, self._specs)
        return self._trained

    def drain(self) -> None:
        """Completes all updates, once, before another place is taken."""
        pace = self.pace
        if pace is not None and not pace.is_sync and not self._is_drained:
            pace.drain(self.client)
            self._is_drained = True

    def replace(self, client: Client, pace: TrainerSync) -> None:
        """Goes on in another place of the job."""
        if self.pace is not None and not pace.is_sync:
            pace.take_over(self.pace, client, self._keeper())
        self._client, self.pace, self._is_drained = client, pace, False
        self._tables = self._trained = None

    def close(self) -> None:
        """Flushes this trainer's updates, and disconnects."""
        client = self._own()
        if client is not None:
            try:
                if self.pace is not None:
                    self.pace.flush()
            finally:
                client.close()

    def abandon(self, why: str = "") -> None:
        """Disconnects without a bye, as a failed trainer; `why` is its last heartbeat."""
        client = self._own()
        if client is not None:
            client.abandon(why)

    def _at_exit(self) -> None:
        """Disconnects when the script has ended: it has no more gradients to send.

        Python keeps the exception that ended it, and Jupyter that of a cell, which may be long ago.
        """
        failed = getattr(sys, "last_value", None)
        if failed is not None and "IPython" not in sys.modules:
            self.abandon(f"failed with {type(failed).__name__}")
        else:
            self.close()

    def _own(self) -> Client | None:
        """Returns the client if this process connected it; a fork need not close it."""
        if self._client is None or self._process != os.getpid():
            return None
        atexit.unregister(self._at_exit)
        return self._client
