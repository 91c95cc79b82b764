"""pslib's DownpourServer and DownpourWorker.

The first description of a table is kept, so a `fleet_desc_file` overrides the strategy.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxfleet.contrib.downpour import node
from jaxfleet.contrib.downpour.descriptions import (
    DENSE,
    SPARSE,
    DownpourServerParameter,
    DownpourTrainerParameter,
    ServerParameter,
    TableParameter,
)
from jaxfleet.contrib.downpour.pslib import accessors
from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.framework.variable import Pairs, Variable

TableOptions = Mapping[str, Any] | None


class DownpourServer:
    """Builder of the servers' configuration, starting from `begun`."""

    def __init__(self, begun: ServerParameter | None = None) -> None:
        self._desc = (begun and begun.downpour_server_param) or DownpourServerParameter(
            service_param=node.SERVICE
        )

    def add_sparse_table(self, table_id: int, strategy: TableOptions = None) -> None:
        """Adds a table of rows by keys.

        Raises:
            ValueError: the strategy has unknown keys, or the number is that of a dense table.
        """
        if not self._is_there(table_id, SPARSE):
            self._add(accessors.sparse_table(table_id, strategy))

    def add_dense_table(
        self,
        table_id: int,
        param_var: Sequence[Variable],
        grad_var: Sequence[Variable],
        strategy: TableOptions = None,
        sparse_table_names: Collection[str] = (),
    ) -> None:
        """Adds a table of parameters.

        The gradients are not sent to servers; `sparse_table_names` are left out of dense tables.

        Raises:
            ValueError: the strategy has unknown keys, or the number is that of a sparse table.
        """
        del grad_var
        if not self._is_there(table_id, DENSE):
            size = node.size_of(x for x in param_var if x.name not in sparse_table_names)
            self._add(accessors.dense_table(table_id, strategy, size))

    def add_data_norm_table(
        self,
        table_id: int,
        learning_rate: float,
        param_var: Sequence[Variable],
        grad_var: Sequence[Variable],
        strategy: TableOptions = None,
        sparse_table_names: Collection[str] = (),
    ) -> None:
        """Adds a table of data_norm's counts and sums; see `add_dense_table`."""
        del learning_rate, grad_var
        if not self._is_there(table_id, DENSE):
            size = node.size_of(x for x in param_var if x.name not in sparse_table_names)
            self._add(accessors.data_norm_table(table_id, strategy, size))

    def get_desc(self) -> ServerParameter:
        return ServerParameter(self._desc)

    def _is_there(self, table_id: int, kind: str) -> bool:
        known = next((t for t in self._desc.downpour_table_param if t.table_id == table_id), None)
        if known is not None and known.type != kind:
            what = f"expect table {table_id} type={kind}, but actual type={known.type}"
            raise mistake(what, "look into the fleet_desc_file")
        return known is not None

    def _add(self, table: TableParameter) -> None:
        tables = (*self._desc.downpour_table_param, table)
        self._desc = replace(self._desc, downpour_table_param=tables)


class DownpourWorker:
    """Builder of one program's workers' configuration, starting from `begun`."""

    def __init__(self, window: int, begun: DownpourTrainerParameter | None = None) -> None:
        self.window = window
        self._desc = replace(
            begun or DownpourTrainerParameter(),
            push_sparse_per_batch=window,
            push_dense_per_batch=window,
        )

    def add_sparse_table(
        self, table_id: int, slot_key_vars: Sequence[Variable], slot_value_vars: Sequence[Variable]
    ) -> None:
        """Adds a table of rows by keys, unless it has other look-ups already (ValueError)."""
        made = node.sparse_table(table_id, slot_key_vars, slot_value_vars)
        known = next((t for t in self._desc.sparse_table if t.table_id == table_id), None)
        if known is None:
            self._desc = replace(self._desc, sparse_table=(*self._desc.sparse_table, made))
        elif (known.slot_key, known.slot_value) != (made.slot_key, made.slot_value):
            what = f"sparse table {table_id} is described with {list(known.slot_key)}"
            raise mistake(f"{what}, and the program looks up {list(made.slot_key)}")

    def add_dense_table(self, table_id: int, pairs: Pairs) -> None:
        """Adds a table of pairs, unless described already with other parameters (ValueError)."""
        made = node.dense_table(table_id, [p for p, _ in pairs], [g for _, g in pairs])
        known = next((t for t in self._desc.dense_table if t.table_id == table_id), None)
        if known is None:
            self._desc = replace(self._desc, dense_table=(*self._desc.dense_table, made))
        elif known.dense_variable_name != made.dense_variable_name:
            what = f"dense table {table_id} is described with {list(known.dense_variable_name)}"
            raise mistake(f"{what}, and the program has {list(made.dense_variable_name)}")

    def skip(self, op_types: Sequence[str]) -> None:
        """Sets the operators of distributed tables that workers skip."""
        new = (x for x in op_types if x not in self._desc.skip_op)
        self._desc = replace(self._desc, skip_op=(*self._desc.skip_op, *new))

    def get_desc(self) -> DownpourTrainerParameter:
        return self._desc
