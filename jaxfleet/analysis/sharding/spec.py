"""Shardings and the device mesh: how a value of the one-device program is laid out on the devices.

A value is replicated (every device has all of it), sharded along an axis (each device has its rows,
in the order of the devices), partial (each device has a summand, or a candidate for the maximum, of
it), or varying (each device has a value of its own, as local statistics are).
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from jaxfleet.errors import PassError
from jaxfleet.ir import Attr, Attrs, Dim, Kind, Program, Size
from jaxfleet.ir.attributes import map_attr
from jaxfleet.ir.dims import divide_exactly, letter


class ShardingKind(enum.Enum):
    """The four layouts of a value on the devices."""

    REPLICATED = "replicated"
    SHARDED = "sharded"
    PARTIAL = "partial"
    VARYING = "varying"


@dataclass(frozen=True, slots=True)
class Sharding:
    """The layout of one value on the devices."""

    layout: ShardingKind
    axis: int = -1  # the axis that is cut, for `SHARDED`
    how: str = ""  # the reduction that completes it, for `PARTIAL`: sum, max, min, prod, and, or

    def __str__(self) -> str:
        detail = str(self.axis) if self.layout is ShardingKind.SHARDED else self.how
        return f"{self.layout.value}({detail})" if detail else self.layout.value

    @property
    def is_partial(self) -> bool:
        return self.layout is ShardingKind.PARTIAL

    @property
    def is_sum(self) -> bool:
        """Whether this is a summand."""
        return self.layout is ShardingKind.PARTIAL and self.how == "sum"

    @property
    def is_sharded(self) -> bool:
        return self.layout is ShardingKind.SHARDED


REPLICATED = Sharding(ShardingKind.REPLICATED)
VARYING = Sharding(ShardingKind.VARYING)
SUM = Sharding(ShardingKind.PARTIAL, how="sum")


def sharded(axis: int) -> Sharding:
    """Returns the label of a value cut along an axis."""
    return Sharding(ShardingKind.SHARDED, axis=axis)


def partial(how: str) -> Sharding:
    """Returns the label of a summand, or of a candidate for another reduction."""
    return Sharding(ShardingKind.PARTIAL, how=how)


def completed(label: Sharding) -> Sharding:
    """Returns the label of a value after completion."""
    return VARYING if label.layout is ShardingKind.VARYING else REPLICATED


def common_sharding(labels: Iterable[Sharding]) -> Sharding:
    """Returns a label that every one of several alternative values can be brought to.

    A replicated value can become rows or a summand; rows and summands only meet complete.
    """
    found = set(labels) - {REPLICATED}
    if len(found) == 1:
        return found.pop()
    return VARYING if VARYING in found else REPLICATED


@dataclass(frozen=True)
class Mesh:
    """The devices that share a batch.

    With a batch letter `b`, a device has `b` rows and the whole batch has `devices*b`.
    """

    devices: int
    letter: str | None = None  # the batch letter, or None if the batch is a number
    rows: int | None = None  # the whole batch, if it is a number

    def full(self, size: Size) -> Size:
        """Returns the size of the whole in terms of a device's letters."""
        if self.letter is None or not isinstance(size, Dim):
            return size
        return _full(size, self.letter, self.devices)

    def part(self, size: Size) -> Size | None:
        """Returns a device's part of a size, or None if it does not divide."""
        return divide_exactly(self.full(size), self.devices)

    def has_letter(self, size: Size) -> bool:
        """Whether a size grows with the batch."""
        return isinstance(size, Dim) and self.letter is not None and self.letter in size.letters

    def batch_axis(self, shape: Sequence[Size], among: Sequence[int] | None = None) -> int | None:
        """Returns the first axis that grows with the batch and can be cut."""
        for axis in range(len(shape)) if among is None else among:
            if self.has_letter(shape[axis]) and self.part(shape[axis]) is not None:
                return axis
        return None

    def local_shape(self, shape: Sequence[Size], label: Sharding) -> tuple[Size, ...]:
        """Returns the shape of a device's part of a value."""
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
    """Returns the mesh of a program's devices, and the data variables that are cut.

    A batch of a fixed size that the devices do not divide is a PassError.
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
