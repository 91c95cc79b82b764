"""Finds loops that only add up: each turn adds to what is carried, and reads it for nothing else.

Then the turns can be shared: each device adds up its own, and the sums are summed.
"""

from collections.abc import Mapping

from jaxfleet.ir import Block, Operand

_ADDING = {"jax.add": (0, 1), "jax.add_any": (0, 1), "jax.sub": (0,)}


def accumulators(body: Block, first: int, last: int) -> frozenset[int] | None:
    """Returns which carried values are added to, or None where one is anything else.

    A value that every turn hands on as it came is no accumulator, and does no harm.

    Args:
        body: of a scan.
        first: the place of the first carried value among its arguments.
        last: the place behind the last.
    """
    readers = _readers(body)
    adding: set[int] = set()
    for place, name in enumerate(body.args[first:last]):
        if body.results[place] == name:
            continue
        if not _is_added_to(name, place, body, readers):
            return None
        adding.add(place)
    return frozenset(adding)


def _is_added_to(name: str, place: int, body: Block, readers: Mapping[Operand, list[int]]) -> bool:
    """Tells whether a value reaches a result through additions alone, and nothing else."""
    while True:
        found = readers.get(name, [])
        if len(found) != 1:
            return False
        if found[0] < 0:
            return found[0] == -1 - place
        op = body.ops[found[0]]
        if op.type == "jax.convert_element_type":  # what jax makes of a number of Python's
            if body.variables[name].type != body.variables[op.writes[0]].type:
                return False
        elif op.inputs.index(name) not in _ADDING.get(op.type, ()):
            return False
        (name,) = op.writes


def _readers(body: Block) -> dict[Operand, list[int]]:
    """Returns what reads each value: the places of operators, and -1 - n for the result n."""
    readers: dict[Operand, list[int]] = {}
    for number, op in enumerate(body.ops):
        for operand in op.inputs:
            readers.setdefault(operand, []).append(number)
    for place, operand in enumerate(body.results):
        readers.setdefault(operand, []).append(-1 - place)
    return readers
