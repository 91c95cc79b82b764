"""pslib's DownpourServer and DownpourWorker, and the options of a strategy with their defaults.

The keys, the classes of accessors and the defaults are pslib's. The first description of a table is
kept, so a `fleet_desc_file` overrides the strategy.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from jaxfleet.contrib.downpour import node
from jaxfleet.contrib.downpour.descriptions import (
    DENSE,
    SPARSE,
    AdamSGDParameter,
    DenseSGDRuleParameter,
    DownpourServerParameter,
    DownpourTableAccessorParameter,
    DownpourTrainerParameter,
    NaiveSGDParameter,
    ServerParameter,
    SparseAdamSGDParameter,
    SparseCommonSGDRuleParameter,
    SparseNaiveSGDRuleParameter,
    SparseSGDRuleParameter,
    SummarySGDParameter,
    TableAccessorParameter,
    TableAccessorSaveParameter,
    TableParameter,
)
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.framework.variable import Pairs, Variable

TableOptions = Mapping[str, Any]


class DownpourServer:
    """Builder of the servers' configuration, starting from `begun`."""

    def __init__(self, begun: ServerParameter | None = None) -> None:
        self._desc = (begun and begun.downpour_server_param) or DownpourServerParameter(
            service_param=node.SERVICE
        )

    def add_sparse_table(self, table_id: int, strategy: TableOptions | None = None) -> None:
        """Adds a table of rows by keys.

        Raises:
            ValueError: the strategy has unknown keys, or the number is that of a dense table.
        """
        if not self._is_there(table_id, SPARSE):
            self._add(sparse_table(table_id, strategy))

    def add_dense_table(
        self,
        table_id: int,
        param_var: Sequence[Variable],
        grad_var: Sequence[Variable],
        strategy: TableOptions | None = None,
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
            self._add(dense_table(table_id, strategy, size))

    def add_data_norm_table(
        self,
        table_id: int,
        learning_rate: float,
        param_var: Sequence[Variable],
        grad_var: Sequence[Variable],
        strategy: TableOptions | None = None,
        sparse_table_names: Collection[str] = (),
    ) -> None:
        """Adds a table of data_norm's counts and sums; see `add_dense_table`."""
        del learning_rate, grad_var
        if not self._is_there(table_id, DENSE):
            size = node.size_of(x for x in param_var if x.name not in sparse_table_names)
            self._add(data_norm_table(table_id, strategy, size))

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


T = TypeVar("T")

# Accessors whose row is `embedx_dim` columns more than three: show, click, linear weight.
CTR = ("DownpourCtrAccessor", "DownpourCtrDoubleAccessor", "DownpourUnitAccessor",
       "DownpourDoubleUnitAccessor", "DownpourFeatureValueAccessor")  # fmt: skip
HEAD = 3  # the three columns
VALUE = "DownpourSparseValueAccessor"
DUMPED = ("DownpourCtrAccessor", "DownpourCtrDoubleAccessor", "DownpourUnitAccessor")

_SPARSE_KEYS = frozenset(
    f"sparse_{key}"
    for key in """
    table_class compress_in_save shard_num accessor_class learning_rate initial_g2sum
    initial_range weight_bounds fea_dim embedx_dim embedx_threshold nonclk_coeff click_coeff
    base_threshold delta_threshold delta_keep_days delete_after_unseen_days
    ssd_unseenday_threshold show_click_decay_rate delete_threshold converter deconverter
    enable_cache cache_rate cache_file_num beta1_decay_rate beta2_decay_rate ada_epsilon optimizer
    """.split()  # noqa: SIM905  # a list of words is easier to read so
)
_DENSE_KEYS = frozenset(
    f"dense_{key}"
    for key in """
    table_class compress_in_save accessor_class optimizer learning_rate avg_decay ada_decay
    ada_epsilon mom_decay naive_lr
    """.split()  # noqa: SIM905  # as above
)
_DATA_NORM_KEYS = frozenset(
    f"datanorm_{key}"
    for key in "table_class compress_in_save accessor_class operation decay_rate".split()  # noqa: SIM905
)


def sparse_table(table_id: int, said: TableOptions | None) -> TableParameter:
    """Describes a sparse table for servers; unknown options raise ValueError."""
    strategy = _checked(said, _SPARSE_KEYS, "sparse")
    accessor_class = _one_of(strategy, "sparse_accessor_class", CTR[0], (*CTR, VALUE))
    take = _Taker(strategy, "sparse_")
    return TableParameter(
        table_id,
        take("table_class", "DownpourSparseTable"),
        take("shard_num", 1000),
        _value_accessor(take) if accessor_class == VALUE else _ctr_accessor(take, accessor_class),
        SPARSE,
        take("compress_in_save", True),
        take("enable_cache", True),
        take("cache_rate", 0.00055),
        take("cache_file_num", 16),
    )


def dense_table(table_id: int, said: TableOptions | None, size: int) -> TableParameter:
    """Describes a dense table for servers; unknown options raise ValueError."""
    strategy = _checked(said, _DENSE_KEYS, "dense")
    take = _Taker(strategy, "dense_")
    rate = _number(strategy, "dense_learning_rate", 5e-06)
    rule = DenseSGDRuleParameter(
        _one_of(strategy, "dense_optimizer", "adam", ("adam", "naive")),
        AdamSGDParameter(
            rate,
            take("avg_decay", 0.999993),
            take("ada_decay", 0.9999),
            take("ada_epsilon", 1e-8),
            take("mom_decay", 0.99),
        ),
        NaiveSGDParameter(take("naive_lr", 0.0002)),
    )
    return _dense(table_id, take, size, rule)


def data_norm_table(table_id: int, said: TableOptions | None, size: int) -> TableParameter:
    """Describes a table of data_norm's counts and sums; unknown options raise ValueError."""
    take = _Taker(_checked(said, _DATA_NORM_KEYS, "datanorm"), "datanorm_")
    name = take("operation", "summary")
    rule = DenseSGDRuleParameter(name, summary=SummarySGDParameter(take("decay_rate", 0.999999)))
    return _dense(table_id, take, size, rule)


def _dense(table_id: int, take: "_Taker", size: int, rule: DenseSGDRuleParameter) -> TableParameter:
    accessor = TableAccessorParameter(
        take("accessor_class", "DownpourDenseValueAccessor"), dense_sgd_param=rule, fea_dim=size
    )
    compressed = take("compress_in_save", True)
    table_class = take("table_class", "DownpourDenseTable")
    return TableParameter(table_id, table_class, None, accessor, DENSE, compressed)


def _ctr_accessor(take: "_Taker", accessor_class: str) -> TableAccessorParameter:
    embedx_dim = take("embedx_dim", 8)
    return TableAccessorParameter(
        accessor_class,
        sparse_sgd_param=_adagrad(take),
        fea_dim=take("fea_dim", embedx_dim + 3),
        embedx_dim=embedx_dim,
        embedx_threshold=take("embedx_threshold", 10),
        downpour_accessor_param=DownpourTableAccessorParameter(
            take("nonclk_coeff", 0.1),
            take("click_coeff", 1.0),
            take("base_threshold", 1.5),
            take("delta_threshold", 0.25),
            take("delta_keep_days", 16.0),
            take("delete_after_unseen_days", 30.0),
            take("ssd_unseenday_threshold", 1),
            take("show_click_decay_rate", 0.98),
            take("delete_threshold", 0.8),
        ),
        table_accessor_save_param=_saves(take),
    )


def _value_accessor(take: "_Taker") -> TableAccessorParameter:
    optimizer = _one_of(take.said, "sparse_optimizer", "adam", ("adam", "naive", "adagrad"))
    embedx_dim = take("embedx_dim", 8)
    bounds = _bounds(take)
    rule = SparseCommonSGDRuleParameter(optimizer)
    if optimizer == "adam":
        adam = SparseAdamSGDParameter(
            take("learning_rate", 0.001),
            take("initial_range", 1e-4),
            take("beta1_decay_rate", 0.9),
            take("beta2_decay_rate", 0.999),
            take("ada_epsilon", 1e-8),
            bounds,
        )
        rule = SparseCommonSGDRuleParameter(optimizer, adam=adam)
    elif optimizer == "naive":
        rate, begin = take("learning_rate", 0.05), take("initial_range", 1e-4)
        naive = SparseNaiveSGDRuleParameter(rate, begin, bounds)
        rule = SparseCommonSGDRuleParameter(optimizer, naive=naive)
    else:
        rule = SparseCommonSGDRuleParameter(optimizer, adagrad=_adagrad(take))
    return TableAccessorParameter(
        VALUE,
        fea_dim=take("fea_dim", embedx_dim),
        embedx_dim=embedx_dim,
        embedx_threshold=take("embedx_threshold", 10),
        table_accessor_save_param=_saves(take),
        sparse_commonsgd_param=rule,
    )


def _adagrad(take: "_Taker") -> SparseSGDRuleParameter:
    rate, begin = take("learning_rate", 0.05), take("initial_g2sum", 3.0)
    return SparseSGDRuleParameter(rate, begin, take("initial_range", 1e-4), _bounds(take))


def _bounds(take: "_Taker") -> tuple[float, ...]:
    return tuple(take("weight_bounds", [-10.0, 10.0]))


def _saves(take: "_Taker") -> tuple[TableAccessorSaveParameter, ...]:
    """The commands for writing saves, if the strategy sets them."""
    converter, deconverter = take("converter", ""), take("deconverter", "")
    modes = (1, 2) if converter or deconverter else ()
    return tuple(TableAccessorSaveParameter(mode, converter, deconverter) for mode in modes)


class _Taker:
    """Takes values of the strategy `said` by the last part of their keys, after `prefix`."""

    def __init__(self, said: TableOptions, prefix: str) -> None:
        self.said, self._prefix = said, prefix

    def __call__(self, key: str, default: T) -> T:
        found = self.said.get(self._prefix + key, default)
        if isinstance(default, float) and isinstance(found, int) and not isinstance(found, bool):
            found = float(found)
        kinds = list | tuple if isinstance(default, list) else type(default)
        if not isinstance(found, kinds) or (isinstance(found, bool) and kinds is int):
            what = f"strategy['{self._prefix}{key}'] is {found!r}"
            raise mistake(what, f"a {type(default).__name__}, such as {default!r}")
        return found  # type: ignore[return-value]  # a list or a tuple where the default is a list


def _number(said: TableOptions, key: str, default: float) -> float:
    return float(said.get(key, default))


def _checked(said: TableOptions | None, known: Collection[str], kind: str) -> TableOptions:
    """The options of a strategy, whose keys must be known."""
    strategy = {} if said is None else said
    check_type(strategy, f"the strategy of a {kind} table", Mapping)
    for key in strategy:
        if key not in known:
            raise mistake(f"strategy key '{key}' not support", f"one of {', '.join(sorted(known))}")
    return strategy


def _one_of(said: TableOptions, key: str, default: str, known: Collection[str]) -> str:
    found = said.get(key, default)
    if found not in known:
        raise mistake(f"strategy['{key}'] is {found!r}", f"support {', '.join(known)}")
    return str(found)
