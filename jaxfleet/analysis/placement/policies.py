"""Policies of placement: the rows of each slice, its load, and the server that it goes to."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from jaxfleet.analysis.memory.costs import itemsize
from jaxfleet.analysis.optimizer_groups import OptimizerGroup, OptimizerGroups, RowLocality
from jaxfleet.analysis.placement.sliced_layout import Slice, known_shape, slices_of
from jaxfleet.errors import PassError
from jaxfleet.ir import Program, Variable


def block_sizes(shape: Sequence[int], servers: int, min_block_size: int) -> tuple[int, ...]:
    """Returns the number of elements in each block of a parameter, by fluid's rule.

    There are as many blocks as servers, or fewer if a block would have less than `min_block_size`
    elements; both must be positive. All have the same size, a multiple of whole rows if there are
    two axes or more, except the last, which has the rest. Rounding up to whole rows can leave
    nothing for the last servers.
    """
    check_positive(servers, min_block_size)
    numel, row = prod(shape), prod(shape[1:])
    if numel == 0:
        return (0,)
    count = min(servers, max(1, numel // min_block_size))
    size = -(-numel // count)
    size += -size % row
    return tuple(min(size, numel - start) for start in range(0, numel, size))


def check_positive(servers: int, min_block_size: int) -> None:
    """Raises a PassError if an option of the rule is not positive."""
    for name, value in (("servers", servers), ("min_block_size", min_block_size)):
        if value < 1:
            raise PassError(f"{name} is {value}, but must be at least 1")


def slice_rows(shape: Sequence[int], servers: int, min_block_size: int) -> tuple[int, ...]:
    """Returns the number of rows in each block, by fluid's rule; none for a scalar."""
    sizes, row = block_sizes(shape, servers, min_block_size), prod(shape[1:])
    if not shape:
        return ()
    return tuple(size // row for size in sizes) if prod(shape) else (shape[0],)


def exact_rows(shape: Sequence[int], servers: int, min_block_size: int) -> tuple[int, ...]:
    """Returns the number of rows in each block, by fluid's rule with at least two elements each.

    XLA divides a single number differently from many by the same one (it multiplies by the
    reciprocal), so a block of one element could differ in the last digit from the same element
    beside others. A remainder of one element goes to the block before it.
    """
    check_positive(servers, min_block_size)
    rows = slice_rows(shape, servers, max(min_block_size, 2))
    if len(rows) > 1 and rows[-1] * prod(shape[1:]) == 1:
        return (*rows[:-2], rows[-2] + 1)
    return rows


def slicing_obstacle(group: OptimizerGroup) -> str | None:
    """Returns why a parameter must stay whole whatever its size, with the user's line, or None.

    A parameter that two optimizers update has a gradient from each: both are cut where it is.
    """
    if group.rows is not RowLocality.LOCAL:
        return group.reason.headline if group.reason is not None else f"it is {group.rows.value}"
    for name in group.gradients:
        gradient = group.program.variables[name]
        if gradient.shape != group.param.shape:
            return f"its gradient '{gradient}' has another shape than its own, {group.param.type}"
    return None


_ONE_BLOCK = "fits one block (min_block_size, slice_var, number of servers)"


def reasons_for_whole(program: Program, groups: OptimizerGroups) -> dict[str, str]:
    """Returns, by parameter, why `slice_var` did not cut it: a sentence with the user's line."""
    found: dict[str, str] = {}
    for part in slices_of(program):
        if part.is_whole:
            why = slicing_obstacle(groups.group(part.param))
            found[part.param] = why or _ONE_BLOCK
    return found


@dataclass(frozen=True)
class SliceLoad:
    """A slice with its traffic and state, in bytes."""

    slice: Slice
    param_bytes: int  # the slice itself, which every trainer pulls in a step
    # its optimizer state: the same rows of leaves with rows, and all of the others
    state_bytes: int
    push_bytes: int  # its rows of the gradients, which every trainer pushes in a step
    part_bytes: int  # its server's partial results, sent to every other server in a step

    @property
    def held_bytes(self) -> int:
        """The bytes that its server holds: the parameter's slice and its state."""
        return self.param_bytes + self.state_bytes


def slice_loads(program: Program, groups: OptimizerGroups) -> tuple[SliceLoad, ...]:
    """Returns the load of each slice, in order, for a program that `slice_var` ran on.

    A size that is not known before the program runs is a PassError.
    """
    by_name = {group.name: group for group in groups.groups}
    return tuple(_holding(part, by_name[part.param]) for part in slices_of(program))


def bare_slice_loads(program: Program) -> tuple[SliceLoad, ...]:
    """Returns the loads of the slices without optimizer state, in order."""
    found = []
    for part in slices_of(program):
        param = program.variables[part.param]
        found.append(SliceLoad(part, _bytes_with(part, param, param), 0, 0, 0))
    return tuple(found)


def bytes_of(variable: Variable) -> int:
    """Returns the size of a variable; raises a PassError if it depends on a letter."""
    return prod(known_shape(variable)) * itemsize(variable.dtype)


def _holding(part: Slice, group: OptimizerGroup) -> SliceLoad:
    variables = group.program.variables

    def of(names: tuple[str, ...]) -> int:
        return sum(_bytes_with(part, group.param, variables[name]) for name in names)

    fetched = [op.reads for op in group.program.root.ops if op.type == "fetch"]
    met = [group.program.lookup(name) for names in fetched for name in names]
    return SliceLoad(
        slice=part,
        param_bytes=_bytes_with(part, group.param, group.param),
        state_bytes=of(group.state),
        push_bytes=of(group.gradients),
        part_bytes=sum(_bytes_with(part, group.param, value) for value in met),
    )


def _bytes_with(part: Slice, param: Variable, variable: Variable) -> int:
    """Returns a slice's bytes of a variable: its rows, or all if the variable has other rows."""
    rows, total = variable.shape[:1], bytes_of(variable)
    if part.is_whole or rows != param.shape[:1]:
        return total
    return total // known_shape(param)[0] * part.rows


METHODS = ("round_robin", "hash_name", "balanced")

# Default limit on the fullest server over the mean. An imbalance due to a hash is accepted: for 8
# equal slices on 8 servers it exceeds 2 times the mean every second time, and 4 times the mean less
# than once in a hundred.
MAX_IMBALANCE = 4.0


@dataclass(frozen=True)
class LoadBalance:
    """How evenly servers are filled."""

    held_bytes: Mapping[str, int]  # by endpoint, parameters and their optimizer state

    @classmethod
    def of(
        cls, parts: Iterable[SliceLoad], placement: Mapping[str, str], endpoints: Iterable[str]
    ) -> "LoadBalance":
        held = dict.fromkeys(endpoints, 0)
        for part in parts:
            held[placement[part.slice.name]] += part.held_bytes
        return cls(held)

    @property
    def total(self) -> int:
        return sum(self.held_bytes.values())

    @property
    def fullest(self) -> int:
        return max(self.held_bytes.values(), default=0)

    @property
    def ratio(self) -> float:
        """The fullest server over the mean: 1 if all hold the same."""
        return self.fullest * len(self.held_bytes) / self.total if self.total else 1.0


def dispatch_slices(
    method: str, parts: Sequence[SliceLoad], endpoints: Sequence[str]
) -> dict[str, str]:
    """Returns the endpoint of each slice, by its name, in the order of the slices.

    `method` is one of `METHODS`: `round_robin` takes endpoints in turn, in one walk over all
    slices. `hash_name` uses the CRC-32 of a slice's name, so a slice keeps its server whatever
    other parameters there are. `balanced` assigns the largest slice first, each to the server that
    holds least.
    """
    names = [part.slice.name for part in parts]
    if method == "balanced":
        return _balanced(parts, endpoints)
    if method == "hash_name":
        return {name: endpoints[stable_hash(name) % len(endpoints)] for name in names}
    return {name: endpoints[place % len(endpoints)] for place, name in enumerate(names)}


def stable_hash(name: str) -> int:
    """Hashes a name to the same number in every process, unlike Python's `hash`."""
    return zlib.crc32(name.encode())


def _balanced(parts: Sequence[SliceLoad], endpoints: Sequence[str]) -> dict[str, str]:
    held, placed = [0] * len(endpoints), {part.slice.name: "" for part in parts}
    for part in sorted(parts, key=lambda part: -part.held_bytes):  # stable for equal sizes
        lightest = held.index(min(held))
        held[lightest] += part.held_bytes
        placed[part.slice.name] = endpoints[lightest]
    return placed
