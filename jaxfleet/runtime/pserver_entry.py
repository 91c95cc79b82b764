"""A process of a parameter-server job: trainer or server, by its environment."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, NoReturn, Self

from jaxfleet.capture import Captured
from jaxfleet.env import PeriodicSaves, PserverRole, read_cluster
from jaxfleet.errors import StrategyError
from jaxfleet.ir import Program
from jaxfleet.ops.user_frames import warn_at_caller
from jaxfleet.ps.server import ServerOptions
from jaxfleet.ps.server.process import serve
from jaxfleet.report import of_program
from jaxfleet.runtime.job_places import JobPlaces
from jaxfleet.runtime.pserver_job import (
    example_of,
    programs_for,
    undivided_job,
)
from jaxfleet.runtime.step_html import Explanation, step_html
from jaxfleet.runtime.step_view import write_view
from jaxfleet.runtime.trainer_step import TrainerStep
from jaxfleet.runtime.training_step import Metrics, State
from jaxfleet.strategy import DistributedStrategy


def job_step(
    captured: Captured,
    strategy: DistributedStrategy,
    dump_dir: Path | None,
    cluster: PserverRole | None = None,
) -> "TrainerStep | ServerStep":
    """Returns the step of this process, by default in the environment's job.

    Raises:
        StrategyError: the process does not belong to a job.
    """
    cluster = cluster or read_cluster()
    if cluster is None:
        what = "mode 'pserver' needs servers and trainers, and this process is of no job"
        hint = "start the script with: jaxfleet launch --servers 2 --trainers 2 SCRIPT"
        raise StrategyError(what, hint=hint)
    if cluster.role == "pserver":
        return ServerStep(captured, strategy, cluster)
    trainer = cluster.trainer_id
    assert trainer is not None
    if trainer >= cluster.trainers:  # it joins: the job gives it its number
        trainer = 0
    programs = programs_for(
        strategy,
        trainer=trainer,
        trainers=cluster.trainers,
        endpoints=cluster.endpoints,
        dump_dir=dump_dir,
    )
    example = example_of(captured, strategy, cluster.trainers)
    places = JobPlaces(cluster, strategy)
    step = TrainerStep(captured, strategy, programs, places.first, example=example, scaling=places)
    if trainer == 0 and not cluster.joins and (why := undivided_job(step.dumps)) is not None:
        warn_at_caller(
            f"'{captured.program.name}' is not divided: each of {cluster.trainers} trainers does "
            f"all of the work, since {why}"
        )
    return step


def serve_job(cluster: PserverRole, strategy: DistributedStrategy) -> int:
    """Serves until the job ends, independent of its step; returns the process's exit code.

    Raises:
        ConnectError: the endpoint is taken, or may not be bound.
        StrategyError: the job has no secret, and is not declared insecure.
    """
    assert cluster.current_endpoint is not None
    options = ServerOptions(
        server=cluster.server_id,
        job=cluster.job,
        launch_id=cluster.launch_id,
        trainers=cluster.trainers,
        lost_after_s=strategy.lost_after_s,
        step_timeout_s=strategy.step_timeout_s,
        connect_s=strategy.connect_s,
        server_return_s=cluster.server_return_s,
        trainer_return_s=strategy.returns_s,
        checkpoint_dir=cluster.own_checkpoints,
        save_dirs=cluster.save_dirs or None,
    )
    return serve(
        cluster.current_endpoint,
        options,
        secret_file=cluster.secret_file,
        insecure=cluster.insecure,
    )


class ServerStep(Generic[State, Metrics]):
    """A step in a server's process, whose only work is to serve.

    Unless started by `jaxfleet launch`, servers run the job's script too. Any use of the step
    other than `program`, `explain`, `view`, `close` and `with` serves until the job ends, and ends
    the process; `serve` does so explicitly.
    """

    def __init__(
        self, captured: Captured, strategy: DistributedStrategy, cluster: PserverRole
    ) -> None:
        self.captured, self.strategy, self._cluster = captured, strategy, cluster

    def __repr__(self) -> str:
        name, cluster = self.captured.program.name, self._cluster
        which = f"server={cluster.server_id}, servers={len(cluster.endpoints)}"
        return f"ServerStep({name!r}, {which}, trainers={cluster.trainers})"

    def _repr_html_(self) -> str:
        cluster = self._cluster
        rows = [
            ("mode", f"pserver, communication {self.strategy.communication}"),
            ("serves as", f"server {cluster.server_id} of {len(cluster.endpoints)}"),
            ("trainers", f"{cluster.trainers}"),
        ]
        captured = [("captured", self.captured.program)]
        return step_html("ServerStep", self.captured, rows, programs=captured)

    @property
    def program(self) -> Program:
        cluster = self._cluster
        programs = programs_for(
            self.strategy, trainer=0, trainers=cluster.trainers, endpoints=cluster.endpoints
        )
        assert cluster.server_id is not None
        example = example_of(self.captured, self.strategy, cluster.trainers)
        return programs(example).servers[cluster.server_id]

    def explain(self) -> Explanation:
        """Describes this server and its part of the job in a line."""
        program, cluster = self.program, self._cluster
        where = f"server {cluster.server_id} of {len(cluster.endpoints)}"
        count = sum(len(block.ops) for block in program.blocks[1:])
        work = f"{count} operators in {len(program.blocks) - 1} blocks"
        return Explanation(f"{where} runs '{program.name}': {work}")

    def view(self, path: str | Path, *, measure: int = 0) -> Path:
        """Writes a report of this server's program, as `Step.view`.

        Args:
            path: a file, replaced if it exists.
            measure: times no calls, since a server has none; the report states that.
        """
        asked = f"{measure} calls were to be timed, but a" if measure else "A"
        why = f"{asked} server calls no step: it answers trainers."
        history = replace(of_program(self.program), decisions=[self.explain()], why_unmeasured=why)
        return write_view(path, [history])

    def serve(self) -> int:
        """Serves until the job ends; returns the exit code of the process.

        Raises:
            ConnectError: the endpoint is taken, or may not be bound.
        """
        return serve_job(self._cluster, self.strategy)

    def save_periodically(self, _: PeriodicSaves) -> None:
        """Does nothing: trainers have servers write their parts."""

    def close(self) -> None:
        """Does nothing: a server ends when all trainers have disconnected."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve_instead(self, *_: Any, **__: Any) -> NoReturn:
        """Serves, and ends the process: the rest of the script is for trainers."""
        sys.exit(self.serve())

    __call__ = evaluate = save = restore = resume = pull = place = _serve_instead
    batches = look_up = shrink = export = stats = log_to = memory_report = _serve_instead

    @property
    def tables(self) -> NoReturn:
        """Serves, like any first use of the step."""
        self._serve_instead()
