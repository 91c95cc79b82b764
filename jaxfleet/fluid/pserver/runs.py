"""Execution of programs that exchange messages, and the checks that reject some before a run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.fluid.framework.program import KeyedCache, Program, VersionCache
from jaxfleet.fluid.framework.to_ir import ir_program
from jaxfleet.fluid.lowering.program_cache import Names
from jaxfleet.fluid.lowering.rewrites import RUN
from jaxfleet.fluid.pserver.async_normalization import with_parts, with_trainer_sums
from jaxfleet.fluid.pserver.checkpoint_notify import (
    CHECKPOINT_OPS,
    TABLES,
    is_checkpoint_op,
    run_checkpoint_ops,
    save_table,
)
from jaxfleet.fluid.pserver.connections import (
    PROCESS,
    Connection,
    Connections,
    JobInfo,
    job_info_of,
    serve_program,
    with_server_info,
)
from jaxfleet.fluid.pserver.normalization import (
    normalize_trainer,
    served_blocks,
    server_inputs,
    without_tables,
)
from jaxfleet.fluid.pserver.row_programs import LOOK_UP, distributed_tables, ids_of_any_size
from jaxfleet.fluid.pserver.trainer import GeoExchange, Parts, TrainerRun, pull_whole
from jaxfleet.fluid.transpiler.pserver_job import REASON, SPECS
from jaxfleet.ir import Kind, Operator
from jaxfleet.ir import Program as IrProgram
from jaxfleet.ir.naming import GRAD
from jaxfleet.ops import Array
from jaxfleet.passes.fluid.job import GEO
from jaxfleet.passes.fluid.local_training import SAMPLES
from jaxfleet.runtime.compiled_program import not_fed
from jaxfleet.runtime.program_timing import FirstRunTimer
from jaxfleet.runtime.scope import Scope
from jaxfleet.runtime.trainer_timing import TrainerTimer
from jaxfleet.runtime.transpile import begin_series, run_passes

_SERVE = frozenset({"listen_and_serv", "fl_listen_and_serv"})
_TALK = frozenset(
    {*CHECKPOINT_OPS, *_SERVE, "send", "recv", "send_barrier", "fetch_barrier", "prefetch"}
)


def talks_to_others(program: Program) -> bool:
    """Whether a run of a program needs servers or trainers."""
    return any(op.type in _TALK for op in program.global_block().ops)


def begins_rows(program: Program) -> bool:
    """Whether a program initializes a server with a distributed table, which gets no rows then."""
    facts = program._facts
    is_servers = facts.get("role") == "pserver" and bool(facts.get(SPECS))
    return is_servers and not talks_to_others(program)


def refuse_several_devices(program: Program) -> None:
    """Raises ProgramError if a program compiled for several devices communicates."""
    if talks_to_others(program):
        what = "a program that sends and receives runs on one device, and is compiled for several"
        hint = "compile it with places=fluid.cpu_places(1), and start a trainer for each device"
        raise ProgramError(what, hint=hint)


class PserverRuns:
    """Runs servers' and trainers' programs for an executor."""

    def __init__(self, connections: Connections | None = None) -> None:
        self.connections = connections if connections is not None else PROCESS
        self._used: list[Connection] = []
        self._geo: dict[JobInfo, GeoExchange] = {}
        self._wide = VersionCache(ids_of_any_size)
        self._known = KeyedCache[tuple[Names, Names], TrainerRun]()

    def run(
        self,
        program: Program,
        runnable: Callable[[Program, Sequence[str]], IrProgram],
        fed: Mapping[str, Any],
        fetch: Names,
        scope: Scope,
        draw: Callable[[], Any],
    ) -> list[Array]:
        """Runs a program once; returns the fetched values.

        A server's program serves until all trainers have closed. `runnable` converts a program to
        the IR as an executor runs it; `draw` returns the run number, a key of random operators.

        Raises:
            ProgramError: it cannot run as written, or its job differs from that of the peers.
            FeedError: an input is neither fed nor in the scope.
            ConnectError: a server does not answer, or the server's endpoint is in use.
            PeerLostError: a server or another trainer left or timed out.
            ClosedError: this trainer has closed, or failed.
        """
        if is_checkpoint_op(program):
            run_checkpoint_ops(program, self.connections)
            return []
        if program.global_block().ops[0].type in _SERVE:
            made = with_server_info(runnable(program, ()))
            check_runnable(made)
            serve_program(made, scope, self.connections)
            return []
        key = (tuple(fed), fetch)
        run = self._known.find(program, key, partial(self._trainer, program, runnable, *key))
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
        """Returns the fed variables that keep 64 bits."""
        return self._wide.get(program)

    def pull(self, program: Program, parts: Parts) -> dict[str, np.ndarray]:
        """Returns whole variables from the servers; see `pull_whole`. The program must have run."""
        return pull_whole(self._spoken(program), parts)

    def save_tables(self, program: Program, folder: Path) -> None:
        """Makes servers write the tables of a program that has run; see `save_table`."""
        for spec in distributed_tables(ir_program(program)):
            save_table(self._spoken(program), spec.name, folder / TABLES)

    def _spoken(self, program: Program) -> Connection:
        """Returns the connection of a trainer's program that has run here."""
        facts = job_info_of(ir_program(program))
        mine = [one for one in self._used if one.facts == facts]
        if not mine:
            what = "this executor has not connected to the servers of the program"
            raise ProgramError(what, hint="run the trainer's startup program with it first")
        return mine[0]

    def close(self) -> None:
        """Closes this trainer at the servers of every program that ran."""
        while self._used:
            self._used.pop().close()
        self._known.clear()

    def _exchanges(
        self, program: Program, connection: Connection, scope: Scope
    ) -> GeoExchange | None:
        """Returns the GEO exchanges of a program, started; None if it has none."""
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
        made = runnable(program, fed)
        check_runnable(made)
        plain, connection = normalize_trainer(made, fetch), self._connection(made)
        series, cache, timer = begin_series(), self.connections.cache, None
        if series is not None and plain.is_step:
            run_passes(plain.program, (), series=series)
            if (first := FirstRunTimer.of(series)) is not None:
                timer = TrainerTimer(first, connection.client, cache)
        return TrainerRun(plain, connection, cache, timer)

    def _connection(self, made: IrProgram) -> Connection:
        facts = job_info_of(made)
        mine = [one for one in self._used if one.facts == facts]
        if mine:
            mine[0].check()
            return mine[0]
        found = self.connections.get(facts)
        self._used.append(found)
        return found


