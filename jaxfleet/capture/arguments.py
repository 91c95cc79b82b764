"""Steps of several arguments: classification into state, batch and fixed arguments.

`train_step(params, opt_state, x, y)` is captured as a step of one state and one batch, keyed by the
names of its arguments. An argument is state if the step returns it: a result of the same structure
and types, in the same order. So is an nnx object that the step changes in place. Of the rest,
arguments with rows are the batch. Random keys, scalars and arguments without common rows, such as a
teacher's parameters, are replicated on every device.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxfleet.capture.nnx_objects import Watched, generator_in, is_generator, update_in_place
from jaxfleet.capture.signature import leaves_of
from jaxfleet.errors import CaptureError, FeedError
from jaxfleet.ops.user_frames import line_of_caller, line_of_function

Trace: TypeAlias = Callable[..., Any]
"""Returns the types of what a step returns, from the step and the types of its arguments."""


@dataclass(frozen=True)
class _Returned:
    """Position in the step's results of an argument's new value."""

    argument: str


@dataclass(frozen=True)
class _Metric:
    """Position in the step's results of the metric of this number."""

    place: int


@dataclass(frozen=True)
class Arguments:
    """Arguments and results of a step that takes more than a state and a batch."""

    names: tuple[str, ...]  # of the arguments, in order
    state: tuple[str, ...]  # those that the step returns or changes in place
    fixed: tuple[str, ...]  # read-only ones without rows, replicated on every device
    batch: tuple[str, ...]  # the others; leaves without rows, such as keys, are replicated too
    # By argument, the leaves that are keys as integers, `jax.random.PRNGKey`
    raw_keys: Mapping[str, frozenset[int]]
    results: Any  # the step's results: tuples of `_Returned` and `_Metric`
    in_place: tuple[str, ...] = ()  # those of the state that the step changes and does not return
    rowless: tuple[str, ...] = ()  # those of the batch without rows: keys and scalars
    generators: tuple[str, ...] = ()  # those that are an `nnx.Rngs`

    def split(self, args: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        if len(args) != len(self.names):
            what = f"the step is called with {len(args)} arguments instead of {len(self.names)}"
            raise FeedError(what, hint=f"call step({', '.join(self.names)})")
        given = dict(zip(self.names, args, strict=True))
        batch = {name: self._with_keys(name, given[name]) for name in self.batch}
        return self.packed({name: given[name] for name in (*self.state, *self.fixed)}), batch

    def packed(self, state: dict[str, Any]) -> Any:
        """Returns a state by name in the step's own form: a single argument is itself."""
        return state[self.state[0]] if self._is_one() else state

    def unpacked(self, state: Any) -> dict[str, Any]:
        return {self.state[0]: state} if self._is_one() else state

    def update(self, args: Sequence[Any], state: Any) -> None:
        """Gives the arguments of a call that the step changes in place their new values."""
        after = self.unpacked(state)
        for name, value in zip(self.names, args, strict=True):
            if name in self.in_place:
                update_in_place(value, after[name])

    def results_of(self, state: Any, metrics: Any) -> Any:
        """Returns a new state and metrics in the form of the user's results."""
        after = self.unpacked(state)
        listed = metrics if self._count_of_metrics() != 1 else (metrics,)

        def built(part: Any) -> Any:
            match part:
                case _Returned(argument):
                    return after[argument]
                case _Metric(place):
                    return listed[place]
            return type(part)(built(item) for item in part)

        return built(self.results)

    def adapted(self, step: Callable[..., Any]) -> Callable[[Any, Any], tuple[Any, Any]]:
        @functools.wraps(step)
        def run(state: Any, batch: Any) -> tuple[Any, Any]:
            given = dict(self.unpacked(state))
            after = {name: given[name] for name in self.fixed}
            given |= {name: self._without_keys(name, batch[name]) for name in self.batch}
            found = step(*(given[name] for name in self.names))
            after |= {name: given[name] for name in self.in_place}
            metrics: list[Any] = []
            for part, value in _parts(self.results, found):
                if isinstance(part, _Returned):
                    after[part.argument] = value
                else:
                    metrics.append(value)
            return self.packed(after), metrics[0] if len(metrics) == 1 else tuple(metrics)

        return run

    def note(self) -> str:
        """Returns a line for `explain()`: the class of each argument."""
        rows = [name for name in self.batch if name not in self.rowless]
        kinds = {"state": self.state, "batch": rows, "whole": [*self.fixed, *self.rowless]}
        named = {name: f"{name} (a generator)" for name in self.generators}
        said = "; ".join(
            f"{kind}: {', '.join(named.get(name, name) for name in names)}"
            for kind, names in kinds.items()
            if names
        )
        return f"arguments by what the step returns: {said}"

    def _is_one(self) -> bool:
        return len(self.state) + len(self.fixed) == 1

    def _count_of_metrics(self) -> int:
        return sum(isinstance(part, _Metric) for part in _leaves(self.results))

    def _with_keys(self, name: str, value: Any) -> Any:
        """Returns an argument with typed keys, scalars without rows, instead of integers."""
        return self._replaced(name, value, jax.random.wrap_key_data)

    def _without_keys(self, name: str, value: Any) -> Any:
        return self._replaced(name, value, jax.random.key_data)

    def _replaced(self, name: str, value: Any, change: Callable[[Any], Any]) -> Any:
        places = self.raw_keys.get(name)
        if places is None:
            return value
        leaves, tree = jax.tree_util.tree_flatten(value)
        changed = [_changed(x, change) if n in places else x for n, x in enumerate(leaves)]
        return jax.tree_util.tree_unflatten(tree, changed)


def read_arguments(
    step: Callable[..., Any], example: Sequence[Any], outputs_of: Trace
) -> Arguments:
    """Classifies the arguments of a step from an example of them.

    Raises:
        CaptureError: an argument is not made of arrays; the step neither returns its first argument
            nor changes any in place; it changes more in place than nnx objects; or no argument has
            rows.
    """
    names = names_of(step, example)
    types = [_types(name, value) for name, value in zip(names, example, strict=True)]
    watched = Watched(step)
    returned = outputs_of(watched, *types)
    reader = _Reader(names, types)
    results = reader.read(returned)
    changed = [names[place] for place in watched.changed]
    in_place = tuple(name for name in changed if name not in reader.taken)
    beside = [names[place] for place in watched.beside if names[place] in in_place]
    if beside:
        what = f"the step replaces an array of '{beside[0]}' that is not an nnx object's, and does "
        hint = f"return '{beside[0]}', or keep the array in a Variable of an object"
        raise CaptureError(f"{what}not return it", source=line_of_function(step), hint=hint)
    if not in_place and reader.taken[:1] != names[:1]:
        raise _returns_no_state(step, names, types, returned)
    state = tuple(name for name in names if name in reader.taken or name in in_place)
    for name in reversed(state[1:]):
        if name not in changed and _is_data(
            name, _others(names, types, ()), _others(names, types, state)
        ):
            state = tuple(kept for kept in state if kept != name)
            results = _as_metric(results, name)
    others = _others(names, types, state)
    keys = {name: _raw_keys(name, tree, others) for name, tree in others.items()}
    raw_keys = {name: places for name, places in keys.items() if places}
    fixed = tuple(
        name for name, tree in others.items() if len(_rows_in({name: tree}, raw_keys)) > 1
    )
    batch = tuple(name for name in others if name not in fixed)
    rowless = tuple(name for name in batch if not _rows_in({name: others[name]}, raw_keys))
    pairs = zip(names, example, strict=True)
    generators = tuple(name for name, value in pairs if is_generator(value))
    results = _numbered(results)
    return Arguments(
        tuple(names), state, fixed, batch, raw_keys, results, in_place, rowless, generators
    )


def check_batch(arguments: Arguments, example: Sequence[Any]) -> None:
    """Rejects a generator that makes the batch state, since the step changes it.

    Raises:
        CaptureError: there is one; the error names its place.
    """
    if len(arguments.batch) > len(arguments.rowless):
        return
    for name, value in zip(arguments.names, example, strict=True):
        place = generator_in(value, name)
        if name in arguments.in_place and name not in arguments.generators and place is not None:
            what = f"'{place}' is a generator of random numbers, which the step changes, so that "
            what = f"{what}'{name}' is state and nothing is the batch"
            names = ", ".join(arguments.names)
            hint = f"pass the generator as an argument of its own: step({names}, rngs)"
            raise CaptureError(what, source=line_of_caller(), hint=hint)


def names_of(step: Callable[..., Any], example: Sequence[Any]) -> list[str]:
    """Returns a name for each argument, from the function's own signature."""
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):
        return [f"argument{place}" for place in range(len(example))]
    names: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}{n}" for n in range(len(example) - len(names))]
        elif parameter.kind in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}:
            names.append(parameter.name)
    return names[: len(example)]


