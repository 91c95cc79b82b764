"""Watch for non-finite losses and states: one warning, or an error, with the step's number."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Kind, Variable
from jaxfleet.ops.user_frames import warn_at_caller

_EVERY_S = 0.1  # between two checks of the metrics since
_MOST_EACH = 64  # most steps between two checks that are examined one by one
_MOST_KEPT = 256
_FIRST_STATE = 16  # the state is read after this step, and after twice as many, and so on
_HINT = (
    "look at that step's batch, and lower the learning rate or clip gradients; "
    "strategy.on_nonfinite='raise' ends the job at the first such step"
)


class FiniteWatch:
    """Watches the scalar metrics and the state.

    Warnings must not cost measurable time: metrics are read once their step is done, some steps
    together and without waiting. The compiled step's flags on its gradients travel with them, so
    the warning names the step of the first bad gradient. The whole state, which may become NaN by
    itself, is read after 16, 32, 64, ... steps. To raise, everything is read at every step, which
    waits for it.

    Args:
        action: `warn`, `raise` or `skip`.
        state: the variables of the state's leaves. A parameter may be neither infinite nor NaN;
            any other leaf may be infinite, as the least loss so far is before the first step.
        speaks: whether this process warns; one of several with the same metrics does.
        of_own: the flags of steps are of this process's own gradients, before servers merge them:
            then it warns of those even if `speaks` is False.
        waits: whether a step's new state includes the effect of those gradients.
        warn: receives the warning.
        clock: the time in seconds.
    """

    def __init__(
        self,
        action: str,
        state: Sequence[Variable],
        *,
        speaks: Callable[[], bool] = lambda: True,
        of_own: bool = False,
        waits: Callable[[], bool] = lambda: True,
        warn: Callable[[str], None] = warn_at_caller,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._raises, self._skips = action == "raise", action == "skip"
        self._state = tuple(state)
        self._warned: set[str] = set()  # metrics, and "" for the state
        self._speaks, self._warn, self._clock = speaks, warn, clock
        self._of_own, self._waits = of_own, waits
        self._looked, self._step = clock(), 0
        self._pending: list[tuple[int, _Numbers]] = []

    def note(
        self, metrics: Sequence[Any], tree: Any, state: Any, finite: Sequence[Any] = ()
    ) -> None:
        """Records a step's results.

        Args:
            metrics: the leaves of the step's metrics.
            tree: their structure.
            state: the new state, or its leaves.
            finite: the step's flags: `bool[devices]`, whether the gradients (where they decide
                whether the step is skipped) or the new parameters are finite; on trainers `bool[2]`
                of each part: the received parameters, and the sent values.

        Raises:
            ProgramError: the strategy is `raise`, and a value is not finite.
        """
        self._step += 1
        ones = [(at, x) for at, x in enumerate(metrics) if getattr(x, "size", 0) == 1]
        numbers = _Numbers(tree, ones, finite, self._of_own)
        if self._raises:
            leaves = _leaves_of(state)
            self._check(self._step, numbers, leaves)
            self._check_state(leaves)
            return
        self._pending.append((self._step, numbers))
        is_late = len(self._pending) % _MOST_KEPT == 0
        if is_late or self._clock() - self._looked >= _EVERY_S:
            self.look(_leaves_of(state), wait=False)
        if len(self._pending) > 4 * _MOST_KEPT:
            del self._pending[0]  # this many steps are under way
        if self._step >= _FIRST_STATE and self._step & (self._step - 1) == 0:
            self._check_state(_leaves_of(state))

    def look(self, leaves: Sequence[Any] = (), *, wait: bool = True) -> None:
        """Examines the metrics recorded since the last check.

        Args:
            leaves: of the newest state, to name the non-finite ones.
            wait: wait for steps that are under way; otherwise they are left for the next check.
        """
        self._looked = self._clock()
        done = len(self._pending)
        if not wait:
            done = next((at for at, (_, x) in enumerate(self._pending) if not x.is_ready), done)
        steps, self._pending = self._pending[:done], self._pending[done:]
        if not steps:
            return
        _, last = steps[-1]
        # A non-finite value persists in later steps, unless its step is skipped.
        read = steps if self._skips else steps[-1:]
        are_finite = all(x.is_all_finite for _, x in read)
        if len(steps) > _MOST_EACH and are_finite and not any(last.not_finite()):
            return
        for step, numbers in steps:
            self._check(step, numbers, leaves, of_gradients=not are_finite)

    def _check(
        self, step: int, numbers: "_Numbers", leaves: Sequence[Any], *, of_gradients: bool = True
    ) -> None:
        told = len(self._warned)
        for name, value in numbers.not_finite():
            self._tell(name, f"metric {name} is {value} at step {step}")
        if not of_gradients or "" in self._warned or numbers.is_finite:
            return
        if len(self._warned) > told:
            self._warned.add("")  # a loss that is not finite has such gradients
        elif self._skips:
            what = f"a gradient is not finite at step {step}, which changes nothing"
            self._tell("", what, is_own=self._of_own)
        elif names := self._not_sound(leaves):
            what = f"the state is not finite after step {step}: {names}; a gradient of it was not"
            self._tell("", what, is_own=self._of_own)
        elif not leaves or not self._of_own or not self._waits():  # else the optimizer repaired it
            self._tell("", f"a gradient is not finite at step {step}", is_own=self._of_own)

    def _check_state(self, leaves: Sequence[Any]) -> None:
        if names := self._not_sound(leaves):
            what = f"the state is not finite after step {self._step}: {names}"
            self._tell("", f"{what}; a gradient of that step, or of one before, was not")

    def _not_sound(self, leaves: Sequence[Any]) -> str:
        """Returns the names of the first non-finite leaves, or ""."""
        pairs = zip(self._state, leaves, strict=True) if leaves else ()
        bad = [v.name for v, leaf in pairs if not _is_sound(leaf, v.kind is Kind.PARAM)]
        return ", ".join(bad[:4]) + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")

    def _tell(self, name: str, what: str, *, is_own: bool = False) -> None:
        """Reports a non-finite value: once for each metric, and once for the state."""
        if self._raises:
            raise ProgramError(what, hint=_HINT.partition(";")[0])
        if name in self._warned:
            return
        self._warned.add(name)
        if is_own or self._speaks():
            self._warn(f"{what} (of this run; warned of once); {_HINT}")


@dataclass(frozen=True)
class _Numbers:
    """The scalar metrics of one step; larger ones are not kept."""

    tree: Any
    leaves: list[tuple[int, Any]]  # the scalars, with their places in the tree
    finite: Sequence[Any]  # the step's flags on its gradients
    of_own: bool  # the flags are a trainer's

    @property
    def is_all_finite(self) -> bool:
        """Whether all checked values are finite, on the devices of this process."""
        parts = (part.data for flag in self.finite for part in flag.addressable_shards)
        return all(bool(np.asarray(part).all()) for part in parts)

    @property
    def is_finite(self) -> bool:
        """Whether gradients were finite, or their parameters were not finite either."""
        if not self.of_own or not self.finite:
            return self.is_all_finite
        parts = np.stack(self.finite)
        return bool(parts[:, 1].all()) or not parts[:, 0].all()

    @property
    def is_ready(self) -> bool:
        """Whether their step is done, as far as values that were not donated since show it."""
        made = (*(x for _, x in self.leaves), *self.finite)
        return all(x.is_ready() for x in made if _is_there(x))

    def not_finite(self) -> Iterator[tuple[str, float]]:
        for place, leaf in self.leaves:
            if isinstance(leaf, jax.Array) and not _is_there(leaf):
                continue  # the script donated its memory to a computation of its own
            if _is_float(leaf) and not np.isfinite(value := float(np.asarray(leaf).reshape(()))):
                places = jax.tree_util.tree_unflatten(self.tree, range(self.tree.num_leaves))
                path = jax.tree_util.tree_leaves_with_path(places)[place][0]
                yield jax.tree_util.keystr(path), value


_leaves_of = jax.tree_util.tree_leaves


def _is_there(value: Any) -> bool:
    return isinstance(value, jax.Array) and not value.is_deleted()


def _is_sound(leaf: Any, is_parameter: bool) -> bool:  # noqa: FBT001  # a private pair
    """Whether this process's part of a leaf is valid; True for a leaf without floats.

    A parameter must be finite, other leaves only not NaN.
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
