"""Top level of `paddle`: the few names that static programs use."""

from collections.abc import Sequence

from jaxfleet.errors import ProgramError
from jaxfleet.fluid import CPUPlace as CPUPlace
from jaxfleet.fluid import CUDAPlace as CUDAPlace
from jaxfleet.fluid import ParamAttr as ParamAttr
from jaxfleet.fluid import Variable, layers
from jaxfleet.fluid.core import is_compiled_with_cuda as is_compiled_with_cuda
from jaxfleet.fluid.readers import batch as batch


def enable_static() -> None:
    """Does nothing: programs are always built."""


def disable_static() -> None:
    """Rejects eager execution."""
    hint = "build a program and run it by an Executor, or write the step in jax (jf.distribute)"
    raise ProgramError("operators cannot run as they are written", hint=hint)


def in_dynamic_mode() -> bool:
    """Whether operators run eagerly; always False."""
    return False


def mean(
    x: Variable,
    axis: int | Sequence[int] | None = None,
    keepdim: bool = False,
    name: str | None = None,
) -> Variable:
    """Averages over axes, or over everything."""
    if axis is None and not keepdim:
        return layers.mean(x, name)
    return layers.reduce_mean(x, axis, keepdim, name)
