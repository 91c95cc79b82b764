"""Runs a program that every one of several ranks runs, one rank a device of this process.

A rank has rows and state of its own: what its optimizer keeps, the running statistics of its rows,
its parameters between two meetings of `local_sgd`. Outside this module there is one value of each
variable, rank 0's, since that is what is saved and read; what the ranks have of it lies beside it
in the scope, and is taken up again by the next run, unless somebody sets the variable in between:
then all ranks take what was set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxfleet.errors import FeedError, StrategyError
from jaxfleet.ir import Program, Variable
from jaxfleet.lower import AXIS, ProgramFunction, device_mesh, on_ranks, shardings
from jaxfleet.ops import Array
from jaxfleet.runtime.devices import steps_must_not_overlap
from jaxfleet.runtime.prepared import Uses, uses_of
from jaxfleet.runtime.scope import OfRanks, Scope


def rank_count(program: Program) -> int:
    """Returns how many ranks a program is for; 1 for one that is not for ranks."""
    if program.attrs.get("role") != "collective":
        return 1
    nranks = program.attrs.get("nranks", 1)
    assert isinstance(nranks, int)
    return nranks


@dataclass(frozen=True)
class RanksProgram:
    """A program made ready to run on all ranks, for one choice of what is fetched.

    Attributes:
        program: it.
        mesh: the ranks' devices, in order.
        function: jitted; state and data in, fetched and new state out, each cut by rank.
        uses: what it takes and gives.
    """

    program: Program
    mesh: Mesh
    function: Any
    uses: Uses

    @classmethod
    def of(cls, program: Program, fetch: tuple[str, ...]) -> "RanksProgram":
        """Makes a program ready.

        Raises:
            StrategyError: this process has fewer devices than there are ranks.
            FeedError: something is fetched that the program does not have.
        """
        uses, mesh = uses_of(program, fetch), device_mesh(_devices(program))
        run = ProgramFunction(program, (*fetch, *(v.name for v in uses.written)), AXIS)

        def one_rank(state: Any, data: Any) -> list[Any]:
            return run(state, data)[1]

        return cls(program, mesh, on_ranks(one_rank, mesh, (*uses.state, *uses.data)), uses)

    def run(self, data: Mapping[str, Any], scope: Scope) -> list[Array]:
        """Runs all ranks once; returns what is fetched, the ranks' values one after another.

        Args:
            data: an array for each variable to feed, with the rows of all ranks.
            scope: where the state is.

        Raises:
            FeedError: ranks cannot share the rows, or the scope lacks something.
        """
        cut = {v.name: self._rows(v, data[v.name]) for v in self.uses.data}
        state = {v.name: self._own(v, scope) for v in self.uses.state}
        made: list[Array] = self.function(state, cut)
        if steps_must_not_overlap(self.mesh.devices.tolist()):
            jax.block_until_ready(made)
        count = len(made) - len(self.uses.written)
        new = zip(self.uses.written, made[count:], strict=True)
        scope.keep_of_ranks({v.name: OfRanks(_shown(v, whole), whole) for v, whole in new})
        return made[:count]

    def _rows(self, variable: Variable, value: Any) -> Array:
        """Returns a fed value cut by rank; a scalar is one for each rank, or one for all."""
        ranks = self.mesh.size
        if not variable.shape:
            value = np.broadcast_to(np.asarray(value), (ranks,))
        elif np.shape(value)[0] % ranks:
            rows = np.shape(value)[0]
            what = f"'{variable.name}' is fed {rows} rows, which {ranks} ranks cannot share"
            raise FeedError(what, hint=f"feed a multiple of {ranks} rows: those of all ranks")
        return jax.device_put(value, self._sharding)

    def _own(self, variable: Variable, scope: Scope) -> Array:
        """Returns what each rank has of a variable: its own, or else what the scope shows.

        Raises:
            FeedError: the scope has none.
        """
        own = scope.of_ranks(variable.name)
        if own is not None and own.whole.sharding == self._sharding:
            return own.whole
        if variable.name not in scope:
            what = f"'{variable.name}' ({variable.type}) is not in the scope"
            hint = "run the startup program first, in the same scope"
            raise FeedError(f"{what}, and the program reads it", hint=hint)
        value = np.atleast_1d(np.asarray(scope.peek(variable.name)))
        shape = (self.mesh.size * value.shape[0], *value.shape[1:])
        return jax.make_array_from_callback(shape, self._sharding, lambda _: value)

    @cached_property
    def _sharding(self) -> NamedSharding:
        return shardings(self.mesh, [0])[0]


def _shown(variable: Variable, whole: Array) -> Array:
    """Returns rank 0's part of what all ranks have: the same memory, but for a number."""
    first = whole.addressable_shards[0].data
    return first if variable.shape else first.reshape(())


def _devices(program: Program) -> Sequence[Any]:
    """Returns the ranks' devices.

    Raises:
        StrategyError: there are fewer.
    """
    ranks, devices = rank_count(program), jax.devices()
    if len(devices) < ranks:
        rank = program.attrs.get("rank", 0)
        what = f"the program is that of rank {rank} of {ranks}, and this process has "
        what += f"{len(devices)} device{'s' * (len(devices) > 1)}, where each rank needs one"
        hint = f"on a CPU, call jf.emulate_devices({ranks}) before jax starts"
        raise StrategyError(what, hint=hint)
    return devices[:ranks]
