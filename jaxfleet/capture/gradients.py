"""Finds out which parameter each marked gradient belongs to."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxfleet.capture.draft import MARK
from jaxfleet.capture.marker import GRADIENT, PARAMETER, Mark, read_mark
from jaxfleet.capture.roles import ancestors_of
from jaxfleet.errors import CaptureError
from jaxfleet.ir import Operand, Operator, Variable


@dataclass(frozen=True)
class Gradient:
    """A marked gradient.

    Attributes:
        param: the state variable that it is the gradient of.
        raw: the value before the marker.
        marked: the value after it.
    """

    param: str
    raw: Operand
    marked: str


def find_gradients(
    ops: Sequence[Operator], *, state: Sequence[str], types: Mapping[str, Variable]
) -> list[Gradient]:
    """Returns the marked gradients with their parameters, in the order of their markers.

    A parameter that came to `update` with its gradient is followed back to the state; where
    `update` got no parameters, they are the part of the state that has the gradients' paths and
    shapes and that the gradients depend on.

    Raises:
        CaptureError: a gradient's parameter cannot be told.
    """
    groups: dict[int, list[tuple[Mark, Operator]]] = defaultdict(list)
    params: dict[tuple[int, int], Operand] = {}
    for op in ops:
        if op.type != MARK:
            continue
        mark = read_mark(op.attrs["mark"])
        assert mark is not None
        if mark.kind == PARAMETER:
            params[mark.optimizer, mark.leaf] = op.inputs[0]
        elif mark.kind == GRADIENT:
            groups[mark.optimizer].append((mark, op))
    found = []
    for marks in groups.values():
        for mark, op in marks:
            param = _param_of(mark, op, params, ops, state, types)
            found.append(Gradient(param, op.inputs[0], op.writes[0]))
    return found


def _param_of(
    mark: Mark,
    op: Operator,
    params: Mapping[tuple[int, int], Operand],
    ops: Sequence[Operator],
    state: Sequence[str],
    types: Mapping[str, Variable],
) -> str:
    given = params.get((mark.optimizer, mark.leaf))
    if isinstance(given, str) and (origin := _origin(given, ops, state)) is not None:
        return origin
    needed = ancestors_of(ops, op.reads)
    shape = types[op.writes[0]].shape
    matches = [
        name
        for name in state
        if types[name].shape == shape and name in needed and _ends_with(name, mark.path)
    ]
    if len(matches) == 1:
        return matches[0]
    where = f"the gradient '{mark.path or 'of the only parameter'}'"
    if not matches:
        what = f"{where} is {types[op.writes[0]].type}, and no state leaf fits it"
    else:
        what = f"{where} may belong to any of {', '.join(matches)}"
    hint = "pass the parameters too: tx.update(gradients, optimizer_state, params)"
    raise CaptureError(what, source=op.source, hint=hint)


def _ends_with(name: str, path: str) -> bool:
    return not path or name == path or name.endswith(f"/{path}")


def _origin(name: str, ops: Sequence[Operator], state: Sequence[str]) -> str | None:
    """Follows a value back through copies and casts to the state leaf that it is."""
    known = set(state)
    producers = {written: op for op in ops for written in op.writes}
    while name not in known:
        op = producers.get(name)
        if op is None or op.type not in {MARK, "jax.convert_element_type", "jax.copy"}:
            return None
        name = op.reads[0]
    return name
