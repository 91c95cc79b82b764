"""Samples of a dataset, slot by slot: values of all samples in one array, and how many each has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jaxfleet.errors import FeedError
from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.lod_tensor import LoDTensor, create_lod_tensor
from jaxfleet.fluid.variable import Variable

_DTYPES = {"int64": np.int64, "float32": np.float32}


@dataclass(frozen=True)
class Slot:
    """What of a line goes to one variable.

    Attributes:
        name: the variable's.
        dtype: `int64` or `float32`.
        shape: of one sample's values, -1 for any size; without the axis that numbers samples.
        is_sequence: samples have unequally many values.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_sequence: bool

    @classmethod
    def of(cls, variable: Variable) -> "Slot":
        """Returns the slot of a variable.

        Raises:
            ProgramError: it has numbers of another kind.
        """
        check_type(variable, "what set_use_var lists", Variable)
        if variable.dtype not in _DTYPES:
            what = f"'{variable.name}' is {variable.dtype}, which no MultiSlot file holds"
            raise mistake(what, "declare int64 or float32, and cast it in the program")
        return cls(variable.name, variable.dtype, variable.shape[1:], variable.lod_level > 0)

    @property
    def is_real(self) -> bool:
        """Whether its values are numbers with points."""
        return self.dtype == "float32"

    @property
    def size(self) -> int | None:
        """How many values a sample has; None where that differs."""
        if self.is_sequence or -1 in self.shape:
            return None
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Samples:
    """Some samples.

    Attributes:
        slots: in the order of a line.
        values: of each slot, all samples' one after another.
        counts: int32[samples, slots].
        ids: of the samples, where lines begin with them.
    """

    slots: tuple[Slot, ...]
    values: tuple[np.ndarray, ...]
    counts: np.ndarray
    ids: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.counts)

    @classmethod
    def none(cls, slots: Sequence[Slot]) -> "Samples":
        """Returns no samples."""
        values = tuple(np.zeros(0, _DTYPES[slot.dtype]) for slot in slots)
        return cls(tuple(slots), values, np.zeros((0, len(slots)), np.int32))

    @classmethod
    def joined(cls, parts: Sequence["Samples"]) -> "Samples":
        """Returns the samples of several, one after another."""
        if len(parts) == 1:
            return parts[0]
        values = tuple(
            np.concatenate(column) for column in zip(*(p.values for p in parts), strict=True)
        )
        named = [p.ids for p in parts if p.ids is not None]
        ids = np.concatenate(named) if named else None
        return cls(parts[0].slots, values, np.concatenate([p.counts for p in parts]), ids)

    def part(self, start: int, stop: int) -> "Samples":
        """Returns the samples from one number to another."""
        stop = min(stop, len(self))
        bounds = zip(self.values, self._begins[start], self._begins[stop], strict=True)
        values = tuple(values[begin:end] for values, begin, end in bounds)
        ids = None if self.ids is None else self.ids[start:stop]
        return Samples(self.slots, values, self.counts[start:stop], ids)

    @cached_property
    def _begins(self) -> np.ndarray:
        """int64[samples + 1, slots]: where each sample's values begin, and the last's end."""
        begins = np.zeros((len(self) + 1, len(self.slots)), np.int64)
        np.cumsum(self.counts, axis=0, out=begins[1:])
        return begins

    def in_order(self, order: np.ndarray) -> "Samples":
        """Returns samples in another order.

        Args:
            order: int64[samples], their numbers.
        """
        columns = enumerate(self.values)
        values = tuple(_gathered(v, self.counts[:, at], order) for at, v in columns)
        ids = None if self.ids is None else self.ids[order]
        return Samples(self.slots, values, self.counts[order], ids)

    def with_slots_in_order(self, orders: Mapping[str, np.ndarray]) -> "Samples":
        """Returns samples with the values of some slots in another order, each by itself.

        Args:
            orders: int64[samples] by the slot's name, the numbers of samples.
        """
        values, counts = list(self.values), self.counts.copy()
        for at, slot in enumerate(self.slots):
            if slot.name in orders:
                order = orders[slot.name]
                values[at] = _gathered(values[at], self.counts[:, at], order)
                counts[:, at] = self.counts[order, at]
        return Samples(self.slots, tuple(values), counts, self.ids)

    def of_rows(self, rows: np.ndarray) -> "Samples":
        """Returns samples each of whose slots is that of a sample of its own.

        Args:
            rows: int64[made, slots], of which sample each slot is.
        """
        columns = enumerate(self.values)
        values = tuple(_gathered(v, self.counts[:, at], rows[:, at]) for at, v in columns)
        counts = np.take_along_axis(self.counts, rows, axis=0)
        ids = None if self.ids is None else self.ids[rows[:, 0]]
        return Samples(self.slots, values, counts, ids)

    def feed(self) -> dict[str, Any]:
        """Returns what a program is fed of them, by name.

        Raises:
            FeedError: samples of a slot differ in size, and its variable has no `lod_level`.
        """
        return {
            slot.name: self._fed(slot, values, self.counts[:, at])
            for at, (slot, values) in enumerate(zip(self.slots, self.values, strict=True))
        }

    def _fed(self, slot: Slot, values: np.ndarray, counts: np.ndarray) -> np.ndarray | LoDTensor:
        if slot.is_sequence:
            return create_lod_tensor(values.reshape(-1, 1), [counts.tolist()])
        if slot.size is None and len(counts) and (counts != counts[0]).any():
            what = f"samples of '{slot.name}' have from {counts.min()} to {counts.max()} values"
            raise FeedError(what, hint="declare it with lod_level=1, or pad the files")
        shape = slot.shape if slot.size is not None else _shape(slot, int(counts[0]))
        return values.reshape(len(counts), *shape)


def _shape(slot: Slot, count: int) -> tuple[int, ...]:
    known = int(np.prod([size for size in slot.shape if size != -1], dtype=np.int64))
    if slot.shape.count(-1) > 1 or count % max(known, 1):
        what = f"{count} values do not fill '{slot.name}' of shape {list(slot.shape)}"
        raise FeedError(what, hint="leave one size open, and feed multiples of the others")
    return tuple(count // known if size == -1 else size for size in slot.shape)


def _gathered(values: np.ndarray, counts: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Returns the values of samples in another order."""
    begins = np.cumsum(counts, dtype=np.int64) - counts
    taken = counts[order].astype(np.int64)
    within = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
    found: np.ndarray = values[np.repeat(begins[order], taken) + within]
    return found
