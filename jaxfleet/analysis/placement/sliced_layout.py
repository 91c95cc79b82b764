"""The slices of each parameter and the server of each slice, as the program records them.

`slice_var` and `dispatch` write both as attributes of the program, so its text contains them;
`insert_send_recv` maps each variable of a server to the step's::

    slices=[["w1", [392, 392]], ["b1", [16]]]
    placement=[["w1.block0", "127.0.0.1:6174"], ["w1.block1", "127.0.0.1:6175"], ...]
    endpoints=["127.0.0.1:6174", "127.0.0.1:6175"]
    holds=[["w1.block1", "w1", 392], ["rate", "rate", -1], ...]
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from jaxfleet.errors import PassError
from jaxfleet.ir import Attr, Operator, Program, Role, Variable, block_name


@dataclass(frozen=True)
class Slice:
    """Some rows of a parameter, or the whole of it."""

    name: str  # `w.block0`; that of the parameter if whole
    param: str
    index: int  # its index among the parameter's slices
    start: int  # its first row
    rows: int  # its number of rows; None for a scalar parameter
    shape: tuple[int, ...]  # its own
    numel: int
    is_whole: bool


def joins_slices(op: Operator) -> bool:
    """Whether an operator joins slices received from servers; any other `concat` is the user's."""
    return op.type == "concat" and op.role is Role.DIST


def slices_of(program: Program) -> tuple[Slice, ...]:
    """Returns the slices of all parameters, grouped by parameter; a PassError if there are none."""
    found: list[Slice] = []
    for param, rows in _rows_by_param(program):
        variable = program.variables.get(param)
        if variable is None:
            raise _wrong(program, "slices", f"'{param}' is not a variable of it")
        shape = known_shape(variable)
        if sum(rows) != sum(shape[:1]) or len(rows) < len(shape[:1]):
            what = f"{list(rows)} are not the rows of '{variable}'"
            raise _wrong(program, "slices", what)
        found.extend(_slices(param, shape, rows))
    return tuple(found)


def placement_of(program: Program) -> dict[str, str]:
    """Returns the endpoint of each slice, by the slice's name; a PassError if there is none."""
    pairs = _entries(program, "placement", "dispatch")
    found: dict[str, str] = {}
    for pair in pairs:
        match pair:
            case (str(name), str(endpoint)):
                found[name] = endpoint
            case _:
                raise _wrong(program, "placement", f"{pair!r} is not a slice and an endpoint")
    names, endpoints = [each.name for each in slices_of(program)], set(endpoints_of(program))
    if list(found) != names:
        odd = sorted(set(found) ^ set(names))
        raise _wrong(program, "placement", f"it does not place each slice once, in order: {odd}")
    if unknown := sorted(set(found.values()) - endpoints):
        raise _wrong(program, "placement", f"'{unknown[0]}' is not among the endpoints")
    return found


def endpoints_of(program: Program) -> tuple[str, ...]:
    """Returns the endpoints of the servers, in order; one may have no slice.

    A program that records none is a PassError.
    """
    entries = _entries(program, "endpoints", "dispatch")
    names = tuple(entry for entry in entries if isinstance(entry, str))
    if len(names) != len(entries):
        raise _wrong(program, "endpoints", f"{list(entries)} are not all strings")
    return names


def rows_of_slices(program: Program) -> dict[str, tuple[int, ...]]:
    """Returns the rows of each slice, by parameter; empty if `slice_var` did not run."""
    return dict(_rows_by_param(program)) if "slices" in program.attrs else {}


def server_variables(program: Program) -> dict[str, tuple[str, int]]:
    """Returns the step's variable, and its first held row, for each of a server's variables.

    The row is -1 if all rows are held. Empty for a trainer.
    """
    found = {}
    for entry in _entries(program, "holds", "insert_send_recv") if "holds" in program.attrs else ():
        match entry:
            case (str(name), str(origin), int(start)):
                found[name] = (origin, start)
            case _:
                raise _wrong(program, "holds", f"{entry!r} is not a variable, what it is of, a row")
    return found


def known_shape(variable: Variable) -> tuple[int, ...]:
    """Returns the shape of a variable; raises a PassError if a size depends on a letter."""
    shape = tuple(size for size in variable.shape if isinstance(size, int))
    if len(shape) != len(variable.shape):
        what = f"the size of '{variable}' is not known before the program runs"
        raise PassError(what, hint="a server can only hold parameters and state of a fixed size")
    return shape


def _slices(param: str, shape: tuple[int, ...], rows: tuple[int, ...]) -> Iterator[Slice]:
    if len(rows) <= 1:
        yield Slice(param, param, 0, 0, sum(rows), shape, prod(shape), is_whole=True)
        return
    starts = accumulate(rows, initial=0)
    for index, (start, count) in enumerate(zip(starts, rows, strict=False)):
        part = (count, *shape[1:])
        name = block_name(param, index)
        yield Slice(name, param, index, start, count, part, prod(part), is_whole=False)


def _rows_by_param(program: Program) -> Iterator[tuple[str, tuple[int, ...]]]:
    for entry in _entries(program, "slices", "slice_var"):
        match entry:
            case (str(param), tuple(sizes)):
                rows = tuple(size for size in sizes if type(size) is int and size >= 0)
                if len(rows) == len(sizes):
                    yield param, rows
                    continue
        raise _wrong(program, "slices", f"{entry!r} is not a parameter and the rows of its slices")


def _entries(program: Program, attr: str, pass_name: str) -> tuple[Attr, ...]:
    value = program.attrs.get(attr)
    if value is None:
        what = f"program '{program.name}' has no attribute '{attr}'"
        raise PassError(what, hint=f"run {pass_name} first")
    if not isinstance(value, tuple):
        raise _wrong(program, attr, "it is not a list")
    return value


def _wrong(program: Program, attr: str, what: str) -> PassError:
    return PassError(f"attribute '{attr}' of program '{program.name}' is wrong: {what}")
