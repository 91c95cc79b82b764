"""The table of sharding rules by operator type; any other type runs whole on every device."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from jaxfleet.analysis.sharding import (
    collectives,
    contraction,
    elementwise,
    gather_scatter,
    rematerialize,
    shape,
)
from jaxfleet.analysis.sharding.rule_api import (
    OperatorSharding,
    OperatorView,
    along,
    gathered,
    whole,
)
from jaxfleet.analysis.sharding.spec import REPLICATED, completed

Rule: TypeAlias = Callable[[OperatorView], OperatorSharding]


def fetch(view: OperatorView) -> OperatorSharding:
    """Returns rows unchanged and completes the rest."""
    return along(view, [x if x.is_sharded else completed(x) for x in view.labels])


def exported(view: OperatorView) -> OperatorSharding:
    """Runs an operator without a rule on all rows, because it may mix any of them."""
    return gathered(view, f"no rule keeps the rows of '{view.op.attrs['name']}' apart")


def raise_if(view: OperatorView) -> OperatorSharding:
    """Passes values on unchanged; all devices agree on whether to raise."""
    kept = [x if x.is_sharded else completed(x) for x in view.labels[2:]]
    return along(view, (REPLICATED, REPLICATED, *kept), *kept)


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(elementwise.NONLINEAR, elementwise.nonlinear),
    **dict.fromkeys(elementwise.ADDITIVE, elementwise.additive),
    **dict.fromkeys(elementwise.LINEAR, elementwise.linear),
    "jax.optimization_barrier": elementwise.linear,
    "jax.mul": elementwise.multiply,
    "jax.div": elementwise.divide,
    "jax.convert_element_type": elementwise.convert,
    "jax.select_n": elementwise.select,
    "jax.broadcast_in_dim": shape.broadcast,
    "jax.iota": shape.iota,
    "jax.reshape": shape.reshape,
    "jax.transpose": shape.transpose,
    "jax.squeeze": shape.squeeze,
    "jax.concatenate": shape.concatenate,
    "jax.stack": shape.stack,
    "jax.unstack": shape.unstack,
    **dict.fromkeys(shape.LINEAR_MIXING, shape.unmixed_rows_linear),
    **dict.fromkeys(shape.MIXING, shape.unmixed_rows),
    "jax.pad": shape.pad,
    **dict.fromkeys(contraction.REDUCTIONS, contraction.reduction),
    "jax.argmax": contraction.arg_reduction,
    "jax.argmin": contraction.arg_reduction,
    "jax.dot_general": contraction.dot_general,
    "jax.conv_general_dilated": contraction.convolution,
    "jax.slice": gather_scatter.static_slice,
    "jax.dynamic_slice": gather_scatter.dynamic_slice,
    "jax.dynamic_update_slice": gather_scatter.dynamic_update_slice,
    "jax.gather": gather_scatter.gather,
    "jax.scatter-add": gather_scatter.scatter_add,
    **{f"jax.scatter{name}": gather_scatter.scatter for name in ("", "-mul", "-min", "-max")},
    "jax.random_bits": rematerialize.draw,
    "jax.random_split": rematerialize.draw,
    "jax.dim_value": whole,
    "exported": exported,
    "raise_if": raise_if,
    "fetch": fetch,
    **collectives.RULES,
    **gather_scatter.TABLE_RULES,
}


def operator_sharding(view: OperatorView) -> OperatorSharding:
    """Returns the sharding of an operator without sub-blocks."""
    rule = RULES.get(view.op.type)
    if rule is None:
        return gathered(view, f"no rule keeps the rows of {view.op.type} apart")
    return rule(view)
