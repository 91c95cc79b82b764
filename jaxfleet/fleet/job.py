"""JobFleet: the facade of a JAX training job, with servers or of ranks alone.

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

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optax

from jaxfleet.capture import capture, distributed_optimizer
from jaxfleet.cluster import initialize, joined
from jaxfleet.cluster.ranks import check_same_rank
from jaxfleet.cluster.roles import RoleMakerBase
from jaxfleet.cluster.roles.base import RankRole
from jaxfleet.env import PserverRole, Rank, read_cluster, read_job, read_rank
from jaxfleet.errors import StrategyError
from jaxfleet.fleet.base import FleetBase
from jaxfleet.ops.user_frames import line_of_caller
from jaxfleet.runtime import DistributedStrategy, distribute
from jaxfleet.runtime.distribution import AnyStep, with_arguments
from jaxfleet.runtime.pserver_entry import job_step, serve_job
from jaxfleet.strategy import as_strategy


class JobFleet(FleetBase):
    """The job of a JAX step, as its script sees it.

    Examples:
        >>> from jaxfleet import fleet
        >>> fleet.init()
        >>> fleet.split_files(["part-0", "part-1"])
        ['part-0', 'part-1']
        >>> fleet.stop_worker()
    """

    def __init__(self) -> None:
        super().__init__()
        self._strategy: DistributedStrategy | None = None
        self._step: AnyStep | None = None

    def init(self, role_maker: RoleMakerBase | None = None) -> None:
        """Sets the role of this process and, in a job without servers, joins the other ranks.

        Call it before any other use of jax.

        Args:
            role_maker: the role. By default the environment decides: that of `jaxfleet launch`,
                SLURM, Open MPI or Kubernetes; without any of them this process is the only worker.

        Raises:
            TypeError: `role_maker` is not a role maker.
            ValueError: the environment does not describe a job.
            ConnectError: another rank did not join in time.
            StrategyError: the process already joined a group, as another rank.

        Examples:
            >>> from jaxfleet import fleet
            >>> fleet.init()
            >>> fleet.worker_index(), fleet.worker_num(), fleet.server_num()
            (0, 1, 0)
        """
        super().init(role_maker)
        self._strategy = self._step = None
        if self.server_num():
            return
        said = self.worker_index(), self.worker_num()
        if said[1] > 1:
            initialize(self._rank())  # or was called before
        if (group := joined()) is not None:
            hint = "let the role maker and jf.initialize() take the same environment"
            check_same_rank("the role maker says", said, (group.rank, group.size), hint)

    def _without_servers(self) -> RoleMakerBase:
        return RankRole()

    def _rank(self) -> Rank:
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
            strategy: how `distribute` makes the step; by default `pserver` in a job with servers,
                else `collective`.

        Raises:
            ValueError: `init` was not called, or the strategy is invalid.
            CaptureError: `optimizer` is not an optimizer.

        Examples:
            >>> import optax
            >>> from jaxfleet import fleet
            >>> fleet.init()
            >>> tx = fleet.distributed_optimizer(optax.adam(1e-3), "single")
        """
        made = distributed_optimizer(optimizer)
        with_servers = self.server_num() > 0
        given = ("pserver" if with_servers else "collective") if strategy is None else strategy
        self._strategy = as_strategy(given)
        return made

    @property
    def strategy(self) -> DistributedStrategy:
        """The strategy of the step.

        Raises:
            StrategyError: `distributed_optimizer` was not called.
        """
        if self._strategy is None:
            what = "the step has no strategy yet"
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

        Examples:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import optax
            >>> from jaxfleet import fleet
            >>> fleet.init()
            >>> tx = fleet.distributed_optimizer(optax.sgd(0.25), "single")
            >>> def train_step(state, batch):
            ...     grad = jax.grad(lambda w: jnp.mean((w * batch) ** 2))(state["w"])
            ...     updates, opt = tx.update(grad, state["opt"], state["w"])
            ...     return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, grad
            >>> w, batch = jnp.float32(2.0), jnp.ones(4)
            >>> state = {"w": w, "opt": tx.init(w)}
            >>> step = fleet.distribute(train_step, example=(state, batch))
            >>> state, grad = step(state, batch)
            >>> float(state["w"]), float(grad)
            (1.0, 4.0)
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
        """Rejects training apart from the other workers while servers wait for all of them."""
        if self.server_num() and self.strategy.mode == "collective":
            what = f"mode 'collective' in a job with {self.server_num()} servers"
            hint = "mode='pserver', which is the default there; mode='single' trains apart"
            raise StrategyError(what, source=line_of_caller(), hint=hint)

    def _cluster(self) -> PserverRole:
        """Returns this process's place among servers and trainers, by the role maker."""
        role, job = self.role_maker, read_job()
        servers, trainers = tuple(role.get_pserver_endpoints()), role.worker_num()
        if not servers:
            what = "mode 'pserver' needs servers, and this job has none"
            hint = "start the script with: jaxfleet launch --servers 2 --trainers 2 SCRIPT"
            raise StrategyError(what, source=line_of_caller(), hint=hint)
        known = read_cluster() or PserverRole(
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
            ValueError: this process is not a server.
            ConnectError: the endpoint is taken, or may not be bound.
            SystemExit: serving failed; the process's log contains the reason.

        Examples:
            >>> from jaxfleet import fleet
            >>> fleet.init()
            >>> if fleet.is_server():
            ...     fleet.run_server()
        """
        self._check_serves()
        strategy = self._strategy or DistributedStrategy(mode="pserver")
        code = serve_job(self._cluster(), strategy)
        if code:
            raise SystemExit(code)

    def save(self, path: str | Path, state: Any, *, data: Mapping[str, int] | None = None) -> None:
        """Writes a checkpoint, each process its own part; every process must call it.

        `data` is the position of a data loader to save with it, `batches.state()`.

        Raises:
            ValueError: there is no step.
            CheckpointError: it cannot be written; the previous checkpoint stays.

        Examples:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import optax
            >>> from jaxfleet import fleet
            >>> fleet.init()
            >>> tx = fleet.distributed_optimizer(optax.sgd(0.25), "single")
            >>> def train_step(state, batch):
            ...     grad = jax.grad(lambda w: jnp.mean((w * batch) ** 2))(state["w"])
            ...     updates, opt = tx.update(grad, state["opt"], state["w"])
            ...     return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, grad
            >>> w, batch = jnp.float32(2.0), jnp.ones(4)
            >>> state = {"w": w, "opt": tx.init(w)}
            >>> step = fleet.distribute(train_step, example=(state, batch))
            >>> state, grad = step(state, batch)
            >>> fleet.save("model", state)
            >>> float(fleet.restore("model")["w"])
            1.0
        """
        self._made().save(path, state, data=data)

    def restore(self, path: str | Path) -> Any:
        """Returns the state in a checkpoint; every process must call it.

        Raises:
            ValueError: there is no step.
            CheckpointError: there is no checkpoint, or it is damaged or of another step.

        Examples:
            >>> import jax
            >>> import jax.numpy as jnp
            >>> import optax
            >>> from jaxfleet import fleet
            >>> fleet.init()
            >>> tx = fleet.distributed_optimizer(optax.sgd(0.25), "single")
            >>> def train_step(state, batch):
            ...     grad = jax.grad(lambda w: jnp.mean((w * batch) ** 2))(state["w"])
            ...     updates, opt = tx.update(grad, state["opt"], state["w"])
            ...     return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, grad
            >>> w, batch = jnp.float32(2.0), jnp.ones(4)
            >>> state = {"w": w, "opt": tx.init(w)}
            >>> step = fleet.distribute(train_step, example=(state, batch))
            >>> fleet.save("model", state)
            >>> restored = fleet.restore("model")
            >>> float(restored["w"])
            2.0
        """
        return self._made().restore(path)

    def stop_worker(self) -> None:
        """Leaves the job, so that servers stop waiting for this worker; idempotent.

        Examples:
            >>> from jaxfleet import fleet
            >>> fleet.init()
            >>> fleet.stop_worker()
        """
        if self._step is not None and not self.is_server():
            self._step.close()

    def _made(self) -> AnyStep:
        if self._step is None:
            what = "there is no step yet"
            hint = "call fleet.distribute(train_step, example=(state, batch)) first"
            raise StrategyError(what, source=line_of_caller(), hint=hint)
        return self._step
