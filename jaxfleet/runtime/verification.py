"""Verification of a step: the results of a simulated job beside those of one device."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfleet.capture import Captured, capture
from jaxfleet.errors import FeedError
from jaxfleet.observability import Progress
from jaxfleet.runtime.checkpointing import on_host
from jaxfleet.runtime.devices import choose_devices
from jaxfleet.runtime.simulated_job import Twin
from jaxfleet.runtime.step import Step
from jaxfleet.strategy import DistributedStrategy

_SHOWN = 5
_CHANGE = 1e-6  # relative, of every float of the first state: some roundings of float32
_ROOM = 10.0  # rounding may change a leaf by this multiple of the effect of such a change


@dataclass(frozen=True)
class Verification:
    """Difference between a job in one process and one device."""

    steps: int  # number of steps
    # By leaf of the state: the largest difference over the largest value; infinite if only one of
    # both has a non-finite value
    differences: dict[str, float]
    same_on_all: bool  # whether all trainers ended with the same state, bit by bit
    tolerance: float = 1e-4  # leaves with a larger difference are examined for noise
    # By leaf beyond the tolerance: the difference of one device from itself, measured alike, if
    # every float of its first state is changed by a factor of 1 +- 1e-6. A leaf that moves so far
    # is decided by rounding: a bias before a normalization, whose gradient is 0 but for rounding,
    # moves in the direction of the noise, by whole steps of Adam.
    noise: dict[str, float] = field(default_factory=dict)

    @property
    def largest(self) -> float:
        """The largest of the differences."""
        return max(self.differences.values(), default=0.0)

    @property
    def agrees(self) -> bool:
        """Whether trainers agree with each other and, but for rounding noise, with one device."""
        within = (x <= self.tolerance or self.is_noise(n) for n, x in self.differences.items())
        return self.same_on_all and all(within)

    def is_noise(self, leaf: str) -> bool:
        """Whether a leaf differs by no more than rounding may move it, which is finite."""
        off = self.differences[leaf]
        return leaf in self.noise and math.isfinite(off) and off <= _ROOM * self.noise[leaf]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def __repr__(self) -> str:
        same = "the same state on all" if self.same_on_all else "trainers differ"
        return f"Verification({self.steps} steps, {same}, largest={self.largest:.1e})"

    def _lines(self) -> Iterator[str]:
        same = "the same state on all trainers" if self.same_on_all else "trainers that DIFFER"
        off = [name for name in self.differences if not self.is_noise(name)]
        largest = max((self.differences[name] for name in off), default=0.0)
        noisy = len(self.differences) - len(off)
        besides = f"; {noisy} more decided by rounding noise" if noisy else ""
        yield f"{self.steps} steps, {same}; off from one device by at most {largest:.1e}{besides}"
        yield (
            "  measure: of each leaf of the state, the largest difference over its largest value; "
            f"tolerance {self.tolerance:.0e}"
        )
        worst = sorted(self.differences.items(), key=lambda item: -item[1])
        for name, value in worst[:_SHOWN]:
            if value:
                yield f"  {name}: {value:.1e}{self._explained(name)}"

    def _explained(self, name: str) -> str:
        if self.differences[name] <= self.tolerance:
            return ""
        alone = f"one device ends {self.noise[name]:.1e} from itself if it starts 1e-6 away"
        if self.is_noise(name):
            return f": rounding noise, since {alone}"
        return f": BEYOND the tolerance and not rounding noise, since {alone}"


def verify(
    train_step: Callable[..., Any],
    state: Any = None,
    batches: Sequence[Any] = (),
    strategy: DistributedStrategy | str | None = None,
    *,
    example: tuple[Any, ...] | None = None,
    servers: int = 2,
    trainers: int = 2,
    tolerance: float = 1e-4,
) -> Verification:
    """Trains on trainers and servers in one process, and on one device, and compares the states.

    The processes are threads that take turns on an in-memory network; all else is as in a job. The
    measure for each leaf of the last state is the largest difference over the largest value that
    the leaf has on one device. Sums in another order make that about 1e-7 to 1e-6 in float32. For a
    leaf beyond the tolerance, one device trains once more, from a state that is changed by 1e-6: a
    similar effect of that is reported as rounding noise.

    A step that takes other arguments than a state and a batch is given an example of them, as for
    `distribute`, and for every step the arguments that it neither returns nor changes in place::

        jf.verify(train_step, example=(params, opt_state, x, y), batches=[(x, y)] * 20)

    Args:
        train_step: the step.
        state: where both start; it can be used afterwards.
        batches: global batches, one a step; rows that the trainers can share. With an example, a
            tuple of arguments, or the argument if there is one.
        strategy: how the step is sliced and placed.
        example: the step's arguments, instead of a state: where both start, and the values of
            arguments without rows.
        servers: number of servers.
        trainers: number of trainers.
        tolerance: leaves with a larger difference make `agrees` False, unless it is rounding noise.

    Raises:
        CaptureError: the step cannot be captured.
        PassError: it cannot be divided between trainers and servers.
        FeedError: a batch cannot be divided among the trainers, has other arguments than the
            step, or there is none; or there are both a state and an example, or neither.
        StrategyError: there would be no server, or no trainer.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import jaxfleet as jf
        >>> import optax
        >>> tx = jf.distributed_optimizer(optax.sgd(0.5))
        >>> def train_step(w, batch):
        ...     loss, gradient = jax.value_and_grad(lambda w: jnp.mean((w - batch) ** 2))(w)
        ...     updates, _ = tx.update(gradient, tx.init(w), w)
        ...     return optax.apply_updates(w, updates), loss
        >>> jf.verify(train_step, jnp.zeros(2), [jnp.ones((4, 2))] * 3).agrees
        True
    """
    if len(batches) == 0:
        raise FeedError("there is no batch to verify on", hint="pass a list of global batches")
    if (state is None) == (example is None):
        hint = "verify(train_step, state, batches) or verify(train_step, example=..., batches=...)"
        raise FeedError("verify needs either a state or an example", hint=hint)
    given = (state, batches[0]) if example is None else tuple(example)
    called = getattr(train_step, "__name__", type(train_step).__name__)
    with Progress(f"verify '{called}'") as progress:
        progress.show("capturing it")
        captured = capture(train_step, example=given)
        state, batches = _states_and_batches(captured, given, batches)
        twin = Twin(captured, None, strategy, servers=servers, trainers=trainers)
        return _verified(twin, state, batches, tolerance, progress)


def _verified(
    twin: Twin, state: Any, batches: Sequence[Any], tolerance: float, progress: Progress
) -> Verification:
    captured = twin.captured
    progress.show(f"training on {len(twin.endpoints)} servers and {twin.trainers} trainers")
    result = twin.run(state, batches)
    keeping = DistributedStrategy(mode="single", donate=False)  # the state is the caller's
    alone = Step(captured, keeping, choose_devices(1))
    ends = [[on_host(x) for x in jax.tree_util.tree_leaves(end)] for end in result.states]
    progress.show("training on one device")
    wanted = _state_after(alone, state, batches)
    names = [leaf.name for leaf in captured.signature.state]
    differences = dict(zip(names, map(_difference, ends[0], wanted), strict=True))
    same = all(_same(x, y) for end in ends for x, y in zip(end, ends[0], strict=True))
    noise: dict[str, float] = {}
    if beyond := [name for name, value in differences.items() if value > tolerance]:
        progress.show("training on one device from a state that is changed by 1e-6")
        moved = _state_after(alone, _changed(state), batches)
        noise = dict(zip(names, map(_difference, moved, wanted), strict=True))
    shown = {name: noise[name] for name in beyond}
    return Verification(len(batches), differences, same, tolerance, shown)


def _states_and_batches(
    captured: Captured, example: Sequence[Any], batches: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """Returns the first state and all batches in the form of the captured step."""
    arguments = captured.arguments
    if arguments is None:
        return example[0], list(batches)
    given, found = dict(zip(arguments.names, example, strict=True)), []
    names = arguments.batch
    for number, batch in enumerate(batches):
        parts = tuple(batch) if len(names) != 1 and isinstance(batch, tuple | list) else (batch,)
        if len(parts) != len(names):
            what = f"batch {number} has {len(parts)} arguments instead of {len(names)}"
            raise FeedError(what, hint=f"pass a tuple ({', '.join(names)}) for every step")
        values = given | dict(zip(names, parts, strict=True))
        state, inner = arguments.split([values[name] for name in arguments.names])
        found.append(inner)
    return state, found


def _state_after(step: Step[Any, Any], state: Any, batches: Sequence[Any]) -> list[np.ndarray]:
    """Returns the leaves of the state after one step per batch."""
    for batch in batches:
        state, _ = step(state, batch)
    return [on_host(x) for x in jax.tree_util.tree_leaves(state)]


def _changed(state: Any) -> Any:
    """Returns a state whose floats are scaled by 1 + 1e-6 or 1 - 1e-6 at random."""
    drawn = np.random.default_rng(0)

    def changed(leaf: Any) -> Any:
        array = jnp.asarray(leaf)
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            return leaf
        factor = 1 + _CHANGE * drawn.choice([-1.0, 1.0], array.shape)
        return (np.asarray(array) * factor).astype(array.dtype)

    return jax.tree_util.tree_map(changed, state)


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    if not expected.size or _same(found, expected):
        return 0.0
    wide = np.complex128 if np.iscomplexobj(expected) else np.float64
    left, right = found.astype(wide), expected.astype(wide)
    if not np.array_equal(np.isfinite(left), np.isfinite(right)):
        return math.inf
    finite = np.isfinite(right)
    if not np.array_equal(left[~finite], right[~finite], equal_nan=True):
        return math.inf
    off = np.abs(left[finite] - right[finite]).max(initial=0.0)
    return float(off / max(np.abs(right[finite]).max(initial=0.0), np.finfo(np.float32).tiny))


def _same(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.tobytes() == right.tobytes()
