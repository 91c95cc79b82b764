"""Transpilers for ranks that train together without servers.

Each only chooses passes: `grad_allreduce_by_role` or `local_sgd` for the main program, `comm_init`
and what follows it for the startup program. See there for what they write.
"""

from collections.abc import Sequence
from typing import ClassVar, Protocol

from jaxfleet.fluid import unique_name
from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.operator import ROLE, ROLE_VAR
from jaxfleet.fluid.program import Program, default_main_program, default_startup_program
from jaxfleet.fluid.roles import OpRole
from jaxfleet.fluid.transpiler.asked import check_among, rank_endpoints
from jaxfleet.fluid.transpiler.rewriting import Rewritten
from jaxfleet.ops.frames import warn_at_caller
from jaxfleet.passes import (
    BroadcastParams,
    CommInit,
    CommInitAll,
    GradAllreduceByRole,
    SnapshotParams,
)
from jaxfleet.passes import (
    LocalSGD as LocalSGDPass,
)
from jaxfleet.pipeline import Pass

_ALONE = "name the others too; one rank needs no transpiler"


class Collective:
    """Rewrites a program so that ranks train together.

    Args:
        nrings: over how many communicators collectives are spread; kept as metadata.
    """

    takes_one_rank: ClassVar[bool] = False

    def __init__(self, nrings: int) -> None:
        self.nrings = nrings
        self.rank, self.nranks = 0, 0
        self.endpoints: list[str] = []
        self.current_endpoint = ""
        self.wait_port = True
        self.startup_program: Program | None = None
        self.main_program: Program | None = None

    def transpile(
        self,
        startup_program: Program | None,
        main_program: Program | None,
        rank: int,
        endpoints: str | Sequence[str],
        current_endpoint: str,
        wait_port: bool,
    ) -> None:
        """Rewrites both programs in place; each keeps what it was as `_origin_program`.

        Args:
            startup_program: the default one, unless given.
            main_program: the default one, unless given.
            rank: which of the endpoints this process is, from 0 on.
            endpoints: `host:port` of every rank, in a list or between commas.
            current_endpoint: this rank's.
            wait_port: taken; the startup program's first run joins the others, and waits for them.

        Raises:
            ValueError: there is one rank only, no such rank, or no such endpoint; or a program is
                rewritten already.
            ConnectError: the others do not listen in time.
        """
        self.startup_program = startup_program or default_startup_program()
        self.main_program = main_program or default_main_program()
        self.endpoints = rank_endpoints(endpoints)
        self.nranks, self.rank = len(self.endpoints), rank
        self.current_endpoint, self.wait_port = current_endpoint, wait_port
        self._check()
        main, startup = self.main_program, self.startup_program
        rewritten = [
            Rewritten.of(startup, self._startup_passes(startup), name="startup"),
            Rewritten.of(main, self._main_passes(main)),
        ]
        for program in rewritten:  # not before both went well
            program.write_back()

    def _check(self) -> None:
        if self.nranks == 1 and not self.takes_one_rank:
            raise mistake(f"there is one rank, {self.endpoints[0]}", _ALONE)
        if self.rank < 0:
            raise mistake(f"the rank is {self.rank}", "ranks count from 0")
        check_among(self.current_endpoint, self.endpoints)

    def _startup_passes(self, program: Program) -> list[Pass]:
        ids = tuple(unique_name.generate("nccl_id") for _ in range(self.nrings))
        join = CommInit(tuple(self.endpoints), self.current_endpoint, self.rank, ids)
        return [join, BroadcastParams(self.nrings, skip=distributed(program))]

    def _main_passes(self, program: Program) -> list[Pass]:
        raise NotImplementedError(f"{type(self).__name__} does not say how {program!r} changes")


class GradAllReduce(Collective):
    """Sums gradients over ranks: every rank updates by the mean of all ranks' gradients.

    Args:
        nrings: over how many communicators the sums are spread.
    """

    def __init__(self, nrings: int = 2) -> None:
        super().__init__(nrings)

    def _main_passes(self, program: Program) -> list[Pass]:
        if not _has_gradients(program):
            what = "no operator of the program finishes a gradient: GradAllReduce sums nothing"
            warn_at_caller(f"{what}; call minimize before the program is transpiled")
            return []
        skip = distributed(program)
        return [GradAllreduceByRole(self.nranks, self.nrings, self.rank, skip)]


