"""Rows of distributed tables that servers have saved: for servers, or for one process."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from jaxfleet.checkpoint import open_checkpoint
from jaxfleet.checkpoint.tables import load_tables, saved_tables
from jaxfleet.errors import SavedError
from jaxfleet.fluid.array_files import file_of
from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.pserver import TABLES
from jaxfleet.fluid.pserver.row_programs import distributed_tables
from jaxfleet.fluid.to_ir import ir_program
from jaxfleet.fluid.variable import Parameter, Variable
from jaxfleet.tables import TableStore, make_store
from jaxfleet.tables.buckets import buckets_of


def server_rows(program: Program, folder: Path) -> dict[str, TableStore]:
    """Returns a server's rows of its distributed tables, however many servers saved them.

    Args:
        program: the server's.
        folder: what `save_persistables` was given.

    Raises:
        CheckpointError: a table is not there, is damaged, or is of another dimension.
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
    """Returns the variables that are tables which servers have saved, each as one array.

    Rows that nobody has looked up begin as the job's would have.

    Raises:
        SavedError: a table has ids that its variable has no rows for.
        CheckpointError: a table is damaged.
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
