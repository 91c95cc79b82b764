"""Programs of a parameter-server job's processes, and their explanation in some twenty lines."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxfleet.analysis.flow import Effects
from jaxfleet.analysis.placement.transfer_plan import transfer_plan
from jaxfleet.analysis.step_checks import meaning_rules
from jaxfleet.capture import Captured
from jaxfleet.env import read_environment
from jaxfleet.errors import StrategyError
from jaxfleet.ir import Kind, Operator, Program, print_program, verify
from jaxfleet.lower.partition import count_waits
from jaxfleet.passes import InsertStartup
from jaxfleet.passes.pipelines import (
    dividing_passes,
    exchange_pass,
    placement_pipeline,
    trainer_pipeline,
)
from jaxfleet.passes.pserver.insert_startup import server_startups, trainer_startup
from jaxfleet.passes.pserver.trainer_split import update_obstacle
from jaxfleet.pipeline import Dump, Pass, Record, Stage, new_dump_folder
from jaxfleet.ps.client.communicator import CommunicationMode
from jaxfleet.ps.client.trainer_identity import TrainerIdentity
from jaxfleet.ps.timeouts import Timeouts
from jaxfleet.runtime.explain import (
    about_capture,
    about_notes,
    about_parts,
    about_passes,
    counted,
    undivided,
    why_undivided,
)
from jaxfleet.runtime.memory_fit import Fit
from jaxfleet.runtime.step_html import Explanation
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
    placed = record[len(first)].after
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
    job: JobPrograms,
    *,
    name: str,
    trainer: int,
    trainers: int,
    endpoints: Sequence[str],
    life: int = 0,
) -> TrainerIdentity:
    """Returns the identity of a trainer; `life` counts its restarts."""
    programs = [(print_program(server), constants_of(server)) for server in job.servers]
    return TrainerIdentity(
        name, trainer, trainers, tuple(endpoints), job.digest, programs, text=job.text, life=life
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
        trainer_return_s=strategy.returns_s,
    )


def about_mode(trainer: Program, trainers: int) -> Iterator[str]:
    """Describes the communication mode of a trainer's program in a job of `trainers`."""
    mode = CommunicationMode.of(trainer)
    if mode is None:
        yield "communication sync: all trainers wait for each other at every step, as on one device"
        return
    how = {
        "async": "gradients are sent as soon as they are computed, and no trainer waits; up to "
        f"{mode.merge} (merge) are added up in one message while an answer is pending",
        "half_async": f"one message has the mean of the gradients of {mode.merge} steps (merge), "
        "and the trainer waits for its answer",
        "dc_asgd": "trainers wait for the answer to each gradient; servers correct it by "
        f"{trainer.attrs.get('compensation')} g g (w - w'), w' what its trainer last received",
        "geo": f"trainers update on their own; every {mode.k_steps} steps (k_steps) they send "
        f"1/{trainers} of their change",
        "fl": f"trainers update on their own; every {mode.k_steps} steps (k_steps) they send "
        "their parameters and go on with the mean",
    }
    yield f"communication {mode.communication}: {how[mode.communication]}"
    if mode.averages_state:
        yield f"values are at most {mode.k_steps - 1} steps old: an exchange waits for all"
        return
    yield (
        f"staleness {mode.staleness}: a step sees all that every trainer sent up to "
        f"{mode.staleness + 1} steps before; a trainer further ahead waits for the slowest"
    )


def explain_job(captured: Captured, strategy: DistributedStrategy, job: JobPrograms) -> Explanation:
    """Returns the explanation of a step that trainers and servers share."""
    lines = [
        *about_capture(captured),
        *_about_processes(captured, strategy, job),
        *about_mode(job.trainer, job.trainers),
        *_about_travel(job, _share(captured, strategy, job)),
        *([] if job.is_whole else about_notes(job.trainer, job.dumps)),
        about_passes(job.dumps),
    ]
    return Explanation("\n".join([lines[0], *(f"  {line}" for line in lines[1:])]))


def undivided_job(dumps: Record) -> str | None:
    """Returns why every trainer computes all of a training step, and a remedy.

    None if trainers divide it, or are not meant to: a single one, or in a relaxed mode.
    """
    stages = [stage for stage in dumps if stage.name == "grad_allreduce"]
    return undivided(stages[0].after, dumps) if stages else None


def _why_undivided(dumps: Record) -> str | None:
    stages = [stage for stage in dumps if stage.name == "grad_allreduce"]
    return why_undivided(stages[0].after, dumps) if stages else None


def _about_processes(
    captured: Captured, strategy: DistributedStrategy, job: JobPrograms
) -> Iterator[str]:
    trainers, rows = job.trainers, captured.signature.rows
    share = _share(captured, strategy, job)
    why = None if job.is_whole else _why_undivided(job.dumps)
    parts = "" if why is not None else f", {share} of {rows} rows on each"
    servers = counted(len(job.servers), "server")
    yield f"{counted(trainers, 'trainer')}{parts}; {servers}"
    if why is not None:
        yield f"every trainer computes the whole batch: {why}"
    if job.is_whole and trainers > 1:
        op = holds_sum(captured.program, strategy, trainers)
        kind = op.type.removeprefix("jax.")
        what = "a branch for each platform" if op.attrs.get("platforms") else f"'{kind}'"
        yield (
            f"every trainer computes the whole batch: values of all rows are needed inside {what} "
            f"({op.source.place()}), where a trainer cannot wait for the others"
        )
    yield from _about_updates(job)
    yield from about_parts(job.trainer)
    if strategy.communication != "sync":  # otherwise the mode defines what is waited for
        return
    waits = count_waits(job.trainer)
    yield f"a step waits for servers {waits} time{'s' * (waits != 1)}"


def _about_updates(job: JobPrograms) -> Iterator[str]:
    if all(stage.name != "update_on_trainers" for stage in job.dumps):
        return
    stage = job.dumps["update_on_trainers"]
    why = update_obstacle(stage.before) if stage.after is not stage.before else None
    if why is not None:
        yield (
            "every trainer runs the optimizer on gradients that servers add up, and holds all of "
            f"its state: {why.headline}"
        )


def _about_travel(job: JobPrograms, rows: int) -> Iterator[str]:
    placed = job.dumps["dispatch"].after
    plan = transfer_plan(placed, trainers=job.trainers, trainer=job.trainer, rows=rows)
    yield from plan.summary()


def _share(captured: Captured, strategy: DistributedStrategy, job: JobPrograms) -> int:
    rows = captured.signature.rows
    return rows if job.is_whole or strategy.batch == "local" else rows // job.trainers
