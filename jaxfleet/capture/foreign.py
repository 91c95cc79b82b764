"""Primitives that jax does not make public, or that a library defines.

One whose implementation is written in other primitives is read as those. Any other is exported, and
runs as one operator.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxfleet.ops import jax_adapter, jaxprs
from jaxfleet.ops.jaxprs import Equation, Jaxpr


def is_foreign(eqn: Equation) -> bool:
    """Whether an equation's primitive is one that programs have no name for."""
    return jax_adapter.find_primitive(eqn.primitive.name) is not eqn.primitive


def implementation(eqn: Equation, known: Sequence[Any | None]) -> Jaxpr | None:
    """Returns what a primitive is made of, as a jaxpr of those inputs that are not known.

    Args:
        eqn: an equation of it.
        known: the value of each of its inputs, or None where only a step has one. Libraries pass
            numbers of functions as inputs, which their implementations read.

    Returns:
        None where its implementation is the primitive itself, or cannot be traced.
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
    except Exception:  # noqa: BLE001  # what it does with tracers is the library's own affair
        return None
    if _uses(jaxpr, eqn.primitive) or not _alike(jaxpr.out_avals, eqn.outvars):
        return None
    return jaxpr


def _uses(jaxpr: Jaxpr, primitive: Any) -> bool:
    opened, _ = jaxprs.open_jaxpr(jaxpr)
    for eqn in opened.eqns:
        call = jaxprs.call_of(eqn)
        if eqn.primitive is primitive or (call is not None and _uses(call.body, primitive)):
            return True
    return False


def _alike(found: Sequence[Any], wanted: Sequence[Any]) -> bool:
    return len(found) == len(wanted) and all(
        x.shape == y.aval.shape and x.dtype == y.aval.dtype
        for x, y in zip(found, wanted, strict=True)
    )
