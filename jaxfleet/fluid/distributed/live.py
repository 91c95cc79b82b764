"""The tables of a running Downpour job, in this process."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.fluid.distributed.dense_rules import DenseRule, dense_rule
from jaxfleet.fluid.distributed.descriptions import PSParameter, TableParameter
from jaxfleet.fluid.distributed.sparse_rules import by_score, table_spec
from jaxfleet.tables import Constant, Sgd, TableSpec
from jaxfleet.tables.store import TableStore

SHOWN = ".shown"  # ends the name of the table that counts how often a key was shown and clicked


Push: TypeAlias = tuple[np.ndarray, np.ndarray]  # keys, each once, and gradients


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

    def declare(self, table_id: int, name: str, dim: int, *, shows: bool) -> None:
        """Makes a sparse table when it is first asked for.

        Args:
            table_id: its number.
            name: of its parameter.
            dim: elements of a row that are trained.
            shows: also count how often its keys were shown and clicked.

        Raises:
            ProgramError: there is no such table, or it has other rows.
        """
        known = self._sparse.get(name)
        if known is not None and known.spec.dim != dim:
            what = f"table '{name}' has rows of {known.spec.dim}, and {dim} are asked for"
            hint = "programs of one job share tables: use_cvm of all or of none"
            raise ProgramError(what, hint=hint)
        for spec in sparse_specs(self._table(table_id), name, dim, shows=shows):
            if spec.name not in self._sparse:
                self._sparse[spec.name] = TableStore(spec)

    def look_up(self, name: str, keys: np.ndarray) -> np.ndarray:
        """Returns the rows of a sparse table that was declared: float32[n, dim]."""
        return self._sparse[name].look_up(keys, step=self.step)

    def push(self, rows: Mapping[str, Push], dense: Mapping[int, Sequence[np.ndarray]]) -> None:
        """Updates sparse tables by name and dense ones by number: a step.

        Raises:
            ProgramError: a gradient is not finite.
        """
        for name, (keys, grads) in rows.items():
            table = self._sparse[name]
            table.update(keys, grads, step=self.step, **scores(table.spec, keys, rows))
        for table_id, grads_of in dense.items():
            self.push_dense(table_id, grads_of)
        self.step += 1

    def begin_dense(self, table_id: int, values: Sequence[np.ndarray]) -> None:
        """Gives a dense table its first values; later ones are left out: servers know better."""
        if table_id not in self._dense:
            whole = flat(values)
            accessor = self._table(table_id).accessor
            rule = dense_rule(accessor.dense_sgd_param if accessor else None, whole.size)
            self._dense[table_id] = whole, rule

    def pull_dense(
        self, table_id: int, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, np.ndarray]:
        """Returns the parameters of a dense table by name; views, for the caller to copy."""
        whole, _ = self._dense[table_id]
        return shaped(whole, shapes)

    def push_dense(self, table_id: int, grads: Sequence[np.ndarray]) -> None:
        """Updates a dense table.

        Raises:
            ProgramError: a gradient is not finite; nothing was updated.
        """
        values, rule = self._dense[table_id]
        whole = flat(grads)
        if not np.isfinite(whole).all():
            what = f"dense table {table_id}: a gradient of step {self.step} is not finite"
            raise ProgramError(what, hint="a smaller learning rate, or other data")
        rule.update(values, whole)

    def stats(self) -> dict[str, dict[str, float]]:
        """Returns what there is of each sparse table, by its name."""
        return {name: dict(table.stats()) for name, table in sorted(self._sparse.items())}

    def _table(self, table_id: int) -> TableParameter:
        if table_id not in self._described:
            known = ", ".join(map(str, sorted(self._described)))
            raise ProgramError(f"servers have no table {table_id}, only {known or 'none'}")
        return self._described[table_id]


def sparse_specs(table: TableParameter, name: str, dim: int, *, shows: bool) -> list[TableSpec]:
    """Returns a sparse table of rows, and where they are counted that of shows and clicks.

    Keys of both go alike, by the same scores.
    """
    assert table.accessor is not None
    made = table_spec(name, dim, table.accessor)
    if not shows:
        return [made]
    go, zero = by_score(table.accessor), Constant(0.0)
    counted = TableSpec(
        name=name + SHOWN, dim=2, initializer=zero, optimizer=Sgd(1.0), evictions=go
    )
    return [replace(made, evictions=go), counted]


def scores(spec: TableSpec, keys: np.ndarray, rows: Mapping[str, Push]) -> dict[str, Any]:
    """Returns how often keys were shown and clicked in a step, if their table counts that.

    Args:
        spec: the table.
        keys: of it, that were pushed.
        rows: all that is pushed, by table: that of shows has what is subtracted from counts.
    """
    counted = rows.get(spec.name.removesuffix(SHOWN) + SHOWN)
    if not spec.has_scores or counted is None or not len(counted[0]):
        return {}
    order = np.argsort(counted[0])
    at = np.minimum(np.searchsorted(counted[0], keys, sorter=order), len(order) - 1)
    places = order[at]
    found = np.where((counted[0][places] == keys)[:, None], -counted[1][places], np.float32(0))
    return {"shows": found[:, 0].copy(), "clicks": found[:, 1].copy()}


def flat(values: Sequence[np.ndarray]) -> np.ndarray:
    """Returns float32[n], one after the other; of none where there are none."""
    arrays = [np.asarray(value, np.float32).reshape(-1) for value in values]
    return np.concatenate([np.zeros(0, np.float32), *arrays])


def shaped(whole: np.ndarray, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Returns what `flat` put one after the other, by name: views of it."""
    found, at = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape, dtype=np.int64))
        found[name] = whole[at : at + size].reshape(shape)
        at += size
    return found
