"""Puts a function on devices: `jit` for one, `jit(shard_map)` for several, or `pmap` so spelled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "data"

Body: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Layout:
    """Says how the second argument and the second result of a body are cut.

    The first of each, the state, is on every device.

    Attributes:
        data: for each leaf of the data, the axis that is cut, or None.
        fetched: the same for each leaf of what is fetched.
    """

    data: tuple[int | None, ...]
    fetched: tuple[int | None, ...]


def device_mesh(devices: Sequence[Any]) -> Mesh:
    """Returns the devices in a row, under the axis name that collectives use."""
    return Mesh(np.asarray(devices), (AXIS,))


def shardings(mesh: Mesh, axes: Sequence[int | None]) -> list[NamedSharding]:
    """Returns where arrays that are cut along these axes lie."""
    return [NamedSharding(mesh, axis_spec(axis)) for axis in axes]


def with_shard_map(body: Body, mesh: Mesh, layout: Layout) -> Body:
    """Returns a body that runs on every device of a mesh, on flat lists of leaves."""
    whole = PartitionSpec()
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(whole, [axis_spec(axis) for axis in layout.data]),
        out_specs=(whole, [axis_spec(axis) for axis in layout.fetched]),
        check_vma=False,
    )


def with_pmap(body: Body, devices: Sequence[Any], layout: Layout) -> Body:
    """Returns the same through `jax.pmap`, for those who want it spelled so.

    `pmap` wants the devices as an axis of their own, which the reshapes add and take away; they
    move no data. Under `jit`, which gives it donation and shardings, it is a `shard_map`.
    """
    count = len(devices)
    mapped = jax.pmap(
        body,
        axis_name=AXIS,
        in_axes=(None, list(layout.data)),
        out_axes=(None, list(layout.fetched)),
        devices=list(devices),
    )

    def run(state: Any, data: Sequence[Any]) -> tuple[Any, Any]:
        cut = [_divide(x, axis, count) for x, axis in zip(data, layout.data, strict=True)]
        new_state, fetched = mapped(state, cut)
        joined = [_join(x, axis) for x, axis in zip(fetched, layout.fetched, strict=True)]
        return new_state, joined

    return run


def _divide(value: Any, axis: int | None, count: int) -> Any:
    if axis is None:
        return value
    shape = value.shape
    return value.reshape(*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :])


def _join(value: Any, axis: int | None) -> Any:
    if axis is None:
        return value
    shape = value.shape
    return value.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def axis_spec(axis: int | None) -> PartitionSpec:
    """Returns how an array that is cut along an axis, or whole, lies on the mesh."""
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS)
