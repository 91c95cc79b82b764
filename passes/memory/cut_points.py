"""Default cut points of the forward part: uniform groups that begin where few bytes cross.

If layers repeat, groups consist of whole layers: they are equal then, and are compiled once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxfleet.analysis.flow import OuterUses, forward_places
from jaxfleet.ir import Dim, Kind, Literal, Operator, Program, Size, evaluate


@dataclass(frozen=True)
class Repetition:
    """A repeating stretch of a list: its first index, period, and total length."""

    start: int
    period: int
    length: int


def longest_repetition(items: Sequence[Any], *, least: int) -> Repetition | None:
    """Returns the longest stretch with at least `least` repetitions, of the shortest period."""
    numbers: dict[Any, int] = {}
    row = np.array([numbers.setdefault(item, len(numbers)) for item in items], dtype=np.int64)
    best: Repetition | None = None
    for period in range(1, len(row) // least + 1):
        start, count = _longest(row[period:] == row[:-period])
        length = count + period
        if length >= least * period and (best is None or length > best.length):
            best = Repetition(start, period, length)
    return best


def _longest(flags: NDArray[np.bool_]) -> tuple[int, int]:
    """Returns the start and the length of the longest run of true."""
    ends = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(np.int8), [0]))))
    if not len(ends):
        return 0, 0
    starts, stops = ends[::2], ends[1::2]
    at = int(np.argmax(stops - starts))
    return int(starts[at]), int(stops[at] - starts[at])


_LEAST = 3  # layers
_ROWS = 256  # assumed batch size if unknown


def default_cut_points(program: Program) -> tuple[int, ...]:
    """Returns the indices of the first operators of all groups but the first.

    The number of groups is about that of operators in each, which minimizes the sum of both (Chen
    et al., 2016); near the end of each equal share, the cut is made where the fewest bytes cross.
    """
    places = sorted(forward_places(program))
    groups = math.isqrt(len(places))
    if groups < 2:
        return ()
    crossing = _crossing(program, places)
    if (layers := _repeated(program, places)) is not None:
        return tuple(places[n] for n in _between_layers(layers, groups, crossing))
    width = len(places) / groups
    found = set()
    for group in range(1, groups):
        middle = group * width
        near = range(max(1, math.ceil(middle - width / 2)), math.floor(middle + width / 2) + 1)
        inside = [place for place in near if place < len(places)]
        found.add(min(inside, key=lambda n: (crossing[n], abs(n - middle), -n)))
    return tuple(places[n] for n in sorted(found))


def _repeated(program: Program, places: list[int]) -> Repetition | None:
    """Returns the layers of forward, if most of it is equal layers."""
    ops = [program.root.ops[place] for place in places]
    found = longest_repetition([_looks(program, op) for op in ops], least=_LEAST)
    return found if found is not None and 2 * found.length >= len(places) else None


def _looks(program: Program, op: Operator) -> str:
    """Returns the properties that an operator shares with its counterparts in other layers."""
    attrs = "" if op.blocks else str(dict(op.attrs))
    types = [x.dtype if isinstance(x, Literal) else program.lookup(x).type for x in op.inputs]
    return f"{op.type} {attrs} {types} {[program.lookup(x).type for x in op.writes]}"


def _between_layers(layers: Repetition, groups: int, crossing: list[int]) -> list[int]:
    """Returns the starts of groups of equally many layers, where the least crosses in a layer."""
    count = layers.length // layers.period
    step = layers.period * max(1, round(count / groups))

    def cuts(first: int) -> list[int]:
        stop = layers.start + layers.length
        return [n for n in range(first, stop + 1, step) if 0 < n < len(crossing)]

    firsts = range(layers.start, layers.start + layers.period)
    best = min(firsts, key=lambda first: (max(crossing[n] for n in cuts(first)), first))
    return cuts(best)


def _crossing(program: Program, places: list[int]) -> list[int]:
    """Returns, for each operator of forward, the bytes of earlier values read from it on."""
    uses, ops = OuterUses(program), program.root.ops
    made: dict[str, int] = {}
    change = [0] * (len(places) + 1)
    last: dict[str, int] = {}
    for at, place in enumerate(places):
        used = uses.of(ops[place])
        last.update(dict.fromkeys(used.reads & made.keys(), at))
        made.update(dict.fromkeys(used.writes, at))
    for name, end in last.items():
        if program.lookup(name).kind is Kind.TEMP:
            change[made[name] + 1] += _elements(program, name)
            change[end + 1] -= _elements(program, name)
    found, total = list[int](), 0
    for step in change[:-1]:
        total += step
        found.append(total)
    return found


def _elements(program: Program, name: str) -> int:
    return math.prod(_number(size) for size in program.lookup(name).shape)


def _number(size: Size) -> int:
    return evaluate(size, dict.fromkeys(size.letters, _ROWS)) if isinstance(size, Dim) else size
