"""The tables of a Downpour job in this process, and the update rules of dense and sparse tables.

Dense tables: `adam` is pslib's, Adam's first moment over Adagrad's sum, both decaying::

    d = ada_decay_rate * d + 1
    s = ada_decay_rate * s + g * g
    v = mom_decay_rate * v + (1 - mom_decay_rate) * g
    w -= learning_rate * sqrt((d + d * ada_epsilon) / (s + d * ada_epsilon)) * v

so a step has size `learning_rate` while gradients stay alike, whatever their magnitude. `naive` is
gradient descent, and `summary` the update of data_norm's counts: `w = summary_decay_rate * w + g`.

Sparse tables: pslib's Adagrad has one sum of squares per row, excluding the current gradient, and
clamps weights to `weight_bounds`, as `DownpourAdagrad` does. pslib divides gradients by the number
of times a key was shown before, which a loss that is a mean has done already. Where shows and
clicks are counted, rows whose score is below `delete_threshold` are removed when a table is shrunk;
other thresholds are kept in the description without effect.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from jaxfleet.contrib.downpour.descriptions import (
    AdamSGDParameter,
    DenseSGDRuleParameter,
    NaiveSGDParameter,
    PSParameter,
    SparseAdamSGDParameter,
    SparseCommonSGDRuleParameter,
    SparseNaiveSGDRuleParameter,
    SparseSGDRuleParameter,
    SummarySGDParameter,
    TableAccessorParameter,
    TableParameter,
)
from jaxfleet.errors import ProgramError
from jaxfleet.tables import (
    Adam,
    ByScore,
    Constant,
    DownpourAdagrad,
    DownpourAdam,
    Sgd,
    Summary,
    TableSpec,
    Uniform,
)
from jaxfleet.tables.store import TableStore
from jaxfleet.tables.validation import Part


class DenseRule(Protocol):
    """An update rule of a dense table, with its state."""

    def update(self, values: np.ndarray, grads: np.ndarray) -> None:
        """Updates all values of a table in place: float32[n] both."""
        ...


class DenseAdam:
    """pslib's Adam for a table of `size` elements."""

    def __init__(self, rule: DownpourAdam, size: int) -> None:
        self._rate, self._keep = np.float32(rule.learning_rate), np.float32(rule.keep)
        self._speed_kept, self._epsilon = np.float32(rule.momentum), np.float32(rule.epsilon)
        self._steps = np.float32(0)
        self._squares = np.zeros(size, np.float32)
        self._speed = np.zeros(size, np.float32)

    def update(self, values: np.ndarray, grads: np.ndarray) -> None:
        one = np.float32(1)
        self._steps = self._keep * self._steps + one
        self._squares *= self._keep
        self._squares += grads * grads
        self._speed *= self._speed_kept
        self._speed += (one - self._speed_kept) * grads
        least = self._steps * self._epsilon
        values -= (
            self._rate * np.sqrt((self._steps + least) / (self._squares + least)) * self._speed
        )


class DenseNaive:
    """Plain gradient descent."""

    def __init__(self, rule: Sgd) -> None:
        self._rate = np.float32(rule.learning_rate)

    def update(self, values: np.ndarray, grads: np.ndarray) -> None:
        values -= self._rate * grads


class DenseSummary:
    """Decayed sum of pushed values."""

    def __init__(self, rule: Summary) -> None:
        self._keep = np.float32(rule.keep)

    def update(self, values: np.ndarray, grads: np.ndarray) -> None:
        values *= self._keep
        values += grads


def dense_rule(rule: Part, size: int) -> DenseRule:
    """Returns the implementation of a dense table's rule in this process."""
    match rule:
        case DownpourAdam():
            return DenseAdam(rule, size)
        case Sgd():
            return DenseNaive(rule)
    assert isinstance(rule, Summary)
    return DenseSummary(rule)


