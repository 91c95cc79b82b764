"""A Downpour job of several processes: servers that hold tables, and workers that train.

::

    job = fluid.distributed.DownpourJob(["10.0.0.1:6174", "10.0.0.2:6174"], workers=2)
    if role == "PSERVER":
        job.serve([main], endpoint)  # until all workers have stopped
    else:
        job.connect([main], worker_id)
        exe.train_from_dataset(main, dataset)
        job.stop()

All processes build the same programs. Steps run in lockstep: the gradients of all workers are
summed in worker order and applied once. A stopped worker is not waited for.

With `staleness=n` workers run asynchronously, as in pslib: a push is applied on arrival, and a
look-up sees the other workers' pushes up to `n` pushes ago (-1: no bound).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxfleet.checkpoint import open_checkpoint
from jaxfleet.checkpoint.tables import load_tables
from jaxfleet.contrib.downpour.local_tables import sparse_specs
from jaxfleet.contrib.downpour.remote_tables import ServerTables, TableAdmin, specs_of
from jaxfleet.contrib.downpour.worker import attach_tables, described_tables, detach_tables
from jaxfleet.contrib.downpour.worker_program import worker_program
from jaxfleet.errors import ProgramError
from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.npz_files import file_of
from jaxfleet.fluid.pserver.connections import PROCESS, Connection, Connections, JobInfo
from jaxfleet.ir import Attr, Attrs, Block, Operator
from jaxfleet.ir import Program as IrProgram
from jaxfleet.ps.server import ServerCore
from jaxfleet.ps.server.execution_plan import ServerPlan
from jaxfleet.ps.server.program_loader import read_plan
from jaxfleet.tables import TableSpec, TableStore, make_store

_ASYNC = 1  # fluid's `distributed_mode` of asynchronous servers


@dataclass
class DownpourJob:
    """Membership of a job, and this process's role in it.

    Attributes:
        endpoints: of all servers, in the same order in all processes.
        workers: the number of workers.
        staleness: pushes a worker may be ahead of another; -1 for no bound, None for lockstep.
        process: transport of this process's connections; tests may substitute another.
    """

    endpoints: Sequence[str]
    workers: int
    process: Connections = field(default_factory=lambda: PROCESS)
    staleness: int | None = None
    _open: Connection | None = None
    _programs: Sequence[Program] = ()
    _tending: TableAdmin | None = None

    def __post_init__(self) -> None:
        if self.staleness is not None and self.staleness < -1:
            raise mistake(f"staleness is {self.staleness}", "a number of pushes, or -1 for any")

    def serve(self, programs: Sequence[Program], endpoint: str, saved: Path | None = None) -> None:
        """Serves the tables of programs until all workers have stopped.

        Args:
            programs: programs that `minimize` described.
            endpoint: the address to listen on, one of the job's.
            saved: folder of saved tables to resume from.

        Raises:
            CheckpointError: a saved table is missing or damaged.
            ProgramError: the endpoint is not the job's, or a program belongs to no Downpour job.
            ConnectError: the endpoint is in use, or binding it is not permitted.
            JaxfleetError: a worker's gradients were rejected, or no worker is alive.
        """
        if endpoint not in self.endpoints:
            what = f"'{endpoint}' is not a server of the job"
            raise mistake(what, f"one of {', '.join(self.endpoints)}")
        number, specs = list(self.endpoints).index(endpoint), job_tables(programs)
        facts = self._facts("pserver", number, specs)
        plan = read_plan(self._program(facts, specs), self.process.cache)
        rows = [] if saved is None else _saved_rows(plan, saved)

        def begin(core: ServerCore) -> None:
            core.begin(plan, {}, facts.digest, rows)

        self.process.wires.serve(facts, begin)

    def connect(self, programs: Sequence[Program], worker_id: int) -> None:
        """Attaches the programs' tables to the servers.

        Raises:
            ConnectError: a server does not answer.
            ProgramError: a server has different tables, or the programs belong to no Downpour job.
        """
        if not 0 <= worker_id < self.workers:
            raise mistake(f"worker_id is {worker_id}, and there are {self.workers} workers")
        specs = job_tables(programs)
        self._open = self.process.get(self._facts("trainer", worker_id, specs))
        is_lockstep = self.staleness is None
        tables = ServerTables(self._open.client, specs, is_lockstep=is_lockstep)
        attach_tables(programs[0], tables)
        self._programs, self._tending = programs, TableAdmin(self._open, tables)

    @property
    def tending(self) -> TableAdmin:
        """Collective administration of whole tables, for a connected worker."""
        if self._tending is None:
            raise mistake("this worker is not connected to servers", "job.connect([main], number)")
        return self._tending

    def stop(self) -> None:
        """Disconnects from the servers, so that the other workers continue without this one."""
        if self._open is not None:
            self._open.close()
            detach_tables(self._programs[0])
            self._open = self._tending = None

    def _facts(self, role: str, number: int, specs: Sequence[TableSpec]) -> JobInfo:
        text = "\n".join([f"staleness {self.staleness}", *(spec.to_text() for spec in specs)])
        digest = hashlib.sha256(text.encode()).hexdigest()
        return JobInfo(role, self.workers, number, tuple(self.endpoints), digest)

    def _program(self, facts: JobInfo, specs: Sequence[TableSpec]) -> IrProgram:
        """Builds a server's program, which has tables and no blocks."""
        attrs: dict[str, Attr] = {
            "endpoint": facts.endpoint,
            "endpoints": facts.endpoints,
            "pserver_id": facts.number,
            "role": "pserver",
            "tables": tuple(spec.to_text() for spec in specs),
            "trainers": facts.trainers,
        }
        none: dict[str, Attr] = {"combine_block_id": -1, "lr_decay_block_id": -1}
        none |= {"optimize_blocks": (), "part_block_ids": ()}
        if self.staleness is not None:
            none["distributed_mode"] = _ASYNC
            attrs["staleness"] = self.staleness
        serve = Operator("listen_and_serv", attrs=Attrs(none))
        name = f"downpour.pserver{facts.number}"
        return IrProgram(name, {}, (Block(ops=(serve,)),), Attrs(attrs))


def _saved_rows(plan: ServerPlan, folder: Path) -> list[TableStore]:
    """Loads a server's rows of all tables, saved by any number of servers."""
    stores = [make_store(spec, share=plan.share) for spec in plan.tables]
    for store in stores:
        saved = open_checkpoint(file_of(folder, store.spec.name))
        load_tables([saved], [store], buckets=plan.buckets)
    return stores


def job_tables(programs: Sequence[Program]) -> list[TableSpec]:
    """Builds the table specs of a job's programs as servers hold them.

    Raises:
        ProgramError: a program belongs to no Downpour job, or to a different one than the first.
    """
    if not programs:
        raise mistake("a job has no programs", "those whose losses were given to minimize")
    desc = described_tables(programs[0])
    by_id = {table.table_id: table for table in desc.tables}
    found: dict[str, TableSpec] = {}
    for program in programs:
        if described_tables(program) is not desc:
            what = "programs of several jobs are given to one"
            raise ProgramError(what, hint="give minimize all their losses at once")
        for one in worker_program(program, is_trained=True).look_ups:
            table = by_id[one.table_id]
            for spec in sparse_specs(table, one.table, one.trained, shows=one.shows):
                found[spec.name] = spec
    return specs_of(desc.tables, found.values())
