"""Layout of the values of a staged step: on one device, or sharded over a mesh."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxfleet.ir import Kind, Variable
from jaxfleet.lower.host_transfer import device_dtype
from jaxfleet.lower.spmd import AXIS, axis_spec, device_mesh

Body = Callable[[Sequence[Any]], list[Any]]


class StagedLayout(Protocol):
    """Builds executables of the parts of a step, for one layout of values."""

    @property
    def axis_name(self) -> str | None:
        """The mesh axis that parts run over, or None on one device."""
        ...

    def jit(self, body: Body, reads: Sequence[Variable], writes: Sequence[Variable]) -> Any:
        """Returns a part's function for `jax.jit`: `*reads -> writes`."""
        ...

    def spec(self, variable: Variable) -> jax.ShapeDtypeStruct:
        """Returns the type of the array that holds a variable between parts."""
        ...

    def own_shape(self, variable: Variable, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of one device's part of the fed data."""
        ...

    def lies(self, variable: Variable) -> str:
        """Returns the layout of a variable: equal parts with equal layouts share an executable."""
        ...

    def fetched(self, variables: Sequence[Variable]) -> Any:
        """Returns a function from the arrays between parts to the fetched values, or None."""
        ...


@dataclass(frozen=True)
class OnOne:
    """All values on one device."""

    device: Any

    @property
    def axis_name(self) -> str | None:
        return None

    def jit(self, body: Body, _: Sequence[Variable], __: Sequence[Variable]) -> Any:
        return lambda *values: body(values)

    def spec(self, variable: Variable) -> jax.ShapeDtypeStruct:
        return _struct(variable, variable.shape, SingleDeviceSharding(self.device))

    def own_shape(self, _: Variable, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape)

    def lies(self, _: Variable) -> str:
        return str(self.device)

    def fetched(self, _: Sequence[Variable]) -> Any:
        return None


@dataclass(frozen=True)
class OnMesh:
    """State replicated; data cut; a temporary cut along an additional leading axis.

    The value of a temporary may differ between devices, whatever its shape.
    """

    devices: tuple[Any, ...]  # in a row
    axes: Mapping[str, int]  # the axis of inputs and outputs that are cut
    # State of which every device has its own; its layout is that of temporaries
    own: tuple[str, ...] = ()

    @property
    def axis_name(self) -> str | None:
        return AXIS

    @property
    def mesh(self) -> Mesh:
        """The devices under their axis name."""
        return device_mesh(self.devices)

    def jit(self, body: Body, reads: Sequence[Variable], writes: Sequence[Variable]) -> Any:

        def own(*values: Any) -> list[Any]:
            taken = [x[0] if self._is_own(v) else x for v, x in zip(reads, values, strict=True)]
            made = body(taken)
            return [x[None] if self._is_own(v) else x for v, x in zip(writes, made, strict=True)]

        return jax.shard_map(
            own,
            mesh=self.mesh,
            in_specs=tuple(self._cut(v) for v in reads),
            out_specs=[self._cut(v) for v in writes],
            check_vma=False,
        )

    def spec(self, variable: Variable) -> jax.ShapeDtypeStruct:
        shape: list[Any] = list(variable.shape)
        if self._is_own(variable):
            shape.insert(0, len(self.devices))
        elif variable.name in self.axes:
            shape[self.axes[variable.name]] *= len(self.devices)
        return _struct(variable, shape, NamedSharding(self.mesh, self._cut(variable)))

    def own_shape(self, variable: Variable, shape: Sequence[int]) -> tuple[int, ...]:
        axis, count = self.axes.get(variable.name), len(self.devices)
        return tuple(n // count if at == axis else n for at, n in enumerate(shape))

    def lies(self, variable: Variable) -> str:
        return f"{self._cut(variable)} {variable.kind.value}"

    def fetched(self, variables: Sequence[Variable]) -> Any:

        def own(*values: Any) -> list[Any]:
            pairs = zip(variables, values, strict=True)
            return [x[0] if self._is_own(v) else x for v, x in pairs]

        return jax.jit(
            jax.shard_map(
                own,
                mesh=self.mesh,
                in_specs=tuple(self._cut(v) for v in variables),
                out_specs=[axis_spec(self.axes.get(v.name)) for v in variables],
                check_vma=False,
            )
        )

    def _cut(self, variable: Variable) -> PartitionSpec:
        if self._is_own(variable):
            return PartitionSpec(AXIS)
        return axis_spec(self.axes.get(variable.name))

    def _is_own(self, variable: Variable) -> bool:
        return variable.kind is Kind.TEMP or variable.name in self.own


def layout_for(
    devices: Sequence[Any], axes: Mapping[str, int], own: tuple[str, ...] = ()
) -> StagedLayout:
    """Returns the layout of the values of a step in parts.

    `axes` are those of inputs and outputs that are cut; each device has its own state `own`.
    """
    return OnOne(devices[0]) if len(devices) == 1 else OnMesh(tuple(devices), axes, own)


def _struct(variable: Variable, shape: Sequence[Any], sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), device_dtype(variable.dtype), sharding=sharding)
