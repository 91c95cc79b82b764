"""Lowering of a function to devices: `jit` for one, `jit(shard_map)` or `pmap` for several."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfleet.errors import FeedError
from jaxfleet.ir import Operator, Program
from jaxfleet.lower.function import bind_sizes, check_types
from jaxfleet.ops import Array, Interpreter, find_op

AXIS = "data"
OWN = -1  # instead of an axis: per device, concatenated along an additional leading axis

Body: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]
Shape: TypeAlias = tuple[int, ...]
UnevenValues: TypeAlias = Mapping[str, Array]
Values: TypeAlias = dict[str, Array]


@dataclass(frozen=True)
class Layout:
    """How the arguments and the results of a body are cut: an axis, None or `OWN` per leaf."""

    data: tuple[int | None, ...]  # for each leaf of the data, the axis that is cut, or None
    fetched: tuple[int | None, ...]  # the same for each fetched leaf
    # The same for each leaf of the state, as `(given, kept)`, with `OWN` too; replicated by default
    state: tuple[tuple[int | None, ...], tuple[int | None, ...]] | None = None
    written: tuple[int | None, ...] = ()  # the same for each leaf of the new state


def device_mesh(devices: Sequence[Any]) -> Mesh:
    """Returns the devices in a row, under the axis name that collectives use."""
    return Mesh(np.asarray(devices), (AXIS,))


def shardings(mesh: Mesh, axes: Sequence[int | None]) -> list[NamedSharding]:
    """Returns the shardings of arrays that are cut along these axes."""
    return [NamedSharding(mesh, axis_spec(axis)) for axis in axes]


def with_shard_map(body: Body, mesh: Mesh, layout: Layout) -> Body:
    """Returns a body that runs on every device of a mesh, on flat lists of leaves."""
    whole: Any = PartitionSpec()
    state, written = layout.state, layout.written
    return jax.shard_map(
        _without_front(body, layout),
        mesh=mesh,
        in_specs=(whole if state is None else tuple(map(_specs, state)), _specs(layout.data)),
        out_specs=(whole if state is None else _specs(written), _specs(layout.fetched)),
        check_vma=False,
    )


def _without_front(body: Body, layout: Layout) -> Body:
    """Returns a body that is called with each device's own values without the leading axis."""
    state = layout.state
    if state is None or OWN not in {*state[0], *state[1], *layout.written}:
        return body

    def run(values: Any, data: Sequence[Any]) -> tuple[Any, Any]:
        pairs = [zip(xs, axes, strict=True) for xs, axes in zip(values, state, strict=True)]
        own = [[x[0] if axis == OWN else x for x, axis in part] for part in pairs]
        new, fetched = body(tuple(own), data)
        back = zip(new, layout.written, strict=True)
        return [x[None] if axis == OWN else x for x, axis in back], fetched

    return run


def _specs(axes: Sequence[int | None]) -> list[PartitionSpec]:
    return [axis_spec(axis) for axis in axes]


def with_pmap(body: Body, devices: Sequence[Any], layout: Layout) -> Body:
    """Returns the same through `jax.pmap`, for callers that require it.

    `pmap` expects the devices as a separate axis, which the reshapes add and remove; they move no
    data. Under `jit`, which gives it donation and shardings, it is a `shard_map`.
    """
    count, state_axes = len(devices), layout.state
    mapped = jax.pmap(
        body,
        axis_name=AXIS,
        in_axes=(_in_front(state_axes), list(layout.data)),
        out_axes=(
            None if state_axes is None else _in_front((layout.written,))[0],
            list(layout.fetched),
        ),
        devices=list(devices),
    )

    def run(state: Any, data: Sequence[Any]) -> tuple[Any, Any]:
        cut = _each(_divide, data, layout.data, count)
        if state_axes is not None:
            pairs = zip(state, state_axes, strict=True)
            state = tuple(_each(_divide, part, axes, count) for part, axes in pairs)
        new_state, fetched = mapped(state, cut)
        if state_axes is not None:
            new_state = _each(_join, new_state, layout.written, count)
        return new_state, _each(_join, fetched, layout.fetched, count)

    return run


def _in_front(parts: Any) -> Any:
    """Returns the axes for `pmap`, which removes the leading axis itself."""
    if parts is None:
        return None
    return tuple([0 if axis == OWN else axis for axis in axes] for axes in parts)