def _looked_up(program: Program, data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields sparse tables with the ids of a step's lookups, as its last `send` specifies."""
    send = program.global_block().ops[-1]
    for table, ids in zip(send.attr("send_varnames"), send.input("X"), strict=True):
        yield table, data[ids]


Rule = Callable[[IrProgram], str | None]


def why_not(program: IrProgram) -> str | None:
    """Returns why a program cannot be run exactly, and what to do; None if it can."""
    return next((reason for rule in _RULES if (reason := rule(program)) is not None), None)


def check_runnable(program: IrProgram) -> None:
    """Raises ProgramError, with the reason and a hint, if a program cannot be run exactly."""
    reason = why_not(program)
    if reason is not None:
        what, _, hint = reason.partition("; ")
        raise ProgramError(what, hint=hint or None)


def _of_tables(program: IrProgram) -> str | None:
    """Rejects a distributed table that servers cannot hold."""
    reason = program.attrs.get(REASON)
    return None if reason is None else str(reason)


def _of_notices(program: IrProgram) -> str | None:
    """Rejects save operators among those that compute, since they are not part of a step."""
    types = [op.type for op in program.root.ops]
    found = [name for name in types if name in CHECKPOINT_OPS]
    if not found or len(found) == len(types):
        return None
    return (
        f"'{found[0]}' stands among operators that compute or send; "
        "run it in a program of its own, between two steps"
    )


def _of_computed_ids(program: IrProgram) -> str | None:
    """Rejects computed ids, which servers need before anything is computed."""
    for op in program.root.ops:
        is_geo = program.attrs.get("mode") == GEO and op.type == "send"
        if op.type in {LOOK_UP, "merge_ids"} or is_geo:
            for ids in map(str, op.inputs.slot("X" if is_geo else "Ids")):
                if ids not in program.variables or program.variables[ids].kind is not Kind.DATA:
                    return (
                        f"'{ids}' is computed, and servers are asked for its rows before that; "
                        "feed the ids of a sparse table as they are"
                    )
    return None


def _of_unmade(program: IrProgram) -> str | None:
    """Rejects a trainer's program that sends a variable without computing it."""
    made = {v.name for v in program.variables.values() if v.kind is not Kind.DATA}
    made.update(name for name in program.variables if name.startswith(SAMPLES))  # it is fed
    if program.attrs.get("mode") == GEO:
        return None
    program = with_parts(program)
    for op in program.root.ops:
        for name in op.reads:
            if op.type in {"send", "split_byref", "split_selected_rows"} and name not in made:
                return _unmade(op, name)
        made.update(op.writes)
    return None


def _of_unsent(program: IrProgram) -> str | None:
    """Rejects a server's program that reads a gradient that no trainer sends."""
    if not _is_served(program):
        return None
    program = without_tables(program)
    program = with_trainer_sums(program)
    # Only gradients: other missing state is detected when the scope is available.
    missing = {name for name in server_inputs(program).state if GRAD in name}
    for index in served_blocks(program):
        for op in program.blocks[index].ops:
            for name in op.reads:
                if name in missing:
                    return _unmade(op, name)
    return None


def _unmade(op: Operator, name: str) -> str:
    return (
        f"'{op.type}' reads '{name}', which no operator computes here: it was clipped among the "
        "optimizer's operators, and those are on servers, which have slices of some gradients; "
        "clip by fluid.clip.set_gradient_clip, which stays with the trainers"
    )


def _is_served(program: IrProgram) -> bool:
    ops: Sequence[Operator] = program.root.ops
    return len(ops) == 1 and ops[0].type in {"listen_and_serv", "fl_listen_and_serv"}


def _attr(program: IrProgram, name: str) -> object:
    return program.root.ops[0].attrs.get(name) if _is_served(program) else None


_RULES: tuple[Rule, ...] = (_of_tables, _of_notices, _of_computed_ids, _of_unmade, _of_unsent)
