"""DownpourServer and DownpourWorker: builders of a job's description, table by table.

They belong to the older API (`fluid.distributed`); pslib's are configured by a strategy.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jaxfleet.contrib.downpour.descriptions import (
    DENSE,
    SPARSE,
    AdamSGDParameter,
    DenseSGDRuleParameter,
    DenseTableParameter,
    DownpourServerParameter,
    DownpourTableAccessorParameter,
    DownpourTrainerParameter,
    NaiveSGDParameter,
    ServerParameter,
    ServerServiceParameter,
    SparseSGDRuleParameter,
    SparseTableParameter,
    SummarySGDParameter,
    TableAccessorParameter,
    TableParameter,
)
from jaxfleet.contrib.downpour.messages import Message
from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.variable import Pairs, Variable
from jaxfleet.ir import grad_name

# Suffixes of data_norm's count and sum parameters.
DATA_NORM = (".batch_size", ".batch_square_sum", ".batch_sum")
SKIPPED = ("lookup_table", "lookup_table_grad")  # skipped by workers

SERVICE = ServerServiceParameter(
    "DownpourBrpcPsServer", "DownpourBrpcPsClient", "DownpourPsService", 0, 12
)


def split_pairs(pairs: Pairs, left_out: Collection[str]) -> tuple[Pairs, Pairs]:
    """Splits pairs into ordinary parameters and those of data_norm; drops `left_out` (tables)."""
    dense = [pair for pair in pairs if pair[0].name not in left_out]
    is_counted = [param.name.endswith(DATA_NORM) for param, _ in dense]
    counted = [pair for pair, counts in zip(dense, is_counted, strict=True) if counts]
    return [pair for pair, is_it in zip(dense, is_counted, strict=True) if not is_it], counted


def size_of(variables: Iterable[Variable]) -> int:
    """Total number of elements."""
    return sum(math.prod(variable.shape) for variable in variables)


def dense_table(
    table_id: int, params: Sequence[Variable], grads: Sequence[Variable]
) -> DenseTableParameter:
    """Describes a dense table for workers."""
    return DenseTableParameter(
        table_id, tuple(x.name for x in params), tuple(x.name for x in grads), size_of(params)
    )


def sparse_table(
    table_id: int, ids: Sequence[Variable], rows: Sequence[Variable]
) -> SparseTableParameter:
    """Describes a sparse table for workers, with as many ids as rows."""
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
    """Removes tables from a startup program: servers initialize rows at first access."""
    block = startup.global_block()
    for name in tables:
        block.ops = [op for op in block.ops if name not in op.output_arg_names]
        block.vars.pop(name, None)
    startup.version += 1


_SHOWN = DownpourTableAccessorParameter(
    nonclk_coeff=0.1,
    click_coeff=2.0,
    base_threshold=0.2,
    delta_threshold=0.15,
    delta_keep_days=31.0,
    show_click_decay_rate=0.999,
    delete_threshold=0.8,
)


class DownpourServer:
    """Builder of the servers' configuration."""

    def __init__(self) -> None:
        self._desc = Message(ServerParameter)
        self._desc.CopyFrom(ServerParameter(DownpourServerParameter(service_param=SERVICE)))

    def add_sparse_table(
        self,
        table_id: int,
        learning_rate: float,
        slot_key_vars: Sequence[Variable],
        slot_value_var: Sequence[Variable],
    ) -> None:
        """Adds a table of rows by keys, updated by Adagrad.

        `slot_key_vars` and `slot_value_var`, ids and rows of each look-up, are part of fluid's
        signature and not sent to servers.
        """
        del slot_key_vars, slot_value_var
        accessor = TableAccessorParameter(
            "DownpourFeatureValueAccessor",
            SparseSGDRuleParameter(float(learning_rate), 3.0, 1e-4, (-10.0, 10.0)),
            fea_dim=11,
            embedx_dim=8,
            embedx_threshold=5,
            downpour_accessor_param=_SHOWN,
        )
        self._add(TableParameter(table_id, "DownpourSparseTable", None, accessor, SPARSE))

    def add_dense_table(
        self,
        table_id: int,
        learning_rate: float,
        param_var: Sequence[Variable],
        grad_var: Sequence[Variable],
    ) -> None:
        """Adds a table of concatenated parameters, updated by pslib's Adam.

        The gradients are part of fluid's signature and not sent to servers.
        """
        del grad_var
        adam = AdamSGDParameter(float(learning_rate), 0.999993, 0.9999, 1e-8, 0.99)
        rule = DenseSGDRuleParameter("adam", adam, NaiveSGDParameter(0.0002))
        self._add_dense(table_id, param_var, rule)

    def add_data_norm_table(
        self,
        table_id: int,
        learning_rate: float,
        param_var: Sequence[Variable],
        grad_var: Sequence[Variable],
    ) -> None:
        """Adds a table of data_norm's counts and sums, to which pushed values are added.

        Fluid's old server lacked this method, so a program with data_norm failed with an
        AttributeError; its newer one has it, with the rule and rate used here.

        `param_var` are the counts and sums, and `grad_var` their increments; no learning rate
        applies.
        """
        del learning_rate, grad_var
        rule = DenseSGDRuleParameter("summary", summary=SummarySGDParameter(0.999999))
        self._add_dense(table_id, param_var, rule)

    def get_desc(self) -> Message:
        """The `ServerParameter` so far; more may be added to it."""
        return self._desc

    def _add(self, table: TableParameter) -> None:
        """Adds a table unless one of the same number and type exists; another type is an error."""
        tables = self._desc.downpour_server_param.downpour_table_param
        for known in tables:
            if known.table_id == table.table_id:
                if known.type != table.type:
                    what = f"table {table.table_id} is {known.type}, and is to be {table.type}"
                    raise mistake(what, "look into the fleet_desc_file")
                return
        tables.append(table)

    def _add_dense(
        self, table_id: int, params: Sequence[Variable], rule: DenseSGDRuleParameter
    ) -> None:
        accessor = TableAccessorParameter(
            "DownpourDenseValueAccessor", dense_sgd_param=rule, fea_dim=size_of(params)
        )
        self._add(TableParameter(table_id, "DownpourDenseTable", None, accessor, DENSE))


