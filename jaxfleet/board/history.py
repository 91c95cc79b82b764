"""History of a job's figures: the newest samples of a bounded number of series."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

MOST_SERIES = 400
_LONGEST = 200  # characters of a name
_UNKNOWN = math.nan

Row = list[float | None]


@dataclass(frozen=True)
class Series:
    """Identity of a line in a chart.

    Attributes:
        group: what is measured: `steps`, `memory`, `scalar`.
        chart: the chart within the group: the name of a scalar metric; "" in other groups.
        label: of the line: `server 0`, `trainer 3`.
    """

    group: str
    chart: str
    label: str

    @classmethod
    def of(cls, group: str, label: str, chart: str = "") -> "Series":
        return cls(group, chart[:_LONGEST], label[:_LONGEST])


class History:
    """The last samples of each series, in rings of one size.

    A series has a value or none at each sample. Once there are `most_series`, others are left out.

    Args:
        samples: number of samples to keep.
        most_series: number of series to keep.

    Attributes:
        series: all series, in order of arrival.
        count: number of samples that were ever added.
        left_out: number of series that the last sample had and that are not kept.
    """

    def __init__(self, samples: int, most_series: int = MOST_SERIES) -> None:
        self.series: list[Series] = []
        self.count = self.left_out = 0
        self._samples, self._most = samples, most_series
        self._times = np.zeros(samples)
        self._rings: dict[Series, np.ndarray] = {}

    @property
    def nbytes(self) -> int:
        return self._times.nbytes + sum(ring.nbytes for ring in self._rings.values())

    @property
    def first(self) -> int:
        """Number of the oldest sample that is kept."""
        return max(0, self.count - self._samples)

    def add(self, at_s: float, values: Mapping[Series, float]) -> None:
        """Adds a sample, taken at a Unix time."""
        place = self.count % self._samples
        self._times[place] = at_s
        for ring in self._rings.values():
            ring[place] = _UNKNOWN
        self.left_out = 0
        for series, value in values.items():
            ring_of = self._rings.get(series)
            if ring_of is None:
                if len(self.series) >= self._most:
                    self.left_out += 1
                    continue
                ring_of = self._rings[series] = np.full(self._samples, _UNKNOWN)
                self.series.append(series)
            ring_of[place] = value
        self.count += 1

    def rows(self, since: int, most: int) -> Iterator[Row]:
        """Yields samples from number `since` on: the time, and a value for each series.

        A value is None if it is unknown or not finite.
        """
        begin = max(since, self.first)
        rings = [self._rings[series] for series in self.series]
        for number in range(begin, min(self.count, begin + most)):
            place = number % self._samples
            yield [round(float(self._times[place]), 3), *(_short(ring[place]) for ring in rings)]


def _short(value: float) -> float | None:
    """Returns a value with nine digits, which JSON can hold."""
    return float(f"{value:.9g}") if math.isfinite(value) else None
