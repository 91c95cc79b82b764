"""What operators with sub-computations carry, the same whatever the JAX line."""

from collections.abc import Callable

from jaxfleet.ir import Attr, Attrs, BlockRef
from jaxfleet.ops import jax_adapter, jaxprs
from jaxfleet.ops.jaxprs import Equation, Jaxpr

_TYPES = {
    "scan": "jax.scan",
    "while": "jax.while",
    "cond": "jax.cond",
    "reduce": "jax.reduce",
    "remat2": "jax.remat2",
    "checkpoint": "jax.remat2",
}


def is_loop(eqn: Equation) -> bool:
    """Tells whether an equation has sub-computations that become blocks."""
    return eqn.primitive.name in _TYPES


def is_recomputed(name: str) -> bool:
    """Tells whether a primitive is jax's `checkpoint`, which computes its values twice."""
    return _TYPES.get(name) == "jax.remat2"


def read_loop(eqn: Equation, block: Callable[[Jaxpr], BlockRef]) -> tuple[str, Attrs]:
    """Returns the operator type and the attributes of an equation with sub-computations.

    Args:
        eqn: for which `is_loop` holds.
        block: makes a block of one of them.
    """
    name, params = eqn.primitive.name, eqn.params
    attrs: dict[str, Attr]
    match name:
        case "scan":
            loop = jaxprs.loop_of(eqn)
            attrs = {
                "body": block(params["jaxpr"]),
                "length": jax_adapter.size_of(params["length"]),
                "num_carry": loop.num_carry,
                "num_consts": loop.num_consts,
                "reverse": bool(params["reverse"]),
                "unroll": jax_adapter.encode(params["unroll"]),
            }
        case "while":
            attrs = {
                "body": block(params["body_jaxpr"]),
                "body_nconsts": params["body_nconsts"],
                "cond": block(params["cond_jaxpr"]),
                "cond_nconsts": params["cond_nconsts"],
            }
        case "cond":
            attrs = {"branches": tuple(block(branch) for branch in params["branches"])}
            if params.get("branches_platforms") is not None:
                attrs["platforms"] = jax_adapter.encode(params["branches_platforms"])
        case "reduce":
            attrs = {"body": block(params["jaxpr"]), "dimensions": tuple(params["dimensions"])}
        case _:  # a recomputation: its policy has done its work when the gradient was taken
            attrs = {
                "body": block(params["jaxpr"]),
                "differentiated": bool(params["differentiated"]),
                "prevent_cse": jax_adapter.encode(params["prevent_cse"]),
            }
    return _TYPES[name], Attrs(attrs)
