"""Programs of a parameter-server job, their constants, and the identity of its trainers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxfleet.analysis.flow import Effects
from jaxfleet.analysis.step_checks import meaning_rules
from jaxfleet.capture import Captured
from jaxfleet.env import read_environment
from jaxfleet.errors import StrategyError
from jaxfleet.ir import Kind, Operator, Program, print_program, verify
from jaxfleet.passes import InsertStartup
from jaxfleet.passes.pipelines import (
    dividing_passes,
    exchange_pass,
    placement_pipeline,
    trainer_pipeline,
)
from jaxfleet.passes.pserver.insert_startup import server_startups, trainer_startup
from jaxfleet.pipeline import Dump, Pass, Record, Stage, new_dump_folder, run_pipeline
from jaxfleet.ps.client.trainer_identity import Timeouts, TrainerIdentity
from jaxfleet.runtime.memory_fit import Fit
from jaxfleet.runtime.transpile import for_slices, transpile
from jaxfleet.strategy import DistributedStrategy, check_skips_no_rows
from jaxfleet.transport.consistency import mask_endpoints, text_digest


@dataclass(frozen=True)
class JobPrograms:
    """Programs of a job's processes."""

    trainer: Program  # this trainer's program
    servers: tuple[Program, ...]  # each server's
    trainer_startup: Program  # this trainer's startup program
    server_startups: tuple[Program, ...]  # each server's
    dumps: Record  # record of every pass on the trainer's program
    trainers: int  # number of trainers
    is_whole: bool  # every trainer computes the whole batch, since it cannot be divided
    text: str  # the programs, which must be the same in all processes of a job
    digest: str  # of the text
    fit: Fit | None = None  # result for a memory budget; None without a budget

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
    """Returns the programs of a job for trainer `trainer`, and of all servers.

    `like` are the programs of another trainer with the same servers.

    Raises:
        PassError: the step cannot be divided between trainers and servers.
        StrategyError: the step needs all rows and trainers have their own only; or trainers average
            parameters and the step has tables.
    """
    _check_tables(program, strategy)
    is_sync = strategy.communication == "sync"
    dividing = _dividing(program, strategy, trainers) if is_sync else ()
    first = placement_pipeline(strategy, endpoints, dividing)
    inserting = exchange_pass(strategy, trainers)
    mine = replace(inserting, trainer_id=trainer)
    more = trainer_pipeline(strategy, trainer=trainer, tables="tables" in program.attrs)
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
    text = mask_endpoints("\n".join(map(str, [program, *servers])), endpoints)
    return JobPrograms(
        trainer=made,
        servers=servers,
        trainer_startup=_trainer_startup(program, made, startups, trainer),
        server_startups=startups,
        dumps=record,
        trainers=trainers,
        is_whole=is_sync and not dividing,
        text=text,
        digest=text_digest(text),
    )


def _check_tables(program: Program, strategy: DistributedStrategy) -> None:
    """Rejects tables if trainers average, as no peer has all rows; or if steps may be skipped."""
    if program.attrs.get("tables"):
        check_skips_no_rows(strategy)
    if strategy.communication == "fl" and program.attrs.get("tables"):
        what = f"'{program.name}' has tables, and tables are not trained with communication='fl'"
        raise StrategyError(what, hint="communication='geo' exchanges changes of rows")


def _dividing(program: Program, strategy: DistributedStrategy, trainers: int) -> tuple[Pass, ...]:
    """Returns the passes that divide the batch among trainers; none if each computes all."""
    if trainers == 1:
        return ()
    passes = dividing_passes(program, strategy, trainers)
    inside = _inner_collective(_divided(program, passes))
    if inside is None:
        return passes
    if strategy.batch == "local":
        what = f"'{program.name}' sums over the batch inside a loop, so a trainer needs all rows"
        hint = "give every trainer the whole batch: strategy.batch='global'"
        raise StrategyError(what, op=inside, hint=hint)
    return ()


def _divided(program: Program, passes: Sequence[Pass]) -> Program:
    for each in passes:
        program = each.run(program)
    return program


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
    """Verifies and dumps a startup program, as a pipeline does for others."""
    verify(startup, more_rules=meaning_rules)
    folder = read_environment().dump_dir
    if folder is not None:
        dump = Dump(new_dump_folder(folder, startup.name))
        dump(Stage(0, None, main, main))
        dump(Stage(1, by, main, startup))


def _inner_collective(program: Program) -> Operator | None:
    """Returns a collective of trainers inside a loop, if there is one."""
    inner, effects = (op for block in program.blocks[1:] for op in block.ops), Effects()
    return next((op for op in inner if effects.is_collective(op)), None)


def holds_sum(program: Program, strategy: DistributedStrategy, trainers: int) -> Operator:
    """Returns the loop or branch whose inner sum keeps a step's batch from being divided."""
    divided = _divided(program, dividing_passes(program, strategy, trainers))
    effects = Effects()
    at = next(i for i, block in enumerate(divided.blocks)
              if i and any(map(effects.is_collective, block.ops)))  # fmt: skip
    return next(op for block in divided.blocks for op in block.ops if at in op.blocks)


def programs_for(
    strategy: DistributedStrategy,
    *,
    trainer: int,
    trainers: int,
    endpoints: Sequence[str],
    dump_dir: Path | None = None,
) -> Callable[[Program], JobPrograms]:
    """Returns a function from a captured step to its job's programs."""

    def make(program: Program) -> JobPrograms:
        return job_programs(
            program,
            strategy,
            trainer=trainer,
            trainers=trainers,
            endpoints=endpoints,
            dump_dir=dump_dir,
        )

    return make


def example_of(captured: Captured, strategy: DistributedStrategy, trainers: int) -> Program:
    """Returns the captured step for batches like the example, as the trainers compute it.

    In sync mode a step is the whole batch's; otherwise it is one trainer's.
    """
    rows = captured.signature.rows
    if strategy.communication == "sync":
        whole = rows * trainers if strategy.batch == "local" else rows
        return for_slices(captured.at(whole), whole, trainers).program
    return captured.at(rows if strategy.batch == "local" else rows // trainers).program


def membership(
    job: JobPrograms, *, name: str, trainer: int, trainers: int, endpoints: Sequence[str]
) -> TrainerIdentity:
    """Returns the identity of a trainer."""
    programs = [(print_program(server), constants_of(server)) for server in job.servers]
    return TrainerIdentity(
        name, trainer, trainers, tuple(endpoints), job.digest, programs, text=job.text
    )


def constants_of(program: Program) -> Mapping[str, np.ndarray]:
    """Returns the values of a program's constants, by name."""
    found = {}
    for scope in (program.variables, *(block.variables for block in program.blocks)):
        for variable in scope.values():
            constant = variable.constant
            if variable.kind is Kind.CONST and constant is not None and constant.value is not None:
                found[variable.name] = np.asarray(constant.value)
    return found


def timeouts_of(strategy: DistributedStrategy, *, server_return_s: float = 0.0) -> Timeouts:
    """Returns the deadlines that a strategy sets."""
    return Timeouts(
        lost_after_s=strategy.lost_after_s,
        step_timeout_s=strategy.step_timeout_s,
        connect_s=strategy.connect_s,
        server_return_s=server_return_s,
    )
