"""Table accessors: the options of a strategy with their defaults.

The keys, the classes and the defaults are pslib's.
"""

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from jaxfleet.contrib.downpour.descriptions import (
    DENSE,
    SPARSE,
    AdamSGDParameter,
    DenseSGDRuleParameter,
    DownpourTableAccessorParameter,
    NaiveSGDParameter,
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

T = TypeVar("T")
TableOptions = Mapping[str, Any]

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
