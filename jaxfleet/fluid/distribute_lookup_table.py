"""The distributed lookup table of a program, whose rows are on parameter servers."""

from jaxfleet.analysis.updates import LOOKUPS
from jaxfleet.errors import FeedError, TableError
from jaxfleet.fluid.framework.operator import Operator
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.variable import Variable


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

    Args:
        program: the program that ran.
        name: the variable missing in its scope; the result is None if it is not such a table.
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
