"""Where the values of a step in parts lie: on one device, or each device's own on a mesh."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxfleet.ir import Kind, Variable
from jaxfleet.lower.host_arrays import device_dtype
from jaxfleet.lower.spmd import AXIS, axis_spec, device_mesh

Body = Callable[[Sequence[Any]], list[Any]]


class PartLayout(Protocol):
    """Makes executables of the parts of a step, and knows how their values lie."""

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
        """Returns the shape of one device's part of what is fed."""
        ...

    def lies(self, variable: Variable) -> str:
        """Returns how a variable lies: parts that do the same to what lies alike are one."""
        ...

    def fetched(self, variables: Sequence[Variable]) -> Any:
        """Returns a function that makes what is fetched of the arrays between parts, or None."""
        ...


@dataclass(frozen=True)
class OnOne:
    """All on one device.

    Attributes:
        device: it.
    """

    device: Any

    @property
    def axis_name(self) -> str | None:
        """None: there is no mesh."""
        return None

    def jit(self, body: Body, _: Sequence[Variable], __: Sequence[Variable]) -> Any:
        """Returns a part's function for `jax.jit`."""
        return lambda *values: body(values)

    def spec(self, variable: Variable) -> jax.ShapeDtypeStruct:
        """Returns the type of the array that holds a variable."""
        return _struct(variable, variable.shape, SingleDeviceSharding(self.device))

    def own_shape(self, _: Variable, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape as it is."""
        return tuple(shape)

    def lies(self, _: Variable) -> str:
        """Returns which device it is."""
        return str(self.device)

    def fetched(self, _: Sequence[Variable]) -> Any:
        """Returns None: what is fetched is as it is."""
        return None


@dataclass(frozen=True)
class OnMesh:
    """State on every device; data cut; a temporary with an axis in front, along which it is cut.

    What a temporary holds may differ between devices, whatever its shape.

    Attributes:
        devices: in a row.
        axes: the axis that is cut, of the variables that go in or come out cut.
        own: state of which every device has its own; it lies as temporaries do.
    """

    devices: tuple[Any, ...]
    axes: Mapping[str, int]
    own: tuple[str, ...] = ()

    @property
    def axis_name(self) -> str | None:
        """The axis that collectives run over."""
        return AXIS

    @property
    def mesh(self) -> Mesh:
        """The devices under their axis name."""
        return device_mesh(self.devices)

    def jit(self, body: Body, reads: Sequence[Variable], writes: Sequence[Variable]) -> Any:
        """Returns a part's function for `jax.jit`."""

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
        """Returns the type of the array that holds a variable."""
        shape: list[Any] = list(variable.shape)
        if self._is_own(variable):
            shape.insert(0, len(self.devices))
        elif variable.name in self.axes:
            shape[self.axes[variable.name]] *= len(self.devices)
        return _struct(variable, shape, NamedSharding(self.mesh, self._cut(variable)))

    def own_shape(self, variable: Variable, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of one device's part of what is fed."""
        axis, count = self.axes.get(variable.name), len(self.devices)
        return tuple(n // count if at == axis else n for at, n in enumerate(shape))

    def lies(self, variable: Variable) -> str:
        """Returns how a variable lies on the mesh."""
        return f"{self._cut(variable)} {variable.kind.value}"

    def fetched(self, variables: Sequence[Variable]) -> Any:
        """Returns a function that makes what is fetched of the arrays between parts."""

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
) -> PartLayout:
    """Returns how the values of a step in parts lie.

    Args:
        devices: what it runs on.
        axes: the axis that is cut, of the variables that go in or come out cut.
        own: state of which every device has its own.
    """
    return OnOne(devices[0]) if len(devices) == 1 else OnMesh(tuple(devices), axes, own)


def _struct(variable: Variable, shape: Sequence[Any], sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), device_dtype(variable.dtype), sharding=sharding)
