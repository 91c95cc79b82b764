"""How many bytes each slice of a parameter brings to its server, and on the way there and back."""

from dataclasses import dataclass
from math import prod

from jaxfleet.analysis.groups import Group, OptimizeGroups
from jaxfleet.analysis.memory.sizes import itemsize
from jaxfleet.analysis.slices import Slice, known_shape, slices_of
from jaxfleet.ir import Program, Variable


@dataclass(frozen=True)
class Holding:
    """A slice with what goes with it, in bytes.

    Attributes:
        slice: it.
        param_bytes: the slice's own, which every trainer pulls in a step.
        state_bytes: its optimizer state: the same rows of leaves with rows, and all of the others.
        push_bytes: its rows of the gradients, which every trainer pushes in a step.
        part_bytes: what its server tells every other server in a step.
    """

    slice: Slice
    param_bytes: int
    state_bytes: int
    push_bytes: int
    part_bytes: int

    @property
    def held_bytes(self) -> int:
        """What its server keeps: the parameter's slice and its state."""
        return self.param_bytes + self.state_bytes


def holdings(program: Program, groups: OptimizeGroups) -> tuple[Holding, ...]:
    """Returns the holding of each slice, in order.

    Args:
        program: one that `slice_var` ran on.
        groups: its optimize groups.

    Raises:
        PassError: `slice_var` has not run, or a size is not known before the program runs.
    """
    by_name = {group.name: group for group in groups.groups}
    return tuple(_holding(part, by_name[part.param]) for part in slices_of(program))


def bare_holdings(program: Program) -> tuple[Holding, ...]:
    """Returns the slices alone, in order, whatever optimizer state goes with them.

    Raises:
        PassError: `slice_var` has not run, or a size is not known before the program runs.
    """
    found = []
    for part in slices_of(program):
        param = program.variables[part.param]
        found.append(Holding(part, _bytes_with(part, param, param), 0, 0, 0))
    return tuple(found)


def bytes_of(variable: Variable) -> int:
    """Returns how many bytes a variable of a known size takes.

    Raises:
        PassError: its size is not known before the program runs.
    """
    return prod(known_shape(variable)) * itemsize(variable.dtype)


def _holding(part: Slice, group: Group) -> Holding:
    variables = group.program.variables

    def of(names: tuple[str, ...]) -> int:
        return sum(_bytes_with(part, group.param, variables[name]) for name in names)

    fetched = [op.reads for op in group.program.root.ops if op.type == "fetch"]
    met = [group.program.lookup(name) for names in fetched for name in names]
    return Holding(
        slice=part,
        param_bytes=_bytes_with(part, group.param, group.param),
        state_bytes=of(group.state),
        push_bytes=of(group.gradients),
        part_bytes=sum(_bytes_with(part, group.param, value) for value in met),
    )


def _bytes_with(part: Slice, param: Variable, variable: Variable) -> int:
    """Returns what of a variable goes with a slice: its rows, or all where it has other rows."""
    rows, total = variable.shape[:1], bytes_of(variable)
    if part.is_whole or rows != param.shape[:1]:
        return total
    return total // known_shape(param)[0] * part.rows