class DownpourWorker:
    """Builder of the workers' configuration; gradients of `window` batches are pushed together."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._desc = Message(DownpourTrainerParameter)
        self._desc.push_sparse_per_batch = self._desc.push_dense_per_batch = window

    def add_sparse_table(
        self,
        table_id: int,
        learning_rate: float,
        slot_key_vars: Sequence[Variable],
        slot_value_vars: Sequence[Variable],
    ) -> None:
        """Adds a table of rows by keys, with ids and rows of each look-up.

        `learning_rate` has no effect: servers apply the update.

        Raises:
            ProgramError: the numbers of ids and rows differ.
        """
        del learning_rate
        table = sparse_table(table_id, slot_key_vars, slot_value_vars)
        _replace(self._desc.sparse_table, table)

    def add_dense_table(
        self,
        table_id: int,
        learning_rate: float,
        param_vars: Sequence[Variable],
        grad_vars: Sequence[Variable],
    ) -> None:
        """Adds a table of parameters; `learning_rate` has no effect: servers apply the update."""
        del learning_rate
        _replace(self._desc.dense_table, dense_table(table_id, param_vars, grad_vars))

    def get_desc(self) -> Message:
        """The `DownpourTrainerParameter` so far; more may be added to it."""
        return self._desc


def _replace(tables: Any, table: SparseTableParameter | DenseTableParameter) -> None:
    """Replaces the table of the same number, or appends it."""
    for known in tables:
        if known.table_id == table.table_id:
            known.CopyFrom(table)
            return
    tables.append(table)
