"""The distributed lookup table of a program, whose rows are on parameter servers.

In fluid `split_ids` and `merge_ids` distribute ids over the servers of a table by remainder. Here
`jaxfleet.tables` distributes them; the operators run for scripts that contain them.
"""

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jaxfleet.analysis.updates import LOOKUPS
from jaxfleet.errors import FeedError, TableError
from jaxfleet.fluid.framework.operator import Operator
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.scope import Scope


def find_distributed_lookup_table(program: Program) -> str | None:
    """Returns the name of the table of lookups with `is_distributed`; None for none.

    Raises:
        TableError: there are several, or an ordinary lookup reads it too.
    """
    lookups = [op for op in program.global_block().ops if op.type in LOOKUPS]
    spread = [op for op in lookups if op.attr("is_distributed")]
    if not spread:
        return None
    table: str = spread[0].input("W")[0]
    for op in lookups:
        other = op.input("W")[0]
        if op.attr("is_distributed") and other != table:
            hint = "only one embedding of a program may be is_distributed"
            raise TableError(f"'{table}' and '{other}' are both distributed", op=op, hint=hint)
        if not op.attr("is_distributed") and other == table:
            hint = "say is_distributed of every embedding that shares it"
            raise TableError(f"'{table}' is distributed, and looked up here too", op=op, hint=hint)
    return table


def find_distributed_lookup_table_inputs(
    program: Program, table_name: str | None
) -> list[Variable]:
    """Returns the ids of every lookup in a table, in order."""
    return _operands(program, table_name, "Ids")


def find_distributed_lookup_table_outputs(
    program: Program, table_name: str | None
) -> list[Variable]:
    """Returns the rows of every lookup in a table, in order."""
    return _operands(program, table_name, "Out")


def lookups_of(program: Program, table_name: str | None) -> list[Operator]:
    """Returns the lookup operators of a table, in order."""
    ops = program.global_block().ops
    return [op for op in ops if op.type in LOOKUPS and op.input("W")[0] == table_name]


def without_rows(program: Program, name: str) -> FeedError | None:
    """Returns the error for a table that a run reads whole while a Downpour job holds it by key.

    `name` is missing in the scope of the run; None if it is not such a table.
    """
    if (program._fleet_opt or {}).get("fleet_desc") is None:
        return None
    op = next((op for op in lookups_of(program, name) if op.attr("is_distributed")), None)
    if op is None:
        return None
    what = f"rows of '{name}' are in the tables of a Downpour job, and this run has none of them"
    hint = (
        "exe.train_from_dataset(program, dataset) looks them up, and infer_from_dataset does; "
        "a program that only an ordinary optimizer saw runs by itself"
    )
    return FeedError(what, op=op, hint=hint)


def _operands(program: Program, table_name: str | None, slot: str) -> list[Variable]:
    names = [
        name
        for op in lookups_of(program, table_name)
        for name in (op.input(slot) or op.output(slot))
    ]
    return [program.global_block()._var_recursive(name) for name in names]


_ID_OPS = frozenset({"split_ids", "merge_ids"})


def has_only_id_ops(program: Program) -> bool:
    """Whether a program contains only operators that split ids and merge rows."""
    ops = program.global_block().ops
    return bool(ops) and all(op.type in _ID_OPS for op in ops)


def run_ids(
    program: Program, fed: Mapping[str, np.ndarray], fetch: Sequence[str], scope: Scope
) -> list[np.ndarray]:
    """Runs a program of id operators, leaving all results in the scope; returns the fetches."""
    values = dict(fed)
    for op in program.global_block().ops:
        if op.type == "split_ids" and op.input("Ids")[0] in scope.selected_rows:
            _split_rows(op, scope)
            continue
        read = [_value(name, values, scope) for name in op.input("Ids")]
        if op.type == "split_ids":
            made = split_ids(read, len(op.output("Out")))
        else:
            rows, x = ([_value(n, values, scope) for n in op.input(s)] for s in ("Rows", "X"))
            made = merge_ids(read, rows, x)
        values.update(zip(op.output("Out"), made, strict=True))
    scope.keep({name: jnp.asarray(array) for name, array in values.items() if name not in fed})
    return [_value(name, values, scope) for name in fetch]


def split_ids(ids: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
    """Returns the sorted unique ids by their remainders: `[n, 1]` for each."""
    found = np.unique(np.concatenate([array.reshape(-1) for array in ids]))
    return [found[found % count == remainder][:, None] for remainder in range(count)]


def merge_ids(
    ids: Sequence[np.ndarray], rows: Sequence[np.ndarray], values: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Returns the values for each array of ids: `[n, ...]`; FeedError if an id has no row.

    `ids` may repeat. Each array in `rows` has the ids of the rows of one array in `values`.
    """
    known = np.concatenate([array.reshape(-1) for array in rows])
    whole, order = np.concatenate(list(values)), np.argsort(known, kind="stable")
    made = []
    for wanted in (array.reshape(-1) for array in ids):
        places = np.minimum(np.searchsorted(known[order], wanted), len(known) - 1)
        at = order[places]
        if len(missing := wanted[known[at] != wanted]):
            raise FeedError(f"merge_ids: no row came for id {missing[0]}", hint="give all rows")
        made.append(whole[at])
    return made


def _split_rows(op: Operator, scope: Scope) -> None:
    """Divides rows by the remainders of their numbers, preserving order."""
    given = scope.selected_rows[op.input("Ids")[0]]
    rows, values, names = np.asarray(given.rows(), np.int64), given.value(), op.output("Out")
    for remainder, name in enumerate(names):
        mine = rows % len(names) == remainder
        made = scope.var(name).get_selected_rows()
        made.set_rows(rows[mine].tolist())
        made.set_height(given.height())
        made.get_tensor().set(values[mine])


def _value(name: str, values: Mapping[str, np.ndarray], scope: Scope) -> np.ndarray:
    if name in values:
        return np.asarray(values[name])
    if name in scope:
        return np.asarray(scope.peek(name))
    raise FeedError(f"'{name}' is neither fed nor in the scope", hint="feed it by its name")
