"""State on parameter servers: saved whole by the first trainer, loaded by servers in slices."""

from collections.abc import Collection, Iterable
from math import prod
from pathlib import Path

import numpy as np

from jaxfleet.checkpoint import open_checkpoint
from jaxfleet.checkpoint.tables import load_tables, saved_tables
from jaxfleet.errors import SavedError
from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.executor import Executor
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.to_ir import ir_program
from jaxfleet.fluid.framework.variable import Parameter, Variable
from jaxfleet.fluid.npz_files import file_of, read_arrays
from jaxfleet.fluid.pserver import TABLES
from jaxfleet.fluid.pserver.row_programs import distributed_tables
from jaxfleet.fluid.transpiler.details.vars_distributed import VarDistributed, VarsDistributed
from jaxfleet.passes.fluid.job import GEO
from jaxfleet.tables import TableStore, make_store
from jaxfleet.tables.buckets import buckets_of

_ON_SERVERS_ALONE = frozenset({"Optimizer", "RemotePrefetch"})


def served_values(executor: Executor, program: Program) -> dict[str, np.ndarray]:
    """Whole values of the variables that only servers hold, if `program` is the first trainer's.

    Raises:
        ProgramError: the trainer has not connected to its servers.
        ClosedError: the trainer is closed.
        PeerLostError: a server was lost or timed out.
    """
    registry = program._parameters_on_pservers
    if registry is None or not is_first_trainer(program):
        return {}
    whole = _whole_parts(registry, _ON_SERVERS_ALONE)
    whole |= {name: [(name, endpoint)] for name, endpoint in registry.shared.items()}
    return executor._pserver.pull(program, whole) if whole else {}


def served_parameters(
    executor: Executor, program: Program, names: Collection[str]
) -> dict[str, np.ndarray]:
    """Whole parameters as servers hold them; empty for a job whose trainers update.

    Names that servers do not hold are omitted. Raises as `served_values`.
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
    """Slices of variables in row order, with the server of each."""
    parts: dict[str, list[VarDistributed]] = {}
    for var in registry.distributed_vars:
        if var.vtype in kinds:
            parts.setdefault(var.origin.name, []).append(var)
    # A one-element variable accompanies every slice of its parameter, with equal values.
    return {name: _in_order(vars) for name, vars in parts.items()}


def is_first_trainer(program: Program) -> bool:
    """Whether a program is the first trainer's, which saves the servers' state."""
    return program._facts.get("role") == "trainer" and program._is_chief


def tables_elsewhere(program: Program) -> frozenset[str]:
    """Tables that a trainer's program looks up and only servers hold."""
    facts = program._facts
    listed = facts.get("prefetched", ())
    if facts.get("role") != "trainer" or facts.get("mode") == GEO or not isinstance(listed, tuple):
        return frozenset()
    return frozenset(map(str, listed))


def _in_order(parts: Iterable[VarDistributed]) -> list[tuple[str, str]]:
    found = sorted(parts, key=lambda part: part.offset)
    kept = found if found[0].is_slice else found[:1]
    return [(part.slice.name, str(part.endpoint)) for part in kept]


def is_server(program: Program) -> bool:
    """Whether a program is a server's, with slices of variables that are saved whole."""
    return program._facts.get("role") == "pserver" and program._parameters_on_pservers is not None


def server_slices(program: Program, folder: Path, filename: str | None) -> dict[str, np.ndarray]:
    """Cuts a server's slices from saved whole variables.

    Raises SavedError if a variable is missing or damaged, or its shape differs from the job's.
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


def server_rows(program: Program, folder: Path) -> dict[str, TableStore]:
    """Loads a server's rows of its distributed tables, saved by any number of servers.

    Raises CheckpointError if a table is missing, damaged or of another dimension.
    """
    endpoints, made = list(program._endpoints), ir_program(program)
    number, servers = endpoints.index(str(program._ps_endpoint)), len(endpoints)
    stores = {}
    for spec in distributed_tables(made):
        store = stores[spec.name] = make_store(spec, share=1.0 / servers)
        saved = open_checkpoint(file_of(folder / TABLES, spec.name))
        load_tables([saved], [store], buckets=buckets_of(number, servers))
    return stores


def saved_tables_of(variables: Iterable[Variable], folder: Path) -> dict[str, np.ndarray]:
    """Loads variables that servers saved as tables, each as one array.

    Rows that were never looked up get the job's initial values. Raises SavedError if a table has
    ids beyond the rows of its variable, and CheckpointError if a table is damaged.
    """
    places = {v: file_of(folder / TABLES, v.name) for v in variables if isinstance(v, Parameter)}
    return {v.name: _whole(v, saved) for v, saved in places.items() if saved.is_dir()}


def _whole(variable: Variable, saved: Path) -> np.ndarray:
    chain = [open_checkpoint(saved)]
    store = make_store(saved_tables(chain)[variable.name].spec)
    load_tables(chain, [store])
    keys, rows = store.export()[0], variable.shape[0]
    if len(keys) and not 0 <= keys.min() <= keys.max() < rows:
        what = f"'{variable.name}' has ids from {keys.min()} to {keys.max()} in {saved}"
        raise mistake(f"{what}, and {rows} rows in the program", kind=SavedError)
    return store.look_up(np.arange(rows, dtype=np.int64))