def described_rule(table: TableParameter) -> Part:
    """Returns the rule that a dense table's description selects.

    Raises:
        ProgramError: no rule is set, or its options are missing.
    """
    said = table.accessor.dense_sgd_param if table.accessor else None
    match said:
        case DenseSGDRuleParameter(name="adam", adam=AdamSGDParameter() as adam):
            return DownpourAdam(
                _number(adam.learning_rate, "adam.learning_rate", "dense"),
                _number(adam.ada_decay_rate, "adam.ada_decay_rate", "dense"),
                _number(adam.mom_decay_rate, "adam.mom_decay_rate", "dense"),
                _number(adam.ada_epsilon, "adam.ada_epsilon", "dense"),
            )
        case DenseSGDRuleParameter(name="naive", naive=NaiveSGDParameter() as naive):
            return Sgd(_number(naive.learning_rate, "naive.learning_rate", "dense"))
        case DenseSGDRuleParameter(name="summary", summary=SummarySGDParameter() as summary):
            return Summary(
                _number(summary.summary_decay_rate, "summary.summary_decay_rate", "dense")
            )
    what = f"a dense table is updated by {said.name if said else None!r} without its parameters"
    raise ProgramError(what, hint="give adam, naive or summary, with its parameters")


_WIDEST = 3e38  # of float32, where the description sets no bounds
_RANGE = 1e-4  # of initial rows, where the description sets none


def table_spec(name: str, dim: int, accessor: TableAccessorParameter) -> TableSpec:
    """Converts pslib's description of a parameter's sparse table; `dim` counts trained elements."""
    rule = _rule(accessor)
    match rule:
        case SparseAdamSGDParameter():
            optimizer: Part = Adam(
                _number(rule.learning_rate, "learning_rate"),
                _number(rule.beta1_decay_rate, "beta1_decay_rate"),
                _number(rule.beta2_decay_rate, "beta2_decay_rate"),
                _number(rule.ada_epsilon, "ada_epsilon"),
            )
        case SparseNaiveSGDRuleParameter():
            optimizer = Sgd(_number(rule.learning_rate, "learning_rate"))
        case SparseSGDRuleParameter():
            optimizer = _adagrad(rule)
    around = rule.initial_range if rule.initial_range is not None else _RANGE
    return TableSpec(name=name, dim=dim, initializer=Uniform(-around, around), optimizer=optimizer)


def score_policy(accessor: TableAccessorParameter) -> tuple[Part, ...]:
    """Eviction policy by shows and clicks; empty if the accessor sets none."""
    said = accessor.downpour_accessor_param
    if said is None or said.delete_threshold is None:
        return ()
    decay = said.show_click_decay_rate
    return (
        ByScore(
            nonclk_coeff=said.nonclk_coeff or 0.0,
            click_coeff=said.click_coeff or 0.0,
            decay=1.0 if decay is None else decay,
            threshold=said.delete_threshold,
        ),
    )


def _rule(
    accessor: TableAccessorParameter,
) -> SparseAdamSGDParameter | SparseNaiveSGDRuleParameter | SparseSGDRuleParameter:
    if accessor.sparse_sgd_param is not None:
        return accessor.sparse_sgd_param
    common = accessor.embedx_sgd_param or accessor.sparse_commonsgd_param
    match common:
        case SparseCommonSGDRuleParameter(name="adam", adam=SparseAdamSGDParameter() as adam):
            return adam
        case SparseCommonSGDRuleParameter(
            name="naive", naive=SparseNaiveSGDRuleParameter() as naive
        ):
            return naive
        case SparseCommonSGDRuleParameter(name="adagrad", adagrad=SparseSGDRuleParameter() as ada):
            return ada
    what = f"a sparse table is updated by {common.name if common else None!r}"
    raise ProgramError(what, hint="adagrad, adam and naive are there, each with its numbers")


def _adagrad(rule: SparseSGDRuleParameter) -> DownpourAdagrad:
    rate = _number(rule.learning_rate, "learning_rate")
    begin = _number(rule.initial_g2sum, "initial_g2sum")
    if begin <= 0:
        hint = "a row's rate is learning_rate * sqrt(initial_g2sum / (initial_g2sum + squares))"
        raise ProgramError(f"initial_g2sum is {begin}, and must be more than 0", hint=hint)
    low, high = rule.weight_bounds or (-_WIDEST, _WIDEST)
    return DownpourAdagrad(rate, begin, low, high)


def _number(given: float | None, name: str, kind: str = "sparse") -> float:
    if given is None:
        raise ProgramError(f"a {kind} table's description does not say {name}")
    return given


