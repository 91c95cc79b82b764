"""What a strategy says of a table, and what holds where it says nothing.

The keys, the classes and the defaults are pslib's (semantics section 24.2 of our notes).
"""

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.distributed.descriptions import (
    DENSE,
    SPARSE,
    AdamSGDParameter,
    DenseSGDRuleParameter,
    DownpourTableAccessorParameter,
    NaiveSGDParameter,
    SparseAdamParameter,
    SparseCommonSGDRuleParameter,
    SparseNaiveParameter,
    SparseSGDRuleParameter,
    SummarySGDParameter,
    TableAccessorParameter,
    TableAccessorSaveParameter,
    TableParameter,
)

T = TypeVar("T")
Said = Mapping[str, Any]

# Of these, `embedx_dim` more columns than three make a row: its show, its click, its own weight.
CTR = ("DownpourCtrAccessor", "DownpourCtrDoubleAccessor", "DownpourUnitAccessor",
       "DownpourDoubleUnitAccessor", "DownpourFeatureValueAccessor")  # fmt: skip
HEAD = 3  # those columns
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
    """.split()  # noqa: SIM905  # a list of words is read more easily so
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


def sparse_table(table_id: int, said: Said | None) -> TableParameter:
    """Describes a sparse table to servers.

    Raises:
        ValueError: a key, a class or an optimizer is unknown.
    """
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


def dense_table(table_id: int, said: Said | None, size: int) -> TableParameter:
    """Describes a dense table to servers.

    Raises:
        ValueError: a key or an optimizer is unknown.
    """
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


def data_norm_table(table_id: int, said: Said | None, size: int) -> TableParameter:
    """Describes a table of data_norm's counts and sums to servers.

    Raises:
        ValueError: a key is unknown.
    """
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
        adam = SparseAdamParameter(
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
        naive = SparseNaiveParameter(rate, begin, bounds)
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
    """Returns the commands that saves are written through, where they are said."""
    converter, deconverter = take("converter", ""), take("deconverter", "")
    modes = (1, 2) if converter or deconverter else ()
    return tuple(TableAccessorSaveParameter(mode, converter, deconverter) for mode in modes)


class _Taker:
    """Takes values of a strategy by the last part of their keys.

    Args:
        said: the strategy.
        prefix: how its keys begin.
    """

    def __init__(self, said: Said, prefix: str) -> None:
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


def _number(said: Said, key: str, default: float) -> float:
    return float(said.get(key, default))


def _checked(said: Said | None, known: Collection[str], kind: str) -> Said:
    """Returns a strategy whose keys are known.

    Raises:
        ValueError: one is not.
    """
    strategy = {} if said is None else said
    check_type(strategy, f"the strategy of a {kind} table", Mapping)
    for key in strategy:
        if key not in known:
            raise mistake(f"strategy key '{key}' not support", f"one of {', '.join(sorted(known))}")
    return strategy


def _one_of(said: Said, key: str, default: str, known: Collection[str]) -> str:
    found = said.get(key, default)
    if found not in known:
        raise mistake(f"strategy['{key}'] is {found!r}", f"support {', '.join(known)}")
    return str(found)
