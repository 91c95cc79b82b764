"""Puts a program that every rank runs on its own rows on a mesh, in several executables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfleet.ir import Kind, Program, Variable
from jaxfleet.lower.host_arrays import device_dtype
from jaxfleet.lower.part_layout import Body
from jaxfleet.lower.part_step import PartStep
from jaxfleet.lower.spmd import AXIS
from jaxfleet.ops import Array

_CUT = PartitionSpec(AXIS)


@dataclass(frozen=True)
class OnRanks:
    """All of it the ranks' own: what goes in and comes out one after another along axis 0.

    A temporary has an axis in front, whatever its shape; a value without axes is a number a rank.

    Attributes:
        mesh: the ranks' devices.
    """

    mesh: Mesh

    @property
    def axis_name(self) -> str | None:
        """The axis that collectives run over."""
        return AXIS

    def jit(self, body: Body, reads: Sequence[Variable], writes: Sequence[Variable]) -> Any:
        """Returns a part's function for `jax.jit`: `*reads -> writes`."""

        def own(*values: Any) -> list[Any]:
            made = body([_taken(v, x) for v, x in zip(reads, values, strict=True)])
            return [_given(v, x) for v, x in zip(writes, made, strict=True)]

        return self._mapped(own, len(reads), len(writes))

    def spec(self, variable: Variable) -> jax.ShapeDtypeStruct:
        """Returns the type of the array that holds a variable between parts."""
        ranks, shape = self.mesh.size, tuple(map(_number, variable.shape))
        if variable.kind is Kind.TEMP or not shape:
            shape = (ranks, *shape)
        else:
            shape = (ranks * shape[0], *shape[1:])
        lies = NamedSharding(self.mesh, _CUT)
        return jax.ShapeDtypeStruct(shape, device_dtype(variable.dtype), sharding=lies)

    def own_shape(self, variable: Variable, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of one rank's part of what is fed."""
        return (shape[0] // self.mesh.size, *shape[1:]) if variable.shape else ()

    def lies(self, variable: Variable) -> str:
        """Returns how a variable lies on the mesh."""
        return "in front" if variable.kind is Kind.TEMP else "along axis 0"

    def fetched(self, variables: Sequence[Variable]) -> Any:
        """Returns a function that makes what is fetched of the arrays between parts."""

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
    """Returns a rank's value of what its device holds."""
    if variable.kind is Kind.TEMP:
        return value[0]
    return value if variable.shape else value.reshape(())


def _given(variable: Variable, value: Any) -> Any:
    return value[None] if variable.kind is Kind.TEMP else jnp.atleast_1d(value)


def _number(size: Any) -> int:
    assert isinstance(size, int)  # parts are made for numbers
    return size


@dataclass
class RankParts:
    """A program over a mesh, in parts: called as what `ParallelFunction.jitted` returns.

    All ranks are fed the same shapes.

    Attributes:
        step: the parts.
    """

    step: PartStep

    @classmethod
    def of(
        cls,
        program: Program,
        fetch: tuple[str, ...],
        written: tuple[str, ...],
        mesh: Mesh,
        state: tuple[Sequence[str], Sequence[str], Sequence[str]],
    ) -> "RankParts":
        """Makes the parts.

        Args:
            program: what a rank runs, with `cut` between its parts.
            fetch: variables to return.
            written: state to return.
            mesh: the ranks' devices.
            state: the names of what is taken, of what is kept, and of what is fed.
        """
        taken, kept, data = (tuple(names) for names in state)
        layout = OnRanks(mesh)
        # Executables with collectives must not overlap: on CPUs they would wait for each other.
        waits = mesh.devices.flat[0].platform == "cpu"
        return cls(PartStep(program, taken, kept, data, written, fetch, layout, waits))

    def __call__(
        self, taken: Mapping[str, Array], kept: Mapping[str, Array], data: Mapping[str, Any]
    ) -> tuple[list[Array], dict[str, Array]]:
        """Runs all ranks once; returns what is fetched, and the new state."""
        step = self.step
        new, fetched = step(
            [taken[name] for name in step.given],
            [kept[name] for name in step.kept],
            [data[name] for name in step.data],
        )
        return fetched, dict(zip(step.written, new, strict=True))
