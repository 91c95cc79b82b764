"""Runs a step in parts: one executable after another, and lets go of what is not read again."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxfleet.ir import Program
from jaxfleet.lower.blocks import ExecutableCache
from jaxfleet.lower.moves import finish, start
from jaxfleet.lower.part_layout import PartLayout
from jaxfleet.lower.peak import Peak, peak_of
from jaxfleet.lower.segmented import Part, Parts
from jaxfleet.lower.sizes import bind_sizes
from jaxfleet.ops import Array


@dataclass
class PartStep:
    """A step in parts, on lists of leaves: `(given, kept, data) -> (written, fetched)`.

    Attributes:
        program: with `cut` between what is compiled apart.
        given: the state whose memory the new state may take.
        kept: the other state.
        data: what is fed.
        written: the state that comes out new.
        fetched: what is fetched.
        layout: where values lie.
        waits: wait for each part; executables with collectives must not overlap on a CPU.
        cache: where executables are kept.
    """

    program: Program
    given: tuple[str, ...]
    kept: tuple[str, ...]
    data: tuple[str, ...]
    written: tuple[str, ...]
    fetched: tuple[str, ...]
    layout: PartLayout
    waits: bool = False
    cache: ExecutableCache = field(default_factory=ExecutableCache)
    _plans: dict[tuple[Any, ...], tuple[Part, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._parts = Parts(self.program, self.layout, self.given, self.fetched, self.cache)
        self._out = self.layout.fetched([self.program.lookup(name) for name in self.fetched])

    def __call__(
        self, given: Sequence[Array], kept: Sequence[Array], data: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
        """Runs one step."""
        values = dict(zip((*self.given, *self.kept), (*given, *kept), strict=True))
        values.update(zip(self.data, data, strict=True))
        for part in self.at([np.shape(x) for x in data]):
            leaving = start(part.moves, values)
            outputs = part.run(*[values[name] for name in part.reads])
            values.update(zip(part.writes, outputs, strict=True))
            for name in part.drops:
                del values[name]
            if self.waits:
                jax.block_until_ready(outputs)
            finish(leaving)
        fetched = [values[name] for name in self.fetched]
        if self._out is not None:
            fetched = self._out(*fetched)
        return [values[name] for name in self.written], fetched

    def at(self, shapes: Sequence[tuple[int, ...]]) -> tuple[Part, ...]:
        """Returns the executables for data of these shapes.

        Raises:
            FeedError: they do not fit the variables.
        """
        key = tuple(shapes)
        if key not in self._plans:
            fed = [self.program.variables[name] for name in self.data]
            own = [self.layout.own_shape(v, shape) for v, shape in zip(fed, shapes, strict=True)]
            self._plans[key] = self._parts.at(bind_sizes(zip(fed, own, strict=True)))
        return self._plans[key]

    def peak(self, shapes: Sequence[tuple[int, ...]]) -> Peak:
        """Returns the peak with data of these shapes, on one device; compiles all parts."""
        return peak_of(self.at(shapes), self.fetched)
