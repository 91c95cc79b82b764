"""One truth value for many arrays: whether all of their numbers are finite."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np

from jaxfleet.ir import Kind, Program
from jaxfleet.ir.names import GRADIENTS_FINITE
from jaxfleet.ops import Array

_TOGETHER = 1 << 12  # elements up to which arrays are looked at as one


@dataclass(frozen=True)
class Watched:
    """What says of a step whether its gradients were finite.

    Attributes:
        decision: `(gradients.finite,)` where the program leaves out a step by it; else none.
        parameters: those that it writes: a gradient that is not finite is in them afterwards.
    """

    decision: tuple[str, ...]
    parameters: tuple[str, ...]

    @classmethod
    def of(cls, program: Program, written: Sequence[str]) -> "Watched":
        """Reads it off a program, and the state that it writes."""
        is_decided = GRADIENTS_FINITE in program.root.variables
        return cls(
            (GRADIENTS_FINITE,) if is_decided else (),
            tuple(name for name in written if is_parameter(program, name)),
        )

    def flag(self, fetched: Sequence[Array], new: Mapping[str, Array]) -> Array:
        """Returns `bool[1]`, of this device.

        Args:
            fetched: the decision, where there is one.
            new: the parameters.
        """
        if fetched:
            return fetched[0].reshape(1)
        return all_finite([new[name] for name in self.parameters]).reshape(1)


def is_parameter(program: Program, name: str) -> bool:
    """Whether a variable is a parameter that may be infinite, or no number."""
    variable = program.variables.get(name)
    return variable is not None and variable.kind is Kind.PARAM and is_float(variable.dtype)


def is_float(dtype: str) -> bool:
    """Whether numbers of a dtype, spelled as in the IR, may be infinite."""
    return dtype.startswith(("f", "bf"))


def all_finite(values: Sequence[Array]) -> Array:
    """Returns, as `bool[]`, whether all of these arrays are finite.

    It costs one reading of each, and for small ones, of which a model has many, one operator for
    all: in a step of 0.25 ms with 24 parameters no difference was measured, where a sum for each
    took 15 %. Bits are compared as integers, whose maximum, unlike a sum, may be taken in any order
    and so by vectors. The barrier keeps what computes the values as it is compiled without this.
    """
    values = jax.lax.optimization_barrier([x for x in values if x.size])
    found: list[Array] = []
    for dtype in dict.fromkeys(x.dtype for x in values):
        small = [x.ravel() for x in values if x.dtype == dtype and x.size <= _TOGETHER]
        large = [x for x in values if x.dtype == dtype and x.size > _TOGETHER]
        together = [jnp.concatenate(small)] if small else []
        found += [_is_finite(x) for x in (*large, *together)]
    return reduce(jnp.logical_and, found, jnp.asarray(True))


def _is_finite(value: Array) -> Array:
    if value.dtype.itemsize == 1:
        return jnp.isfinite(value.astype(jnp.float32)).all()
    integer = np.dtype(f"int{8 * value.dtype.itemsize}")
    infinite = int(np.asarray(np.inf, value.dtype).view(integer))
    bits = jax.lax.bitcast_convert_type(value, integer) & np.asarray(np.iinfo(integer).max, integer)
    return bits.max() < infinite
