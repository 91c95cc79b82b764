"""A Program as a Python function: state and data in, new state and fetched values out."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from jaxfleet.errors import FeedError
from jaxfleet.ir import Dim, Kind, Program, Size, Variable, evaluate
from jaxfleet.ops import Array, Interpreter
from jaxfleet.ops.jax_adapter import dtype_text

Values: TypeAlias = Mapping[str, Array]


def bind_sizes(fed: Iterable[tuple[Variable, Sequence[int]]]) -> dict[str, int]:
    """Returns a number for every letter in the shapes of `fed`, given the shapes of its values.

    Raises:
        FeedError: a shape does not fit its variable; the error names both.
    """
    fed = list(fed)
    sizes: dict[str, int] = {}
    for variable, shape in fed:
        if len(shape) != len(variable.shape):
            raise _misfit(variable, shape)
        for size, number in zip(variable.shape, shape, strict=True):
            if (letter := _bare_letter(size)) is not None:
                sizes.setdefault(letter, number)
    for variable, shape in fed:
        if any(_differs(s, n, sizes) for s, n in zip(variable.shape, shape, strict=True)):
            raise _misfit(variable, shape, sizes)
    return sizes


def _bare_letter(size: Size) -> str | None:
    return str(size) if isinstance(size, Dim) and size.letters == {str(size)} else None


def _differs(size: Size, number: int, sizes: Mapping[str, int]) -> bool:
    return evaluate(size, sizes) != number


def _misfit(
    variable: Variable, shape: Sequence[int], sizes: Mapping[str, int] | None = None
) -> FeedError:
    found = ",".join(map(str, shape))
    given = "".join(f" with {letter}={number}" for letter, number in (sizes or {}).items())
    what = f"'{variable.name}' is fed an array of shape [{found}], but it is {variable.type}{given}"
    return FeedError(what, hint="feed what the program declares")


@dataclass(frozen=True)
class ProgramFunction:
    """Runs a program on values by name; the function that `jit` traces."""

    program: Program
    fetch: tuple[str, ...]  # variables to return
    axis_name: str | None = None  # the mesh axis it runs over, or None on one device

    def __call__(self, state: Values, data: Values) -> tuple[dict[str, Array], list[Array]]:
        """Runs the program once."""
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
    """Returns the inputs and outputs that are cut over the devices, with the axes."""
    pairs = program.attrs.get("sharded", ())
    assert isinstance(pairs, tuple)
    found = {}
    for pair in pairs:
        assert isinstance(pair, tuple)
        name, axis = pair
        found[str(name)] = int(str(axis))
    return found


def device_count(program: Program) -> int:
    """Returns the number of devices that a program was rewritten for; 1 if it was not."""
    devices = program.attrs.get("devices", 1)
    assert isinstance(devices, int)
    return devices


def inputs_of(program: Program) -> tuple[tuple[Variable, ...], tuple[Variable, ...]]:
    """Returns a program's state and its data, in the order of declaration."""
    return program.of_kind(Kind.PARAM, Kind.STATE), program.of_kind(Kind.DATA)


def check_types(fed: Sequence[tuple[Variable, Any]]) -> None:
    """Raises a FeedError for a value whose dtype is not its variable's."""
    for variable, value in fed:
        is_number = isinstance(value, bool | int | float | complex)
        found = dtype_text(jnp.result_type(value) if is_number else value.dtype)
        if found != variable.dtype:
            what = f"'{variable.name}' is fed {found}, but it is {variable.type}"
            raise FeedError(what, hint=f"convert it to {variable.dtype} before the step")


@dataclass(frozen=True)
class Interface:
    """How the user's pytrees map to a program's variables."""

    state: tuple[str, ...]  # variables of the state's leaves, in order
    batch: tuple[str, ...]  # variables of the batch's leaves, in order
    metrics: tuple[str, ...]  # variables of the metrics' leaves, in order
    state_tree: Any  # the structure of the state
    batch_tree: Any  # the structure of the batch
    metrics_tree: Any  # the structure of the metrics
    beside: tuple[str, ...] = ()  # variables that are kept beside the user's state, in order

    @property
    def held(self) -> tuple[str, ...]:
        """All variables kept between steps: the state's leaves, and those beside."""
        return (*self.state, *self.beside)


@dataclass(frozen=True)
class Shares:
    """How a step handles the leaves of the state, by index.

    A leaf that the program only reads is not an output: the input array is returned.
    """

    given: tuple[int, ...]  # donated; the new state reuses their memory
    kept: tuple[int, ...]  # the others
    written: tuple[int, ...]  # those with new values

    @classmethod
    def of(cls, program: Program, state: Sequence[str], *, donate: bool) -> "Shares":
        """Derives them from a program: `donate` holds the variables that its attribute names."""
        named = program.attrs.get("donate", ()) if donate else ()
        assert isinstance(named, tuple)
        ops = (op for block in program.blocks for op in block.ops)
        changed = {name for op in ops for name in op.writes}
        places = range(len(state))
        return cls(
            tuple(place for place in places if state[place] in named),
            tuple(place for place in places if state[place] not in named),
            tuple(place for place in places if state[place] in changed),
        )

    def split(self, leaves: list[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the given and the kept leaves."""
        if not self.kept:
            return leaves, []
        return [leaves[place] for place in self.given], [leaves[place] for place in self.kept]

    def of_each(self, leaves: Sequence[Any]) -> tuple[Any, Any]:
        """Returns the items for given leaves, and those for kept leaves."""
        return tuple(leaves[n] for n in self.given), tuple(leaves[n] for n in self.kept)

    def merged(self, given: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
        places = (*self.given, *self.kept)
        found = dict(zip(places, (*given, *kept), strict=True))
        return [found[place] for place in range(len(places))]

    def updated(self, leaves: list[Any], new: list[Any]) -> list[Any]:
        if len(new) == len(leaves):
            return new
        leaves = leaves.copy()
        for place, value in zip(self.written, new, strict=True):
            leaves[place] = value
        return leaves
