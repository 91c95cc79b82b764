"""ArgumentStep: a distributed step that is called with the arguments of the user's own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax

from jaxfleet.capture import Captured
from jaxfleet.capture.arguments import Arguments
from jaxfleet.errors import FeedError


def with_arguments(step: Any, captured: Captured, example: Sequence[Any]) -> Any:
    """Returns a distributed step as it is called: as it is, or with several arguments.

    Args:
        step: takes a state and a batch.
        captured: what it was made of.
        example: of the arguments.
    """
    arguments = captured.arguments
    return step if arguments is None else ArgumentStep(step, arguments, example)


class ArgumentStep:
    """A step of several arguments: `params, opt_state, loss = step(params, opt_state, x, y)`.

    It returns what the user's function returns. Where the state is several arguments, it is a
    tuple of them for `save`, `restore`, `pull` and `place`. All else is the step's inside.

    Attributes:
        step: the step of a state and a batch: a `Step`, `TrainerStep` or `ServerStep`.
        arguments: which arguments are what.
    """

    def __init__(self, step: Any, arguments: Arguments, example: Sequence[Any]) -> None:
        self.step, self.arguments = step, arguments
        given = dict(zip(arguments.names, example, strict=True))
        self._fixed = {name: _Fixed(given[name]) for name in arguments.fixed}

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Runs one step.

        Args:
            args: as the user's function takes them; the memory of those that it returns is
                reused unless the strategy says not.
            named: arguments by name.

        Raises:
            FeedError: an argument is missing, or not like the example's.
        """
        state, batch = self.arguments.split(self._in_order(args, named))
        for name, fixed in self._fixed.items():
            state[name] = fixed.placed_like(state[name])
        after, metrics = self.step(state, batch)
        for name, fixed in self._fixed.items():
            fixed.placed = after[name]
        return self.arguments.results_of(after, metrics)

    def save(self, path: str | Path, state: Any, *, number: int = 0) -> None:
        """Writes a checkpoint, as `Step.save`."""
        if number:  # a job with servers counts its steps itself
            self.step.save(path, self._named(state), number=number)
        else:
            self.step.save(path, self._named(state))

    def restore(self, path: str | Path) -> Any:
        """Returns the state of a checkpoint, as `Step.restore`."""
        return self._bare(self.step.restore(path))

    def pull(self, state: Any) -> Any:
        """Returns the state with a value for every leaf, as `Step.pull`."""
        return self._bare(self.step.pull(self._named(state)))

    def evaluate(self, function: Callable[[Any, Any], Any], state: Any, batch: Any) -> Any:
        """Returns `function(state, batch)`, as `Step.evaluate`."""
        return self.step.evaluate(_OnBareState(self, function), self._named(state), batch)

    def place(self, state: Any) -> Any:
        """Returns the state on the step's devices, as `Step.place`."""
        return self._bare(self.step.place(self._named(state)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.step.close()

    def __getattr__(self, name: str) -> Any:
        if name == "step":  # not set yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.step, name)

    def __repr__(self) -> str:
        return f"{self.step!r} of ({', '.join(self.arguments.names)})"

    def _in_order(self, args: Sequence[Any], named: dict[str, Any]) -> list[Any]:
        """Returns the arguments of a call in order; the step counts them."""
        rest = self.arguments.names[len(args) :]
        missing, unknown = set(rest) - named.keys(), named.keys() - set(rest)
        if missing or unknown:
            parts = (("without", missing), ("with an unknown or repeated", unknown))
            said = [f"{how} {', '.join(sorted(names))}" for how, names in parts if names]
            what = f"the step is called {' and '.join(said)}"
            raise FeedError(what, hint=f"call step({', '.join(self.arguments.names)})")
        return [*args, *(named[name] for name in rest)]

    def _named(self, state: Any) -> Any:
        """Returns a state as the step has it, arguments that are only read included."""
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
    """A function of a state as the user has it, called with a state as the step has it."""

    step: ArgumentStep
    function: Callable[[Any, Any], Any]

    def __call__(self, state: Any, batch: Any) -> Any:
        return self.function(self.step._bare(state), batch)  # noqa: SLF001  # its other half


class _Fixed:
    """An argument that steps only read: placed on the devices once for every value."""

    def __init__(self, given: Any) -> None:
        self.given, self.placed = given, None

    @property
    def newest(self) -> Any:
        """The argument, on the devices if a step was given it."""
        return self.given if self.placed is None else self.placed

    def placed_like(self, given: Any) -> Any:
        """Returns an argument as the last step placed it, where it is what that one was given."""
        leaves, known = jax.tree_util.tree_leaves(given), jax.tree_util.tree_leaves(self.given)
        same = len(leaves) == len(known) and all(map(_is_jax_and_same, leaves, known))
        if not same or self.placed is None:
            self.given, self.placed = given, None
            return given
        return self.placed


def _is_jax_and_same(value: Any, known: Any) -> bool:
    """Whether two are one array, and immutable."""
    return value is known and isinstance(value, jax.Array)
