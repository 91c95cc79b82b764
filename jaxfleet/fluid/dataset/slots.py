"""Samples by slot: flat arrays of all values, with lengths; merging by line id."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from jaxfleet.errors import FeedError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.lod_tensor import LoDTensor, create_lod_tensor

_DTYPES = {"int64": np.int64, "float32": np.float32}


@dataclass(frozen=True)
class Slot:
    """The part of a line that is fed to one variable."""

    name: str  # the variable's
    dtype: str  # `int64` or `float32`
    shape: tuple[int, ...]  # of one sample, -1 for any size; without the batch axis
    is_sequence: bool  # the number of values varies between samples

    @classmethod
    def of(cls, variable: Variable) -> "Slot":
        """Returns the slot of a variable; ProgramError for an unsupported dtype."""
        check_type(variable, "what set_use_var lists", Variable)
        if variable.dtype not in _DTYPES:
            what = f"'{variable.name}' is {variable.dtype}, which no MultiSlot file holds"
            raise mistake(what, "declare int64 or float32, and cast it in the program")
        return cls(variable.name, variable.dtype, variable.shape[1:], variable.lod_level > 0)

    @property
    def is_real(self) -> bool:
        """Whether its values are real numbers."""
        return self.dtype == "float32"

    @property
    def size(self) -> int | None:
        """The number of values of a sample; None if it varies."""
        if self.is_sequence or -1 in self.shape:
            return None
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Samples:
    """A sequence of samples."""

    slots: tuple[Slot, ...]  # in the order of a line
    values: tuple[np.ndarray, ...]  # of each slot, those of all samples concatenated
    counts: np.ndarray  # int32[samples, slots]
    ids: np.ndarray | None = None  # of the samples, if lines begin with them

    def __len__(self) -> int:
        return len(self.counts)

    @classmethod
    def none(cls, slots: Sequence[Slot]) -> "Samples":
        values = tuple(np.zeros(0, _DTYPES[slot.dtype]) for slot in slots)
        return cls(tuple(slots), values, np.zeros((0, len(slots)), np.int32))

    @classmethod
    def joined(cls, parts: Sequence["Samples"]) -> "Samples":
        if len(parts) == 1:
            return parts[0]
        values = tuple(
            np.concatenate(column) for column in zip(*(p.values for p in parts), strict=True)
        )
        named = [p.ids for p in parts if p.ids is not None]
        ids = np.concatenate(named) if named else None
        return cls(parts[0].slots, values, np.concatenate([p.counts for p in parts]), ids)

    def part(self, start: int, stop: int) -> "Samples":
        stop = min(stop, len(self))
        bounds = zip(self.values, self._begins[start], self._begins[stop], strict=True)
        values = tuple(values[begin:end] for values, begin, end in bounds)
        ids = None if self.ids is None else self.ids[start:stop]
        return Samples(self.slots, values, self.counts[start:stop], ids)

    @cached_property
    def _begins(self) -> np.ndarray:
        """int64[samples + 1, slots]: the offset of each sample's values, and the end."""
        begins = np.zeros((len(self) + 1, len(self.slots)), np.int64)
        np.cumsum(self.counts, axis=0, out=begins[1:])
        return begins

    def in_order(self, order: np.ndarray) -> "Samples":
        """Permutes the samples; `order` is int64[samples], their numbers."""
        columns = enumerate(self.values)
        values = tuple(_gathered(v, self.counts[:, at], order) for at, v in columns)
        ids = None if self.ids is None else self.ids[order]
        return Samples(self.slots, values, self.counts[order], ids)

    def with_slots_in_order(self, orders: Mapping[str, np.ndarray]) -> "Samples":
        """Permutes the values of some slots independently, by int64[samples] for each."""
        values, counts = list(self.values), self.counts.copy()
        for at, slot in enumerate(self.slots):
            if slot.name in orders:
                order = orders[slot.name]
                values[at] = _gathered(values[at], self.counts[:, at], order)
                counts[:, at] = self.counts[order, at]
        return Samples(self.slots, tuple(values), counts, self.ids)

    def of_rows(self, rows: np.ndarray) -> "Samples":
        """Assembles samples from slots of the samples `rows`, int64[made, slots]."""
        columns = enumerate(self.values)
        values = tuple(_gathered(v, self.counts[:, at], rows[:, at]) for at, v in columns)
        counts = np.take_along_axis(self.counts, rows, axis=0)
        ids = None if self.ids is None else self.ids[rows[:, 0]]
        return Samples(self.slots, values, counts, ids)

    def feed(self) -> dict[str, Any]:
        """Returns the feed of a program, by name.

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
    begins = np.cumsum(counts, dtype=np.int64) - counts
    taken = counts[order].astype(np.int64)
    within = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
    found: np.ndarray = values[np.repeat(begins[order], taken) + within]
    return found


_ZERO = 1e-6  # smaller absolute values count as 0, as in fluid


def merge_by_id(samples: Samples, merge_size: int) -> Samples:
    """Merges the samples of each id, in the order of the ids.

    A slot of sequences comes from the one sample that has values in it; an id with values in two
    of its samples is dropped. A dense slot keeps the last values that are not all 0.

    `merge_size` is the required number of samples of an id, or 0 for any; other ids are dropped.
    """
    assert samples.ids is not None
    order = np.argsort(samples.ids.astype(str), kind="stable").tolist()
    has_values, rows, lost = _has_values(samples), list[list[int]](), 0
    for _, group in groupby(order, key=samples.ids.__getitem__):
        members = list(group)
        chosen = None
        if merge_size in {0, len(members)}:
            chosen = _chosen(samples, members, has_values)
        if chosen is None:
            lost += len(members)
        else:
            rows.append(chosen)
    if lost:
        what = f"{lost} samples are left out: their ids have not {merge_size} samples each"
        warnings.warn(f"{what}, or two of them have values in one slot", stacklevel=4)
    return samples.of_rows(np.array(rows, np.int64).reshape(-1, len(samples.slots)))


def _chosen(samples: Samples, members: Sequence[int], has_values: np.ndarray) -> list[int] | None:
    """Returns the sample from which each slot is taken; None if two have values."""
    chosen = []
    for at, slot in enumerate(samples.slots):
        having = [member for member in members if has_values[member, at]] or [members[0]]
        if slot.is_sequence and len(having) > 1:
            return None
        chosen.append(having[-1])
    return chosen


def _has_values(samples: Samples) -> np.ndarray:
    """Returns bool[samples, slots]: whether any value is nonzero."""
    columns = []
    for at, values in enumerate(samples.values):
        counted = np.concatenate([[0], np.cumsum(np.abs(values) >= _ZERO)])
        ends = np.cumsum(samples.counts[:, at], dtype=np.int64)
        columns.append(counted[ends] > counted[ends - samples.counts[:, at]])
    return np.stack(columns, axis=1)
