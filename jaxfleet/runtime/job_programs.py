"""The programs of a parameter-server job: a trainer's, one for each server, and how all start."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxfleet.analysis.rules import meaning_rules
from jaxfleet.env import read_environment
from jaxfleet.errors import StrategyError
from jaxfleet.ir import Operator, Program, verify
from jaxfleet.passes import (
    DeadCodeElimination,
    Dispatch,
    GradAllreduce,
    InsertSendRecv,
    InsertStartup,
    MergeSends,
    ScheduleSends,
    SkipNonfinite,
    SliceVar,
    SparseTable,
    UpdateOnTrainers,
)
from jaxfleet.passes._effects import Effects
from jaxfleet.passes._startup import server_startups, trainer_startup
from jaxfleet.pipeline import (
    Dump,
    Pass,
    Record,
    Stage,
    new_dump_folder,
    run_pipeline,
)
from jaxfleet.ps.job_text import digest_of, without_ports
from jaxfleet.runtime.memory_fit import Fit
from jaxfleet.runtime.strategy import DistributedStrategy, check_skips_no_rows
from jaxfleet.runtime.transpile import named_passes, transpile


@dataclass(frozen=True)
class JobPrograms:
    """What the processes of a job run.

    Attributes:
        trainer: this trainer's program.
        servers: each server's.
        trainer_startup: this trainer's startup program.
        server_startups: each server's.
        dumps: what every pass did to the trainer's program.
        trainers: how many there are.
        is_whole: every trainer computes the whole batch, since it cannot be divided.
        text: the programs, which must be the same in all processes of a job.
        digest: of the text.
        fit: what was found for a budget of memory; None where none was asked for.
    """

    trainer: Program
    servers: tuple[Program, ...]
    trainer_startup: Program
    server_startups: tuple[Program, ...]
    dumps: Record
    trainers: int
    is_whole: bool
    text: str
    digest: str
    fit: Fit | None = None

    def __repr__(self) -> str:
        of_servers = ", ".join(repr(program) for program in self.servers[:2])
        more = len(self.servers) - 2
        of_servers += f", and {more} more" if more > 0 else ""
        return f"JobPrograms(trainer={self.trainer!r}, servers=[{of_servers}])"


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
        StrategyError: trainers have their own rows only, and the step needs all of them on each;
            they average what they have, and the step has tables.
    """
    _check_tables(program, strategy)
    is_sync = strategy.communication == "sync"
    dividing = _dividing(program, strategy, trainers) if is_sync else []
    updating = [UpdateOnTrainers()] if is_sync else []
    skipping = [SkipNonfinite()] if strategy.on_nonfinite == "skip" else []
    clean = [DeadCodeElimination(), *skipping]
    first = [*clean, *dividing, *updating, *_placing(strategy, endpoints)]
    more = _scheduling(strategy)
    if "tables" in program.attrs:
        more.append(SparseTable(trainer_id=trainer))
    more += named_passes(strategy)
    inserting = _inserting(strategy, trainers)
    mine = replace(inserting, trainer_id=trainer)
    made, record = transpile(program, [*first, mine, *more], dump_dir=dump_dir)
    if like is not None:
        startup = _trainer_startup(program, made, like.server_startups, trainer)
        return replace(like, trainer=made, trainer_startup=startup, dumps=record)
    placed = run_pipeline(program, first, rules=meaning_rules)
    servers = tuple(
        transpile(placed, [replace(inserting, server=n)], dump_dir=None)[0]
        for n in range(len(endpoints))
    )
    startups = _server_startups(program, servers)
    text = without_ports("\n".join(map(str, [program, *servers])), endpoints)
    return JobPrograms(
        trainer=made,
        servers=servers,
        trainer_startup=_trainer_startup(program, made, startups, trainer),
        server_startups=startups,
        dumps=record,
        trainers=trainers,
        is_whole=is_sync and not dividing,
        text=text,
        digest=digest_of(text),
    )


def _check_tables(program: Program, strategy: DistributedStrategy) -> None:
    """Refuses tables where trainers average what they have, for nobody has all rows; or skip."""
    if program.attrs.get("tables"):
        check_skips_no_rows(strategy)
    if strategy.communication == "fl" and program.attrs.get("tables"):
        what = f"'{program.name}' has tables, and tables are not trained with communication='fl'"
        raise StrategyError(what, hint="communication='geo' exchanges changes of rows")


