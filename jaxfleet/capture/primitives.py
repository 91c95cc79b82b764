"""Primitives that hold computations, check values at run time, or belong to a library.

A primitive whose implementation uses other primitives is read as those. Any other is exported, and
runs as one operator.

`equinox.error_if`, on which diffrax rests, is such a branch. The callback itself is a function of
the tracing process; its messages are data, which a program can hold.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxfleet.ir import Attr, Attrs, BlockRef
from jaxfleet.ops import jax_adapter
from jaxfleet.ops.jax_adapter import Equation, Jaxpr


def is_foreign(eqn: Equation) -> bool:
    """Whether programs have no name for an equation's primitive."""
    return jax_adapter.find_primitive(eqn.primitive.name) is not eqn.primitive


def implementation(eqn: Equation, known: Sequence[Any | None]) -> Jaxpr | None:
    """Returns the implementation of a primitive, as a jaxpr of its unknown inputs.

    Args:
        eqn: an equation of it.
        known: the value of each of its inputs, or None if only a step has it. Libraries pass
            numbers of functions as inputs, which their implementations read.

    Returns:
        None if its implementation is the primitive itself, or cannot be traced.
    """
    run: Callable[..., Any] | None = getattr(eqn.primitive, "impl", None)
    if run is None:
        return None
    open_places = [place for place, value in enumerate(known) if value is None]
    avals = [eqn.invars[place].aval for place in open_places]
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals]

    def expand(*values: Any) -> Any:
        filled = list(known)
        for place, value in zip(open_places, values, strict=True):
            filled[place] = value
        found = run(*filled, **eqn.params)
        return list(found) if eqn.primitive.multiple_results else [found]

    try:
        jaxpr = jax.make_jaxpr(expand)(*types)
    except Exception:  # noqa: BLE001  # the library's treatment of tracers may raise anything
        return None
    if _uses(jaxpr, eqn.primitive) or not _alike(jaxpr.out_avals, eqn.outvars):
        return None
    return jaxpr


def _uses(jaxpr: Jaxpr, primitive: Any) -> bool:
    opened, _ = jax_adapter.open_jaxpr(jaxpr)
    for eqn in opened.eqns:
        call = jax_adapter.call_of(eqn)
        if eqn.primitive is primitive or (call is not None and _uses(call.body, primitive)):
            return True
    return False


def _alike(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    return len(found) == len(wanted) and all(
        x.shape == y.aval.shape and x.dtype == y.aval.dtype
        for x, y in zip(found, wanted, strict=True)
    )


_RAISES = ("equinox._errors", "_error.<locals>.raises")


@dataclass(frozen=True)
class Check:
    """A branch that passes values through, or raises.

    Attributes:
        messages: possible messages of the error.
        number: selects the message: an input's position, or a literal.
        values: positions of the inputs passed through.
    """

    messages: tuple[str, ...]
    number: Any
    values: tuple[int, ...]


def check_of(eqn: Equation) -> Check | None:
    """Returns an equation as a check, or None for any other equation."""
    if eqn.primitive.name != "cond" or len(eqn.params["branches"]) != 2:
        return None
    passing, failing = (jax_adapter.open_jaxpr(branch)[0] for branch in eqn.params["branches"])
    if passing.eqns or not failing.eqns or any(map(jax_adapter.is_literal, passing.outvars)):
        return None
    first = failing.eqns[0]
    messages = _messages(first)
    if messages is None:
        return None
    places = {variable: place for place, variable in enumerate(passing.invars, 1)}
    number = first.invars[0]
    if not jax_adapter.is_literal(number):
        number = {variable: place for place, variable in enumerate(failing.invars, 1)}[number]
    return Check(messages, number, tuple(places[variable] for variable in passing.outvars))


def _messages(eqn: Equation) -> tuple[str, ...] | None:
    if eqn.primitive.name != "pure_callback":
        return None
    function: Any = getattr(eqn.params["callback"], "callback_func", None)
    names = (getattr(function, "__module__", ""), getattr(function, "__qualname__", ""))
    if names != _RAISES:
        return None
    return tuple(map(str, inspect.getclosurevars(function).nonlocals["msgs"]))


_TYPES = {
    "scan": "jax.scan",
    "while": "jax.while",
    "cond": "jax.cond",
    "reduce": "jax.reduce",
    "remat2": "jax.remat2",
    "checkpoint": "jax.remat2",
}


def is_loop(eqn: Equation) -> bool:
    """Whether an equation has sub-computations that become blocks."""
    return eqn.primitive.name in _TYPES


def is_recomputed(name: str) -> bool:
    """Whether a primitive is jax's `checkpoint`, which computes its values twice."""
    return _TYPES.get(name) == "jax.remat2"


def read_loop(eqn: Equation, block: Callable[[Jaxpr], BlockRef]) -> tuple[str, Attrs]:
    """Returns the operator type and the attributes of an equation for which `is_loop` holds.

    `block` makes a block of a sub-computation.
    """
    name, params = eqn.primitive.name, eqn.params
    attrs: dict[str, Attr]
    match name:
        case "scan":
            loop = jax_adapter.loop_of(eqn)
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
        case _:  # a recomputation: its policy was applied when the gradient was taken
            attrs = {
                "body": block(params["jaxpr"]),
                "differentiated": bool(params["differentiated"]),
                "prevent_cse": jax_adapter.encode(params["prevent_cse"]),
            }
    return _TYPES[name], Attrs(attrs)
