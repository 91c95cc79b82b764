"""What servers hold of a job: its first trainer saves it whole, servers load their slices."""

from collections.abc import Collection, Iterable
from math import prod
from pathlib import Path

import numpy as np

from jaxfleet.errors import SavedError
from jaxfleet.fluid.array_files import file_of, read_arrays
from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.executor import Executor
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.transpiler.details.vars_distributed import (
    VarDistributed,
    VarsDistributed,
)
from jaxfleet.passes.geo_sgd import MODE as GEO

_ON_SERVERS_ALONE = frozenset({"Optimizer", "RemotePrefetch"})


def served_values(executor: Executor, program: Program) -> dict[str, np.ndarray]:
    """Returns the whole variables that servers alone hold, if the program is the first trainer's.

    Args:
        executor: the one that trains.
        program: a trainer's, or any other.

    Raises:
        ProgramError: the trainer has not spoken with its servers.
        ClosedError: it has closed.
        PeerLostError: a server went, or takes too long.
    """
    registry = program._parameters_on_pservers
    if registry is None or not is_first_trainers(program):
        return {}
    whole = _whole_parts(registry, _ON_SERVERS_ALONE)
    whole |= {name: [(name, endpoint)] for name, endpoint in registry.shared.items()}
    return executor._pserver.pull(program, whole) if whole else {}


def served_parameters(
    executor: Executor, program: Program, names: Collection[str]
) -> dict[str, np.ndarray]:
    """Returns parameters whole, as servers have them; none of a job whose trainers update.

    Args:
        executor: the one that trains.
        program: a trainer's.
        names: which; what servers do not have is left out.

    Raises:
        ProgramError: the trainer has not spoken with its servers.
        ClosedError: it has closed.
        PeerLostError: a server went, or takes too long.
    """
    registry = program._parameters_on_pservers
    if registry is None or program._facts.get("mode") == GEO:
        return {}
    parts = _whole_parts(registry, frozenset({"Param", "RemotePrefetch"}))
    wanted = {name: slices for name, slices in parts.items() if name in names}
    return executor._pserver.pull(program, wanted) if wanted else {}


def _whole_parts(
    registry: VarsDistributed, kinds: frozenset[str]
) -> dict[str, list[tuple[str, str]]]:
    """Returns the slices of variables in the order of their rows, with the server of each."""
    parts: dict[str, list[VarDistributed]] = {}
    for var in registry.distributed_vars:
        if var.vtype in kinds:
            parts.setdefault(var.origin.name, []).append(var)
    # What has one element goes with every slice of its parameter, and is the same with each.
    return {name: _in_order(vars) for name, vars in parts.items()}


def is_first_trainers(program: Program) -> bool:
    """Tells whether a program is that of the first trainer, who saves what servers hold."""
    return program._facts.get("role") == "trainer" and program._is_chief


def tables_elsewhere(program: Program) -> frozenset[str]:
    """Returns the tables that a trainer's program looks up, and that servers alone hold."""
    facts = program._facts
    listed = facts.get("prefetched", ())
    if facts.get("role") != "trainer" or facts.get("mode") == GEO or not isinstance(listed, tuple):
        return frozenset()
    return frozenset(map(str, listed))


def _in_order(parts: Iterable[VarDistributed]) -> list[tuple[str, str]]:
    found = sorted(parts, key=lambda part: part.offset)
    kept = found if found[0].is_slice else found[:1]
    return [(part.slice.name, str(part.endpoint)) for part in kept]


def is_servers(program: Program) -> bool:
    """Tells whether a program is a server's, whose slices are of variables that are saved whole."""
    return program._facts.get("role") == "pserver" and program._parameters_on_pservers is not None


def server_slices(program: Program, folder: Path, filename: str | None) -> dict[str, np.ndarray]:
    """Returns what a server holds, cut from whole variables that were saved.

    Raises:
        SavedError: a variable is not there, is damaged, or has another shape than the job's.
    """
    assert program._parameters_on_pservers is not None
    registry, declared = program._parameters_on_pservers, program.global_block().vars
    held = registry.get_distributed_vars_by_ep(str(program._ps_endpoint))
    found = {part.slice.name: _cut(part, folder, filename) for part in held}
    shared = [name for name in registry.shared if name in declared]
    return found | {name: _saved(name, folder, filename) for name in shared}


def _cut(part: VarDistributed, folder: Path, filename: str | None) -> np.ndarray:
    name, shape = part.origin.name, part.origin.shape
    array = _saved(name, folder, filename)
    if array.shape != tuple(shape):
        what = f"'{name}' has shape {list(array.shape)} in {folder}, and {list(shape)} in the job"
        raise mistake(what, kind=SavedError)
    if not part.is_slice:
        return array
    start = part.offset // max(prod(shape[1:]), 1)
    return array[start : start + part.slice.shape[0]]


def _saved(name: str, folder: Path, filename: str | None) -> np.ndarray:
    path = file_of(folder, name) if filename is None else folder / filename
    array = read_arrays(path, [name]).get(name)
    if array is None:
        raise mistake(f"'{name}' is not saved in {path}", kind=SavedError)
    return array
