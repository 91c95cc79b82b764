"""Runs a trainer's program: its computation, and between what servers are sent and asked."""

from collections.abc import Mapping
from typing import Any

from jaxfleet.errors import FeedError
from jaxfleet.fluid.pserver.connections import Connection
from jaxfleet.fluid.pserver.programs import PlainTrainer
from jaxfleet.fluid.pserver.row_traffic import RowTraffic
from jaxfleet.ir import Kind
from jaxfleet.lower import ExecutableCache, bind_sizes
from jaxfleet.ops import Array
from jaxfleet.ps.trainer import Trainer
from jaxfleet.runtime.prepared import read_before_written
from jaxfleet.runtime.scope import Scope


class TrainerRun:
    """A trainer's program that is ready to run, for one choice of what is fed and fetched.

    Attributes:
        program: it, without what only fluid needs.
        data: the names that are fed.
        fetched: the names of what is fetched, in order.
        connection: the lines to its servers.
    """

    def __init__(self, plain: PlainTrainer, connection: Connection, cache: ExecutableCache) -> None:
        self.program, self.connection = plain.program, connection
        self._plain, self.fetched = plain, plain.fetched
        needed, program = read_before_written(plain.program), plain.program
        self._rows = RowTraffic(plain.tables, connection.client)
        self._fed = tuple(v.name for v in program.of_kind(Kind.DATA) if v.name in needed)
        made = {name for table in plain.tables for name in (table.rows, *table.places.values())}
        ids = (name for table in plain.tables for name in table.places)
        self.data = tuple(dict.fromkeys((*ids, *(n for n in self._fed if n not in made))))
        persistable = program.of_kind(Kind.PARAM, Kind.STATE)
        self._state = tuple(v.name for v in persistable if v.name in needed)
        self._trainer = Trainer(program, connection.client, cache, self._rows.push)

    def run(self, data: Mapping[str, Any], scope: Scope) -> dict[str, Array]:
        """Runs it; returns what is fetched, by name, and leaves the rest in the scope.

        Raises:
            FeedError: a value is not fed, not in the scope, or of another shape.
            PeerLostError: a server, or another trainer, went or takes too long.
            ClosedError: this trainer has closed, or gave up.
        """
        self.connection.check()
        program, client = self.program, self.connection.client
        state = self._held(scope)
        given = {**data, **self._rows.look_up(data)}
        fed = {name: given[name] for name in self._fed}
        sizes = bind_sizes((program.variables[name], value.shape) for name, value in fed.items())
        if self._plain.is_step:
            client.next_step(0)  # trainers' batches may differ in size
        client.doing(f"step {client.step}" if self._plain.is_step else "startup")
        try:
            _, values = self._trainer.run(state, fed, sizes)
        except Exception as error:
            self._failed(error)
            raise
        made = dict(zip(self._plain.wanted, values, strict=True))
        scope.keep({name: made[name] for name in self._plain.outliving})
        for name in self._plain.outliving:
            _ = scope[name]  # a server's memory, maybe: no run may take it for its results
        return made

    def _held(self, scope: Scope) -> dict[str, Array]:
        for name in self._state:
            if name not in scope:
                found = self.program.variables[name].type
                what = f"'{name}' ({found}) is not in the scope, and the trainer's program reads it"
                raise FeedError(what, hint="run the startup program first, in the same scope")
        return {name: scope.peek(name) for name in self._state}

    def _failed(self, error: Exception) -> None:
        """Lets a step be tried again of which nothing was sent; gives up after another."""
        client = self.connection.client
        if not self._plain.is_step:
            return
        if client.has_pushed(client.step):
            self.connection.fail(error)
        else:
            client.step -= 1
