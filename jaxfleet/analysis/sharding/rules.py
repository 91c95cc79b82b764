"""The table of sharding rules by operator type; any other type runs whole on every device.

The rules of collectives serve to check a rewritten program.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from jaxfleet.analysis.sharding import arithmetic, gather_scatter, shape
from jaxfleet.analysis.sharding.plan import OperatorSharding, OperatorView, along, gathered, whole
from jaxfleet.analysis.sharding.spec import REPLICATED, SUM, VARYING, completed, partial, sharded

Rule: TypeAlias = Callable[[OperatorView], OperatorSharding]


def _reduced(how: str) -> Rule:
    def rule(view: OperatorView) -> OperatorSharding:
        count = len(view.labels)
        return along(view, (partial(how),) * count, *[REPLICATED] * count)

    return rule


def _average(view: OperatorView) -> OperatorSharding:
    """Averages the devices' own values."""
    return along(view, [completed(x) for x in view.labels], *[REPLICATED] * len(view.labels))


def _allgather(view: OperatorView) -> OperatorSharding:
    return along(view, (sharded(view.number("axis")),), REPLICATED)


def _reducescatter(view: OperatorView) -> OperatorSharding:
    return along(view, (SUM,), sharded(view.number("axis")))


def _alltoall(view: OperatorView) -> OperatorSharding:
    """Moves the cut from one axis to another."""
    inputs = (sharded(view.number("from_axis")),)
    return along(view, inputs, sharded(view.number("axis")))


def _split(view: OperatorView) -> OperatorSharding:
    """Splits a value into each device's rows."""
    return along(view, (completed(view.labels[0]),), sharded(view.number("axis")))


def _summand(view: OperatorView) -> OperatorSharding:
    """Turns a replicated value into a summand that counts once."""
    return along(view, (REPLICATED,), SUM)


def _local(view: OperatorView) -> OperatorSharding:
    """Takes a summand for the whole sum."""
    return along(view, (SUM,), VARYING)


def _own_iota(view: OperatorView) -> OperatorSharding:
    """Counts a device's rows."""
    return along(view, (), sharded(view.number("dimension")))


def _own_draw(view: OperatorView) -> OperatorSharding:
    """Draws a device's rows."""
    axis = len(view.shapes[0]) + view.number("rows_axis")
    return along(view, (completed(view.labels[0]),), sharded(axis))


def _fetch(view: OperatorView) -> OperatorSharding:
    """Returns rows unchanged and completes the rest."""
    return along(view, [x if x.is_sharded else completed(x) for x in view.labels])


def _exported(view: OperatorView) -> OperatorSharding:
    """Runs an operator without a rule on all rows, because it may mix any of them."""
    return gathered(view, f"no rule keeps the rows of '{view.op.attrs['name']}' apart")


def _raise_if(view: OperatorView) -> OperatorSharding:
    """Passes values on unchanged; all devices agree on whether to raise."""
    kept = [x if x.is_sharded else completed(x) for x in view.labels[2:]]
    return along(view, (REPLICATED, REPLICATED, *kept), *kept)


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(arithmetic.NONLINEAR, arithmetic.nonlinear),
    **dict.fromkeys(arithmetic.ADDITIVE, arithmetic.additive),
    **dict.fromkeys(arithmetic.LINEAR, arithmetic.linear),
    "jax.optimization_barrier": arithmetic.linear,
    "jax.mul": arithmetic.multiply,
    "jax.div": arithmetic.divide,
    "jax.convert_element_type": arithmetic.convert,
    "jax.select_n": arithmetic.select,
    **dict.fromkeys(arithmetic.REDUCTIONS, arithmetic.reduction),
    "jax.argmax": arithmetic.arg_reduction,
    "jax.argmin": arithmetic.arg_reduction,
    "jax.dot_general": arithmetic.dot_general,
    "jax.conv_general_dilated": arithmetic.convolution,
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
    "jax.random_bits": shape.draw,
    "jax.random_split": shape.draw,
    "jax.slice": gather_scatter.static_slice,
    "jax.dynamic_slice": gather_scatter.dynamic_slice,
    "jax.dynamic_update_slice": gather_scatter.dynamic_update_slice,
    "jax.gather": gather_scatter.gather,
    "jax.scatter-add": gather_scatter.scatter_add,
    **{f"jax.scatter{name}": gather_scatter.scatter for name in ("", "-mul", "-min", "-max")},
    **gather_scatter.TABLE_RULES,
    "jax.dim_value": whole,
    "exported": _exported,
    "raise_if": _raise_if,
    "fetch": _fetch,
    **{
        f"c_allreduce_{how}": _reduced(how)
        for how in ("sum", "max", "min", "prod", "and", "or", "xor")
    },
    "c_allreduce_avg": _average,
    "c_allgather": _allgather,
    "c_reducescatter": _reducescatter,
    "c_alltoall": _alltoall,
    "c_split": _split,
    "c_summand": _summand,
    "c_local": _local,
    "c_complete": whole,
    "c_iota": _own_iota,
    "c_random_bits": _own_draw,
    "c_random_split": _own_draw,
}


def operator_sharding(view: OperatorView) -> OperatorSharding:
    """Returns the sharding of an operator without sub-blocks."""
    rule = RULES.get(view.op.type)
    if rule is None:
        return gathered(view, f"no rule keeps the rows of {view.op.type} apart")
    return rule(view)