class LocalSGD(Collective):
    """Lets every rank update by itself, and takes the mean of their parameters.

    Args:
        nrings: over how many communicators the sums are spread.
        k_steps: after how many steps ranks meet; fluid knows 1 only.
    """

    def __init__(self, nrings: int = 2, k_steps: int = 1) -> None:
        super().__init__(nrings)
        self.k_steps = k_steps

    def _startup_passes(self, program: Program) -> list[Pass]:
        skip = distributed(program)
        return [*super()._startup_passes(program), SnapshotParams(self.k_steps, skip)]

    def _main_passes(self, program: Program) -> list[Pass]:
        skip = distributed(program)
        return [LocalSGDPass(self.nranks, self.nrings, self.rank, self.k_steps, skip)]


class SingleProcessMultiThread(GradAllReduce):
    """Sums gradients over the devices of one process, one for each endpoint."""

    takes_one_rank = True

    def __init__(self) -> None:
        super().__init__(1)

    def _startup_passes(self, program: Program) -> list[Pass]:
        del program
        return [CommInitAll()]


class HasRings(Protocol):
    """The part of a transpiler's config that matters here."""

    nccl_comm_num: int


def transpile_collective(
    config: HasRings,
    collective_mode: str | type[Collective] | Collective | None,
    trainer_id: int,
    trainers: str | Sequence[str],
    current_endpoint: str,
    startup_program: Program | None = None,
    main_program: Program | None = None,
    wait_port: bool = True,
) -> None:
    """Rewrites programs as a collective transpiler does.

    Args:
        config: says how many rings there are.
        collective_mode: `grad_allreduce`, `local_sgd` or `single_process_multi_thread`, one of the
            classes, or an instance of one.
        trainer_id: the rank.
        trainers: `host:port` of every rank, in a list or between commas.
        current_endpoint: this rank's.
        startup_program: the default one, unless given.
        main_program: the default one, unless given.
        wait_port: taken; the startup program's first run joins the others, and waits for them.

    Raises:
        ValueError: no such mode, or what `Collective.transpile` refuses.
    """
    transpiler = _transpiler(collective_mode, config.nccl_comm_num)
    if not isinstance(trainers, str | list | tuple):
        what = f"trainers is {trainers!r}, and in this mode the endpoints of all ranks"
        raise mistake(what, "trainers='host:port,host:port'")
    endpoints = rank_endpoints(trainers)
    if len(endpoints) == 1 and not transpiler.takes_one_rank:
        raise mistake(f"there is one rank, {endpoints[0]}", _ALONE)
    transpiler.transpile(
        startup_program, main_program, trainer_id, endpoints, current_endpoint, wait_port
    )


def _has_gradients(program: Program) -> bool:
    """Whether an operator of backward names a parameter's gradient that it finishes."""
    ops = program.global_block().ops
    return any(op.attr(ROLE_VAR) and op.attr(ROLE) & OpRole.BACKWARD for op in ops)


def distributed(program: Program) -> tuple[str, ...]:
    """Returns the parameters of which each rank has rows of its own."""
    return tuple(p.name for p in program.all_parameters() if p.is_distributed)


_MODES: dict[str, type[GradAllReduce | LocalSGD]] = {
    "grad_allreduce": GradAllReduce,
    "local_sgd": LocalSGD,
    "single_process_multi_thread": SingleProcessMultiThread,
}


def _transpiler(mode: object, nrings: int) -> Collective:
    """Returns the transpiler of a mode.

    Raises:
        ProgramError: it is none.
    """
    if isinstance(mode, Collective):
        return mode
    found = _MODES.get(mode) if isinstance(mode, str) else mode
    if not (isinstance(found, type) and issubclass(found, Collective)):
        what = f"config.collective_mode is {mode!r}"
        raise mistake(what, f"choose one of {', '.join(_MODES)}, or a class of collective")
    if issubclass(found, SingleProcessMultiThread):
        return found()
    return found(nrings)
