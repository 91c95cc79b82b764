"""What labels the results of an operator can have in a program that is already rewritten.

There sizes are a device's own, and the whole's are gone, so that some values can be read in more
than one way: a broadcast of what every device has is whole, and rows, and so on. A value's label
is therefore one of a set, which later operators narrow down.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice, product
from math import prod
from typing import TypeAlias

from jaxfleet.analysis.labels.label import REPLICATED, SUM, VARYING, Label, sharded
from jaxfleet.analysis.labels.mesh import Mesh
from jaxfleet.analysis.labels.placing import Placing, View, as_ints
from jaxfleet.analysis.labels.rules import RULES, place
from jaxfleet.analysis.labels.shape import grown_axes
from jaxfleet.ir import Attrs, Literal, Operator, Size, Variable

Labels: TypeAlias = frozenset[Label]
Type: TypeAlias = tuple[str, tuple[Size, ...]]  # dtype and shape

ANY: Labels = frozenset()  # of a value that nothing is known of
WHOLE: Labels = frozenset({REPLICATED})
ZERO: Labels = frozenset({REPLICATED, SUM})
_MOST_WAYS = 256  # to combine the labels of an operator's inputs; beyond it, nothing is known


class LocalMesh(Mesh):
    """Devices as a rewritten program has them: every size in it is a device's own."""

    def part(self, size: Size) -> Size | None:
        """Returns the size: it is that of a device's part."""
        return size


_MESH = LocalMesh(devices=1)


def literal_labels(literal: Literal) -> Labels:
    """Returns how a literal can lie: zero is also a summand of nothing."""
    return ZERO if literal.value == 0 else WHOLE


@lru_cache(maxsize=1 << 14)
def outcomes(
    op_type: str,
    attrs: Attrs,
    labels: tuple[Labels, ...],
    types: tuple[Type, ...],
    out_types: tuple[Type, ...],
) -> tuple[Labels, ...] | None:
    """Returns how the results of an operator can lie, or None where its inputs cannot be so.

    Args:
        op_type: an operator without sub-blocks.
        attrs: its attributes.
        labels: how each of its inputs can lie.
        types: of its inputs.
        out_types: of its outputs.
    """
    unknown = (ANY,) * len(out_types)
    if ANY in labels or prod(map(len, labels)) > _MOST_WAYS or not _has_rule(op_type):
        return unknown
    op = Operator(op_type, attrs=attrs)
    found: list[set[Label]] = [set() for _ in out_types]
    fits = False
    for inputs in product(*labels):
        view = _view(op, inputs, types, out_types)
        for outputs in _ways(view):
            fits = True
            for known, label in zip(found, outputs, strict=True):
                known.add(label)
    return tuple(map(frozenset, found)) if fits else None


def misfit(
    op_type: str,
    attrs: Attrs,
    labels: tuple[Labels, ...],
    types: tuple[Type, ...],
    out_types: tuple[Type, ...],
) -> tuple[int, Label, Label]:
    """Returns an input that cannot lie as it does: its place, its label, and the one it needs."""
    op = Operator(op_type, attrs=attrs)
    inputs = tuple(min(known, key=str) for known in labels)
    wanted = place(_view(op, inputs, types, out_types)).inputs
    pairs = enumerate(zip(inputs, wanted, strict=True))
    return next((i, label, need) for i, (label, need) in pairs if label != need)


def _has_rule(op_type: str) -> bool:
    return op_type in RULES or op_type.startswith("jax.")


def _view(
    op: Operator, labels: tuple[Label, ...], types: tuple[Type, ...], out_types: tuple[Type, ...]
) -> View:
    return View(
        op,
        labels,
        tuple([shape for _, shape in types]),
        tuple([shape for _, shape in out_types]),
        _MESH,
        tuple([dtype for dtype, _ in types]),
        tuple([dtype for dtype, _ in out_types]),
    )


def _ways(view: View) -> Iterator[tuple[Label, ...]]:
    """Yields how the outputs can lie if the inputs lie as they do, none where they cannot."""
    placing = place(view)
    if placing.inputs != view.labels:
        return
    yield placing.outputs
    match view.op.type:
        case "jax.broadcast_in_dim" if not view.has_rows and SUM not in view.labels:
            yield from ((sharded(axis),) for axis in grown_axes(view))
        case "jax.iota":
            counted, rank = view.number("dimension"), len(view.out_shapes[0])
            yield from ((sharded(axis),) for axis in range(rank) if axis != counted)
        case "jax.reshape" if view.has_rows:
            yield from _reshaped(view)


def _reshaped(view: View) -> Iterator[tuple[Label]]:
    """Yields every axis that cuts the same elements: several do, beside axes of one."""
    shape, out, axis = view.shapes[0], view.out_shapes[0], view.axis(0)
    order = view.op.attrs.get("dimensions")
    places = as_ints(order) if order is not None else tuple(range(len(shape)))
    assert axis is not None
    before = prod((shape[i] for i in places[: places.index(axis)]), start=1)
    for place_ in range(len(out)):
        if prod(out[:place_], start=1) == before:
            yield (sharded(place_),)