def _dividing(program: Program, strategy: DistributedStrategy, trainers: int) -> list[Pass]:
    """Returns the pass that divides the batch among trainers; none where each computes all."""
    if trainers == 1:
        return []
    dividing = GradAllreduce(devices=trainers, local_statistics=strategy.local_statistics)
    inside = _inner_collective(dividing.run(program))
    if inside is None:
        return [dividing]
    if strategy.batch == "local":
        what = f"'{program.name}' sums over the batch inside a loop, so a trainer needs all rows"
        hint = "give every trainer the whole batch: strategy.batch='global'"
        raise StrategyError(what, op=inside, hint=hint)
    return []


def _inserting(strategy: DistributedStrategy, trainers: int) -> InsertSendRecv:
    """Returns the pass that writes programs: of trainer 0, or of whom it is replaced for."""
    if strategy.communication == "sync":
        return InsertSendRecv(trainers=trainers)
    return InsertSendRecv(
        trainers=trainers,
        mode=strategy.communication,
        staleness=strategy.bound,
        merge=strategy.merge,
        k_steps=strategy.k_steps,
        compensation=strategy.delay_compensation,
        by_rows=strategy.communication == "fl" and strategy.average == "rows",
    )


def _scheduling(strategy: DistributedStrategy) -> list[Pass]:
    """Returns the passes that order what is sent; trainers that update send it all at once."""
    if strategy.communication in {"geo", "fl"}:
        return [MergeSends()]
    return [ScheduleSends(cuts=strategy.send_cuts), MergeSends()]


def _placing(strategy: DistributedStrategy, endpoints: Sequence[str]) -> list[Pass]:
    """Returns the passes that cut parameters and place them on servers."""
    slicing = SliceVar(
        servers=len(endpoints), min_block_size=strategy.min_block_size, slice=strategy.slice_var
    )
    dispatch = Dispatch(
        endpoints=tuple(endpoints), method=strategy.dispatch, max_imbalance=strategy.max_imbalance
    )
    return [slicing, dispatch]


def _server_startups(step: Program, servers: Sequence[Program]) -> tuple[Program, ...]:
    startups = server_startups(step, servers)
    for number, (server, startup) in enumerate(zip(servers, startups, strict=True)):
        _check_and_dump(server, startup, InsertStartup(server=number))
    return startups


def _trainer_startup(
    step: Program, trainer: Program, startups: Sequence[Program], trainer_id: int
) -> Program:
    startup = trainer_startup(step, trainer, startups, trainer_id=trainer_id)
    _check_and_dump(trainer, startup, InsertStartup(trainer_id))
    return startup


def _check_and_dump(main: Program, startup: Program, by: Pass) -> None:
    """Does for a startup program what a pipeline does for the others."""
    verify(startup, more_rules=meaning_rules)
    folder = read_environment().dump_dir
    if folder is not None:
        dump = Dump(new_dump_folder(folder, startup.name))
        dump(Stage(0, None, main, main))
        dump(Stage(1, by, main, startup))


def _inner_collective(program: Program) -> Operator | None:
    """Returns what trainers would have to ask servers for from inside a loop, if anything."""
    inner, effects = (op for block in program.blocks[1:] for op in block.ops), Effects()
    return next((op for op in inner if effects.is_collective(op)), None)


def holds_sum(program: Program, strategy: DistributedStrategy, trainers: int) -> Operator:
    """Returns what keeps a step's batch from being divided: a loop, or a branch, with a sum inside.

    Args:
        program: the captured step, which every trainer computes whole.
        strategy: its own.
        trainers: how many there are.
    """
    dividing = GradAllreduce(devices=trainers, local_statistics=strategy.local_statistics)
    divided, effects = dividing.run(program), Effects()
    at = next(i for i, block in enumerate(divided.blocks)
              if i and any(map(effects.is_collective, block.ops)))  # fmt: skip
    return next(op for block in divided.blocks for op in block.ops if at in op.blocks)
