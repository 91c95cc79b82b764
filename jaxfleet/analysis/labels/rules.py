"""Which rule each operator type follows; a type that is not here runs whole on every device."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from jaxfleet.analysis.labels import (
    collectives,
    contract,
    elementwise,
    indexing,
    lookup,
    random,
    reduce,
    sections,
    shape,
    tables,
)
from jaxfleet.analysis.labels.label import REPLICATED, settle
from jaxfleet.analysis.labels.placing import Placing, View, along, gathered, whole

Rule: TypeAlias = Callable[[View], Placing]


def fetch(view: View) -> Placing:
    """Returns rows as they are and completes the rest."""
    return along(view, [x if x.is_sharded else settle(x) for x in view.labels])


def exported(view: View) -> Placing:
    """Runs what no rule describes on all rows: nothing is known of which rows it mixes."""
    return gathered(view, f"no rule keeps the rows of '{view.op.attrs['name']}' apart")


def raise_if(view: View) -> Placing:
    """Hands values on as they lie; all devices agree on whether to raise."""
    kept = [x if x.is_sharded else settle(x) for x in view.labels[2:]]
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
    **dict.fromkeys(sections.LINEAR, sections.apart_linear),
    **dict.fromkeys(sections.OTHERS, sections.apart),
    "jax.pad": sections.pad,
    **dict.fromkeys(reduce.REDUCTIONS, reduce.reduction),
    "jax.argmax": reduce.arg_reduction,
    "jax.argmin": reduce.arg_reduction,
    "jax.dot_general": contract.dot_general,
    "jax.conv_general_dilated": contract.convolution,
    "jax.slice": indexing.static_slice,
    "jax.dynamic_slice": indexing.dynamic_slice,
    "jax.dynamic_update_slice": indexing.dynamic_update_slice,
    "jax.gather": lookup.gather,
    "jax.scatter-add": lookup.scatter_add,
    **{f"jax.scatter{name}": lookup.scatter for name in ("", "-mul", "-min", "-max")},
    "jax.random_bits": random.draw,
    "jax.random_split": random.draw,
    "jax.dim_value": whole,
    "exported": exported,
    "raise_if": raise_if,
    "fetch": fetch,
    **collectives.RULES,
    **tables.RULES,
}


def place(view: View) -> Placing:
    """Returns how an operator without sub-blocks runs on the devices."""
    rule = RULES.get(view.op.type)
    if rule is None:
        return gathered(view, f"no rule keeps the rows of {view.op.type} apart")
    return rule(view)
