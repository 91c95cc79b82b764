"""PSLib: the fleet of jobs with sparse tables, described by a strategy."""

from collections.abc import Mapping, Sequence
from functools import partial
from math import log
from pathlib import Path
from typing import Any

import numpy as np

from jaxfleet.contrib.downpour.job import DownpourJob
from jaxfleet.contrib.downpour.local_tables import SHOWN
from jaxfleet.contrib.downpour.pslib.optimizer import DownpourOptimizer
from jaxfleet.contrib.downpour.remote_tables import BEGUN, TableAdmin, dense_name
from jaxfleet.contrib.downpour.worker import Worker, described_tables
from jaxfleet.contrib.downpour.worker_program import worker_program
from jaxfleet.errors import StrategyError, UnsupportedError
from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.executor import Executor
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.incubate.fleet.base.fleet_base import Fleet, Mode, leave
from jaxfleet.fluid.scope import Scope, global_scope

_SUM, _SIZE = ".batch_sum", ".batch_size"


class PSLib(Fleet):
    """A job with tables on servers and asynchronous workers."""

    def __init__(self) -> None:
        super().__init__(Mode.PSLIB)
        self._strategy: Mapping[str, Any] = {}
        self._programs: list[Program] = []
        self._job: DownpourJob | None = None
        self._model_dir: Path | None = None

    def distributed_optimizer(
        self, optimizer: Any, strategy: Mapping[str, Any] | None = None
    ) -> DownpourOptimizer:
        """Returns an optimizer whose `minimize` describes the job.

        Args:
            optimizer: the script's; servers use pslib's whatever it is.
            strategy: see `DistributedAdam.minimize`. `staleness` is how many pushes a worker may be
                ahead of another: None for lockstep, -1 (the default, as in pslib) for no bound.

        Raises:
            TypeError: the strategy is not a mapping, or the optimizer is not an optimizer.
            ValueError: `init` was not called.
        """
        made = DownpourOptimizer(
            optimizer,
            strategy,
            worker_index=self.worker_index() if self.is_worker() else 0,
            worker_num=self.worker_num(),
            told=self._take,
        )
        self._strategy = dict(strategy or {})
        return made

    def _take(self, programs: list[Program]) -> None:
        self._programs = programs

    # --- processes ---------------------------------------------------------------------------

    def init_worker(self) -> None:
        """Starts this process as a worker; startup programs must have run in the global scope.

        Dense tables are initialized from the first worker's parameters.

        Raises:
            ValueError: `minimize` was not called, a startup program has not run, or this process is
                a server.
            ConnectError: a server does not answer.
        """
        programs, servers = self._described(), self.role_maker.get_pserver_endpoints()
        self._check_works()
        if servers:
            self._job = self._made(servers)
            self._job.connect(programs, self.worker_index())
        scope = global_scope()
        for program in programs:  # for the description and initial values of its tables
            Worker(program, scope, partial(self.executor._run_once, scope), is_trained=True)
        if self._job is not None:
            self._job.tending.meet("train")

    def init_server(self, model_dir: str | None = None, mode: int = 0) -> None:
        """Prepares this process as a server.

        Args:
            model_dir: folder that `save_persistables` wrote, to resume from.
            mode: 0: the whole model.

        Raises:
            ValueError: `minimize` was not called, the folder is missing, or this process is a
                worker.
            NotImplementedError: another mode.
        """
        self._described()
        self._check_serves()
        _whole(mode)
        if model_dir and not Path(model_dir).is_dir():
            what = f"There is no directory named '{model_dir}'"
            raise mistake(what, "that of fleet.save_persistables, which all servers see")
        self._model_dir = Path(model_dir) if model_dir else None

    def run_server(self) -> None:
        """Serves until all workers have stopped.

        Raises:
            ValueError: `minimize` was not called, or this process is a worker.
            CheckpointError: the tables to resume from are damaged, or belong to another job.
            ConnectError: the endpoint is in use, or binding it is not permitted.
        """
        programs, servers = self._described(), self.role_maker.get_pserver_endpoints()
        self._check_serves()
        here = servers[self.server_index()]
        self._made(servers).serve(programs, here, self._model_dir)

    def stop_worker(self) -> None:
        """Disconnects this worker from the servers; idempotent."""
        if self._job is not None:
            self._job.stop()
            self._job = None
        leave(self.role_maker)
        self.executor.close()

    def barrier_worker(self) -> None:
        """Waits for all workers; through the servers, without another way."""
        if self._job is None:
            super().barrier_worker()
        else:
            self._job.tending.meet("go on")

    # --- tables: collective calls, executed by the first worker ------------------------------

    def save_persistables(
        self, executor: Executor, dirname: str, main_program: Program | None = None, mode: int = 0
    ) -> None:
        """Makes servers write all tables; see `save_model`. Other arguments have no effect."""
        del executor, main_program
        self.save_model(dirname, mode)

    def save_inference_model(
        self,
        executor: Executor,
        dirname: str,
        feeded_var_names: Sequence[str],
        target_vars: Sequence[Variable],
        main_program: Program | None = None,
        export_for_deployment: bool = True,
    ) -> None:
        """Makes servers write all tables, as pslib does; see `save_model`."""
        del executor, feeded_var_names, target_vars, main_program, export_for_deployment
        self.save_model(dirname)

    def save_model(self, dirname: str, mode: int = 0) -> None:
        """Makes servers write all tables, each to a folder of its name.

        Args:
            dirname: a folder that all servers can access.
            mode: 0: the whole model.

        Raises:
            NotImplementedError: another mode.
            CheckpointError: a table cannot be written; an earlier save is left intact.
        """
        _whole(mode)
        self._tending.save(Path(dirname))

    def load_model(self, dirname: str, mode: int = 0) -> None:
        """Makes servers load all tables from a save of `save_model`, with its arguments.

        Raises:
            NotImplementedError: another mode.
            CheckpointError: a table is missing, damaged or of another kind.
        """
        _whole(mode)
        self._tending.load(Path(dirname))

    def save_one_table(self, table_id: int, model_dir: str, mode: int = 0) -> None:
        """Makes servers write one table; see `save_model`."""
        _whole(mode)
        self._tending.save(Path(model_dir), self._names(table_id))

    def load_one_table(self, table_id: int, model_path: str, mode: int = 0) -> None:
        """Makes servers load one table; see `load_model`."""
        _whole(mode)
        self._tending.load(Path(model_path), self._names(table_id))

    def save_cache_model(
        self,
        executor: Executor,
        dirname: str,
        main_program: Program | None = None,
        mode: int = 0,
        table_id: int = 0,
    ) -> int:
        """Refuses: there is no cache of rows."""
        del executor, dirname, main_program, mode, table_id
        raise UnsupportedError("there is no cache of rows to be saved", hint="save_persistables")

    def shrink_sparse_table(self) -> None:
        """Decays shows and clicks, and evicts rows with a low score.

        Counts exist only with `use_cvm`; without it no row is evicted.
        """
        found = [t.table_id for t in described_tables(self._described()[0]).tables]
        sparse = [n for n in found if n is not None and not self._is_dense(n)]
        self._tending.shrink([name for number in sparse for name in self._names(number)])

    def shrink_dense_table(
        self,
        decay: float,
        emb_dim: int = 11,
        scope: Scope | None = None,
        table_id: int | None = None,
    ) -> None:
        """Removes decayed shows from the sums of `data_norm`.

        For the first column of every embedding, the logarithm of its shows, `log(decay)` times the
        count is added to the sum.

        Args:
            decay: of shows, the same as in `shrink_sparse_table`.
            emb_dim: columns of an embedding.
            scope: no effect; servers hold the sums.
            table_id: a dense table; all of them unless given.

        Raises:
            ValueError: the decay is not positive, or there is no such table.
        """
        del scope
        if not decay > 0:
            raise mistake(f"decay is {decay}", "it is what is left of shows, such as 0.98")
        if table_id is not None:
            self._names(table_id)
        tending = self._tending
        changed: dict[int, list[np.ndarray]] = {}
        for program in self._described():
            block = program.global_block()
            for table in worker_program(program, is_trained=True).dense:
                shapes = {name: block.var(name).shape for name in table.dense_variable_name}
                number = table.table_id
                assert number is not None
                if any(n.endswith(_SUM) for n in shapes) and table_id in {None, number}:
                    values = tending.tables.pull_dense(number, shapes)
                    changed[number] = _decayed(values, decay, emb_dim)
        is_first = self.is_first_worker()
        tending.tables.add_dense(changed if is_first else {})
        tending.meet("go on after sums have shrunk")

    def clear_one_table(self, table_id: int) -> None:
        """Removes all rows of a table; a dense one becomes zero."""
        self._tending.clear(self._names(table_id))

    def clear_model(self) -> None:
        """Removes all rows of all tables."""
        self._tending.clear()

    def print_table_stat(self, table_id: int) -> None:
        """Prints a table's number of rows, on the first worker."""
        names = self._names(table_id)
        if self.is_first_worker():
            counted = self._tending.tables.stats()
            for name in names:
                text = f"table {table_id}, '{name}': {counted.get(name, {}).get('rows', 0)} rows"
                print(text)  # noqa: T201  # the purpose of the method
        self._tending.meet("go on after figures")

    # --- state --------------------------------------------------------------------------------

    @property
    def _tending(self) -> TableAdmin:
        if self._job is None:
            what = "this process is not a worker of a job with servers"
            hint = "call fleet.init_worker() first; without servers no process keeps tables"
            raise mistake(what, hint, StrategyError)
        return self._job.tending

    def _described(self) -> list[Program]:
        if not self._programs:
            what = "You should run DistributedOptimizer.minimize() first"
            raise mistake(what, kind=StrategyError)
        return self._programs

    def _made(self, servers: list[str]) -> DownpourJob:
        staleness = self._strategy.get("staleness", -1)
        process = self.executor._pserver.connections
        return DownpourJob(servers, self.worker_num(), process, staleness)

    def _is_dense(self, table_id: int) -> bool:
        tables = described_tables(self._described()[0]).tables
        return any(t.table_id == table_id and t.type == "PS_DENSE_TABLE" for t in tables)

    def _names(self, table_id: int) -> list[str]:
        """A table's name on servers, and those of its companions."""
        known, name = self._tending.tables.names, dense_name(table_id)
        if self._is_dense(table_id):
            return [each for each in (name, name + BEGUN) if each in known]
        look_ups = [
            one for p in self._described() for one in worker_program(p, is_trained=True).look_ups
        ]
        found = {one.table for one in look_ups if one.table_id == table_id}
        if not found:
            raise mistake(f"servers have no table {table_id}", f"they have {', '.join(known)}")
        return [each for name in found for each in (name, name + SHOWN) if each in known]


def _decayed(values: Mapping[str, np.ndarray], decay: float, emb_dim: int) -> list[np.ndarray]:
    """The increment of each parameter of a dense table."""
    changes = {name: np.zeros_like(value) for name, value in values.items()}
    for name in values:
        if name.endswith(_SUM):
            sizes = values[name.removesuffix(_SUM) + _SIZE]
            changes[name][::emb_dim] = sizes[::emb_dim] * np.float32(log(decay))
    return list(changes.values())


def _whole(mode: int) -> None:
    """Rejects any save mode but the whole model: deltas, and formats of other servers."""
    if mode != 0:
        what = f"mode {mode}: tables are saved and loaded whole"
        raise UnsupportedError(what, hint="mode=0")


fleet = PSLib()
