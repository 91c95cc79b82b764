"""What an executor does with programs that talk to other processes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.fluid.drawing import RUN
from jaxfleet.fluid.plans import Names
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.pserver.connections import PROCESS, Connection, Connections
from jaxfleet.fluid.pserver.facts import Facts, facts_of, with_facts_of_server
from jaxfleet.fluid.pserver.geo import GeoExchange
from jaxfleet.fluid.pserver.notices import NOTICES, TABLES, is_notice, run_notices, save_table
from jaxfleet.fluid.pserver.programs import plain_trainer
from jaxfleet.fluid.pserver.refusals import check_runnable
from jaxfleet.fluid.pserver.row_programs import distributed_tables, ids_of_any_size
from jaxfleet.fluid.pserver.served_values import Parts, pull_whole
from jaxfleet.fluid.pserver.serving import serve_program
from jaxfleet.fluid.pserver.training import TrainerRun
from jaxfleet.fluid.to_ir import ir_program
from jaxfleet.fluid.transpiler.table_spec import SPECS
from jaxfleet.fluid.versions import PerVersion
from jaxfleet.ir import Program as IrProgram
from jaxfleet.ops import Array
from jaxfleet.passes.geo_sgd import MODE as GEO
from jaxfleet.runtime.prepared import not_fed
from jaxfleet.runtime.scope import Scope

_SERVE = frozenset({"listen_and_serv", "fl_listen_and_serv"})
_TALK = frozenset({*NOTICES, *_SERVE, "send", "recv", "send_barrier", "fetch_barrier", "prefetch"})


def talks_to_others(program: Program) -> bool:
    """Tells whether a run of a program needs servers or trainers."""
    return any(op.type in _TALK for op in program.global_block().ops)


def begins_rows(program: Program) -> bool:
    """Tells whether a program begins a server that has a distributed table, without rows then."""
    facts = program._facts
    is_servers = facts.get("role") == "pserver" and bool(facts.get(SPECS))
    return is_servers and not talks_to_others(program)


def refuse_several_devices(program: Program) -> None:
    """Refuses to run a program that talks to others on several devices of a process.

    Raises:
        ProgramError: it does.
    """
    if talks_to_others(program):
        what = "a program that sends and receives runs on one device, and is compiled for several"
        hint = "compile it with places=fluid.cpu_places(1), and start a trainer for each device"
        raise ProgramError(what, hint=hint)


class PserverRuns:
    """Runs servers' and trainers' programs for an executor.

    Args:
        connections: those of the process, unless given.
    """

    def __init__(self, connections: Connections | None = None) -> None:
        self.connections = connections if connections is not None else PROCESS
        self._used: list[Connection] = []
        self._geo: dict[Facts, GeoExchange] = {}
        self._wide = PerVersion(ids_of_any_size)
        self._known: PerVersion[dict[tuple[Names, Names], TrainerRun]] = PerVersion(lambda _: {})

    def run(
        self,
        program: Program,
        runnable: Callable[[Program, Sequence[str]], IrProgram],
        fed: Mapping[str, Any],
        fetch: Names,
        scope: Scope,
        draw: Callable[[], Any],
    ) -> list[Array]:
        """Runs a program once; returns what is fetched.

        Args:
            program: a server's, which serves until all trainers have closed; or a trainer's.
            runnable: gives it in the IR, as an executor runs it.
            fed: values for data.
            fetch: the names that are fetched.
            scope: has the state, and gets it.
            draw: returns what this run's random operators draw by.

        Raises:
            ProgramError: it cannot be run as it is written, or its job is another than the others'.
            FeedError: a value is not fed or not in the scope.
            ConnectError: a server does not answer, or the server's endpoint is taken.
            PeerLostError: a server, or another trainer, went or takes too long.
            ClosedError: this trainer has closed before, or gave up.
        """
        if is_notice(program):
            run_notices(program, self.connections)
            return []
        if program.global_block().ops[0].type in _SERVE:
            made = with_facts_of_server(runnable(program, ()))
            check_runnable(made)
            serve_program(made, scope, self.connections)
            return []
        run = self._trainer(program, runnable, tuple(fed), fetch)
        data = {**fed, RUN: draw()} if RUN in run.data else fed
        missing = [name for name in run.data if name not in data]
        if missing:
            raise not_fed(run.program, missing[0], [name for name in run.data if name != RUN])
        exchanges = self._exchanges(program, run.connection, scope)
        found = run.run(data, scope)
        if exchanges is not None:
            exchanges.step(_looked_up(program, data), scope)
        return [found[name] for name in run.fetched]

    def ids_of_any_size(self, program: Program) -> frozenset[str]:
        """Returns what is fed and stays the 64 bits that it is."""
        return self._wide.get(program)

    def pull(self, program: Program, parts: Parts) -> dict[str, np.ndarray]:
        """Returns whole variables as servers have them; see `pull_whole`.

        Raises:
            ProgramError: the program has not run here, so there are no servers yet.
        """
        return pull_whole(self._spoken(program), parts)

    def save_tables(self, program: Program, folder: Path) -> None:
        """Has servers write the distributed tables of a program; see `save_table`.

        Raises:
            ProgramError: the program has not run here, so there are no servers yet.
        """
        for spec in distributed_tables(ir_program(program)):
            save_table(self._spoken(program), spec.name, folder / TABLES)

    def _spoken(self, program: Program) -> Connection:
        """Returns the connection of a trainer's program that has run here."""
        facts = facts_of(ir_program(program))
        mine = [one for one in self._used if one.facts == facts]
        if not mine:
            what = "this executor has not spoken with the servers of the program"
            raise ProgramError(what, hint="run the trainer's startup program with it first")
        return mine[0]

    def close(self) -> None:
        """Tells the servers of every program that ran that this trainer is done."""
        while self._used:
            self._used.pop().close()
        self._known.clear()

    def _exchanges(
        self, program: Program, connection: Connection, scope: Scope
    ) -> GeoExchange | None:
        """Returns what exchanges changes after a run of a program, begun; None for no such run."""
        if connection.facts.mode != GEO:
            return None
        if any(op.type == "recv" for op in program.global_block().ops):  # a startup program
            self._geo.pop(connection.facts, None)
            return None
        known = self._geo.get(connection.facts)
        if known is None:
            known = self._geo[connection.facts] = GeoExchange.of(ir_program(program), connection)
            known.begin(scope)
        return known

    def _trainer(
        self,
        program: Program,
        runnable: Callable[[Program, Sequence[str]], IrProgram],
        fed: Names,
        fetch: Names,
    ) -> TrainerRun:
        known = self._known.get(program)
        run = known.get((fed, fetch))
        if run is None:
            made = runnable(program, fed)
            check_runnable(made)
            plain, connection = plain_trainer(made, fetch), self._connection(made)
            run = known[fed, fetch] = TrainerRun(plain, connection, self.connections.cache)
        return run

    def _connection(self, made: IrProgram) -> Connection:
        facts = facts_of(made)
        mine = [one for one in self._used if one.facts == facts]
        if mine:
            mine[0].check()
            return mine[0]
        found = self.connections.get(facts)
        self._used.append(found)
        return found


def _looked_up(program: Program, data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields sparse tables with the ids that a step looked up in them, as its last `send` says."""
    send = program.global_block().ops[-1]
    for table, ids in zip(send.attr("send_varnames"), send.input("X"), strict=True):
        yield table, data[ids]
