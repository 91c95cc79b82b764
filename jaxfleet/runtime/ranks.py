"""Runs a program that every one of several ranks runs, one rank a device.

A rank has rows and state of its own: what its optimizer keeps, the running statistics of its rows,
its parameters between two meetings of `local_sgd`. Outside this module there is one value of each
variable, rank 0's, since that is what is saved and read; what the ranks have of it lies beside it
in the scope, and is taken up again by the next run, unless somebody sets the variable in between:
then all ranks take what was set.

The devices are this process's, or those of a group of processes. There each process brings and
sees the part of its own devices alone, all ranks are fed the same shapes, and "rank 0" above is
the first of the process's own.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxfleet.analysis.memory.reused import held_by
from jaxfleet.errors import FeedError, StrategyError
from jaxfleet.group import Joined
from jaxfleet.group.arrays import digest, of_each_rank, own_rows
from jaxfleet.ir import Kind, Program, Variable
from jaxfleet.lower import ParallelFunction, RankParts, device_mesh, shardings
from jaxfleet.ops import Array
from jaxfleet.ops.frames import warn_at_caller
from jaxfleet.runtime.devices import steps_must_not_overlap
from jaxfleet.runtime.parts import Fed, Fetched, Shape
from jaxfleet.runtime.prepared import Uses, donated, missing_state, says_cut, uses_of
from jaxfleet.runtime.scope import OfRanks, Scope

# What runs, and what says the shapes of what each rank fetched.
_Run: TypeAlias = tuple[Any, Callable[[Sequence[Array]], Sequence[tuple[Shape, ...]]]]
_OWN = ("gen_nccl_id", "c_comm_init")  # operators that differ from rank to rank
_MOST_SHOWN = 4  # of what is fed, in a line for other processes
_SEED = re.compile(r"\bseed=\d+")  # ranks may draw otherwise: what must be alike is broadcast


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
        fetch: variables to return.
        mesh: the ranks' devices, in order.
        uses: what it takes and gives.
        joined: this process, where the devices are those of a group.
        timeout_s: how long the others may take over a run.
        functions: jitted, by the shapes of what ranks are fed.
        digests: of what processes have agreed on, likewise.
        compared: the parameters that no run writes, as they were when processes compared them.
    """

    program: Program
    fetch: tuple[str, ...]
    mesh: Mesh
    uses: Uses
    joined: Joined | None = None
    timeout_s: float = 600.0
    functions: dict[Any, _Run] = field(default_factory=dict)
    digests: dict[Any, str] = field(default_factory=dict)
    compared: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        program: Program,
        fetch: tuple[str, ...],
        devices: Sequence[Any] | None = None,
        joined: Joined | None = None,
    ) -> "RanksProgram":
        """Makes a program ready.

        Args:
            program: what every rank runs.
            fetch: variables to return.
            devices: one for each rank; the first ones that there are, unless given.
            joined: this process, where they are those of a group.

        Raises:
            StrategyError: this process has fewer devices than there are ranks.
            FeedError: something is fetched that the program does not have, or no more when it ends.
        """
        fetch = held_by(program, fetch)
        mesh = device_mesh(_devices(program) if devices is None else devices)
        return cls(program, fetch, mesh, uses_of(program, fetch), joined)

    def run(self, data: Mapping[str, Any], scope: Scope) -> list[Array]:
        """Runs all ranks once; returns what is fetched, the ranks' values one after another.

        Args:
            data: an array for each variable to feed, with the rows of all ranks.
            scope: where the state is.

        Raises:
            FeedError: ranks cannot share the rows, or the scope lacks something.
        """
        rows = {v.name: self._rows(v, data[v.name]) for v in self.uses.data}
        numbers = {v.name for v in self.uses.data if not v.shape}
        return list(self.run_parts(Fed.even(rows, numbers, self.own), scope).values)

    def run_parts(self, fed: Fed, scope: Scope) -> Fetched:
        """Runs all ranks once, each on as many rows as it is given.

        Args:
            fed: an array for each variable to feed.
            scope: where the state is.

        Raises:
            FeedError: the scope lacks something, or ranks join what has different shapes.
        """
        if self.joined is not None:
            self.joined.next_step()
        run, shapes = self._function(fed)
        if self.joined is not None:
            self._compare_set(self.joined, scope)
        reused = donated(self.program)
        taken = {v.name: self._taken(v, scope) for v in self.uses.state if v.name in reused}
        kept = {v.name: self._own(v, scope) for v in self.uses.state if v.name not in reused}
        rows = {name: self._placed(value) for name, value in fed.rows.items()}
        fetched, new = self._run(lambda: run(taken, kept, rows), fed)
        of_ranks = shapes(fetched)
        written = {v.name: OfRanks(_shown(v, new[v.name]), new[v.name]) for v in self.uses.written}
        scope.keep_of_ranks(written)
        if self.joined is not None:
            fetched = [own_rows(value) for value in fetched]
        return Fetched(self.fetch, fetched, of_ranks[: self.own])

    def _run(self, run: Callable[[], tuple[list[Array], dict[str, Array]]], fed: Fed) -> Any:
        """Runs, and waits where devices, or processes, must not be at two runs at once."""
        if self.joined is None:
            fetched, new = run()
            if steps_must_not_overlap(self.mesh.devices.tolist()):
                jax.block_until_ready((fetched, new))
            return fetched, new
        what, agreed = self._said(fed), self.digests.get(_key(fed), "")
        return self.joined.run_step(what, run, timeout_s=self.timeout_s, digest=agreed)

    def _compare_set(self, joined: Joined, scope: Scope) -> None:
        """Warns where processes have set parameters to different values: no run makes them equal.

        It may be meant, where ranks train apart, and so is no error.
        """
        params = [v.name for v in self.uses.state if v.kind is Kind.PARAM]
        own = {name: scope.peek(name) for name in params if self._is_set(name, scope)}
        fresh = [name for name, value in own.items() if self.compared.get(name) is not value]
        if not fresh:
            return
        written = {v.name for v in self.uses.written}
        self.compared.update({name: own[name] for name in fresh if name not in written})
        said = "\n".join(f"{name} {digest(own[name])}" for name in fresh)
        what = f"comparing {len(fresh)} parameters that were set"
        first, *others = joined.gather(what, said.encode(), timeout_s=self.timeout_s)
        for rank, other in enumerate(others, start=1):
            pairs = zip(first.decode().split("\n"), other.decode().split("\n"), strict=True)
            names = [one.rpartition(" ")[0] for one, another in pairs if one != another]
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                warn_at_caller(
                    f"'{names[0]}'{more} was set to other values on rank {rank} than on rank 0, and"
                    " stays so: set it alike, such as from one file, or run the startup program"
                    " with one random_seed"
                )
                return

    def _is_set(self, name: str, scope: Scope) -> bool:
        """Tells whether a parameter has what somebody set, and not what ranks have written."""
        own = scope.of_ranks(name)
        return name in scope and (own is None or own.whole.sharding != self._sharding)

    def put(self, name: str, values: Sequence[Any], scope: Scope) -> None:
        """Gives every rank a value of its own of a variable; the scope shows the first rank's."""
        joined = np.concatenate([np.atleast_1d(value) for value in values])
        whole = self._placed(joined)
        shown = _shown(self.program.variables[name], whole)
        scope.keep_of_ranks({name: OfRanks(shown, whole)})

    def _function(self, fed: Fed) -> _Run:
        key = _key(fed)
        if key not in self.functions:
            shapes = fed.shapes if self.joined is None else self._agreed(self.joined, fed)
            written = tuple(v.name for v in self.uses.written)
            if says_cut(self.program) and all(one == shapes[0] for one in shapes):
                self.functions[key] = self._in_parts(written), self._even
            else:
                made = ParallelFunction(self.program, self.fetch, written, self.mesh, shapes)
                self.functions[key] = made.jitted(), lambda _: made.fetched
        return self.functions[key]

    def _in_parts(self, written: tuple[str, ...]) -> RankParts:
        reused, state = donated(self.program), [v.name for v in self.uses.state]
        taken = [name for name in state if name in reused]
        kept = [name for name in state if name not in reused]
        names = taken, kept, [v.name for v in self.uses.data]
        return RankParts.of(self.program, self.fetch, written, self.mesh, names)

    def _even(self, fetched: Sequence[Array]) -> Sequence[tuple[Shape, ...]]:
        """Returns the shapes of what each rank fetches, which are the same."""
        ranks = self.mesh.size
        own = tuple((value.shape[0] // ranks, *value.shape[1:]) for value in fetched)
        return (own,) * ranks

    def _agreed(self, joined: Joined, fed: Fed) -> tuple[Mapping[str, Shape], ...]:
        """Returns the shapes of what all ranks are fed, which are the same everywhere.

        Raises:
            FeedError: they are not, on this process's own devices.
            ProgramError: they are not on others, or others run another program.
        """
        first = fed.shapes[0]
        if any(shapes != first for shapes in fed.shapes):
            what = f"devices of one process of {joined.size} are fed different numbers of rows"
            raise FeedError(what, hint=f"feed a multiple of {self.own} rows")
        lines = [*(f"'{name}' is fed {list(shape)}" for name, shape in first.items())]
        lines += [f"fetched: {', '.join(self.fetch)}", *str(self.program).splitlines()]
        ranks = f"{self.mesh.size} ranks of {joined.size} processes"
        same = [_SEED.sub("", line) for line in (ranks, *lines) if not _is_own(line)]
        agreed = joined.agree(self._said(fed), same, timeout_s=self.timeout_s)
        self.digests[_key(fed)] = agreed
        return (first,) * self.mesh.size

    def _said(self, fed: Fed) -> str:
        """Returns the program and what a device is fed, as other processes are told."""
        known = [f"'{name}' {list(shape)}" for name, shape in fed.shapes[0].items() if shape]
        shown = [*known[:_MOST_SHOWN], *(["..."] if len(known) > _MOST_SHOWN else [])]
        return f"the program '{self.program.name}'" + (f" fed {', '.join(shown)}" if shown else "")

    def _rows(self, variable: Variable, value: Any) -> Any:
        """Returns a fed value that ranks can share; a scalar is one for each, or one for all."""
        ranks = self.own
        if not variable.shape:
            value = np.broadcast_to(np.asarray(value), (ranks,))
        elif np.shape(value)[0] % ranks:
            rows = np.shape(value)[0]
            what = f"'{variable.name}' is fed {rows} rows, which {ranks} ranks cannot share"
            raise FeedError(what, hint=f"feed a multiple of {ranks} rows: those of all ranks")
        return value

    def _placed(self, value: Any) -> Array:
        if isinstance(value, jax.Array) and value.sharding == self._sharding:
            return value
        if self.joined is not None:
            return of_each_rank(value, self._sharding)
        return jax.device_put(value, self._sharding)

    def _taken(self, variable: Variable, scope: Scope) -> Array:
        """Returns what each rank has of a variable, in memory that the run may take."""
        own, found = scope.of_ranks(variable.name), self._own(variable, scope)
        shares = own is not None and own.whole is found and scope.is_lent(variable.name)
        return jax.numpy.array(found, copy=True) if shares else found

    def _own(self, variable: Variable, scope: Scope) -> Array:
        """Returns what each rank has of a variable: its own, or else what the scope shows.

        Raises:
            FeedError: the scope has none.
        """
        own = scope.of_ranks(variable.name)
        if own is not None and own.whole.sharding == self._sharding:
            return own.whole
        if variable.name not in scope:
            raise missing_state(self.program, variable.name)
        value = np.atleast_1d(np.asarray(scope.peek(variable.name)))
        shape = (self.mesh.size * value.shape[0], *value.shape[1:])
        return jax.make_array_from_callback(shape, self._sharding, lambda _: value)

    @cached_property
    def own(self) -> int:
        """How many of the ranks' devices are this process's."""
        return len(self.mesh.local_devices)

    @cached_property
    def _sharding(self) -> NamedSharding:
        return shardings(self.mesh, [0])[0]


def _key(fed: Fed) -> Any:
    """Returns what a program is compiled for."""
    return tuple(tuple(shapes.items()) for shapes in fed.shapes)


def _is_own(line: str) -> bool:
    """Tells whether a line of a program's text says which rank it is of."""
    return line.startswith("program ") or any(f"{name}(" in line for name in _OWN)


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
