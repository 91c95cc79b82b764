"""Splits branches over all parameters into branches over one each.

`optax.MultiSteps` and `optax.apply_if_finite` put a whole update under one `cond`. What it returns
for one parameter depends on that parameter, its gradient and its state, and on the choice; so it
is as many conditionals under one choice, and each of them can go where its parameter goes.
"""

from collections.abc import Sequence
from dataclasses import replace

from jaxfleet.analysis.groups.copier import Copier
from jaxfleet.analysis.groups.graph import Graph
from jaxfleet.analysis.groups.inline import inline_known_branches
from jaxfleet.analysis.groups.inner import Inner, union
from jaxfleet.analysis.groups.owners import Owners, is_several, is_single
from jaxfleet.ir import Operator, Program

# Parts that are no one parameter's, by what they read: several parameters, what was made of
# several, nothing of any.
_SEVERAL, _COMMON, _FREE = -2, -1, 0


def split_branches(program: Program) -> Program:
    """Returns the program with every `cond` of its optimize section split by parameter.

    The results that read one parameter, its gradient or its state come out of a `cond` of their
    own; the others by whether they read several, or none. Where the choice is known, the branch
    takes the place of the `cond`. A program without any is returned as it is.
    """
    program = inline_known_branches(program)
    while (after := _split_once(program)) is not program:
        program = after  # of two branches in a row, the second is seen to divide once the first is
    return program


def _split_once(program: Program) -> Program:
    owners, inner = Owners.of(Graph.of(program)), Inner(program)
    ops = program.root.ops
    found = {
        place: _parts(owners, place, ops[place])
        for place in owners.graph.nodes
        if inner.can_narrow(ops[place])
    }
    parts = {place: outputs for place, outputs in found.items() if len(outputs) > 1}
    if not parts:
        return program
    copier = Copier(inner, [program.root])
    split: list[Operator] = []
    for place, op in enumerate(ops):
        split += [copier.copy(op, outputs) for outputs in parts.get(place, [None])]
    return replace(program, blocks=(program.root.with_ops(split), *copier.blocks[1:]))


def _parts(owners: Owners, place: int, op: Operator) -> list[list[int]]:
    """Returns the outputs of an operator that belong together, in an order that is safe.

    State is updated in place: no part may read what a part before it writes.
    """
    node, parts = owners.graph.nodes[place], dict[int, list[int]]()
    for output, reads in enumerate(node.reads):
        parts.setdefault(_key(owners, reads), []).append(output)
    singles = [key for key in parts if key > 0]
    keys = [key for key in (_SEVERAL, *singles, _COMMON, _FREE) if key in parts]
    written = set[str]()
    for key in keys:
        values = (value for output in parts[key] for value in node.reads[output])
        if written.intersection(owners.graph.values[value].name for value in values):
            return [list(range(len(op.writes)))]
        written.update(op.writes[output] for output in parts[key])
    return [parts[key] for key in keys]


def _key(owners: Owners, reads: Sequence[int]) -> int:
    masks = [owners.own[value] for value in reads]
    whose = union(mask for mask in masks if is_single(mask))
    if is_several(whose):
        return _SEVERAL
    return whose or (_COMMON if any(masks) else _FREE)
