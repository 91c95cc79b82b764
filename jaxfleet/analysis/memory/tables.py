"""Sums over values that begin in one range of stages and end in another, for all groups at once.

A value of the forward part begins where it is made and ends where it is last read, later on. One
of what follows forward is made at a late stage and last read at an early one: its stages are
counted from the back, so that time goes the same way for both.
"""

from collections.abc import Iterable

import numpy as np

from jaxfleet.analysis.memory.chain import Table


class Sums:
    """Bytes of values, by where they begin and where they end.

    `grid[p, c]` with stages `p` and `c` from 0 to their number: cuts, the ends included.
    """

    def __init__(self, stages: int, spans: Iterable[tuple[int, int, int]]) -> None:
        """Sums up.

        Args:
            stages: how many there are.
            spans: of each value, where it begins, where it ends, and its bytes.
        """
        counts = np.zeros((stages + 1, stages + 1), np.int64)
        for begins, ends, size in spans:
            counts[begins + 1, ends + 1] += size
        self._sums: Table = counts.cumsum(0).cumsum(1)  # [a, b]: begins before a and ends before b
        self._diagonal = np.diagonal(self._sums)

    def inside(self) -> Table:
        """Returns `[p, c]`: what begins from `p` on and ends before `c`."""
        return self._diagonal[None, :] - self._sums

    def leaving(self) -> Table:
        """Returns `[p, c]`: what begins from `p` on and before `c`, and ends from `c` on."""
        to_the_end = self._sums[:, -1]
        return (to_the_end[None, :] - self._diagonal[None, :]) - (to_the_end[:, None] - self._sums)

    def entering(self) -> Table:
        """Returns `[p, c]`: what begins before `p`, and ends from `p` on."""
        row = self._sums[:, -1] - self._diagonal
        return np.repeat(row[:, None], len(row), axis=1)

    def peak_inside(self, own: Table, until: Iterable[tuple[int, int, int, int]] = ()) -> Table:
        """Returns `[p, c]`: the most that is alive at a stage of the group, of what stays inside.

        Args:
            own: by stage, the most of what begins and ends in that one stage.
            until: spans with a stage more: what is there from the group's first stage until that.
        """
        stages, sums = len(own), self._sums
        peaks = np.zeros((stages + 1, stages + 1), np.int64)
        waiting = sorted(until, key=lambda span: span[2])
        for stage in range(stages):
            first, end = slice(0, stage + 1), slice(stage + 1, None)
            # What begins from p on up to the stage, and ends from it on before c.
            alive = sums[stage + 1, end][None, :] - sums[first, end]
            alive = alive - (sums[stage + 1, stage] - sums[first, stage])[:, None]
            if waiting:
                waiting = [span for span in waiting if span[2] >= stage]
                there = Sums(stages, [(begins, ends, size) for begins, ends, _, size in waiting])
                alive = alive + there.inside()[first, end]
            peaks[first, end] = np.maximum(peaks[first, end], alive + own[stage])
        return peaks


def turned(table: Table) -> Table:
    """Returns a table over stages that were counted from the back, as one that counts forward."""
    return table[::-1, ::-1].T
