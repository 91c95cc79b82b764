"""The job that is simulated: a step whose parameters show which pushes they contain.

The gradient of every trainer's step is 1 at a place of its own in `hits_a` and `hits_b`, which lie
on different servers, and in the rows of a table; the rate is 1. So a value shows which pushes it
contains and how often, whatever their order (`pushes.py`). `fit` depends on all earlier values and
rows, so where no order is left open any that is used at a wrong step changes its bits.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfleet as jf
from jaxfleet.capture import Captured, capture
from jaxfleet.data import Loader
from jaxfleet.errors import CheckpointError
from jaxfleet.ir import Program
from jaxfleet.lower import ExecutableCache
from jaxfleet.passes.pserver.placement import local_endpoints
from jaxfleet.ps.client.client import Client
from jaxfleet.runtime.pserver_job import JobPrograms, example_of, job_programs
from jaxfleet.runtime.trainer_membership import Scaling
from jaxfleet.runtime.trainer_step import TrainerStep
from jaxfleet.strategy import DistributedStrategy
from jaxfleet.tables import Constant, Sgd

STEPS, TRAINERS = 5, 2
MOST_SERVERS = 3  # of a job that moves
PLACES = STEPS * TRAINERS
NAME = "simulation"
LOST_AFTER_S, STEP_TIMEOUT_S, CONNECT_S = 4.0, 20.0, 25.0
TRAINER_RETURN_S = 30.0  # of modes that wait for lost trainers
REPLAY_BYTES = 1 << 12
SAVED_AT, RESTORED_AT = 2, 4  # steps of the script, if it does so
_ROWS_OF_CHANGES = 12  # of a step that one to four trainers share
KEYS = np.array([2, 3])  # of two servers, each has one
HITS = ("hits_a", "hits_b")
LEAVES = (*HITS, "fit")

Relaxed: TypeAlias = Literal["async", "half_async", "dc_asgd", "geo", "fl"]

_ROWS = jf.embedding_table("rows", PLACES, initializer=Constant(0.0), optimizer=Sgd(1.0))
_CACHE = ExecutableCache()


@dataclass(frozen=True, order=True)
class Mode:
    """How the trainers of a job communicate.

    Attributes:
        staleness: bound of a relaxed mode; None for sync.
        has_table: the step looks up and trains rows of a table.
        servers: number of servers.
        waits: for lost trainers, whose place others take.
        relaxed: which relaxed mode, if one.
        period: its `merge`, or its `k_steps`.
        saves: the script saves a checkpoint of the job.
        restores: it also restores that later, once.
        leases: trainers lease their samples, of which each step takes one.
        changes: the job goes on without lost trainers, and others may leave and join.
        moves: servers may be added and removed while it runs.
    """

    staleness: int | None = None
    has_table: bool = False
    servers: int = 2
    waits: bool = False
    relaxed: Relaxed = "async"
    period: int = 1
    saves: bool = False
    restores: bool = False
    leases: bool = False
    changes: bool = False
    moves: bool = False

    @property
    def most_servers(self) -> int:
        """The greatest number of servers at a time."""
        return MOST_SERVERS if self.moves else self.servers

    @property
    def communication(self) -> Relaxed | Literal["sync"]:
        return "sync" if self.staleness is None else self.relaxed

    @property
    def is_exact(self) -> bool:
        """Whether all trainers wait for each other, so that every value has only one result."""
        return self.communication in {"sync", "fl"}

    def __str__(self) -> str:
        mode: str = self.communication
        if self.staleness is not None:
            mode += f" every {self.period}" * (self.period > 1) + f", staleness {self.staleness}"
        more = f"{', a table' * self.has_table}{', waits for trainers' * self.waits}"
        more += f"{', saves' * self.saves}{', restores' * self.restores}"
        more += ", leases samples" * self.leases + ", changes its trainers" * self.changes
        more += ", moves" * self.moves
        return f"{mode}, {self.servers} servers{more}"


@dataclass
class Record:
    """What one trainer has seen.

    Attributes:
        seen: every step with the values that it computed with, by leaf; twice after a restore.
        before: the number of them that former processes with its number have seen.
        lags: the reported histogram of lags, of the last process.
        servers: the number of servers after each of those steps, and at the end.
        final: the last state.
        rows: the last rows of the table.
    """

    seen: list[tuple[int, dict[str, np.ndarray]]] = field(default_factory=list)
    before: int = 0
    lags: dict[str, Any] = field(default_factory=dict)
    servers: list[int] = field(default_factory=list)
    final: dict[str, np.ndarray] = field(default_factory=dict)
    rows: np.ndarray | None = None


@functools.cache
def strategy_of(mode: Mode) -> DistributedStrategy:
    """Returns the strategy of a mode, with short timeouts."""
    more: dict[str, Any] = {}
    if mode.staleness is not None:
        more = {"staleness": mode.staleness, "merge": mode.period, "k_steps": mode.period}
    if mode.waits:
        more |= {"on_trainer_lost": "wait", "trainer_return_s": TRAINER_RETURN_S}
    if mode.changes:
        more |= {"on_trainer_lost": "continue"}
    return DistributedStrategy(
        mode="pserver",
        batch="local" if mode.leases else "global",
        communication=mode.communication,
        min_block_size=PLACES,
        delay_compensation=0.5,  # 1 would hide a push that is applied twice
        lost_after_s=LOST_AFTER_S,
        step_timeout_s=STEP_TIMEOUT_S,
        connect_s=CONNECT_S,
        replay_bytes=REPLAY_BYTES,
        **more,
    )


@functools.cache
def first_state(mode: Mode) -> Any:
    """Returns the state that all trainers begin with, on the host."""
    params = {name: np.zeros(PLACES, np.float32) for name in HITS}
    params["fit"] = np.ones(2, np.float32)
    if mode.has_table:
        params["rows"] = np.asarray(_ROWS.init())
    return params, optax.sgd(1.0).init(params)


@functools.cache
def batches(mode: Mode) -> tuple[dict[str, np.ndarray], ...]:
    """Returns the batches of all steps, with a row for each trainer."""
    draw = np.random.default_rng(5)
    hot = np.eye(PLACES, dtype=np.float32).reshape(STEPS, TRAINERS, PLACES)
    found = []
    copies = _copies(mode)
    for step in range(STEPS):
        batch = {"hot": hot[step], "x": draw.normal(size=(TRAINERS, 2)).astype(np.float32)}
        if mode.has_table:
            batch["keys"] = np.tile(KEYS, (TRAINERS, 1))
        found.append({name: np.tile(rows, (copies, 1)) for name, rows in batch.items()})
    return tuple(found)


def _copies(mode: Mode) -> int:
    """Returns how often a batch has each row."""
    return _ROWS_OF_CHANGES // TRAINERS if mode.changes and not mode.leases else 1


@functools.cache
def _samples(mode: Mode) -> dict[str, np.ndarray]:
    """Returns the source of a job whose trainers lease samples."""
    draw = np.random.default_rng(5)
    hot = np.eye(PLACES, dtype=np.float32)
    source = {"hot": hot, "x": draw.normal(size=(PLACES, 2)).astype(np.float32)}
    if mode.has_table:
        source["keys"] = np.tile(KEYS, (PLACES, 1))
    return source


def _loader(mode: Mode, trainer: int) -> Loader:
    part = min(trainer, TRAINERS - 1), TRAINERS  # of one that joins, too: each step has a sample
    return Loader(_samples(mode), TRAINERS, seed=5, batch="local", part=part, prefetch=1)


@functools.cache
def _captured(mode: Mode) -> Captured:
    tx = jf.distributed_optimizer(optax.sgd(1.0))

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt = state

        def loss_fn(params: Any) -> jax.Array:
            loss = sum((params[name] * batch["hot"]).sum(-1).mean() for name in HITS)
            loss = loss + 0.1 * ((params["fit"] - batch["x"]) ** 2).sum(-1).mean()
            if mode.has_table:
                rows = _ROWS(params["rows"], batch["keys"])
                loss = loss + (rows * batch["hot"][:, None]).sum() / _copies(mode)
                loss = loss + 0.1 * jax.lax.stop_gradient(rows).mean() * params["fit"].sum()
            return jnp.asarray(loss)

        grads = jax.grad(loss_fn)(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), {n: params[n] for n in LEAVES}

    batch = _loader(mode, 0)[0] if mode.leases else batches(mode)[0]
    return capture(train_step, example=(first_state(mode), batch))


def endpoints_of(mode: Mode) -> tuple[str, ...]:
    """Returns the endpoints of the servers with which a job begins."""
    return tuple(local_endpoints(mode.servers))


def programs_of(
    mode: Mode, trainer: int, trainers: int = TRAINERS, endpoints: tuple[str, ...] = ()
) -> Callable[[Program], JobPrograms]:
    """Returns what makes the programs of a trainer, for the first servers by default."""
    return _programs_of(mode, trainer, trainers, endpoints or endpoints_of(mode))


@functools.cache
def _programs_of(
    mode: Mode, trainer: int, trainers: int, endpoints: tuple[str, ...]
) -> Callable[[Program], JobPrograms]:
    made: dict[int, tuple[Program, JobPrograms]] = {}

    def make(program: Program) -> JobPrograms:
        if id(program) not in made:
            job = job_programs(
                program,
                strategy_of(mode),
                trainer=trainer,
                trainers=trainers,
                endpoints=endpoints,
                like=_programs_of(mode, 0, trainers, endpoints)(program) if trainer else None,
            )
            made[id(program)] = program, job  # which keeps the program, and so its id
        return made[id(program)][1]

    return make


@functools.cache
def _example(mode: Mode) -> Program:
    return example_of(_captured(mode), strategy_of(mode), TRAINERS)


def cache() -> ExecutableCache:
    """Returns the executables of all jobs."""
    return _CACHE


def new_step(
    mode: Mode,
    trainer: int,
    connect: Callable[[JobPrograms], Client],
    scaling: Scaling | None = None,
) -> TrainerStep:
    """Returns a step of a trainer; all jobs share its programs and executables."""
    return TrainerStep(
        _captured(mode),
        strategy_of(mode),
        programs_of(mode, trainer) if scaling is None else scaling.programs(trainer, TRAINERS),
        connect,
        example=_example(mode),
        cache=_CACHE,
        scaling=scaling,
    )


def train(
    mode: Mode,
    trainer: int,
    connect: Callable[[JobPrograms], Client],
    record: Record,
    *,
    pause: Callable[[int], None],
    folder: Path,
    scaling: Scaling | None = None,
    leaves_after: int | None = None,
) -> None:
    """Runs the script of a trainer.

    Args:
        mode: how trainers communicate.
        trainer: which one this is.
        connect: returns its client.
        record: of what it sees.
        pause: takes the time of each step's computation.
        folder: for the checkpoint of a script that saves.
        scaling: of a job whose trainers or servers change.
        leaves_after: the step after which this trainer leaves such a job.
    """
    with new_step(mode, min(trainer, TRAINERS - 1), connect, scaling) as step:
        record.before = len(record.seen)
        state, number = step.resume(first_state(mode))
        if mode.leases:
            loader = _loader(mode, trainer)
            state, number = _train_on_leases(step, state, loader, pause, leaves_after), STEPS
        saved, restored = number >= SAVED_AT, False
        while number < STEPS:
            state, used = step(state, batches(mode)[number])
            number += 1
            record.seen.append((number, {name: np.array(used[name]) for name in LEAVES}))
            record.servers.append(len(step.client.me.endpoints))
            pause(number)
            if number == leaves_after:
                step.leave()
            if mode.saves and number == SAVED_AT and not restored:
                saved = _saves(step, state, folder)
            if mode.restores and number == RESTORED_AT and saved and not restored:
                state, restored, number = step.restore(folder), True, SAVED_AT
        last, _ = step.pull(state)
        record.final = {name: np.array(last[name]) for name in LEAVES}
        if mode.has_table:
            record.rows = np.array(step.look_up("rows", KEYS))
        record.servers.append(len(step.client.me.endpoints))
        record.lags = dict(step.stats()["trainer"].get("staleness", {}))


def _train_on_leases(
    step: TrainerStep,
    state: Any,
    loader: Loader,
    pause: Callable[[int], None],
    leaves_after: int | None,
) -> Any:
    for number, batch in enumerate(step.batches(loader), 1):
        state, _ = step(state, batch)
        pause(number)
        if number == leaves_after:
            step.leave()
    return state


def _saves(step: TrainerStep, state: Any, folder: Path) -> bool:
    """Saves; a script may go on without a checkpoint if none could be written."""
    try:
        step.save(folder, state)
    except CheckpointError:
        return False
    return True
