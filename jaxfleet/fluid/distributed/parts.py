"""What both generations of Downpour servers and workers share: names, sizes, tables of workers."""

import math
from collections.abc import Collection, Iterable, Sequence

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.distributed.descriptions import (
    DenseTableParameter,
    ServerServiceParameter,
    SparseTableParameter,
)
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.variable import Pairs, Variable
from jaxfleet.ir import grad_name

# How the names of the parameters end that data_norm counts and sums in.
DATA_NORM = (".batch_size", ".batch_square_sum", ".batch_sum")
SKIPPED = ("lookup_table", "lookup_table_grad")  # what workers do not run of a distributed table

SERVICE = ServerServiceParameter(
    "DownpourBrpcPsServer", "DownpourBrpcPsClient", "DownpourPsService", 0, 12
)


def split_pairs(pairs: Pairs, left_out: Collection[str]) -> tuple[Pairs, Pairs]:
    """Returns ordinary parameters with their gradients, and those of data_norm.

    Args:
        pairs: parameters with gradients.
        left_out: names of parameters that are in neither: the tables.
    """
    dense = [pair for pair in pairs if pair[0].name not in left_out]
    is_counted = [param.name.endswith(DATA_NORM) for param, _ in dense]
    counted = [pair for pair, counts in zip(dense, is_counted, strict=True) if counts]
    return [pair for pair, is_it in zip(dense, is_counted, strict=True) if not is_it], counted


def size_of(variables: Iterable[Variable]) -> int:
    """Returns how many elements variables have together."""
    return sum(math.prod(variable.shape) for variable in variables)


def dense_table(
    table_id: int, params: Sequence[Variable], grads: Sequence[Variable]
) -> DenseTableParameter:
    """Describes a dense table to workers."""
    return DenseTableParameter(
        table_id, tuple(x.name for x in params), tuple(x.name for x in grads), size_of(params)
    )


def sparse_table(
    table_id: int, ids: Sequence[Variable], rows: Sequence[Variable]
) -> SparseTableParameter:
    """Describes a sparse table to workers.

    Raises:
        ProgramError: there are not as many ids as rows.
    """
    if len(ids) != len(rows):
        what = f"sparse table {table_id} has {len(ids)} inputs and {len(rows)} outputs"
        raise mistake(what, "each look-up has one of either")
    names = tuple(x.name for x in rows)
    return SparseTableParameter(
        table_id,
        slot_key=tuple(x.name for x in ids),
        slot_value=names,
        slot_gradient=tuple(map(grad_name, names)),
    )


def leave_out_of_startup(startup: Program, tables: Collection[str]) -> None:
    """Takes tables out of a startup program: their rows begin on servers, at first touch."""
    block = startup.global_block()
    for name in tables:
        block.ops = [op for op in block.ops if name not in op.output_arg_names]
        block.vars.pop(name, None)
    startup.version += 1
