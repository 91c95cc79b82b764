"""Transpilers for ranks that train without servers, and nccl2 mode.

Each only selects passes: `grad_allreduce_by_role` or `local_sgd` for the main program, `comm_init`
and its successors for the startup program. In nccl2 mode the main program does not change:
`CompiledProgram.with_data_parallel` sums its gradients over all devices of all trainers, and the
startup program names the trainers (the pass `gen_nccl_id`).
"""

from collections.abc import Sequence
from typing import ClassVar

import jax

from jaxfleet.cluster import has_started
from jaxfleet.errors import AssertedError
from jaxfleet.fluid import unique_name
from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.framework.from_ir import Rewritten
from jaxfleet.fluid.framework.operator import ROLE, ROLE_VAR, OpRole
from jaxfleet.fluid.framework.program import Program, default_main_program, default_startup_program
from jaxfleet.fluid.transpiler.config import DistributeTranspilerConfig, check_among, rank_endpoints
from jaxfleet.ops.user_frames import warn_at_caller
from jaxfleet.passes import (
    BroadcastParams,
    CommInit,
    CommInitAll,
    GradAllreduceByRole,
    SnapshotParams,
)
from jaxfleet.passes import LocalSGD as LocalSGDPass
from jaxfleet.pipeline import Pass
from jaxfleet.runtime.devices import emulated_count


def note_trainers(program: Program, config: DistributeTranspilerConfig, trainers: str) -> None:
    """Records the trainers that train together on a main program, whose operators do not change.

    `config` and `trainers` are as after the startup program was rewritten.
    """
    program._trainers_endpoints = rank_endpoints(trainers)
    program._nccl_comm_num = config.nccl_comm_num
    note_levels(program, config)


def note_levels(program: Program, config: DistributeTranspilerConfig) -> None:
    """Records on a main program the groups of trainers of hierarchical sums, if any."""
    program._use_hierarchical_allreduce = config.use_hierarchical_allreduce
    if config.use_hierarchical_allreduce:
        inner = config.hierarchical_allreduce_inter_nranks
        program._hierarchical_allreduce_inter_nranks = inner


def group_size(config: DistributeTranspilerConfig, trainers: int) -> int:
    """Returns the number of trainers in a group of hierarchical sums, such as a machine's devices.

    AssertedError if the trainers do not make several such groups.
    """
    inner = config.hierarchical_allreduce_inter_nranks
    if inner <= 1:
        # Counting devices starts jax, which could then not join the other trainers any more.
        inner = jax.local_device_count() if has_started() else emulated_count()
    if trainers <= inner or trainers % inner:
        what = f"{trainers} trainers do not make several groups of {inner}"
        hint = "config.hierarchical_allreduce_inter_nranks is how many trainers a machine has"
        raise mistake(what, hint, AssertedError)
    return inner


ALONE = "name the others too; one rank needs no transpiler"


class Collective:
    """Rewrites a program for ranks that train together.

    Collectives are spread over `nrings` communicators, which is only metadata.
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
        """Rewrites both programs in place; each keeps the original as `_origin_program`.

        Args:
            startup_program: the default one, unless given.
            main_program: the default one, unless given.
            rank: the number of this process among the endpoints, from 0.
            endpoints: `host:port` of every rank, in a list or separated by commas.
            current_endpoint: this rank's.
            wait_port: ignored; the first run of the startup program joins and waits for the others.

        Raises:
            ValueError: there is only one rank, no such rank, or no such endpoint; or a program has
                been rewritten already.
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
        for program in rewritten:  # only after both succeeded
            program.write_back()

    def _check(self) -> None:
        if self.nranks == 1 and not self.takes_one_rank:
            raise mistake(f"there is one rank, {self.endpoints[0]}", ALONE)
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
    """Sums gradients over ranks: each rank updates with the mean gradient."""

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
    """Updates each rank independently, and averages their parameters every `k_steps`."""

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
    """Sums gradients over the devices of one process, one device for each endpoint."""

    takes_one_rank = True

    def __init__(self) -> None:
        super().__init__(1)

    def _startup_passes(self, program: Program) -> list[Pass]:
        del program
        return [CommInitAll()]


def _has_gradients(program: Program) -> bool:
    """Whether a backward operator records the parameter whose gradient it completes."""
    ops = program.global_block().ops
    return any(op.attr(ROLE_VAR) and op.attr(ROLE) & OpRole.BACKWARD for op in ops)


def distributed(program: Program) -> tuple[str, ...]:
    """Returns the parameters of which each rank has its own rows."""
    return tuple(p.name for p in program.all_parameters() if p.is_distributed)


_MODES: dict[str, type[GradAllReduce | LocalSGD]] = {
    "grad_allreduce": GradAllReduce,
    "local_sgd": LocalSGD,
    "single_process_multi_thread": SingleProcessMultiThread,
}


def transpiler_of(mode: object, nrings: int) -> Collective:
    """Returns the transpiler of a mode; ProgramError if there is none."""
    if isinstance(mode, Collective):
        return mode
    found = _MODES.get(mode) if isinstance(mode, str) else mode
    if not (isinstance(found, type) and issubclass(found, Collective)):
        what = f"config.collective_mode is {mode!r}"
        raise mistake(what, f"choose one of {', '.join(_MODES)}, or a class of collective")
    if issubclass(found, SingleProcessMultiThread):
        return found()
    return found(nrings)