def _each(
    change: Callable[..., Any], values: Sequence[Any], axes: Sequence[int | None], count: int
) -> list[Any]:
    return [change(x, axis, count) for x, axis in zip(values, axes, strict=True)]


def _divide(value: Any, axis: int | None, count: int) -> Any:
    if axis is None or axis == OWN:
        return value
    shape = value.shape
    return value.reshape(*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :])


def _join(value: Any, axis: int | None, _: int) -> Any:
    if axis is None or axis == OWN:
        return value
    shape = value.shape
    return value.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def axis_spec(axis: int | None) -> PartitionSpec:
    """Returns the spec of an array that is cut along an axis, replicated, or per device."""
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS)


@dataclass(frozen=True)
class UnevenVariant:
    """The shapes on some of the devices."""

    interpreter: Interpreter  # runs operators with the sizes of these devices
    shapes: dict[str, Shape]  # of each value so far

    def run(
        self, ops: Sequence[Operator], values: UnevenValues, wanted: Iterable[str]
    ) -> UnevenValues:
        """Returns the results of operators on values of the variant's own shapes."""
        program = self.interpreter.program
        part = program.with_block(program.root.with_ops(ops))
        names = list(wanted)
        made = replace(self.interpreter, program=part).run(values, keep=names)
        return {name: made[name] for name in names}

    def predict(
        self, ops: Sequence[Operator], values: UnevenValues, wanted: Iterable[str]
    ) -> dict[str, Shape]:
        """Returns the shapes of the results of operators."""
        like = {n: jax.ShapeDtypeStruct(self.shapes[n], v.dtype) for n, v in values.items()}
        made = jax.eval_shape(lambda given: self.run(ops, given, wanted), like)
        return {name: value.shape for name, value in made.items()}

    def branch(
        self, ops: Sequence[Operator], wanted: Mapping[str, Shape]
    ) -> Callable[[UnevenValues], UnevenValues]:
        """Returns operators as a function of padded values to values padded to these shapes."""

        def run(values: UnevenValues) -> UnevenValues:
            own = {name: _cut(value, self.shapes[name]) for name, value in values.items()}
            return {n: _pad(v, wanted[n]) for n, v in self.run(ops, own, wanted).items()}

        return run


def run_uneven(
    program: Program,
    variants: Sequence[UnevenVariant],
    which: Array,
    values: UnevenValues,
    keep: Iterable[str],
) -> dict[str, Array]:
    """Runs block 0 on padded values and returns the padded final values of `keep`.

    `which` is the index of this device's variant; the shapes of all values are added to the
    variants. A collective over values whose shapes differ between devices is a FeedError.
    """
    held = dict(values)
    for section in _sections(program, keep):
        if section.is_collective:
            _check_alike(section.ops, variants)
            made = variants[0].run(section.ops, held, section.makes)
            shapes = [{name: value.shape for name, value in made.items()}] * len(variants)
        else:
            read = {name: held[name] for name in section.reads if name in held}
            shapes = [x.predict(section.ops, read, section.makes) for x in variants]
            largest = {name: _largest([s[name] for s in shapes]) for name in section.makes}
            branches = [variant.branch(section.ops, largest) for variant in variants]
            made = lax.switch(which, branches, read)
        held.update(made)
        for variant, more in zip(variants, shapes, strict=True):
            variant.shapes.update(more)
    return held


@dataclass(frozen=True)
class _Section:
    """Consecutive operators."""

    ops: tuple[Operator, ...]
    is_collective: bool  # all devices run them together
    reads: frozenset[str]  # the names that they read
    makes: tuple[str, ...]  # the names that they write and that are read later


def _sections(program: Program, keep: Iterable[str]) -> Iterator[_Section]:
    """Yields the operators of block 0 in order, collectives separate from the others."""
    groups = [
        (is_collective, tuple(ops))
        for is_collective, ops in groupby(
            program.root.ops, lambda op: find_op(op).traits.is_collective
        )
    ]
    wanted, found = set(keep), []
    for is_collective, ops in reversed(groups):
        written = dict.fromkeys(name for op in ops for name in op.writes)
        makes = tuple(name for name in written if name in wanted)
        # A sub-block may write a variable in part only, so its old value is read.
        reads = frozenset(n for op in ops for n in (*op.reads, *(op.writes if op.blocks else ())))
        wanted |= reads
        found.append(_Section(ops, is_collective, reads, makes))
    return reversed(found)


