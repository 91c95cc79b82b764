"""What a training step may not do: what to say of it, and what to do instead."""

from typing import Any

from jaxfleet.errors import CaptureError
from jaxfleet.ir import Source

_PLACEMENTS = frozenset({"device_put", "mesh_cast", "reshard", "shard_map", "sharding_constraint"})


def updates_in_loop(source: Source) -> CaptureError:
    """Returns the error for a wrapped optimizer whose update is only a part of a computation."""
    what = "the optimizer's update runs inside a loop or a branch"
    hint = (
        "wrap the outermost optimizer, jf.distributed_optimizer(optax.MultiSteps(...)); where the "
        "loop or branch is your own, call the step in a Python loop, or choose with jnp.where"
    )
    return CaptureError(what, source=source, hint=hint)


def has_effect(name: str, source: Source) -> CaptureError:
    """Returns the error for a primitive that does something besides computing."""
    what = f"the training step has a side effect: {name}"
    hint = "return what you want to see as a metric, or take the call out of the step"
    return CaptureError(what, source=source, hint=hint)


def is_leaked(value: Any, source: Source) -> CaptureError:
    """Returns the error for a traced value that outlived its trace."""
    what = f"the training step uses a value that another trace left behind: {value.aval}"
    hint = "return what is to be kept, in the state; keep no traced values in lists or objects"
    return CaptureError(what, source=source, hint=hint)


def not_data(name: str, source: Source, error: Exception) -> CaptureError:
    """Returns the error for a primitive that holds what is not data, such as a function."""
    if "callback" in name:
        what = f"the training step calls back into Python: {name}"
        hint = "compute it before the step and pass it in the batch, or write it in jax.numpy"
    elif name in _PLACEMENTS:
        what = f"the training step places a value on devices by hand: {name}"
        hint = "take the call out of the step: distribute places values by itself"
    else:
        what = f"jax.{name} cannot be written down as a program: {error}"
        hint = "write this part of the step with functions of jax.numpy or jax.lax"
    return CaptureError(what, source=source, hint=hint)
