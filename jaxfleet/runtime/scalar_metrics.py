"""Scalar metrics of a step, read by name without waiting for the step."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxfleet.ir.naming import unique
from jaxfleet.observability import printable

MOST_METRICS = 1000  # of one step; the rest is left out
MOST_NAME = 200  # characters of a name
_BARE = "metric"  # the name of a metric that is not in a container


@dataclass(frozen=True)
class Scalars:
    """Scalar metrics of a step, by name; that of no step has none."""

    step: int = 0
    values: dict[str, float] = field(default_factory=dict)


class ScalarMetrics:
    """Keeps the scalar metrics that a step returned last, and reads those that are computed.

    A scalar is a number, or an array without axes of a float, integer or bool type. It is named by
    its path in the metrics: `{"loss": x, "eval": {"top1": y}}` has `loss` and `eval/top1`. Names
    are printable and cut at 200 characters; at most 1000 scalars are kept.

    `note` belongs to the thread that runs steps, and so does `latest`, unless scalars are shared.

    Args:
        is_shared: whether other threads call `latest`. The script may delete a metric while one of
            them asks for it, which crashes jaxlib 0.10; an array of the same buffer that only this
            object refers to raises an error instead. It takes 1 to 3 us a scalar.

    Attributes:
        step: number of the last step, from 1.
        listeners: receive each step's scalars, which may not be computed yet.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        self.step, self._is_shared = 0, is_shared
        self.listeners: list[Listener] = []
        self._named = ScalarNames((), ())
        # A step that is not computed yet stays at the second place until it is, while newer ones
        # pass it: if many steps are in flight, the newest is never computed when it is read.
        self._kept: tuple[StepScalars | None, ...] = (None, None, None)
        self._read = Scalars()
        self._lock = threading.Lock()

    def note(self, leaves: Sequence[Any], names: Sequence[str], *, at_least: int = 0) -> None:
        """Records a step's metrics.

        Args:
            leaves: of the metrics.
            names: of the leaves, as capture names them; leaves of other shapes come with names that
                are another object.
            at_least: number of the step in a job that began before this process.
        """
        self.step = max(self.step + 1, at_least)
        if names is not self._named.given:
            self._named = ScalarNames(names, leaves)
        scalars = [leaves[at] for at in self._named.places]
        if self._is_shared:
            scalars = list(map(_own_array, scalars))
        newest = StepScalars(self.step, self._named, scalars)
        _, waiting, ready = self._kept
        if waiting is None or waiting.seems_ready:
            waiting, ready = newest, waiting
        self._kept = newest, waiting, ready
        for listener in self.listeners:
            listener.note(newest)

    def latest(self) -> Scalars:
        """Returns the newest scalars that are computed, without waiting."""
        with self._lock:
            for known in self._kept:
                if known is None or known.step <= self._read.step:
                    break
                if known.is_ready:
                    self._read = Scalars(known.step, known.read())
                    break
            return self._read


class ScalarNames:
    """Names and places of the scalars among the leaves of metrics.

    Attributes:
        given: the names of all leaves.
        places: of the scalars.
        left_out: number of scalars beyond the limit.
    """

    def __init__(self, given: Sequence[str], leaves: Sequence[Any]) -> None:
        places = [at for at, leaf in enumerate(leaves) if _is_scalar(leaf)]
        self.given, self.places = given, places[:MOST_METRICS]
        self.left_out = len(places) - len(self.places)

    @cached_property
    def names(self) -> list[str]:
        """A name for each place, all of them different."""
        found: dict[str, None] = {}
        for place in self.places:
            path = self.given[place].removeprefix("metrics").removeprefix("/")
            found[unique(printable(path, MOST_NAME) or _BARE, found)] = None
        return list(found)


@dataclass(frozen=True)
class StepScalars:
    """The scalars of one step, which may not be computed yet."""

    step: int
    named: ScalarNames
    leaves: Sequence[Any]

    @property
    def is_ready(self) -> bool:
        """Whether all are computed, as far as this process has them."""
        return all(map(_is_ready, self.leaves))

    @property
    def seems_ready(self) -> bool:
        """Whether the last is computed, and so probably all: to ask 100 takes 30 us."""
        return not self.leaves or _is_ready(self.leaves[-1])

    def read(self) -> dict[str, float]:
        """Returns the values, after waiting for them; those that cannot be read are left out."""
        values = zip(self.named.names, map(value_of, self.leaves), strict=True)
        return {name: value for name, value in values if value is not None}


class Listener(Protocol):
    """Receives the scalars of every step."""

    def note(self, scalars: StepScalars) -> None: ...

    def close(self) -> None: ...


def _is_scalar(leaf: Any) -> bool:
    if isinstance(leaf, bool | int | float):
        return True
    if getattr(leaf, "ndim", 1) != 0:
        return False
    kinds = (jnp.floating, jnp.integer, jnp.bool_)  # and not a random key
    return any(jnp.issubdtype(leaf.dtype, kind) for kind in kinds)


def _own_array(leaf: Any) -> Any:
    """Returns an array of the same buffer that its user has no reference to."""
    if not isinstance(leaf, jax.Array) or leaf.is_deleted():
        return leaf
    return leaf.addressable_data(0)


def _is_ready(leaf: Any) -> bool:
    # A script may have donated the array to a computation of its own. Asking an array that it has
    # deleted whether it is ready crashes jaxlib 0.10, so this asks in two steps.
    if not hasattr(leaf, "is_ready") or leaf.is_deleted():
        return True
    try:
        ready: bool = leaf.is_ready()
    except RuntimeError:  # deleted since
        return True
    return ready


def value_of(leaf: Any) -> float | None:
    """Returns a scalar's value; None if it cannot be read."""
    with suppress(RuntimeError, ValueError, OverflowError):  # deleted, failed, or a huge int
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            leaf = leaf.addressable_data(0)
        return float(np.asarray(leaf)) if hasattr(leaf, "dtype") else float(leaf)
    return None
