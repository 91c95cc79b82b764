"""Twin: trainers and servers of a job in one process, deterministically scheduled.

::

    twin = Twin(train_step, example=(state, batch), strategy=strategy, servers=2, trainers=2)
    result = twin.run(state, batches)

Only the network is simulated: programs, messages, servers and steps are the real ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxfleet.capture import Captured, capture
from jaxfleet.errors import CaptureError, StrategyError
from jaxfleet.ir import Program
from jaxfleet.lower import ExecutableCache
from jaxfleet.passes.pserver.placement import local_endpoints
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.server import Server, ServerCore, ServerOptions
from jaxfleet.runtime.memory_report import fitting
from jaxfleet.runtime.pserver_job import (
    JobPrograms,
    example_of,
    job_programs,
    membership,
    timeouts_of,
)
from jaxfleet.runtime.trainer_step import TrainerStep
from jaxfleet.strategy import DistributedStrategy, as_strategy
from jaxfleet.transport.memory_network import MemoryNetwork

_FOREVER_S = 1e9  # no peer can be lost in one process


@dataclass(frozen=True)
class TwinResult:
    """Results of a run."""

    states: tuple[Any, ...]  # the last state of each trainer, with values instead of handles
    metrics: tuple[tuple[Any, ...], ...]  # of every step, for each trainer

    def __repr__(self) -> str:
        steps = len(self.metrics[0]) if self.metrics else 0
        return f"TwinResult({len(self.states)} trainers, {steps} steps)"


class Twin:
    """A job in one process.

    Args:
        train_step: a step, captured or not.
        example: a state and a batch.
        strategy: how the step is sliced and placed; its mode need not be `pserver`.
        servers: number of servers.
        trainers: number of trainers.
        cache: of executables; twins with the same cache share them.

    Raises:
        StrategyError: there would be no server, or no trainer.
        CaptureError: the step cannot be captured, or there is no example to capture it for.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import jaxfleet as jf
        >>> import optax
        >>> tx = jf.distributed_optimizer(optax.sgd(0.5))
        >>> def train_step(w, batch):
        ...     loss, gradient = jax.value_and_grad(lambda w: jnp.mean((w - batch) ** 2))(w)
        ...     updates, _ = tx.update(gradient, tx.init(w), w)
        ...     return optax.apply_updates(w, updates), loss
        >>> w, batch = jnp.zeros(2), jnp.ones((4, 2))
        >>> twin = jf.Twin(train_step, (w, batch), servers=1, trainers=2)
        >>> twin.run(w, [batch] * 3).states[0]
        Array([0.875, 0.875], dtype=float32)
    """

    def __init__(
        self,
        train_step: Callable[[Any, Any], tuple[Any, Any]] | Captured,
        example: tuple[Any, Any] | None = None,
        strategy: DistributedStrategy | str | None = None,
        *,
        servers: int = 2,
        trainers: int = 2,
        cache: ExecutableCache | None = None,
    ) -> None:
        if servers < 1 or trainers < 1:
            what = f"a job of {servers} servers and {trainers} trainers does not train"
            raise StrategyError(what, hint="give it at least one of each")
        if not isinstance(train_step, Captured):
            if example is None:
                what = "a step that is not captured yet needs an example"
                raise CaptureError(what, hint="jf.Twin(train_step, (state, batch), ...)")
            train_step = capture(train_step, example=example)
        self.captured, self.strategy = train_step, as_strategy(strategy)
        self.trainers = trainers
        self.endpoints = local_endpoints(servers)
        self.cache = cache if cache is not None else ExecutableCache()
        self._jobs: dict[str, list[JobPrograms]] = {}  # by the captured program's text

    def __repr__(self) -> str:
        name, servers = self.captured.program.name, len(self.endpoints)
        return f"Twin({name!r}, servers={servers}, trainers={self.trainers})"

    def run(
        self, state: Any, batches: Sequence[Any], *, network: MemoryNetwork | None = None
    ) -> TwinResult:
        """Trains on the batches, from a state.

        Args:
            state: initial state of all trainers.
            batches: global batches, one a step.
            network: for example one with faults; by default without.
        """
        return self.play(lambda step: _trained(step, state, batches), network=network)

    def play(
        self,
        script: Callable[[TrainerStep], tuple[Any, tuple[Any, ...]]],
        *,
        network: MemoryNetwork | None = None,
        checkpoint_dir: Path | None = None,
    ) -> TwinResult:
        """Runs a script on every trainer: it takes the step, and returns state and metrics."""
        net = network if network is not None else MemoryNetwork()
        people: dict[str, Callable[[], Any]] = {}
        for number in range(len(self.endpoints)):
            people[f"server {number}"] = partial(self._serve, net, number, checkpoint_dir)
        for number in range(self.trainers):
            people[f"trainer {number}"] = partial(self._train, net, number, script)
        results = net.run(people, longest_s=600.0)
        ends = [results[f"trainer {number}"] for number in range(self.trainers)]
        return TwinResult(tuple(end[0] for end in ends), tuple(end[1] for end in ends))

    def programs(self, trainer: int = 0) -> JobPrograms:
        """Returns the programs of a trainer and of the servers."""
        rows = self.captured.signature.rows
        return fitting(self._make(trainer), self.strategy, rows, self.cache)(self._example())

    def _example(self) -> Program:
        return example_of(self.captured, self.strategy, self.trainers)

    def _make(self, trainer: int) -> Callable[[Program], JobPrograms]:
        def make(program: Program) -> JobPrograms:
            jobs = self._jobs.setdefault(str(program), [])
            made = job_programs(
                program,
                self.strategy,
                trainer=trainer,
                trainers=self.trainers,
                endpoints=self.endpoints,
                like=jobs[0] if jobs else None,
            )
            jobs.append(made)
            return made

        return make

    def _serve(self, network: MemoryNetwork, number: int, folder: Path | None) -> int:
        endpoint = self.endpoints[number]
        options = ServerOptions(
            server=number, lost_after_s=_FOREVER_S, step_timeout_s=_FOREVER_S, checkpoint_dir=folder
        )
        core = ServerCore(endpoint, self.cache, network.clock, options)
        server = Server(
            core,
            network.listen(endpoint),
            connect=network.connect,
            clock=network.clock,
            threaded=False,
        )
        code = server.serve()
        if core.failure is not None:
            raise core.failure
        return code

    def _train(
        self,
        network: MemoryNetwork,
        number: int,
        script: Callable[[TrainerStep], tuple[Any, tuple[Any, ...]]],
    ) -> tuple[Any, tuple[Any, ...]]:
        def connect(job: JobPrograms) -> Client:
            me = membership(
                job, name="twin", trainer=number, trainers=self.trainers, endpoints=self.endpoints
            )
            lines = network.connect(self.endpoints)
            return Client(lines, me, timeouts=timeouts_of(self.strategy), clock=network.clock)

        with TrainerStep(
            self.captured,
            self.strategy,
            self._make(number),
            connect,
            example=self._example(),
            cache=self.cache,
        ) as step:
            return script(step)


def _trained(step: TrainerStep, state: Any, batches: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    metrics = []
    for batch in batches:
        state, measured = step(state, batch)
        metrics.append(measured)
    return step.pull(state), tuple(metrics)
