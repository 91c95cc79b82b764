"""Primitives that hold computations, check values at run time, or belong to a library.

Also the errors for those, and for steps, that cannot be captured, with their remedies.

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

from jaxfleet.errors import CaptureError
from jaxfleet.ir import Attr, Attrs, BlockRef, Source
from jaxfleet.ops import jax_adapter
from jaxfleet.ops.jax_adapter import Equation, Jaxpr
from jaxfleet.ops.user_frames import line_of_error

_RAISES = ("equinox._errors", "_error.<locals>.raises")
_TYPES = {
    "scan": "jax.scan",
    "while": "jax.while",
    "cond": "jax.cond",
    "reduce": "jax.reduce",
    "remat2": "jax.remat2",
    "checkpoint": "jax.remat2",
}
_PLACEMENTS = frozenset({"device_put", "mesh_cast", "reshard", "sharding_constraint"})
NOT_WRAPPED = "no optimizer is wrapped"
_DIVISIONS = frozenset({"pmap", "shard_map", "xla_pmap"})


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


@dataclass(frozen=True)
class Check:
    """A branch that passes values through, or raises."""

    messages: tuple[str, ...]  # possible messages of the error
    number: Any  # selects the message: an input's position, or a literal
    values: tuple[int, ...]  # positions of the inputs passed through


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


def has_effect(name: str, source: Source) -> CaptureError:
    """Error for a primitive with a side effect."""
    what = f"the training step has a side effect: {name}"
    hint = "return what you want to see as a metric, or take the call out of the step"
    return CaptureError(what, source=source, hint=hint)


def is_leaked(value: Any, source: Source) -> CaptureError:
    """Error for a traced value that outlived its trace."""
    what = f"the training step uses a value that another trace left behind: {value.aval}"
    hint = "return what is to be kept, in the state; keep no traced values in lists or objects"
    return CaptureError(what, source=source, hint=hint)


def reduces_by_hand(error: NameError) -> CaptureError:
    """Error for a reduction over an unbound axis of devices."""
    what = f"the step reduces over devices by hand: {str(error).split('.')[0]}"
    source = line_of_error(error)
    hint = "take pmean, psum and their like out: distribute completes sums by itself"
    if (norm := _norm_in(error)) is not None:
        option = next(x for x in ("cross_replica_axis", "axis_name") if hasattr(norm, x))
        where = f"leave {option}={getattr(norm, option)!r} out of {type(norm).__name__}"
        hint = f"{where}: its statistics are of the whole batch on every device without it"
    return CaptureError(what, source=source, hint=hint)


def division_in(jaxpr: Jaxpr) -> str | None:
    """Returns the primitive that divides a whole step over devices, or None."""
    opened, _ = jax_adapter.open_jaxpr(jaxpr)
    while len(opened.eqns) == 1 and (call := jax_adapter.call_of(opened.eqns[0])) is not None:
        opened, _ = jax_adapter.open_jaxpr(call.body)
    return next((e.primitive.name for e in opened.eqns if e.primitive.name in _DIVISIONS), None)


def _norm_in(error: NameError) -> Any | None:
    """Returns the library's normalization layer in an exception's traceback, or None."""
    frame = error.__traceback__
    while frame is not None:
        module = frame.tb_frame.f_locals.get("self")
        names = ("cross_replica_axis", "axis_name")
        if "Norm" in type(module).__name__ and any(getattr(module, x, None) for x in names):
            return module
        frame = frame.tb_next
    return None


def is_divided_by_hand(name: str, source: Source | None) -> CaptureError:
    """Error for a step, or a part of it, that `pmap` or `shard_map` divides."""
    how = "jax.pmap" if name in {"pmap", "xla_pmap"} else "jax.pmap or jax.shard_map"
    what = f"the step is divided over devices by hand, by {how}"
    hint = "pass it without pmap and shard_map, with a state and a batch of one device: "
    hint += "distribute divides the batch by itself"
    return CaptureError(what, source=source, hint=hint)


def traced_before(source: Source | None) -> CaptureError:
    """Error for a jitted step that jax traced before its optimizer was wrapped."""
    what = "the step was traced before its optimizer was wrapped: jax.jit keeps that trace"
    hint = "write tx = jf.distributed_optimizer(...) before the step is called for the first time, "
    hint += "or pass the function that is not jitted"
    return CaptureError(what, source=source, hint=hint)


def is_refused(name: str) -> bool:
    """Whether a primitive is always rejected: it calls back, or places values."""
    return "callback" in name or name in _PLACEMENTS or name in _DIVISIONS


def not_data(name: str, source: Source, error: Exception) -> CaptureError:
    """Error for a primitive that holds a function or the like, and cannot be exported."""
    if name in _DIVISIONS:
        return is_divided_by_hand(name, source)
    if "callback" in name:
        what = f"the training step calls back into Python: {name}"
        hint = "compute it before the step and pass it in the batch, or write it in jax.numpy"
    elif name in _PLACEMENTS:
        what = f"the training step places a value on devices by hand: {name}"
        hint = "take the call out of the step: distribute places values by itself"
    else:
        reason = str(error).split("\n")[0]
        what = f"the primitive '{name}' cannot be written down or exported: {reason}"
        hint = "write this part of the step with functions of jax.numpy or jax.lax"
    return CaptureError(what, source=source, hint=hint)
