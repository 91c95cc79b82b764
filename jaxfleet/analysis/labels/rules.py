"""Which rule each operator type follows; a type that is not here runs whole on every device."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

from jaxfleet.analysis.labels import collectives, elementwise, indexing, random, reduce, shape
from jaxfleet.analysis.labels.label import Placing, View, along, gathered, settle

Rule: TypeAlias = Callable[[View], Placing]


def dim_value(view: View) -> Placing:
    """Gives the size of the whole batch."""
    return along(view, (), view.settled)


def fetch(view: View) -> Placing:
    """Returns rows as they are and completes the rest."""
    return along(view, tuple(x if x.is_sharded else settle(x) for x in view.labels))


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
    **dict.fromkeys(("jax.rev", "jax.cumsum", "jax.split"), shape.unmoved_linear),
    **{
        f"jax.{name}": shape.unmoved
        for name in (
            *("cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "top_k", "approx_top_k"),
            *("pad", "fft", "reduce_window", "reduce_window_sum", "reduce_window_max"),
            *("reduce_window_min", "select_and_scatter_add", "select_and_gather_add"),
            *("select_and_scatter", "cholesky", "triangular_solve", "eigh", "svd", "qr", "lu"),
        )
    },
    **{
        f"jax.reduce_{name}": reduce.reduction for name in ("sum", "max", "min", "prod", "and", "or")
    },
    "jax.argmax": reduce.arg_reduction,
    "jax.argmin": reduce.arg_reduction,
    "jax.dot_general": reduce.dot_general,
    "jax.conv_general_dilated": reduce.convolution,
    "jax.slice": indexing.static_slice,
    "jax.dynamic_slice": indexing.dynamic_slice,
    "jax.dynamic_update_slice": indexing.dynamic_update_slice,
    "jax.gather": indexing.gather,
    "jax.scatter-add": indexing.scatter_add,
    **{f"jax.scatter{name}": indexing.scatter for name in ("", "-mul", "-min", "-max")},
    "jax.random_bits": random.random_bits,
    "jax.random_split": random.random_split,
    "jax.dim_value": dim_value,
    "fetch": fetch,
    **collectives.RULES,
}


def place(view: View) -> Placing:
    """Returns how an operator without sub-blocks runs on the devices."""
    rule = RULES.get(view.op.type)
    if rule is None:
        return gathered(view, f"no rule keeps the rows of {view.op.type} apart")
    return rule(view)
