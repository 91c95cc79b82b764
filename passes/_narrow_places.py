"""Where forward is cut when nobody says: where little crosses, into groups of equal length.

Where layers repeat, groups are of whole layers: they are equal then, and are compiled once.
"""

import math

from jaxfleet.analysis.forward_part import forward_places
from jaxfleet.analysis.uses import OuterUses
from jaxfleet.ir import Dim, Kind, Literal, Operator, Program, Size, evaluate
from jaxfleet.passes._repeats import Repeats, longest_repeats

_LEAST = 3  # layers
_ROWS = 256  # what a letter counts for, where no sizes are at hand


def narrow_places(program: Program) -> tuple[int, ...]:
    """Returns the places of the first operators of groups, the first group's left out.

    Groups are about as many as each has operators, by which the sum of both is least (Chen et al.,
    2016); each cut is made where the fewest bytes cross, near where equal groups would end.
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


def _repeated(program: Program, places: list[int]) -> Repeats | None:
    """Returns the layers of forward, where most of it is equal layers."""
    ops = [program.root.ops[place] for place in places]
    found = longest_repeats([_looks(program, op) for op in ops], least=_LEAST)
    return found if found is not None and 2 * found.length >= len(places) else None


def _looks(program: Program, op: Operator) -> str:
    """Returns what an operator has in common with its fellows in other layers."""
    attrs = "" if op.blocks else str(dict(op.attrs))
    types = [x.dtype if isinstance(x, Literal) else program.lookup(x).type for x in op.inputs]
    return f"{op.type} {attrs} {types} {[program.lookup(x).type for x in op.writes]}"


def _between_layers(layers: Repeats, groups: int, crossing: list[int]) -> list[int]:
    """Returns where groups of as many layers each begin, where the least crosses in a layer."""
    count = layers.length // layers.period
    step = layers.period * max(1, round(count / groups))

    def cuts(first: int) -> list[int]:
        stop = layers.start + layers.length
        return [n for n in range(first, stop + 1, step) if 0 < n < len(crossing)]

    firsts = range(layers.start, layers.start + layers.period)
    best = min(firsts, key=lambda first: (max(crossing[n] for n in cuts(first)), first))
    return cuts(best)


def _crossing(program: Program, places: list[int]) -> list[int]:
    """Returns, for each operator of forward, the bytes that it and later ones read of earlier."""
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
