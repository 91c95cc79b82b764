"""Labels: how a value of the one-device program lies on the devices.

A value is replicated (every device has all of it), sharded along an axis (each device has its
rows, in the order of the devices), partial (each device has a summand, or a candidate for the
maximum, of it), or varying (each device has a value of its own, as local statistics are).
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from jaxfleet.ir import Attr, Attrs, Dim, Operator, Size, Struct
from jaxfleet.ir.dims import divide_exactly, letter


class Layout(enum.Enum):
    """The four ways a value can lie on the devices."""

    REPLICATED = "replicated"
    SHARDED = "sharded"
    PARTIAL = "partial"
    VARYING = "varying"


@dataclass(frozen=True, slots=True)
class Label:
    """How one value lies on the devices.

    Attributes:
        layout: which of the four ways.
        axis: the axis that is cut, for `SHARDED`.
        how: what completes it, for `PARTIAL`: sum, max, min, prod, and, or.
    """

    layout: Layout
    axis: int = -1
    how: str = ""

    def __str__(self) -> str:
        detail = str(self.axis) if self.layout is Layout.SHARDED else self.how
        return f"{self.layout.value}({detail})" if detail else self.layout.value

    @property
    def is_sum(self) -> bool:
        """Tells whether this is a summand."""
        return self.layout is Layout.PARTIAL and self.how == "sum"

    @property
    def is_sharded(self) -> bool:
        """Tells whether each device has its own rows."""
        return self.layout is Layout.SHARDED


REPLICATED = Label(Layout.REPLICATED)
VARYING = Label(Layout.VARYING)
SUM = Label(Layout.PARTIAL, how="sum")


def sharded(axis: int) -> Label:
    """Returns the label of a value cut along an axis."""
    return Label(Layout.SHARDED, axis=axis)


def partial(how: str) -> Label:
    """Returns the label of a summand, or of a candidate for another reduction."""
    return Label(Layout.PARTIAL, how=how)


@dataclass(frozen=True)
class Mesh:
    """The devices, and how sizes of the one-device program look on them.

    With a batch letter `b`, a device has `b` rows and the whole batch has `devices*b`.

    Attributes:
        devices: how many there are.
        letter: the batch letter, or None where the batch is a number.
    """

    devices: int
    letter: str | None

    def full(self, size: Size) -> Size:
        """Returns a size of the whole, as one device spells it."""
        if self.letter is None or not isinstance(size, Dim):
            return size
        return size.substitute({self.letter: letter(self.letter) * self.devices})

    def part(self, size: Size) -> Size | None:
        """Returns a device's part of a size, or None where it does not divide."""
        return divide_exactly(self.full(size), self.devices)

    def has_letter(self, size: Size) -> bool:
        """Tells whether a size grows with the batch."""
        return isinstance(size, Dim) and self.letter is not None and self.letter in size.letters

    def batch_axis(self, shape: Sequence[Size], *, among: Sequence[int] | None = None) -> int | None:
        """Returns the first axis that grows with the batch and can be cut."""
        for axis in range(len(shape)) if among is None else among:
            if self.has_letter(shape[axis]) and self.part(shape[axis]) is not None:
                return axis
        return None

    def local_shape(self, shape: Sequence[Size], label: Label) -> tuple[Size, ...]:
        """Returns the shape that a device has of a value."""
        sizes = [self.full(size) for size in shape]
        if label.is_sharded:
            part = self.part(shape[label.axis])
            assert part is not None, f"axis {label.axis} of {shape} does not divide"
            sizes[label.axis] = part
        return tuple(sizes)

    def full_attrs(self, attrs: Attrs) -> Attrs:
        """Returns attributes with every symbolic size made that of the whole."""
        if self.letter is None:
            return attrs
        return Attrs({key: self._full_attr(value) for key, value in attrs.items()})

    def _full_attr(self, value: Attr) -> Attr:
        if isinstance(value, Dim):
            return self.full(value)
        if isinstance(value, tuple):
            return tuple(self._full_attr(item) for item in value)
        if isinstance(value, Struct):
            return Struct(value.name, self.full_attrs(value.fields))
        return value


@dataclass(frozen=True)
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
    """

    op: Operator
    labels: tuple[Label, ...]
    shapes: tuple[tuple[Size, ...], ...]
    out_shapes: tuple[tuple[Size, ...], ...]
    mesh: Mesh
    dtypes: tuple[str, ...]
    out_dtypes: tuple[str, ...]

    def ints(self, name: str) -> tuple[int, ...]:
        """Returns an attribute that is a list of numbers."""
        return as_ints(self.op.attrs[name])

    def axis(self, place: int) -> int | None:
        """Returns the axis an input is cut along, or None."""
        label = self.labels[place]
        return label.axis if label.is_sharded else None

    @property
    def settled(self) -> Label:
        """The label of a result that depends on no rows: varying where an input is."""
        return VARYING if VARYING in self.labels else REPLICATED


@dataclass(frozen=True)
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


def as_ints(value: Attr) -> tuple[int, ...]:
    """Returns an attribute as a tuple of numbers."""
    assert isinstance(value, tuple)
    return tuple(item for item in value if isinstance(item, int))


def settle(label: Label) -> Label:
    """Returns the label that a value has once it is complete."""
    return VARYING if label.layout is Layout.VARYING else REPLICATED


def gathered(view: View, note: str) -> Placing:
    """Runs the operator whole on every device: right for any operator, if not cheap."""
    inputs = tuple(settle(label) for label in view.labels)
    outputs = (view.settled,) * len(view.out_shapes)
    cut = any(label.is_sharded for label in view.labels)
    attrs = view.mesh.full_attrs(view.op.attrs)
    return Placing(inputs, outputs, attrs, note=note if cut else "")


def along(view: View, inputs: Sequence[Label], *outputs: Label, **attrs: Attr) -> Placing:
    """Runs the operator on each device's rows.

    Attributes given by keyword are used as they are; sizes in the others become the whole's.
    """
    rest = view.mesh.full_attrs(view.op.attrs.without(*attrs))
    return Placing(tuple(inputs), outputs, rest.updated(**attrs))


def local_sizes(view: View, shape: Sequence[Size], axis: int) -> Attr:
    """Returns a shape as an attribute, with a device's part on one axis."""
    return tuple(view.mesh.local_shape(shape, sharded(axis)))
