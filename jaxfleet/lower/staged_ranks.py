"""Runs a per-rank program over a mesh in several executables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfleet.ir import Kind, Program, Variable
from jaxfleet.lower.host_transfer import device_dtype
from jaxfleet.lower.spmd import AXIS
from jaxfleet.lower.staged import StagedStep
from jaxfleet.lower.staged_sharding import Body
from jaxfleet.ops import Array

_CUT = PartitionSpec(AXIS)


@dataclass(frozen=True)
class OnRanks:
    """The layout of values per rank: inputs and outputs are concatenated along axis 0.

    A temporary has an additional leading axis, whatever its shape; a value without axes is one
    number per rank.
    """

    mesh: Mesh  # the ranks' devices

    @property
    def axis_name(self) -> str | None:
        return AXIS

    def jit(self, body: Body, reads: Sequence[Variable], writes: Sequence[Variable]) -> Any:

        def own(*values: Any) -> list[Any]:
            made = body([_taken(v, x) for v, x in zip(reads, values, strict=True)])
            return [_given(v, x) for v, x in zip(writes, made, strict=True)]

        return self._mapped(own, len(reads), len(writes))

    def spec(self, variable: Variable) -> jax.ShapeDtypeStruct:
        ranks, shape = self.mesh.size, tuple(map(_number, variable.shape))
        if variable.kind is Kind.TEMP or not shape:
            shape = (ranks, *shape)
        else:
            shape = (ranks * shape[0], *shape[1:])
        lies = NamedSharding(self.mesh, _CUT)
        return jax.ShapeDtypeStruct(shape, device_dtype(variable.dtype), sharding=lies)

    def own_shape(self, variable: Variable, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of one rank's part of the fed data."""
        return (shape[0] // self.mesh.size, *shape[1:]) if variable.shape else ()

    def lies(self, variable: Variable) -> str:
        return "in front" if variable.kind is Kind.TEMP else "along axis 0"

    def fetched(self, variables: Sequence[Variable]) -> Any:

        def own(*values: Any) -> list[Any]:
            pairs = zip(variables, values, strict=True)
            return [jnp.atleast_1d(_taken(v, x)) for v, x in pairs]

        return jax.jit(self._mapped(own, len(variables), len(variables)))

    def _mapped(self, own: Any, reads: int, writes: int) -> Any:
        return jax.shard_map(
            own,
            mesh=self.mesh,
            in_specs=(_CUT,) * reads,
            out_specs=[_CUT] * writes,
            check_vma=False,
        )


def _taken(variable: Variable, value: Any) -> Any:
    """Returns a rank's value from its device's array."""
    if variable.kind is Kind.TEMP:
        return value[0]
    return value if variable.shape else value.reshape(())


def _given(variable: Variable, value: Any) -> Any:
    return value[None] if variable.kind is Kind.TEMP else jnp.atleast_1d(value)


def _number(size: Any) -> int:
    assert isinstance(size, int)  # parts are made for numbers
    return size


@dataclass
class StagedRanks:
    """A program over a mesh, in parts, with the signature of `ParallelFunction.jitted`'s result.

    All ranks are fed the same shapes.
    """

    step: StagedStep  # the parts

    @classmethod
    def of(
        cls,
        program: Program,
        fetch: tuple[str, ...],
        written: tuple[str, ...],
        mesh: Mesh,
        state: tuple[Sequence[str], Sequence[str], Sequence[str]],
    ) -> "StagedRanks":
        """Builds the parts of a rank's program, which has `cut` between them.

        `state` contains the names of the taken state, the kept state, and the data.
        """
        taken, kept, data = (tuple(names) for names in state)
        layout = OnRanks(mesh)
        # Executables with collectives must not overlap: on CPUs they would wait for each other.
        waits = mesh.devices.flat[0].platform == "cpu"
        return cls(StagedStep(program, taken, kept, data, written, fetch, layout, waits))

    def __call__(
        self, taken: Mapping[str, Array], kept: Mapping[str, Array], data: Mapping[str, Any]
    ) -> tuple[list[Array], dict[str, Array]]:
        """Runs all ranks once; returns the fetched values and the new state."""
        step = self.step
        new, fetched = step(
            [taken[name] for name in step.given],
            [kept[name] for name in step.kept],
            [data[name] for name in step.data],
        )
        return fetched, dict(zip(step.written, new, strict=True))
