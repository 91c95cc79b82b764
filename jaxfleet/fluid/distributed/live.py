"""The tables of a running Downpour job, in this process."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.fluid.distributed.dense_rules import DenseRule, dense_rule
from jaxfleet.fluid.distributed.descriptions import PSParameter, TableParameter
from jaxfleet.fluid.distributed.sparse_rules import table_spec
from jaxfleet.tables import Constant, Sgd, TableSpec
from jaxfleet.tables.store import TableStore

_SHOWN = ".shown"  # ends the name of the table that counts how often a key was shown and clicked


class LiveTables:
    """Holds what servers hold: rows by key, and dense parameters one after the other.

    Args:
        desc: what the tables are.
    """

    def __init__(self, desc: PSParameter) -> None:
        self._described = {table.table_id or 0: table for table in desc.tables}
        self._sparse: dict[str, TableStore] = {}
        self._dense: dict[int, tuple[np.ndarray, DenseRule]] = {}
        self.step = 0

    def sparse(self, table_id: int, name: str, dim: int) -> TableStore:
        """Returns a sparse table; makes it when it is first asked for.

        Args:
            table_id: its number.
            name: of its parameter.
            dim: elements of a row that are trained.

        Raises:
            ProgramError: there is no such table, or it has other rows.
        """
        if name not in self._sparse:
            accessor = self._table(table_id).accessor
            assert accessor is not None
            self._sparse[name] = TableStore(table_spec(name, dim, accessor))
        found = self._sparse[name]
        if found.spec.dim != dim:
            what = f"table '{name}' has rows of {found.spec.dim}, and {dim} are asked for"
            raise ProgramError(
                what, hint="programs of one job share tables: use_cvm of all or none"
            )
        return found

    def shown(self, name: str) -> TableStore:
        """Returns the table that counts how often keys of a sparse table were shown and clicked."""
        return self._sparse.setdefault(name + _SHOWN, TableStore(_counts(name + _SHOWN)))

    def begin_dense(self, table_id: int, values: Sequence[np.ndarray]) -> None:
        """Gives a dense table its first values; later ones are left out: servers know better."""
        if table_id not in self._dense:
            flat = _flat(values)
            accessor = self._table(table_id).accessor
            rule = dense_rule(accessor.dense_sgd_param if accessor else None, flat.size)
            self._dense[table_id] = flat, rule

    def pull_dense(
        self, table_id: int, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, np.ndarray]:
        """Returns the parameters of a dense table by name; views, for the caller to copy."""
        flat, _ = self._dense[table_id]
        found, at = {}, 0
        for name, shape in shapes.items():
            size = int(np.prod(shape, dtype=np.int64))
            found[name] = flat[at : at + size].reshape(shape)
            at += size
        return found

    def push_dense(self, table_id: int, grads: Sequence[np.ndarray]) -> None:
        """Updates a dense table.

        Raises:
            ProgramError: a gradient is not finite; nothing was updated.
        """
        values, rule = self._dense[table_id]
        flat = _flat(grads)
        if not np.isfinite(flat).all():
            what = f"dense table {table_id}: a gradient of step {self.step} is not finite"
            raise ProgramError(what, hint="a smaller learning rate, or other data")
        rule.update(values, flat)

    def stats(self) -> dict[str, dict[str, float]]:
        """Returns what there is of each sparse table, by its name."""
        return {name: dict(table.stats()) for name, table in sorted(self._sparse.items())}

    def _table(self, table_id: int) -> TableParameter:
        if table_id not in self._described:
            known = ", ".join(map(str, sorted(self._described)))
            raise ProgramError(f"servers have no table {table_id}, only {known or 'none'}")
        return self._described[table_id]


def _counts(name: str) -> TableSpec:
    return TableSpec(name=name, dim=2, initializer=Constant(0.0), optimizer=Sgd(1.0))


def _flat(values: Sequence[np.ndarray]) -> np.ndarray:
    """Returns float32[n], one after the other; of none where there are none."""
    arrays = [np.asarray(value, np.float32).reshape(-1) for value in values]
    return np.concatenate([np.zeros(0, np.float32), *arrays])
