"""What a sparse table's description is to our own tables of rows.

pslib's Adagrad has one sum of squares a row, without the gradient at hand, and keeps weights within
`weight_bounds`; `DownpourAdagrad` is that. pslib divides gradients by how often a key was shown
before, which a loss that is a mean has done already. Where shows and clicks are counted, rows whose
score is under `delete_threshold` go when a table is shrunk; other thresholds are kept in the
description, and do nothing.
"""

from jaxfleet.errors import ProgramError
from jaxfleet.fluid.distributed.descriptions import (
    SparseAdamParameter,
    SparseCommonSGDRuleParameter,
    SparseNaiveParameter,
    SparseSGDRuleParameter,
    TableAccessorParameter,
)
from jaxfleet.tables import Adam, ByScore, DownpourAdagrad, Sgd, TableSpec, Uniform
from jaxfleet.tables.spec import Part

_WIDEST = 3e38  # of float32, where the description says no bounds
_RANGE = 1e-4  # within which rows begin, where the description does not say it


def table_spec(name: str, dim: int, accessor: TableAccessorParameter) -> TableSpec:
    """Returns our own description of a sparse table.

    Args:
        name: of the table: its parameter's.
        dim: how many elements of a row are trained.
        accessor: pslib's description.

    Raises:
        ProgramError: it does not say how rows are updated.
    """
    rule = _rule(accessor)
    match rule:
        case SparseAdamParameter():
            optimizer: Part = _adam(rule)
        case SparseNaiveParameter():
            optimizer = Sgd(_number(rule.learning_rate, "learning_rate"))
        case SparseSGDRuleParameter():
            optimizer = _adagrad(rule)
    around = rule.initial_range if rule.initial_range is not None else _RANGE
    return TableSpec(name=name, dim=dim, initializer=Uniform(-around, around), optimizer=optimizer)


def by_score(accessor: TableAccessorParameter) -> tuple[Part, ...]:
    """Returns which rows go where shows and clicks are counted; none where nothing says it."""
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
) -> SparseAdamParameter | SparseNaiveParameter | SparseSGDRuleParameter:
    if accessor.sparse_sgd_param is not None:
        return accessor.sparse_sgd_param
    common = accessor.embedx_sgd_param or accessor.sparse_commonsgd_param
    match common:
        case SparseCommonSGDRuleParameter(name="adam", adam=SparseAdamParameter() as adam):
            return adam
        case SparseCommonSGDRuleParameter(name="naive", naive=SparseNaiveParameter() as naive):
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


def _adam(rule: SparseAdamParameter) -> Adam:
    return Adam(
        _number(rule.learning_rate, "learning_rate"),
        _number(rule.beta1_decay_rate, "beta1_decay_rate"),
        _number(rule.beta2_decay_rate, "beta2_decay_rate"),
        _number(rule.ada_epsilon, "ada_epsilon"),
    )


def _number(given: float | None, name: str) -> float:
    if given is None:
        raise ProgramError(f"a sparse table's description does not say {name}")
    return given
