"""Makes a Python function of a Program: state and data in, new state and fetched values out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from jaxfleet.errors import FeedError
from jaxfleet.ir import Kind, Program, Variable
from jaxfleet.lower.sizes import bind_sizes
from jaxfleet.ops import Array, Interpreter
from jaxfleet.ops.jax_adapter import dtype_text

Values: TypeAlias = Mapping[str, Array]


@dataclass(frozen=True)
class ProgramFunction:
    """Runs a program on values by name; what `jit` traces.

    Attributes:
        program: what to run.
        fetch: variables to return.
        axis_name: the mesh axis it runs over, or None on one device.
    """

    program: Program
    fetch: tuple[str, ...]
    axis_name: str | None = None

    def __call__(self, state: Values, data: Values) -> tuple[dict[str, Array], list[Array]]:
        """Runs the program once.

        Args:
            state: an array for every param and state variable.
            data: an array for every data variable.

        Raises:
            FeedError: a value's type is not its variable's.
        """
        fed = [(self.program.variables[name], value) for name, value in {**state, **data}.items()]
        check_types(fed)
        sizes = bind_sizes((variable, np.shape(value)) for variable, value in fed)
        scope = Interpreter(self.program, sizes, self.axis_name).run(
            {**state, **data}, keep=self.fetch
        )
        missing = [name for name in self.fetch if name not in scope]
        if missing:
            raise FeedError(f"'{missing[0]}' is fetched, but '{self.program.name}' never makes it")
        return {name: scope[name] for name in state}, [scope[name] for name in self.fetch]


def cut_axes(program: Program) -> dict[str, int]:
    """Returns the variables that go in or come out cut over the devices, with the axes."""
    pairs = program.attrs.get("sharded", ())
    assert isinstance(pairs, tuple)
    found = {}
    for pair in pairs:
        assert isinstance(pair, tuple)
        name, axis = pair
        found[str(name)] = int(str(axis))
    return found


def device_count(program: Program) -> int:
    """Returns how many devices a program was rewritten for; 1 for a one-device program."""
    devices = program.attrs.get("devices", 1)
    assert isinstance(devices, int)
    return devices


def inputs_of(program: Program) -> tuple[tuple[Variable, ...], tuple[Variable, ...]]:
    """Returns a program's state and its data, in the order of declaration."""
    return program.of_kind(Kind.PARAM, Kind.STATE), program.of_kind(Kind.DATA)


def check_types(fed: Sequence[tuple[Variable, Any]]) -> None:
    """Refuses a value whose dtype is not its variable's.

    Raises:
        FeedError: the error names both.
    """
    for variable, value in fed:
        is_number = isinstance(value, bool | int | float | complex)
        found = dtype_text(jnp.result_type(value) if is_number else value.dtype)
        if found != variable.dtype:
            what = f"'{variable.name}' is fed {found}, but it is {variable.type}"
            raise FeedError(what, hint=f"convert it to {variable.dtype} before the step")