def _types(name: str, value: Any) -> Any:
    leaves = leaves_of({name: value}, "argument", source=line_of_caller())
    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak) for x in leaves]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(value), specs)


class _Reader:
    """Pairs a step's results with its arguments, both in order."""

    def __init__(self, names: Sequence[str], types: Sequence[Any]) -> None:
        self.names, self.types = names, types
        self.taken: list[str] = []
        self.next = 0

    def read(self, value: Any) -> Any:
        """Returns the positions of arguments and metrics in a result."""
        for place in range(self.next, len(self.names)):
            if _alike(value, self.types[place]):
                self.next = place + 1
                self.taken.append(self.names[place])
                return _Returned(self.names[place])
        if type(value) in {tuple, list}:
            return type(value)(self.read(part) for part in value)
        return _Metric(0)


def _alike(result: Any, argument: Any) -> bool:
    """Whether a result may be an argument's new value; a loss is never a learning rate's."""
    found, given = jax.tree_util.tree_leaves(result), jax.tree_util.tree_leaves(argument)
    structure: Callable[[Any], Any] = jax.tree_util.tree_structure
    if structure(result) != structure(argument):
        return False
    if not given:  # the state of plain SGD: empty states in a tuple; metrics may be {} or None
        return bool(structure(argument).num_nodes > 1)
    if jax.tree_util.all_leaves([argument]) and _is_number(argument):
        return False
    return all(
        tuple(x.shape) == tuple(y.shape) and x.dtype == y.dtype
        for x, y in zip(found, given, strict=True)
    )


