"""DownpourServer and DownpourWorker: build the descriptions of a Downpour job, table by table.

These are those of the old API (`fluid.distributed`); those of pslib are built by a strategy.
"""

from collections.abc import Sequence
from typing import Any

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.distributed.descriptions import (
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
    SparseSGDRuleParameter,
    SparseTableParameter,
    SummarySGDParameter,
    TableAccessorParameter,
    TableParameter,
)
from jaxfleet.fluid.distributed.messages import Message
from jaxfleet.fluid.distributed.parts import SERVICE, dense_table, size_of, sparse_table
from jaxfleet.fluid.variable import Variable

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
    """Builds what servers are told."""

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
        """Adds a table of rows by keys.

        Args:
            table_id: its number.
            learning_rate: of Adagrad.
            slot_key_vars: the ids of each look-up; servers are told of workers' no more.
            slot_value_var: the rows of each look-up, as that.
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
        """Adds a table of parameters, one after the other.

        Args:
            table_id: its number.
            learning_rate: of its Adam.
            param_var: the parameters.
            grad_var: their gradients; servers are told of workers' no more.
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
        """Adds a table of data_norm's counts and sums: what is pushed is added to them.

        Fluid's old server had no such method, and a program with data_norm ended in an
        AttributeError; its new one has it, with the rule and the rate that stand here.

        Args:
            table_id: its number.
            learning_rate: taken; counts have none.
            param_var: the counts and sums.
            grad_var: what is added to them.
        """
        del learning_rate, grad_var
        rule = DenseSGDRuleParameter("summary", summary=SummarySGDParameter(0.999999))
        self._add_dense(table_id, param_var, rule)

    def get_desc(self) -> Message:
        """Returns what was added so far: a `ServerParameter`, to which more may be added."""
        return self._desc

    def _add(self, table: TableParameter) -> None:
        """Adds a table, unless there is one of its number and type already.

        Raises:
            ProgramError: there is one of another type.
        """
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
    """Builds what workers are told.

    Args:
        window: gradients of how many batches are pushed together.
    """

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
        """Adds a table of rows by keys.

        Args:
            table_id: its number.
            learning_rate: taken; servers update.
            slot_key_vars: the ids of each look-up.
            slot_value_vars: the rows of each look-up.

        Raises:
            ProgramError: they are not equally many.
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
        """Adds a table of parameters.

        Args:
            table_id: its number.
            learning_rate: taken; servers update.
            param_vars: the parameters.
            grad_vars: their gradients.
        """
        del learning_rate
        _replace(self._desc.dense_table, dense_table(table_id, param_vars, grad_vars))

    def get_desc(self) -> Message:
        """Returns what was added so far: a `DownpourTrainerParameter`, as of servers."""
        return self._desc


def _replace(tables: Any, table: SparseTableParameter | DenseTableParameter) -> None:
    """Replaces the table of the same number, or adds it."""
    for known in tables:
        if known.table_id == table.table_id:
            known.CopyFrom(table)
            return
    tables.append(table)
