"""The devices, and how sizes of the one-device program look on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from jaxfleet.analysis.labels.label import Label
from jaxfleet.errors import PassError
from jaxfleet.ir import Attr, Attrs, Dim, Kind, Program, Size
from jaxfleet.ir.dims import divide_exactly, letter
from jaxfleet.ir.values import map_attr


@dataclass(frozen=True)
class Mesh:
    """The devices that share a batch.

    With a batch letter `b`, a device has `b` rows and the whole batch has `devices*b`.

    Attributes:
        devices: how many there are.
        letter: the batch letter, or None where the batch is a number.
        rows: the whole batch, where it is a number.
    """

    devices: int
    letter: str | None = None
    rows: int | None = None

    def full(self, size: Size) -> Size:
        """Returns a size of the whole, as one device spells it."""
        if self.letter is None or not isinstance(size, Dim):
            return size
        return _full(size, self.letter, self.devices)

    def part(self, size: Size) -> Size | None:
        """Returns a device's part of a size, or None where it does not divide."""
        return divide_exactly(self.full(size), self.devices)

    def has_letter(self, size: Size) -> bool:
        """Tells whether a size grows with the batch."""
        return isinstance(size, Dim) and self.letter is not None and self.letter in size.letters

    def batch_axis(self, shape: Sequence[Size], among: Sequence[int] | None = None) -> int | None:
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
        if self.letter is None or not any(_may_hold_sizes(value) for value in attrs.values()):
            return attrs
        return Attrs({key: map_attr(value, self._full_leaf) for key, value in attrs.items()})

    def _full_leaf(self, value: Attr) -> Attr:
        return self.full(value) if isinstance(value, Dim) else value


def mesh_of(program: Program, devices: int) -> tuple[Mesh, dict[str, int]]:
    """Returns the devices as labels see them, and the data variables that are cut.

    Raises:
        PassError: a batch of a fixed size cannot be divided.
    """
    batch = program.attrs.get("batch")
    if isinstance(batch, int) and batch % devices:
        what = f"a batch of {batch} rows cannot be divided among {devices} devices"
        raise PassError(what, hint=f"use a multiple of {devices} rows")
    cut = {v.name: 0 for v in program.of_kind(Kind.DATA) if v.shape and v.shape[0] == batch}
    name = min(batch.letters) if isinstance(batch, Dim) else None
    return Mesh(devices, name, batch if isinstance(batch, int) else None), cut


def _may_hold_sizes(value: Attr) -> bool:
    if isinstance(value, tuple):
        return any(map(_may_hold_sizes, value))
    return isinstance(value, Dim) or hasattr(value, "fields")


@lru_cache(maxsize=1 << 12)
def _full(size: Dim, name: str, devices: int) -> Size:
    return size.substitute({name: letter(name) * devices})