def _check_alike(ops: Sequence[Operator], variants: Sequence[UnevenVariant]) -> None:
    for op in ops:
        for name in op.reads:
            shapes = {variant.shapes[name] for variant in variants}
            if len(shapes) > 1:
                what = f"'{name}' has different shapes on the devices, {sorted(shapes)},"
                hint = "feed all devices equally many rows"
                raise FeedError(f"{what} and '{op.type}' joins them", op=op, hint=hint)


def _largest(shapes: Sequence[Shape]) -> Shape:
    return tuple(max(sizes) for sizes in zip(*shapes, strict=True))


def _cut(value: Array, shape: Shape) -> Array:
    return value if value.shape == shape else value[tuple(slice(0, size) for size in shape)]


def _pad(value: Array, shape: Shape) -> Array:
    if value.shape == shape:
        return value
    return jnp.pad(value, [(0, wide - size) for size, wide in zip(value.shape, shape, strict=True)])


@dataclass(frozen=True)
class ParallelFunction:
    """A program over a mesh, for one division of the rows.

    Every value, state included, is per rank and concatenated along axis 0; if shapes differ, each
    is padded to the largest. A value without axes becomes one number per rank.
    """

    program: Program  # the program of a rank
    fetch: tuple[str, ...]  # variables to return
    written: tuple[str, ...]  # state to return
    mesh: Mesh  # the ranks' devices
    fed: tuple[Mapping[str, Shape], ...]  # for each rank, the shapes of its data, in the same order
    # For each rank, the shapes of its fetched values; known once the function was traced
    fetched: list[tuple[Shape, ...]] = field(default_factory=list)

    def jitted(self) -> Any:
        """Returns the function: `(state to take, state to keep, data) -> (fetched, new state)`.

        It is compiled at its first call. The memory of its first argument becomes the new state.
        """
        cut = PartitionSpec(AXIS)
        body = jax.shard_map(
            self._body, mesh=self.mesh, in_specs=(cut, cut, cut), out_specs=cut, check_vma=False
        )
        return jax.jit(body, donate_argnums=(0,))

    def _body(self, taken: Values, kept: Values, data: Values) -> tuple[list[Array], Values]:
        state = {name: self._own(name, value) for name, value in {**taken, **kept}.items()}
        values = self._run(state, {name: self._own(name, value) for name, value in data.items()})
        fetched = [jnp.atleast_1d(values[name]) for name in self.fetch]
        return fetched, {name: jnp.atleast_1d(values[name]) for name in self.written}

    def _own(self, name: str, value: Array) -> Array:
        return value if self.program.variables[name].shape else value.reshape(())

    def _run(self, state: Values, data: Values) -> Values:
        """Runs the program, and records the shapes of the fetched values."""
        keep, given = (*self.written, *self.fetch), {**state, **data}
        places: dict[tuple[Shape, ...], int] = {}
        which = [places.setdefault(tuple(fed.values()), len(places)) for fed in self.fed]
        variants = [self._variant(given, self.fed[which.index(n)]) for n in range(len(places))]
        if len(variants) == 1:
            values = variants[0].interpreter.run(given, keep=keep)
            variants[0].shapes.update((name, values[name].shape) for name in self.fetch)
        else:
            mine = jnp.asarray(which, jnp.int32)[lax.axis_index(AXIS)]
            values = run_uneven(self.program, variants, mine, given, keep)
        shapes = [tuple(x.shapes[name] or (1,) for name in self.fetch) for x in variants]
        self.fetched[:] = [shapes[place] for place in which]
        return values

    def _variant(self, given: Values, fed: Mapping[str, Shape]) -> UnevenVariant:
        """Returns the variant of a rank with data of these shapes."""
        variables = self.program.variables
        check_types([(variables[name], value) for name, value in given.items()])
        shapes = {**{name: value.shape for name, value in given.items()}, **fed}
        sizes = bind_sizes((variables[name], shape) for name, shape in shapes.items())
        return UnevenVariant(Interpreter(self.program, sizes, AXIS), shapes)