def _is_number(leaf: Any) -> bool:
    return leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _others(names: Sequence[str], types: Sequence[Any], state: Sequence[str]) -> dict[str, Any]:
    return {name: x for name, x in zip(names, types, strict=True) if name not in state}


def _rows_in(
    trees: Mapping[str, Any], keys: Mapping[str, frozenset[int]] | None = None
) -> set[int]:
    """Returns the leading sizes of some arguments' leaves, except raw keys."""
    found = set()
    for name, tree in trees.items():
        left_out = (keys or {}).get(name, frozenset())
        for place, leaf in enumerate(jax.tree_util.tree_leaves(tree)):
            if leaf.shape and place not in left_out:
                found.add(leaf.shape[0])
    return found


def _is_data(name: str, trees: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether a returned argument is the batch, for example one that is reconstructed."""
    rows = _rows_in(others)
    if not rows:
        return True
    is_array = jax.tree_util.all_leaves([trees[name]])
    return is_array and _rows_in({name: trees[name]}) == rows


def _raw_keys(name: str, tree: Any, others: Mapping[str, Any]) -> frozenset[int]:
    """Returns the leaves of an argument that are raw keys, unless those are its rows."""
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    places = {
        place
        for place, leaf in enumerate(jax.tree_util.tree_leaves(tree))
        if leaf.shape == key.shape and leaf.dtype == key.dtype
    }
    said = any(word in name.lower() for word in ("key", "rng", "seed"))
    elsewhere = _rows_in({other: x for other, x in others.items() if other != name})
    return frozenset(places) if said or key.shape[0] not in elsewhere else frozenset()


def _changed(leaf: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.eval_shape(change, leaf)
    return change(jnp.asarray(leaf))


def _as_metric(results: Any, argument: str) -> Any:
    """Returns results in which an argument taken for state is a metric."""
    if isinstance(results, _Returned):
        return _Metric(0) if results.argument == argument else results
    if isinstance(results, _Metric):
        return results
    return type(results)(_as_metric(part, argument) for part in results)


def _numbered(results: Any) -> Any:
    count = iter(range(len(list(_leaves(results)))))

    def numbered(part: Any) -> Any:
        if isinstance(part, _Metric):
            return _Metric(next(count))
        return part if isinstance(part, _Returned) else type(part)(map(numbered, part))

    return numbered(results)


def _leaves(results: Any) -> Iterator[_Returned | _Metric]:
    if isinstance(results, _Returned | _Metric):
        yield results
        return
    for part in results:
        yield from _leaves(part)


def _parts(results: Any, found: Any) -> Iterator[tuple[_Returned | _Metric, Any]]:
    if isinstance(results, _Returned | _Metric):
        yield results, found
        return
    for part, value in zip(results, found, strict=True):
        yield from _parts(part, value)


def _returns_no_state(
    step: Callable[..., Any], names: Sequence[str], types: Sequence[Any], returned: Any
) -> CaptureError:
    parts = returned if isinstance(returned, tuple) else (returned,)
    called = f"{getattr(step, '__name__', 'the step')}({', '.join(names)})"
    what = f"{called} returns nothing that '{names[0]}' could become: {_described(parts)}"
    structure: Callable[[Any], Any] = jax.tree_util.tree_structure
    if any(structure(part) == structure(types[0]) for part in parts):
        what = f"{called} returns '{names[0]}' with other shapes or types"
    hint = f"return what it becomes, in the order of the arguments: return {names[0]}, ..., loss"
    return CaptureError(what, source=line_of_function(step), hint=hint)


def _described(parts: Sequence[Any]) -> str:
    kinds = [type(part).__name__ for part in parts]
    return ", ".join("an array" if "Shape" in kind else kind for kind in kinds)
