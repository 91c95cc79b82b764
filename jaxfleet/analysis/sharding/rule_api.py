"""The interface of sharding rules: the operator view and the returned sharding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jaxfleet.analysis.sharding.spec import REPLICATED, VARYING, Mesh, Sharding, completed, sharded
from jaxfleet.ir import Attr, Attrs, Operator, Size, Variable


@dataclass(frozen=True, slots=True)
class OperatorView:
    """A sharding rule's view of an operator.

    Attributes:
        labels: the layout of its inputs.
        shapes: its inputs' shapes in the one-device program.
        out_shapes: its outputs' shapes there.
        mesh: the devices.
        dtypes: its inputs' dtypes.
        out_dtypes: its outputs' dtypes.
        zeros: which inputs are zero whatever the data.
        completes: whether its output is needed complete, so that a summand saves nothing.
        needed: which outputs are needed complete, gradients of parameters among them.
    """

    op: Operator
    labels: tuple[Sharding, ...]
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
        labels: tuple[Sharding, ...],
        mesh: Mesh,
        find: Callable[[str], Variable],
        *,
        zeros: frozenset[int] = frozenset(),
        completes: bool = False,
    ) -> "OperatorView":
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
    def settled(self) -> Sharding:
        """The label of a result that depends on no rows: varying if an input is."""
        return VARYING if VARYING in self.labels else REPLICATED


@dataclass(frozen=True, slots=True)
class OperatorSharding:
    """How an operator runs on the devices.

    Attributes:
        inputs: the required layout of its inputs.
        outputs: the resulting layout of its outputs.
        attrs: its attributes there; sizes are a device's own.
        op_type: the operator that replaces it, if any.
        note: why it could not run on rows alone, for the user.
    """

    inputs: tuple[Sharding, ...]
    outputs: tuple[Sharding, ...]
    attrs: Attrs
    op_type: str = ""
    note: str = ""

    def noting(self, note: str) -> "OperatorSharding":
        return replace(self, note=note)


def as_ints(value: Attr) -> tuple[int, ...]:
    """Returns an attribute as a tuple of numbers."""
    assert isinstance(value, tuple)
    return tuple(item for item in value if isinstance(item, int))


def as_sizes(value: Attr) -> list[Size]:
    """Returns an attribute as a list of sizes."""
    assert isinstance(value, tuple)
    return [item for item in value if isinstance(item, Size)]


def gathered(view: OperatorView, note: str) -> OperatorSharding:
    """Runs the operator whole on every device: right for any operator, but expensive."""
    placing = whole(view)
    return placing.noting(note) if view.has_rows else placing


def whole(view: OperatorView) -> OperatorSharding:
    """Runs the operator on complete values."""
    outputs = [view.settled] * len(view.out_shapes)
    return along(view, [completed(label) for label in view.labels], *outputs)


def along(
    view: OperatorView, inputs: Sequence[Sharding], *outputs: Sharding, **attrs: Attr
) -> OperatorSharding:
    """Runs the operator on inputs with its labels.

    Attributes given by keyword are used as they are; sizes in the others become those of the whole.
    """
    rest = view.op.attrs.without(*attrs) if attrs else view.op.attrs
    rest = view.mesh.full_attrs(rest)
    return OperatorSharding(tuple(inputs), outputs, rest.updated(**attrs) if attrs else rest)


def local_sizes(view: OperatorView, shape: Sequence[Size], axis: int) -> tuple[Size, ...]:
    """Returns a shape with a device's part on one axis."""
    return view.mesh.local_shape(shape, sharded(axis))