SHOWN = ".shown"  # suffix of the table that counts shows and clicks by key


Push: TypeAlias = tuple[np.ndarray, np.ndarray]  # unique keys, and gradients


class LocalTables:
    """In-process tables: rows by key, and dense parameters stored contiguously."""

    def __init__(self, desc: PSParameter) -> None:
        self._described = {table.table_id or 0: table for table in desc.tables}
        self._sparse: dict[str, TableStore] = {}
        self._dense: dict[int, tuple[np.ndarray, DenseRule]] = {}
        self.step = 0

    def declare(self, table_id: int, name: str, dim: int, *, shows: bool) -> None:
        """Creates a sparse table at its first use.

        `dim` counts a row's trained elements; `shows` also counts shows and clicks by key.
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
        """Looks up rows of a declared sparse table: float32[n, dim]."""
        return self._sparse[name].look_up(keys, step=self.step)

    def peek(self, name: str, keys: np.ndarray) -> np.ndarray:
        """Returns rows as `look_up`, and creates none."""
        return self._sparse[name].peek(keys)

    def push(self, rows: Mapping[str, Push], dense: Mapping[int, Sequence[np.ndarray]]) -> None:
        """Updates sparse tables by name and dense ones by number, as one step.

        A gradient that is not finite raises ProgramError.
        """
        for name, (keys, grads) in rows.items():
            table = self._sparse[name]
            table.update(keys, grads, step=self.step, **scores(table.spec, keys, rows))
        for table_id, grads_of in dense.items():
            self.push_dense(table_id, grads_of)
        self.step += 1

    def begin_dense(self, table_id: int, values: Sequence[np.ndarray]) -> None:
        """Sets a dense table's initial values; later calls have no effect."""
        if table_id not in self._dense:
            whole = flat(values)
            rule = described_rule(self._table(table_id))
            self._dense[table_id] = whole, dense_rule(rule, whole.size)

    def pull_dense(
        self, table_id: int, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, np.ndarray]:
        """Parameters of a dense table by name, as views that the caller must copy."""
        whole, _ = self._dense[table_id]
        return shaped(whole, shapes)

    def push_dense(self, table_id: int, grads: Sequence[np.ndarray]) -> None:
        """Updates a dense table, unless a gradient is not finite (ProgramError)."""
        values, rule = self._dense[table_id]
        whole = flat(grads)
        if not np.isfinite(whole).all():
            what = f"dense table {table_id}: a gradient of step {self.step} is not finite"
            raise ProgramError(what, hint="a smaller learning rate, or other data")
        rule.update(values, whole)

    def stats(self) -> dict[str, dict[str, float]]:
        return {name: dict(table.stats()) for name, table in sorted(self._sparse.items())}

    def _table(self, table_id: int) -> TableParameter:
        if table_id not in self._described:
            known = ", ".join(map(str, sorted(self._described)))
            raise ProgramError(f"servers have no table {table_id}, only {known or 'none'}")
        return self._described[table_id]


def sparse_specs(table: TableParameter, name: str, dim: int, *, shows: bool) -> list[TableSpec]:
    """Specs of a sparse table and, if `shows`, of its counts, which evict the same keys."""
    assert table.accessor is not None
    made = table_spec(name, dim, table.accessor)
    if not shows:
        return [made]
    go, zero = score_policy(table.accessor), Constant(0.0)
    counted = TableSpec(
        name=name + SHOWN, dim=2, initializer=zero, optimizer=Sgd(1.0), evictions=go
    )
    return [replace(made, evictions=go), counted]


def scores(spec: TableSpec, keys: np.ndarray, rows: Mapping[str, Push]) -> dict[str, Any]:
    """Shows and clicks of the keys pushed in a step, if their table counts them.

    `rows` is the whole push by table; the count table's entry holds the values to subtract.
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
    """Concatenates values to float32[n]; empty without values."""
    arrays = [np.asarray(value, np.float32).reshape(-1) for value in values]
    return np.concatenate([np.zeros(0, np.float32), *arrays])


def shaped(whole: np.ndarray, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Splits the result of `flat` by name, into views."""
    found, at = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape, dtype=np.int64))
        found[name] = whole[at : at + size].reshape(shape)
        at += size
    return found
