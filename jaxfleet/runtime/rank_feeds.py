"""Feeds and fetches of several ranks: rows, shapes, and their concatenation."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from jaxfleet.errors import FeedError
from jaxfleet.ops import Array

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Fed:
    """Feeds of all ranks.

    Attributes:
        rows: by name, the ranks' feeds along axis 0, each padded to the largest.
        shapes: for each rank, the unpadded shapes.
    """

    rows: Mapping[str, Any]
    shapes: tuple[Mapping[str, Shape], ...]

    @classmethod
    def even(cls, rows: Mapping[str, Any], numbers: Container[str], ranks: int) -> "Fed":
        """Divides rows evenly among ranks; `numbers` are names with one scalar for each rank."""
        each = {
            name: () if name in numbers else (len(x) // ranks, *np.shape(x)[1:])
            for name, x in rows.items()
        }
        return cls(rows, (each,) * ranks)

    @classmethod
    def of(cls, parts: Sequence[Mapping[str, Any]]) -> "Fed":
        """Joins the ranks' feeds, which have the same names."""
        names = list(parts[0])
        shapes = tuple({name: np.shape(part[name]) for name in names} for part in parts)
        return cls({name: _joined([part[name] for part in parts]) for name in names}, shapes)


def _joined(values: Sequence[Any]) -> np.ndarray:
    parts = [np.atleast_1d(value) for value in values]
    shapes = [np.shape(part) for part in parts]
    if len(set(shapes)) == 1:
        return np.concatenate(parts)  # the common case: even padding by nothing takes time
    largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    wide = [[(0, most - n) for n, most in zip(s, largest, strict=True)] for s in shapes]
    return np.concatenate([np.pad(p, w) for p, w in zip(parts, wide, strict=True)])


@dataclass(frozen=True)
class Fetched:
    """Results of all ranks, in the order of the fetch list.

    Attributes:
        names: of the fetches.
        values: the ranks' values along axis 0, padded to the largest.
        shapes: for each rank, the unpadded shapes.
    """

    names: Sequence[str]
    values: Sequence[Array]
    shapes: Sequence[Sequence[Shape]]

    def first(self, count: int) -> "Fetched":
        shapes = [own[:count] for own in self.shapes]
        return Fetched(self.names[:count], self.values[:count], shapes)

    def parts(self) -> list[list[np.ndarray]]:
        """Returns for each fetch a list of the ranks' values."""
        return [self._parts(place) for place in range(len(self.values))]

    def merged(self) -> list[np.ndarray]:
        """Returns each fetch with the ranks' values concatenated along axis 0.

        Raises:
            FeedError: they differ in another axis.
        """
        return [self._merged(place) for place in range(len(self.values))]

    def _merged(self, place: int) -> np.ndarray:
        if len({tuple(own[place]) for own in self.shapes}) == 1:
            return np.array(self.values[place])
        parts = self._parts(place)
        if len({part.shape[1:] for part in parts}) > 1:
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            what = f"'{self.names[place]}' cannot be joined along axis 0, it is {shapes}"
            raise FeedError(what, hint="run with return_merged=False")
        return np.concatenate(parts)

    def _parts(self, place: int) -> list[np.ndarray]:
        padded = np.split(np.asarray(self.values[place]), len(self.shapes))
        cuts = [tuple(slice(0, size) for size in own[place]) for own in self.shapes]
        return [part[cut].copy() for part, cut in zip(padded, cuts, strict=True)]
