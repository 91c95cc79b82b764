"""JobFleet: a job of a JAX step, asked of one object: with servers, or of ranks.

::

    from jaxfleet import fleet

    fleet.init()
    mode = "pserver" if fleet.server_num() else "collective"
    own_rows = DistributedStrategy(mode=mode, batch="local")  # of this worker's own files
    tx = fleet.distributed_optimizer(optax.adam(1e-3), own_rows)
    step = fleet.distribute(train_step, example=(state, batch))
    if fleet.is_server():
        fleet.run_server()
    for path in fleet.split_files(paths):
        ...
        state, metrics = step(state, batch)
    fleet.save("model", state)
    fleet.stop_worker()
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optax

from jaxfleet.capture import capture, distributed_optimizer
from jaxfleet.env import Cluster, Rank, read_cluster, read_job, read_rank
from jaxfleet.errors import StrategyError
from jaxfleet.fleet.base import FleetBase
from jaxfleet.fleet.ranks import RankRole
from jaxfleet.fleet.roles import RoleMakerBase
from jaxfleet.fleet.same_rank import check_same_rank
from jaxfleet.group import initialize, joined
from jaxfleet.ops.frames import line_of_caller
from jaxfleet.runtime import DistributedStrategy, distribute
from jaxfleet.runtime.argument_step import with_arguments
from jaxfleet.runtime.distributing import AnyStep
from jaxfleet.runtime.processes import job_step, serve_job
from jaxfleet.runtime.strategy import as_strategy


class JobFleet(FleetBase):
    """What a script of a JAX step asks and says of its job."""

    def __init__(self) -> None:
        super().__init__()
        self._strategy: DistributedStrategy | None = None
        self._step: AnyStep | None = None

    def init(self, role_maker: RoleMakerBase | None = None) -> None:
        """Says which process of the job this is, and joins the others where there are no servers.

        It is called before anything else of jax.

        Args:
            role_maker: says it. Unless given, the environment does: that of `jaxfleet launch`, of
                SLURM, Open MPI or Kubernetes; where it says nothing, this is the only worker.

        Raises:
            TypeError: it is no role maker.
            ValueError: the environment is no job's.
            ConnectError: another rank did not come in time.
            StrategyError: the process has joined a group before, and as another rank.
        """
        super().init(role_maker)
        self._strategy = self._step = None
        if self.server_num():
            return
        said = self.worker_index(), self.worker_num()
        if said[1] > 1:
            initialize(self._rank())  # or has been called before
        if (group := joined()) is not None:
            hint = "let the role maker and jf.initialize() take the same environment"
            check_same_rank("the role maker says", said, (group.rank, group.size), hint)

    def _without_servers(self) -> RoleMakerBase:
        return RankRole()

    def _rank(self) -> Rank:
        """Returns which rank this is, as its role maker says it."""
        endpoints, job = tuple(self.role_maker.get_trainer_endpoints()), read_job()
        known = read_rank() or Rank(0, endpoints, job.name, job.secret_file)
        return replace(known, rank=self.worker_index(), endpoints=endpoints)

    def distributed_optimizer(
        self,
        optimizer: optax.GradientTransformation | optax.MultiSteps,
        strategy: DistributedStrategy | str | None = None,
    ) -> optax.GradientTransformationExtraArgs:
        """Wraps an Optax optimizer, as `jf.distributed_optimizer`, and keeps the strategy.

        Args:
            optimizer: any Optax transformation.
            strategy: how `distribute` makes the step; in a job with servers `pserver`, else
                `collective`, unless given.

        Raises:
            ValueError: `init` was not called, or the strategy is none.
            CaptureError: it is no optimizer.
        """
        made = distributed_optimizer(optimizer)
        with_servers = self.server_num() > 0
        given = ("pserver" if with_servers else "collective") if strategy is None else strategy
        self._strategy = as_strategy(given)
        return made

    @property
    def strategy(self) -> DistributedStrategy:
        """How the step is made.

        Raises:
            StrategyError: nothing was said of it.
        """
        if self._strategy is None:
            what = "nobody has said how the step is distributed"
            hint = "call fleet.distributed_optimizer(tx, strategy) first"
            raise StrategyError(what, source=line_of_caller(), hint=hint)
        return self._strategy

    def distribute(
        self,
        train_step: Callable[..., Any],
        example: tuple[Any, ...],
        *,
        dump_dir: str | Path | None = None,
        name: str | None = None,
    ) -> AnyStep:
        """Compiles a one-device step, as `jf.distribute` does, for this process of the job.

        Raises:
            CaptureError: the step cannot be captured.
            StrategyError: the strategy does not fit the machine or the job.
        """
        if self.strategy.mode == "pserver":
            folder = Path(dump_dir) if dump_dir is not None else None
            captured = capture(train_step, example=example, name=name)
            made = job_step(captured, self.strategy, folder, self._cluster())
            self._step = with_arguments(made, captured, example)
        else:
            self._check_has_no_servers()
            strategy = self.strategy
            self._step = distribute(train_step, example, strategy, dump_dir=dump_dir, name=name)
        return self._step

    def _check_has_no_servers(self) -> None:
        """Refuses to train apart from the other workers, while servers wait for all of them."""
        if self.server_num() and self.strategy.mode == "collective":
            what = f"mode 'collective' in a job with {self.server_num()} servers"
            hint = "mode='pserver', which is the default there; mode='single' trains apart"
            raise StrategyError(what, source=line_of_caller(), hint=hint)

    def _cluster(self) -> Cluster:
        """Returns who takes part, as the role maker says it."""
        role, job = self.role_maker, read_job()
        servers, trainers = tuple(role.get_pserver_endpoints()), role.worker_num()
        if not servers:
            what = "mode 'pserver' needs servers, and this job has none"
            hint = "start the script with: jaxfleet launch --servers 2 --trainers 2 SCRIPT"
            raise StrategyError(what, source=line_of_caller(), hint=hint)
        known = read_cluster() or Cluster(
            "trainer",
            trainers,
            servers,
            job=job.name,
            secret_file=job.secret_file,
            insecure=job.insecure,
            save_dirs=job.save_dirs,
        )
        is_server = role.is_server()
        return replace(
            known,
            role="pserver" if is_server else "trainer",
            trainers=trainers,
            endpoints=servers,
            trainer_id=None if is_server else role.worker_index(),
            current_endpoint=servers[role.server_index()] if is_server else None,
        )

    def run_server(self) -> None:
        """Serves until all workers have stopped; a server needs nothing of the step.

        Raises:
            ValueError: this process is no server.
            ConnectError: the endpoint is taken, or may not be bound.
            SystemExit: serving failed; the process's log says why.
        """
        self._check_serves()
        strategy = self._strategy or DistributedStrategy(mode="pserver")
        code = serve_job(self._cluster(), strategy)
        if code:
            raise SystemExit(code)

    def save(self, path: str | Path, state: Any) -> None:
        """Writes a checkpoint, of which every process of the job writes its part; all call it.

        Raises:
            ValueError: there is no step.
            CheckpointError: it cannot be written; what was there before stays.
        """
        self._made().save(path, state)

    def restore(self, path: str | Path) -> Any:
        """Returns the state that a checkpoint holds; all call it.

        Raises:
            ValueError: there is no step.
            CheckpointError: there is none, it is damaged, or of another step.
        """
        return self._made().restore(path)

    def stop_worker(self) -> None:
        """Ends being a worker: servers wait for it no longer. Again, it does nothing."""
        if self._step is not None and not self.is_server():
            self._step.close()

    def _made(self) -> AnyStep:
        if self._step is None:
            what = "there is no step yet"
            hint = "call fleet.distribute(train_step, example=(state, batch)) first"
            raise StrategyError(what, source=line_of_caller(), hint=hint)
        return self._step
