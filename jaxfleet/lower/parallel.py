"""Puts a program that every rank runs on its own rows on a mesh, as one XLA program."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxfleet.ir import Program
from jaxfleet.lower.function import check_types
from jaxfleet.lower.sizes import bind_sizes
from jaxfleet.lower.spmd import AXIS
from jaxfleet.lower.uneven import Shape, Variant, run_uneven
from jaxfleet.ops import Array, Interpreter

Values: TypeAlias = dict[str, Array]


@dataclass(frozen=True)
class ParallelFunction:
    """A program over a mesh, for one way that rows are shared out.

    Every value, state too, goes in and comes out as the ranks' own, one after another along axis
    0; where shapes differ, each is padded to the largest. A value without axes is a number a rank.

    Attributes:
        program: what a rank runs.
        fetch: variables to return.
        written: state to return.
        mesh: the ranks' devices.
        fed: for each rank, the shapes of what it is fed, in the same order.
        fetched: for each rank, the shapes of what it fetches; known once the function was traced.
    """

    program: Program
    fetch: tuple[str, ...]
    written: tuple[str, ...]
    mesh: Mesh
    fed: tuple[Mapping[str, Shape], ...]
    fetched: list[tuple[Shape, ...]] = field(default_factory=list)

    def jitted(self) -> Any:
        """Returns the function: `(state to take, state to keep, data) -> (fetched, new state)`.

        It is compiled when it first runs. The memory of its first argument becomes the new state.
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
        """Runs the program, and notes the shapes of what is fetched."""
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

    def _variant(self, given: Values, fed: Mapping[str, Shape]) -> Variant:
        """Returns what a rank runs by that is fed these shapes."""
        variables = self.program.variables
        check_types([(variables[name], value) for name, value in given.items()])
        shapes = {**{name: value.shape for name, value in given.items()}, **fed}
        sizes = bind_sizes((variables[name], shape) for name, shape in shapes.items())
        return Variant(Interpreter(self.program, sizes, AXIS), shapes)
