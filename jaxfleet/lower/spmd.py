"""Lowering of a function to devices: `jit` for one, `jit(shard_map)` or `pmap` for several."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "data"
OWN = -1  # instead of an axis: per device, concatenated along an additional leading axis

Body: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Layout:
    """How the arguments and the results of a body are cut: an axis, None or `OWN` per leaf.

    Attributes:
        data: for each leaf of the data, the axis that is cut, or None.
        fetched: the same for each fetched leaf.
        state: the same for each leaf of the state, as `(given, kept)`, with `OWN` too; replicated
            by default.
        written: the same for each leaf of the new state.
    """

    data: tuple[int | None, ...]
    fetched: tuple[int | None, ...]
    state: tuple[tuple[int | None, ...], tuple[int | None, ...]] | None = None
    written: tuple[int | None, ...] = ()


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
        in_specs=(
            whole if state is None else tuple(map(_specs, state)),
            _specs(layout.data),
        ),
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
