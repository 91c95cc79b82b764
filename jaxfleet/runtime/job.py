"""How a step of a parameter-server job finds its servers."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxfleet.capture import Captured
from jaxfleet.ir import Kind, Program, print_program
from jaxfleet.ps.membership import Membership
from jaxfleet.ps.options import Patience
from jaxfleet.runtime.job_programs import JobPrograms, job_programs
from jaxfleet.runtime.strategy import DistributedStrategy


def programs_for(
    strategy: DistributedStrategy,
    *,
    trainer: int,
    trainers: int,
    endpoints: Sequence[str],
    dump_dir: Path | None = None,
) -> Callable[[Program], JobPrograms]:
    """Returns what makes a job's programs of a captured step."""

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
    """Returns the captured step for batches like the example, as trainers of a job compute it.

    Where all wait for each other, a step is the whole batch's; else it is one trainer's.
    """
    rows = captured.signature.rows
    is_shared = strategy.communication != "sync" and strategy.batch == "global"
    return captured.at(rows // trainers if is_shared else rows).program


def membership(
    job: JobPrograms, *, name: str, trainer: int, trainers: int, endpoints: Sequence[str]
) -> Membership:
    """Returns who a trainer is."""
    programs = [(print_program(server), constants_of(server)) for server in job.servers]
    return Membership(
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


def patience_of(strategy: DistributedStrategy, *, server_return_s: float = 0.0) -> Patience:
    """Returns the deadlines that a strategy sets."""
    return Patience(
        lost_after_s=strategy.lost_after_s,
        step_timeout_s=strategy.step_timeout_s,
        connect_s=strategy.connect_s,
        server_return_s=server_return_s,
    )
