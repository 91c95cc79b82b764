"""The programs of a parameter-server job: a trainer's, and one for each server."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxfleet.analysis.rules import meaning_rules
from jaxfleet.ir import Program
from jaxfleet.passes import (
    DeadCodeElimination,
    Dispatch,
    GradAllreduce,
    InsertSendRecv,
    MergeSends,
    ScheduleSends,
    SliceVar,
)
from jaxfleet.passes._uses import Effects
from jaxfleet.pipeline import Pass, Record, parse_pipeline, run_pipeline
from jaxfleet.runtime.strategy import DistributedStrategy
from jaxfleet.runtime.transpile import transpile


@dataclass(frozen=True)
class JobPrograms:
    """What the processes of a job run.

    Attributes:
        trainer: this trainer's program.
        servers: each server's.
        dumps: what every pass did to the trainer's program.
        trainers: how many there are.
        is_whole: every trainer computes the whole batch, since it cannot be divided.
        digest: the same in all processes of a job that run the same programs.
    """

    trainer: Program
    servers: tuple[Program, ...]
    dumps: Record
    trainers: int
    is_whole: bool
    digest: str


def job_programs(
    program: Program,
    strategy: DistributedStrategy,
    *,
    trainer: int,
    trainers: int,
    endpoints: Sequence[str],
    dump_dir: Path | None = None,
    like: JobPrograms | None = None,
) -> JobPrograms:
    """Returns the programs of a job.

    Args:
        program: the captured step.
        strategy: how it is cut and placed.
        trainer: whose program, of the trainers.
        trainers: how many there are.
        endpoints: of the servers.
        dump_dir: where to write dumps.
        like: those of another trainer, which has the same servers.

    Raises:
        PassError: the step cannot be divided between trainers and servers.
    """
    first: list[Pass] = [DeadCodeElimination()]
    whole = trainers == 1
    if trainers > 1:
        divided = GradAllreduce(devices=trainers, local_statistics=strategy.local_statistics)
        whole = _has_inner_collectives(divided.run(program))
        first += [] if whole else [divided]
    first += [
        SliceVar(
            servers=len(endpoints),
            min_block_size=strategy.min_block_size,
            slice=strategy.slice_var,
        ),
        Dispatch(
            endpoints=tuple(endpoints),
            method=strategy.dispatch,
            max_imbalance=strategy.max_imbalance,
        ),
    ]
    more = [ScheduleSends(cuts=strategy.send_cuts), MergeSends(), *parse_pipeline(strategy.passes)]
    mine = InsertSendRecv(trainers=trainers, trainer_id=trainer)
    made, record = transpile(program, [*first, mine, *more], dump_dir=dump_dir)
    if like is not None:
        return replace(like, trainer=made, dumps=record)
    placed = run_pipeline(program, first, rules=meaning_rules)
    servers = tuple(
        transpile(placed, [InsertSendRecv(trainers=trainers, server=n)], dump_dir=None)[0]
        for n in range(len(endpoints))
    )
    return JobPrograms(made, servers, record, trainers, whole, _digest(program, servers))


def _has_inner_collectives(program: Program) -> bool:
    """Tells whether trainers would have to talk to servers from inside a loop."""
    effects = Effects()
    return any(effects.is_collective(op) for block in program.blocks[1:] for op in block.ops)


def _digest(program: Program, servers: Sequence[Program]) -> str:
    texts = [str(program), *map(str, servers)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
