"""nccl2 mode: processes that sum gradients among themselves, where the executor puts the sums in.

The main program stays as it is; `CompiledProgram.with_data_parallel` sums its gradients over all
devices of all trainers. The startup program says who they are: the pass `gen_nccl_id`.
"""

from typing import Protocol

import jax

from jaxfleet.errors import AssertedError
from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.program import Program, default_startup_program
from jaxfleet.fluid.transpiler.asked import check_among, rank_endpoints
from jaxfleet.fluid.transpiler.rewriting import Rewritten
from jaxfleet.group import has_started
from jaxfleet.passes import GenNcclId
from jaxfleet.runtime.devices import emulated_count


class HasNccl(Protocol):
    """The part of a transpiler's config that matters here."""

    nccl_comm_num: int
    use_hierarchical_allreduce: bool
    hierarchical_allreduce_inter_nranks: int


def transpile_nccl2(
    config: HasNccl,
    trainer_id: int,
    trainers: str,
    current_endpoint: str,
    startup_program: Program | None = None,
    wait_port: bool = True,
) -> None:
    """Adds to the startup program who trains together.

    Args:
        config: how sums are spread and grouped. `hierarchical_allreduce_inter_nranks` up to 1
            means the number of this process's devices, and is set to it.
        trainer_id: which of the trainers this is, from 0 on.
        trainers: `host:port` of each, between commas.
        current_endpoint: this trainer's.
        startup_program: the default one, unless given.
        wait_port: taken; the startup program's first run joins the others, and waits for them.

    Raises:
        AssertionError: the trainers are no string, or cannot be grouped.
        ValueError: there is no such trainer.
    """
    del wait_port
    if not isinstance(trainers, str):
        what = f"trainers is a string of endpoints in nccl2 mode, not {trainers!r}"
        raise mistake(what, "join them: ','.join(endpoints)", AssertedError)
    if trainer_id < 0:
        raise mistake(f"trainer_id is {trainer_id}", "trainers count from 0")
    endpoints = rank_endpoints(trainers)
    check_among(current_endpoint, endpoints)
    if config.use_hierarchical_allreduce:
        config.hierarchical_allreduce_inter_nranks = _inner(config, len(endpoints))
    tell = GenNcclId(
        tuple(endpoints),
        trainer_id,
        config.nccl_comm_num,
        config.use_hierarchical_allreduce,
        config.hierarchical_allreduce_inter_nranks,
    )
    startup = Rewritten.of(startup_program or default_startup_program(), [tell], name="startup")
    startup.write_back()


def note_trainers(program: Program, config: HasNccl, trainers: str) -> None:
    """Notes on a main program, whose operators do not change, who trains together.

    Args:
        program: it.
        config: as `transpile_nccl2` left it.
        trainers: as `transpile_nccl2` took it.
    """
    program._trainers_endpoints = rank_endpoints(trainers)
    program._nccl_comm_num = config.nccl_comm_num
    note_levels(program, config)


def note_levels(program: Program, config: HasNccl) -> None:
    """Notes on a main program whether sums are made within groups of trainers, and which."""
    program._use_hierarchical_allreduce = config.use_hierarchical_allreduce
    if config.use_hierarchical_allreduce:
        inner = config.hierarchical_allreduce_inter_nranks
        program._hierarchical_allreduce_inter_nranks = inner


def _inner(config: HasNccl, trainers: int) -> int:
    """Returns how many trainers a group has."""
    inner = config.hierarchical_allreduce_inter_nranks
    if inner <= 1:
        # To count devices starts jax, which could not join the other trainers any more.
        inner = jax.local_device_count() if has_started() else emulated_count()
    if trainers <= inner or trainers % inner:
        what = f"{trainers} trainers do not make several groups of {inner}"
        hint = "config.hierarchical_allreduce_inter_nranks is how many trainers a machine has"
        raise mistake(what, hint, AssertedError)
    return inner
