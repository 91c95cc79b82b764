"""`distribute`: from the user's step and a strategy to a distributed step.

It takes a state and a batch, or the arguments of the user's function: `ArgumentStep`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, overload

import jax

from jaxfleet.analysis.step_checks import frozen_statistics_warning, repeated_key_warning
from jaxfleet.capture import Captured, capture
from jaxfleet.capture.arguments import Arguments
from jaxfleet.capture.captured import rare_collections
from jaxfleet.cluster import check_has_joined, joined
from jaxfleet.env import read_periodic_saves, read_rank
from jaxfleet.errors import FeedError, StrategyError
from jaxfleet.observability import Progress
from jaxfleet.ops.user_frames import warn_at_caller
from jaxfleet.runtime.devices import choose_devices
from jaxfleet.runtime.periodic_saves import reserve_folder
from jaxfleet.runtime.rank_step import RankStep
from jaxfleet.runtime.step import Step
from jaxfleet.runtime.step_html import arguments_html
from jaxfleet.runtime.training_step import Batch, Metrics, State
from jaxfleet.strategy import DistributedStrategy, as_strategy

if TYPE_CHECKING:
    from jaxfleet.runtime.pserver_entry import ServerStep
    from jaxfleet.runtime.trainer_step import TrainerStep

_PAIR = 2  # a state and a batch


def with_arguments(step: Any, captured: Captured, example: Sequence[Any]) -> Any:
    """Wraps a step of a state and a batch if the user's function takes other arguments."""
    arguments = captured.arguments
    return step if arguments is None else ArgumentStep(step, arguments, example)


