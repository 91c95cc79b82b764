"""Errors for steps that cannot be captured, with their remedies."""

from typing import Any

from jaxfleet.errors import CaptureError
from jaxfleet.ir import Source
from jaxfleet.ops import jax_adapter
from jaxfleet.ops.jax_adapter import Jaxpr
from jaxfleet.ops.user_frames import line_of_error

_PLACEMENTS = frozenset({"device_put", "mesh_cast", "reshard", "sharding_constraint"})
NOT_WRAPPED = "no optimizer is wrapped"
_DIVISIONS = frozenset({"pmap", "shard_map", "xla_pmap"})


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
