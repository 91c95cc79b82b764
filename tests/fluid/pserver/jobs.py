"""Jobs of fluid's scripts in one process: executors over a network in memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from jaxfleet import fluid
from tests.fluid.nets import fresh
from tests.fluid.pserver.memory import Job

Build = Callable[[], fluid.Variable]  # builds a net with its optimizer; returns the loss
Feed = Mapping[str, np.ndarray]
Feeds = Sequence[Sequence[Feed]]  # of every trainer, of every step


@dataclass
class Seen:
    """Results of a job.

    Attributes:
        losses: of every trainer, of every step.
        params: each trainer's final parameters.
        begun: each trainer's initial parameters.
        scopes: of the servers.
    """

    losses: list[list[float]] = field(default_factory=list)
    params: list[dict[str, np.ndarray]] = field(default_factory=list)
    begun: list[dict[str, np.ndarray]] = field(default_factory=list)
    scopes: list[fluid.Scope] = field(default_factory=list)


class Script:
    """The script of every process of a job.

    Args:
        job: its network.
        build: builds the net.
        endpoints: of the servers.
        trainers: the number of trainers.
        seed: of both programs.
        config: fields of the transpiler's config.
    """

    def __init__(
        self,
        job: Job,
        build: Build,
        endpoints: Sequence[str],
        trainers: int,
        *,
        seed: int = 7,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.job, self.build, self.endpoints, self.trainers = job, build, endpoints, trainers
        self.seed, self.config = seed, config or {}

    def transpiled(self, number: int = 0) -> tuple[Any, fluid.Program, fluid.Variable]:
        """Returns the transpiler, the startup program and the loss of a process."""
        config = fluid.DistributeTranspilerConfig()
        for name, value in {"wait_port": False, **self.config}.items():
            setattr(config, name, value)
        transpiler = fluid.DistributeTranspiler(config)
        with fresh() as (main, startup):
            loss = self.build()
            main.random_seed = startup.random_seed = self.seed
            transpiler.transpile(
                number, pservers=",".join(self.endpoints), trainers=self.trainers,
                sync_mode=config.sync_mode,
            )  # fmt: skip
        return transpiler, startup, loss

    def executor(self) -> fluid.Executor:
        """Returns an executor that communicates over the network in memory."""
        exe = fluid.Executor(fluid.CPUPlace())
        exe._pserver.connections = self.job.connections()
        return exe

    def serve(self, number: int, scope: fluid.Scope) -> None:
        main, startup = self.transpiled()[0].get_pserver_programs(self.endpoints[number])
        exe = self.executor()
        exe.run(startup, scope=scope)
        exe.run(main, scope=scope)

    def train(self, number: int, feeds: Sequence[Feed], seen: Seen) -> list[float]:
        transpiler, startup, loss = self.transpiled(number)
        main, exe, scope = transpiler.get_trainer_program(), self.executor(), fluid.Scope()
        exe.run(startup, scope=scope)
        seen.begun[number] = held(main, scope)
        losses = [
            float(exe.run(main, feed=dict(fed), fetch_list=[loss], scope=scope)[0][0])
            for fed in feeds
        ]
        exe.close()
        seen.params[number] = held(main, scope)
        return losses


def held(program: fluid.Program, scope: fluid.Scope) -> dict[str, np.ndarray]:
    return {p.name: np.array(scope[p.name]) for p in program.all_parameters()}


def run_job(build: Build, feeds: Feeds, *, servers: int = 2, **more: Any) -> Seen:
    """Trains on servers; each trainer on its own feeds."""
    job, count = Job(), len(feeds)
    endpoints = [f"127.0.0.1:{7201 + n}" for n in range(servers)]
    script = Script(job, build, endpoints, count, **more)
    seen = Seen(
        params=[{} for _ in feeds],
        begun=[{} for _ in feeds],
        scopes=[fluid.Scope() for _ in endpoints],
    )
    people: dict[str, Callable[[], Any]] = {
        f"server {n}": partial(script.serve, n, seen.scopes[n]) for n in range(servers)
    }
    people |= {f"trainer {n}": partial(script.train, n, feeds[n], seen) for n in range(count)}
    done = job.run(people)
    seen.losses = [done[f"trainer {n}"] for n in range(count)]
    return seen


def run_alone(build: Build, feeds: Sequence[Feed], *, seed: int = 7) -> Seen:
    """Trains in one process, on whole batches."""
    scope, exe = fluid.Scope(), fluid.Executor(fluid.CPUPlace())
    with fresh() as (main, startup):
        loss = build()
        main.random_seed = startup.random_seed = seed
    exe.run(startup, scope=scope)
    begun = held(main, scope)
    losses = [
        float(exe.run(main, feed=dict(fed), fetch_list=[loss], scope=scope)[0][0]) for fed in feeds
    ]
    return Seen([losses], [held(main, scope)], [begun])


def shared_out(batches: Sequence[Feed], trainers: int) -> list[list[Feed]]:
    """Returns the batches of each trainer: every second row, if there are two."""
    return [
        [{name: rows[n::trainers] for name, rows in fed.items()} for fed in batches]
        for n in range(trainers)
    ]