class ArgumentStep:
    """A step of several arguments: `params, opt_state, loss = step(params, opt_state, x, y)`.

    It returns the results of the user's function, and changes the nnx objects in place that the
    function changes and does not return. A state of several arguments is a tuple of them
    for `save`, `restore`, `pull` and `place`. All else is delegated to the inner step.

    Attributes:
        step: the step of a state and a batch: a `Step`, `TrainerStep` or `ServerStep`.
        arguments: the classes of the arguments.
    """

    def __init__(self, step: Any, arguments: Arguments, example: Sequence[Any]) -> None:
        self.step, self.arguments = step, arguments
        given = dict(zip(arguments.names, example, strict=True))
        self._fixed = {name: _Fixed(given[name]) for name in arguments.fixed}

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Runs one step.

        Args:
            args: as for the user's function; the memory of those that it returns is reused if the
                strategy's `donate` is set.
            named: arguments by name.

        Raises:
            FeedError: an argument is missing, or does not match the example's.
        """
        given = self._in_order(args, named)
        state, batch = self.arguments.split(given)
        for name, fixed in self._fixed.items():
            state[name] = fixed.placed_like(state[name])
        after, metrics = self.step(state, batch)
        for name, fixed in self._fixed.items():
            fixed.placed = after[name]
        self.arguments.update(given, after)
        return self.arguments.results_of(after, metrics)

    def save(
        self,
        path: str | Path,
        state: Any,
        *,
        number: int = 0,
        data: Mapping[str, int] | None = None,
    ) -> None:
        """Writes a checkpoint, as `Step.save`."""
        if number:  # a job with servers counts its steps itself
            self.step.save(path, self._named(state), number=number, data=data)
        else:
            self.step.save(path, self._named(state), data=data)

    def restore(self, path: str | Path) -> Any:
        """Returns the state of a checkpoint, as `Step.restore`."""
        return self._bare(self.step.restore(path))

    def resume(self, state: Any) -> tuple[Any, int]:
        """Returns the state to go on from, and the number of its steps, as `Step.resume`."""
        found, done = self.step.resume(self._named(state))
        return self._bare(found), done

    def pull(self, state: Any) -> Any:
        """Returns the state with a value for every leaf, as `Step.pull`."""
        return self._bare(self.step.pull(self._named(state)))

    def evaluate(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns `function(*args)`, as `Step.evaluate`.

        Args:
            function: takes a state and a batch, or the state's arguments one by one, as the step
                does, followed by any others.
            args: the state and a batch, each as one value, a tuple if it is several arguments; or
                three and more values: `step.evaluate(accuracy, params, opt_state, x, y)`.

        Raises:
            FeedError: there are too few values for the state's arguments and a batch.
        """
        if len(args) == _PAIR:
            state, batch = args
            return self.step.evaluate(_OnBareState(self, function), self._named(state), batch)
        names = self.arguments.state
        if len(args) <= max(len(names), _PAIR):
            what = f"evaluate is called with {len(args)} values behind the function"
            raise FeedError(what, hint=f"pass {', '.join(names)} and what else the function takes")
        parts, rest = args[: len(names)], args[len(names) :]
        state = parts[0] if len(names) == 1 else parts
        return self.step.evaluate(_OnParts(self, function), self._named(state), rest)

    def place(self, state: Any) -> Any:
        """Returns the state on the step's devices, as `Step.place`."""
        return self._bare(self.step.place(self._named(state)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, /, *more: object) -> None:
        self.step.__exit__(error, *more)

    def __getattr__(self, name: str) -> Any:
        if name == "step":  # not set yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.step, name)

    def __repr__(self) -> str:
        return f"{self.step!r} of ({', '.join(self.arguments.names)})"

    def _repr_html_(self) -> str:
        return arguments_html(self.step, self.arguments.names)

    def _in_order(self, args: Sequence[Any], named: dict[str, Any]) -> list[Any]:
        """Returns the arguments of a call in order, after checking their number."""
        rest = self.arguments.names[len(args) :]
        missing, unknown = set(rest) - named.keys(), named.keys() - set(rest)
        if missing or unknown:
            parts = (("without", missing), ("with an unknown or repeated", unknown))
            said = [f"{how} {', '.join(sorted(names))}" for how, names in parts if names]
            what = f"the step is called {' and '.join(said)}"
            raise FeedError(what, hint=f"call step({', '.join(self.arguments.names)})")
        return [*args, *(named[name] for name in rest)]

    def _named(self, state: Any) -> Any:
        """Returns a state in the inner step's form, including arguments that are only read."""
        names = self.arguments.state
        parts = (state,) if len(names) == 1 else tuple(state)
        if len(parts) != len(names):
            what = f"a state of {len(parts)} parts instead of {len(names)}"
            raise FeedError(what, hint=f"pass ({', '.join(names)})")
        fixed = {name: value.newest for name, value in self._fixed.items()}
        return self.arguments.packed({**dict(zip(names, parts, strict=True)), **fixed})

    def _bare(self, state: Any) -> Any:
        found = self.arguments.unpacked(state)
        parts = tuple(found[name] for name in self.arguments.state)
        return parts[0] if len(parts) == 1 else parts


@dataclass(frozen=True)
class _OnBareState:
    """Adapts a function of the user's form of a state to the inner step's form."""

    step: ArgumentStep
    function: Callable[[Any, Any], Any]

    def __call__(self, state: Any, batch: Any) -> Any:
        return self.function(self.step._bare(state), batch)  # noqa: SLF001  # its other half


@dataclass(frozen=True)
class _OnParts:
    """Adapts a function of the state's arguments and others to the inner step's state."""

    step: ArgumentStep
    function: Callable[..., Any]

    def __call__(self, state: Any, rest: Sequence[Any]) -> Any:
        bare = self.step._bare(state)  # noqa: SLF001  # its other half
        is_one = len(self.step.arguments.state) == 1
        return self.function(*((bare,) if is_one else bare), *rest)


class _Fixed:
    """An argument that steps only read: placed on the devices once for every value."""

    def __init__(self, given: Any) -> None:
        self.given, self.placed = given, None
        self._leaves: list[Any] = []  # of what is placed: an nnx object may have others since

    @property
    def newest(self) -> Any:
        """The argument, on the devices if a step received it."""
        return self.placed_like(self.given)

    def placed_like(self, given: Any) -> Any:
        """Returns the placed copy of an argument if it is the last step's argument."""
        leaves, known = jax.tree_util.tree_leaves(given), self._leaves
        same = len(leaves) == len(known) and all(map(_is_jax_and_same, leaves, known))
        if not same or self.placed is None:
            self.given, self.placed, self._leaves = given, None, leaves
            return given
        return self.placed


def _is_jax_and_same(value: Any, known: Any) -> bool:
    return value is known and isinstance(value, jax.Array)


if TYPE_CHECKING:
    _StateAndBatch: TypeAlias = Step | TrainerStep | ServerStep
    AnyStep: TypeAlias = _StateAndBatch | ArgumentStep
else:  # annotations stay readable by `typing.get_type_hints`
    _StateAndBatch = AnyStep = Any


@overload
def distribute(
    train_step: Callable[[State, Batch], tuple[State, Metrics]],
    example: tuple[State, Batch],
    strategy: DistributedStrategy | str | None = None,
    *,
    dump_dir: str | Path | None = None,
    name: str | None = None,
) -> "Step[State, Metrics] | TrainerStep[State, Metrics] | ServerStep[State, Metrics]": ...


@overload
def distribute(
    train_step: Callable[..., Any],
    example: tuple[Any, Any, Any, *tuple[Any, ...]],
    strategy: DistributedStrategy | str | None = None,
    *,
    dump_dir: str | Path | None = None,
    name: str | None = None,
) -> ArgumentStep: ...


def distribute(
    train_step: Callable[..., Any],
    example: tuple[Any, ...],
    strategy: DistributedStrategy | str | None = None,
    *,
    dump_dir: str | Path | None = None,
    name: str | None = None,
) -> AnyStep:
    """Compiles a one-device training step into a distributed one.

    The result computes what the step computes on one device with the whole batch: sums over the
    batch are completed over all devices wherever the program needs them complete.

    A step may take more than a state and a batch, and return it in another order::

        step = jf.distribute(train_step, example=(params, opt_state, x, y))
        params, opt_state, loss = step(params, opt_state, x, y)

        step = jf.distribute(train_step, example=(state, batch, rng))
        state, metrics = step(state, batch, rng)

    A result with the structure, shapes and types of an argument, in the same order, is that
    argument's new value, and its memory is reused. The first argument must be among them. Of the
    others those with rows are the batch; random keys, typed or not, and scalars are replicated on
    every device, and so is an argument whose leaves have no rows in common, such as a teacher's
    parameters. Pass another key at every call. `explain()` lists the class of each argument.

    Args:
        train_step: takes `(state, batch)` and returns `(state, metrics)`, or takes several
            arguments as above. Its optimizer is wrapped in `distributed_optimizer`.
        example: its arguments, or their types. Axis 0 of every batch leaf that has one is the
            global batch.
        strategy: a `DistributedStrategy`, or the name of a mode; by default `collective`.
        dump_dir: a directory for dumps of every pass.
        name: the program's name; by default the function's.

    Raises:
        CaptureError: the step cannot be captured.
        StrategyError: the strategy does not fit the machine, this process does not belong to a job,
            or it is a rank and has not joined the others.
        FeedError: the example's batch cannot be divided among the devices.

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
        >>> w, batch = jnp.zeros(2), jnp.ones((8, 2))
        >>> step = jf.distribute(train_step, example=(w, batch))
        >>> w, loss = step(w, batch)
        >>> w
        Array([0.5, 0.5], dtype=float32)
    """
    chosen = as_strategy(strategy)
    folder = Path(dump_dir) if dump_dir is not None else None
    if chosen.mode == "collective":
        _check_communication(chosen)
        check_has_joined()
    called = name or getattr(train_step, "__name__", type(train_step).__name__)
    with Progress(f"distribute '{called}'") as progress:
        progress.show("capturing it")
        captured = capture(train_step, example=example, name=name)
        progress.show("running its passes")
        return _distributed(captured, chosen, folder, example)


def _distributed(
    captured: Captured, chosen: DistributedStrategy, folder: Path | None, example: Sequence[Any]
) -> AnyStep:
    """Warns of what the user may not have meant, and returns the step."""
    fixed = captured.arguments.fixed if captured.arguments is not None else ()
    leaves = [leaf.name for leaf in captured.signature.state]
    given = frozenset(name for name in leaves if name.split("/")[0] in fixed)
    for warning in (
        frozen_statistics_warning(captured.program),
        repeated_key_warning(captured.program, given=given),
    ):
        if warning is not None:
            warn_at_caller(warning)
    with rare_collections():
        made: AnyStep = with_arguments(_made(captured, chosen, folder), captured, example)
    return made


def _made(captured: Captured, strategy: DistributedStrategy, folder: Path | None) -> _StateAndBatch:
    if strategy.mode == "pserver":
        from jaxfleet.runtime.pserver_entry import job_step  # noqa: PLC0415  # other modes need no ps

        return _saving(job_step(captured, strategy, folder))
    if strategy.mode == "collective" and (here := joined()) is not None:
        return _saving(RankStep(captured, strategy, here, folder))
    devices = choose_devices(1 if strategy.mode == "single" else strategy.devices)
    step = Step(captured, strategy, devices, folder)
    # Of several processes each runs such a step alone, and no two may write the same checkpoints.
    rank = read_rank()
    return _saving(step) if rank is not None and len(rank.endpoints) == 1 else step


def _saving(step: _StateAndBatch) -> _StateAndBatch:
    """Lets a step write the checkpoints that the launch requests, if any."""
    saves = read_periodic_saves()
    if saves is not None:
        step.save_periodically(saves)
        reserve_folder(saves, step.captured.program.name)
    return step


def _check_communication(strategy: DistributedStrategy) -> None:
    """Rejects communication modes for trainers of servers.

    Not checked by the strategy itself: its mode may still change (`Twin` ignores it).
    """
    if strategy.communication not in {"sync", "local_sgd"}:
        what = f"communication {strategy.communication!r} is between trainers and servers"
        raise StrategyError(what, hint="mode='pserver'; devices of a mesh go together")
