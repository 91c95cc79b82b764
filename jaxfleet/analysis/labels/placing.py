"""What a rule is asked (`View`) and what it answers (`Placing`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jaxfleet.analysis.labels.label import REPLICATED, VARYING, Label, settle, sharded
from jaxfleet.analysis.labels.mesh import Mesh
from jaxfleet.ir import Attr, Attrs, Operator, Size, Variable


@dataclass(frozen=True, slots=True)
class View:
    """What a rule sees of an operator.

    Attributes:
        op: the operator.
        labels: how its inputs lie.
        shapes: its inputs' shapes in the one-device program.
        out_shapes: its outputs' shapes there.
        mesh: the devices.
        dtypes: its inputs' dtypes.
        out_dtypes: its outputs' dtypes.
        zeros: which inputs are zero whatever the data.
        completes: its output is needed complete, so that nothing is won by a summand.
        needed: which outputs are needed complete, gradients of parameters among them.
    """

    op: Operator
    labels: tuple[Label, ...]
    shapes: tuple[tuple[Size, ...], ...]
    out_shapes: tuple[tuple[Size, ...], ...]
    mesh: Mesh
    dtypes: tuple[str, ...]
    out_dtypes: tuple[str, ...]
    zeros: frozenset[int] = frozenset()
    completes: bool = False
    needed: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        op: Operator,
        labels: tuple[Label, ...],
        mesh: Mesh,
        find: Callable[[str], Variable],
        *,
        zeros: frozenset[int] = frozenset(),
        completes: bool = False,
    ) -> "View":
        """Returns the view of an operator whose variables a function finds."""
        ins = [find(x) if isinstance(x, str) else x for x in op.inputs]
        outs = [find(x) for x in op.writes]
        return cls(
            op,
            labels,
            tuple([x.shape if isinstance(x, Variable) else () for x in ins]),
            tuple([x.shape for x in outs]),
            mesh,
            tuple([x.dtype for x in ins]),
            tuple([x.dtype for x in outs]),
            zeros,
            completes,
        )

    def ints(self, name: str) -> tuple[int, ...]:
        """Returns an attribute that is a list of numbers."""
        return as_ints(self.op.attrs[name])

    def number(self, name: str) -> int:
        """Returns an attribute that is a number."""
        return int(str(self.op.attrs[name]))

    def axis(self, place: int) -> int | None:
        """Returns the axis an input is cut along, or None."""
        label = self.labels[place]
        return label.axis if label.is_sharded else None

    @property
    def has_rows(self) -> bool:
        """Tells whether an input is cut."""
        return any(label.is_sharded for label in self.labels)

    @property
    def settled(self) -> Label:
        """The label of a result that depends on no rows: varying where an input is."""
        return VARYING if VARYING in self.labels else REPLICATED


@dataclass(frozen=True, slots=True)
class Placing:
    """Says how an operator runs on the devices.

    Attributes:
        inputs: how its inputs must lie.
        outputs: how its outputs then lie.
        attrs: its attributes there; sizes are a device's own.
        op_type: the operator that takes its place, if another.
        note: why it could not run on rows alone, for the reader.
    """

    inputs: tuple[Label, ...]
    outputs: tuple[Label, ...]
    attrs: Attrs
    op_type: str = ""
    note: str = ""

    def noting(self, note: str) -> "Placing":
        """Returns the placing with a note for the reader."""
        return replace(self, note=note)


def as_ints(value: Attr) -> tuple[int, ...]:
    """Returns an attribute as a tuple of numbers."""
    assert isinstance(value, tuple)
    return tuple(item for item in value if isinstance(item, int))


def as_sizes(value: Attr) -> list[Size]:
    """Returns an attribute as a list of sizes."""
    assert isinstance(value, tuple)
    return [item for item in value if isinstance(item, Size)]


def gathered(view: View, note: str) -> Placing:
    """Runs the operator whole on every device: right for any operator, if not cheap."""
    placing = whole(view)
    return placing.noting(note) if view.has_rows else placing


def whole(view: View) -> Placing:
    """Runs the operator on complete values."""
    outputs = [view.settled] * len(view.out_shapes)
    return along(view, [settle(label) for label in view.labels], *outputs)


def along(view: View, inputs: Sequence[Label], *outputs: Label, **attrs: Attr) -> Placing:
    """Runs the operator on what the labels say.

    Attributes given by keyword are used as they are; sizes in the others become the whole's.
    """
    rest = view.op.attrs.without(*attrs) if attrs else view.op.attrs
    rest = view.mesh.full_attrs(rest)
    return Placing(tuple(inputs), outputs, rest.updated(**attrs) if attrs else rest)


def local_sizes(view: View, shape: Sequence[Size], axis: int) -> tuple[Size, ...]:
    """Returns a shape with a device's part on one axis."""
    return view.mesh.local_shape(shape, sharded(axis))
