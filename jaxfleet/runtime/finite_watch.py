"""A watch over losses and states that are not finite: one warning, or an error, with the step."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Kind, Variable
from jaxfleet.ops.frames import warn_at_caller

_EVERY_S = 0.1  # between two looks at the metrics of the steps since
_MOST_EACH = 64  # steps between two looks, up to which each is looked at
_MOST_KEPT = 256
_FIRST_STATE = 16  # the state is read after this step, and after twice as many, and so on
_HINT = (
    "look at that step's batch, and lower the learning rate or clip gradients; "
    "strategy.on_nonfinite='raise' ends the job at the first such step"
)


class FiniteWatch:
    """Looks at the metrics that are one number, and at the state.

    To warn must cost nothing that can be measured: metrics are looked at once their step is done,
    some steps together and without waiting for any, and the state, which keeps what a gradient
    that is not finite made of it, after 16, 32, 64, ... steps. To raise, both are read at every
    step, which waits for it.

    Args:
        action: `warn` or `raise`.
        state: the variables of the state's leaves. A parameter may be neither infinite nor NaN;
            any other leaf may be infinite, as the least loss so far is before the first step.
        speaks: whether this process warns; of several with the same metrics one does.
        warn: takes the warning.
        clock: the time in seconds.
    """

    def __init__(
        self,
        action: str,
        state: Sequence[Variable],
        *,
        speaks: Callable[[], bool] = lambda: True,
        warn: Callable[[str], None] = warn_at_caller,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._raises, self._state = action == "raise", tuple(state)
        self._warned: set[str] = set()  # metrics, and "" for the state
        self._speaks, self._warn, self._clock = speaks, warn, clock
        self._looked, self._step = clock(), 0
        self._pending: list[tuple[int, _Numbers]] = []

    def note(self, metrics: Sequence[Any], tree: Any, leaves: Sequence[Any]) -> None:
        """Takes a step's results.

        Args:
            metrics: the leaves of what the step returned as such.
            tree: their structure.
            leaves: of the new state.

        Raises:
            ProgramError: the strategy says `raise`, and something is not finite.
        """
        self._step += 1
        numbers = _Numbers.of(metrics, tree)
        if self._raises:
            self._check(self._step, numbers)
            self._check_state(leaves)
            return
        self._pending.append((self._step, numbers))
        if len(self._pending) > _MOST_KEPT:
            del self._pending[0]
        if self._step >= _FIRST_STATE and self._step & (self._step - 1) == 0:
            self._check_state(leaves)
        if self._clock() - self._looked >= _EVERY_S:
            self.look(wait=False)

    def look(self, *, wait: bool = True) -> None:
        """Looks at the metrics of the steps that were not looked at yet.

        Args:
            wait: wait for steps that are under way; they are left for the next look if not.
        """
        self._looked = self._clock()
        done = len(self._pending)
        if not wait:
            done = next((at for at, (_, x) in enumerate(self._pending) if not x.is_ready), done)
        steps, self._pending = self._pending[:done], self._pending[done:]
        if len(steps) > _MOST_EACH and not any(steps[-1][1].not_finite()):
            return  # steps are short; one that was not finite shows in those after it
        for step, numbers in steps:
            self._check(step, numbers)

    def _check(self, step: int, numbers: "_Numbers") -> None:
        for name, value in numbers.not_finite():
            self._tell(name, f"metric {name} is {value} at step {step}")

    def _check_state(self, leaves: Sequence[Any]) -> None:
        pairs = zip(self._state, leaves, strict=True)
        bad = [v.name for v, leaf in pairs if not _is_sound(leaf, v.kind is Kind.PARAM)]
        if bad:
            shown = ", ".join(bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")
            what = f"the state is not finite after step {self._step}: {shown}"
            self._tell("", f"{what}; a gradient of that step, or of one before, was not")

    def _tell(self, name: str, what: str) -> None:
        """Reports something that is not finite: once for each metric, and once for the state."""
        if self._raises:
            raise ProgramError(what, hint=_HINT.partition(";")[0])
        if name in self._warned:
            return
        self._warned.add(name)
        if self._speaks():
            self._warn(f"{what} (of this run; warned of once); {_HINT}")


@dataclass(frozen=True)
class _Numbers:
    """The metrics of one step that are one number; larger ones are not kept.

    Attributes:
        tree: of all metrics.
        leaves: those, with their places in the tree.
    """

    tree: Any
    leaves: list[tuple[int, Any]]

    @classmethod
    def of(cls, leaves: Sequence[Any], tree: Any) -> "_Numbers":
        """Returns those of what a step returned."""
        return cls(tree, [(at, x) for at, x in enumerate(leaves) if getattr(x, "size", 0) == 1])

    @property
    def is_ready(self) -> bool:
        """Whether their step is done, as far as can be known of what was not donated since."""
        return all(x.is_ready() for _, x in self.leaves if _is_there(x))

    def not_finite(self) -> Iterator[tuple[str, float]]:
        """Yields the names and values of those that are not finite."""
        for place, leaf in self.leaves:
            if isinstance(leaf, jax.Array) and not _is_there(leaf):
                continue  # the script gave its memory to a computation of its own
            if _is_float(leaf) and not np.isfinite(value := float(np.asarray(leaf).reshape(()))):
                places = jax.tree_util.tree_unflatten(self.tree, range(self.tree.num_leaves))
                path = jax.tree_util.tree_leaves_with_path(places)[place][0]
                yield jax.tree_util.keystr(path), value


def _is_there(value: Any) -> bool:
    return isinstance(value, jax.Array) and not value.is_deleted()


def _is_sound(leaf: Any, is_parameter: bool) -> bool:  # noqa: FBT001  # a private pair
    """Whether what this process has of a leaf is what training makes; True where it has no floats.

    Args:
        leaf: of the state.
        is_parameter: whether it must be finite, and not only numbers.
    """
    if not isinstance(leaf, jax.Array) or not _is_float(leaf):
        return True
    array = np.asarray(leaf.addressable_shards[0].data)
    if array.dtype.itemsize < 4:
        array = array.astype(np.float32)
    with np.errstate(all="ignore"):
        # A sum is read at the speed of memory; that of large numbers may be infinite all the same.
        if np.isfinite(array.sum()):
            return True
        return bool(np.isfinite(array).all() if is_parameter else not np.isnan(array).any())


def _is_float(leaf: Any) -> bool:
    return bool(jax.numpy.issubdtype(leaf.dtype, np.floating))
