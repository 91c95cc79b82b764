"""Executor of a program that several ranks run, one rank a device.

Each rank has rows and state of its own: its optimizer's state, the running statistics of its rows,
its parameters between two exchanges of `local_sgd`. Outside this module each variable has one
value, rank 0's, which is saved and read. The ranks' values lie beside it in the scope for the next
run, unless the variable is set in between: then all ranks take the new value.

The devices are this process's, or those of a group of processes. There each process feeds and sees
only the part of its own devices, all ranks are fed the same shapes, and "rank 0" above is the
first of the process's own.
"""

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxfleet.analysis.memory.final_variables import final_variables
from jaxfleet.cluster import ProcessGroup
from jaxfleet.cluster.global_arrays import digest, local_rows, of_each_rank
from jaxfleet.errors import FeedError, StrategyError
from jaxfleet.ir import Kind, Program, Variable
from jaxfleet.lower import ParallelFunction, StagedRanks, device_mesh, shardings
from jaxfleet.ops import Array
from jaxfleet.ops.user_frames import warn_at_caller
from jaxfleet.runtime.compiled_program import Uses, donated, missing_state, says_cut, uses_of
from jaxfleet.runtime.devices import steps_must_not_overlap
from jaxfleet.runtime.program_timing import FirstRunTimer
from jaxfleet.runtime.scope import OfRanks, Scope

Shape: TypeAlias = tuple[int, ...]
# The jitted function, and the function that returns the shapes of each rank's fetches.
_Run: TypeAlias = tuple[Any, Callable[[Sequence[Array]], Sequence[tuple[Shape, ...]]]]
_OWN = ("gen_nccl_id", "c_comm_init")  # operators that differ from rank to rank
_MOST_SHOWN = 4  # feeds, in a line for other processes
_SEED = re.compile(r"\bseed=\d+")  # ranks may draw apart: what must match is broadcast


@dataclass(frozen=True)
class Fed:
    """Feeds of all ranks."""

    rows: Mapping[str, Any]  # by name, the ranks' feeds along axis 0, each padded to the largest
    shapes: tuple[Mapping[str, Shape], ...]  # for each rank, the unpadded shapes

    @classmethod
    def even(cls, rows: Mapping[str, Any], numbers: Container[str], ranks: int) -> "Fed":
        """Divides rows evenly among ranks; `numbers` are names with one scalar for each rank."""
        each = {
            name: () if name in numbers else (len(x) // ranks, *np.shape(x)[1:])
            for name, x in rows.items()
        }
        return cls(rows, (each,) * ranks)

    @classmethod
    def of(cls, parts: Sequence[Mapping[str, Any]]) -> "Fed":
        """Joins the ranks' feeds, which have the same names."""
        names = list(parts[0])
        shapes = tuple({name: np.shape(part[name]) for name in names} for part in parts)
        return cls({name: _joined([part[name] for part in parts]) for name in names}, shapes)


def _joined(values: Sequence[Any]) -> np.ndarray:
    parts = [np.atleast_1d(value) for value in values]
    shapes = [np.shape(part) for part in parts]
    if len(set(shapes)) == 1:
        return np.concatenate(parts)  # the common case: even padding by nothing takes time
    largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    wide = [[(0, most - n) for n, most in zip(s, largest, strict=True)] for s in shapes]
    return np.concatenate([np.pad(p, w) for p, w in zip(parts, wide, strict=True)])


@dataclass(frozen=True)
class Fetched:
    """Results of all ranks, in the order of the fetch list."""

    names: Sequence[str]  # of the fetches
    values: Sequence[Array]  # the ranks' values along axis 0, padded to the largest
    shapes: Sequence[Sequence[Shape]]  # for each rank, the unpadded shapes

    def first(self, count: int) -> "Fetched":
        shapes = [own[:count] for own in self.shapes]
        return Fetched(self.names[:count], self.values[:count], shapes)

    def parts(self) -> list[list[np.ndarray]]:
        """Returns for each fetch a list of the ranks' values."""
        return [self._parts(place) for place in range(len(self.values))]

    def merged(self) -> list[np.ndarray]:
        """Returns each fetch with the ranks' values concatenated along axis 0.

        Raises:
            FeedError: they differ in another axis.
        """
        return [self._merged(place) for place in range(len(self.values))]

    def _merged(self, place: int) -> np.ndarray:
        if len({tuple(own[place]) for own in self.shapes}) == 1:
            return np.array(self.values[place])
        parts = self._parts(place)
        if len({part.shape[1:] for part in parts}) > 1:
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            what = f"'{self.names[place]}' cannot be joined along axis 0, it is {shapes}"
            raise FeedError(what, hint="run with return_merged=False")
        return np.concatenate(parts)

    def _parts(self, place: int) -> list[np.ndarray]:
        padded = np.split(np.asarray(self.values[place]), len(self.shapes))
        cuts = [tuple(slice(0, size) for size in own[place]) for own in self.shapes]
        return [part[cut].copy() for part, cut in zip(padded, cuts, strict=True)]


def rank_count(program: Program) -> int:
    """Returns the number of ranks that a program is for; 1 for an ordinary program."""
    if program.attrs.get("role") != "collective":
        return 1
    nranks = program.attrs.get("nranks", 1)
    assert isinstance(nranks, int)
    return nranks


@dataclass(frozen=True)
class RanksProgram:
    """A program compiled for all ranks, for one choice of fetches."""

    program: Program  # the program
    fetch: tuple[str, ...]  # variables to return
    mesh: Mesh  # the ranks' devices, in order
    uses: Uses  # its inputs and outputs
    joined: ProcessGroup | None = None  # this process, if the devices are those of a group
    timeout_s: float = 600.0  # deadline of a run for the other processes
    # Jitted, by the shapes of the ranks' feeds
    functions: dict[Any, _Run] = field(default_factory=dict)
    # Agreed with the other processes, likewise
    digests: dict[Any, str] = field(default_factory=dict)
    # Parameters that no run writes, as of the last comparison of processes
    compared: dict[str, Any] = field(default_factory=dict)
    timer: FirstRunTimer | None = None  # if the program is timed for its dump

    @classmethod
    def of(
        cls,
        program: Program,
        fetch: tuple[str, ...],
        devices: Sequence[Any] | None = None,
        joined: ProcessGroup | None = None,
        timer: FirstRunTimer | None = None,
    ) -> "RanksProgram":
        """Compiles a program; `devices`, by default the first ones, are one for each rank.

        A `timer` times its first run, if all ranks are of this process.

        Raises:
            StrategyError: this process has fewer devices than there are ranks.
            FeedError: a fetched variable does not exist, or is dead at the end.
        """
        fetch = final_variables(program, fetch)
        mesh = device_mesh(_devices(program) if devices is None else devices)
        timer = timer if joined is None else None
        return cls(program, fetch, mesh, uses_of(program, fetch), joined, timer=timer)

    def run(self, data: Mapping[str, Any], scope: Scope) -> list[Array]:
        """Runs all ranks once; returns the fetches, the ranks' values concatenated.

        `data` has the rows of all ranks for each variable to feed.

        Raises:
            FeedError: ranks cannot share the rows, or the scope lacks a variable.
        """
        rows = {v.name: self._rows(v, data[v.name]) for v in self.uses.data}
        numbers = {v.name for v in self.uses.data if not v.shape}
        return list(self.run_parts(Fed.even(rows, numbers, self.own), scope).values)

    def run_parts(self, fed: Fed, scope: Scope) -> Fetched:
        """Runs all ranks once, each on its own number of rows.

        Raises:
            FeedError: the scope lacks a variable, or ranks join values of different shapes.
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
        if self.timer is not None:
            self.timer.look(run, taken, kept, rows, ranks=self.mesh.size)
        fetched, new = self._run(lambda: run(taken, kept, rows), fed)
        of_ranks = shapes(fetched)
        written = {v.name: OfRanks(_shown(v, new[v.name]), new[v.name]) for v in self.uses.written}
        scope.keep_of_ranks(written)
        if self.joined is not None:
            fetched = [local_rows(value) for value in fetched]
        return Fetched(self.fetch, fetched, of_ranks[: self.own])

    def _run(self, run: Callable[[], tuple[list[Array], dict[str, Array]]], fed: Fed) -> Any:
        """Runs, and waits if devices or processes must not overlap runs."""
        if self.joined is None:
            fetched, new = run()
            if steps_must_not_overlap(self.mesh.devices.tolist()):
                jax.block_until_ready((fetched, new))
            return fetched, new
        what, agreed = self._said(fed), self.digests.get(_key(fed), "")
        return self.joined.run_step(what, run, timeout_s=self.timeout_s, digest=agreed)

    def _compare_set(self, joined: ProcessGroup, scope: Scope) -> None:
        """Warns if processes have set parameters to different values: no run makes them equal.

        It is not an error, since ranks may train apart on purpose.
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
        """Whether a parameter was set from outside, and not written by ranks."""
        own = scope.of_ranks(name)
        return name in scope and (own is None or own.whole.sharding != self._sharding)

    def put(self, name: str, values: Sequence[Any], scope: Scope) -> None:
        """Sets a variable's value on each rank; the scope shows the first rank's."""
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

    def _in_parts(self, written: tuple[str, ...]) -> StagedRanks:
        reused, state = donated(self.program), [v.name for v in self.uses.state]
        taken = [name for name in state if name in reused]
        kept = [name for name in state if name not in reused]
        names = taken, kept, [v.name for v in self.uses.data]
        return StagedRanks.of(self.program, self.fetch, written, self.mesh, names)

    def _even(self, fetched: Sequence[Array]) -> Sequence[tuple[Shape, ...]]:
        """Returns the shapes of each rank's fetches, which are the same."""
        ranks = self.mesh.size
        own = tuple((value.shape[0] // ranks, *value.shape[1:]) for value in fetched)
        return (own,) * ranks

    def _agreed(self, joined: ProcessGroup, fed: Fed) -> tuple[Mapping[str, Shape], ...]:
        """Returns the shapes of all ranks' feeds, after comparing them and the programs."""
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
        """Describes the program and a device's feeds to other processes."""
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
        """Returns each rank's value of a variable, in memory that the run may take."""
        own, found = scope.of_ranks(variable.name), self._own(variable, scope)
        shares = own is not None and own.whole is found and scope.is_lent(variable.name)
        return jax.numpy.array(found, copy=True) if shares else found

    def _own(self, variable: Variable, scope: Scope) -> Array:
        """Returns each rank's own value of a variable, or else the scope's."""
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
        """The number of the ranks' devices in this process."""
        return len(self.mesh.local_devices)

    @cached_property
    def _sharding(self) -> NamedSharding:
        return shardings(self.mesh, [0])[0]


def _key(fed: Fed) -> Any:
    """Returns the cache key of a feed."""
    return tuple(tuple(shapes.items()) for shapes in fed.shapes)


def _is_own(line: str) -> bool:
    """Whether a line of a program's text depends on the rank."""
    return line.startswith("program ") or any(f"{name}(" in line for name in _OWN)


def _shown(variable: Variable, whole: Array) -> Array:
    """Returns rank 0's part of all ranks' values: the same memory, except for a scalar."""
    first = whole.addressable_shards[0].data
    return first if variable.shape else first.reshape(())


def _devices(program: Program) -> Sequence[Any]:
    """Returns the ranks' devices; rejects a machine with fewer."""
    ranks, devices = rank_count(program), jax.devices()
    if len(devices) < ranks:
        rank = program.attrs.get("rank", 0)
        what = f"the program is that of rank {rank} of {ranks}, and this process has "
        what += f"{len(devices)} device{'s' * (len(devices) > 1)}, where each rank needs one"
        hint = f"on a CPU, call jf.emulate_devices({ranks}) before jax starts"
        raise StrategyError(what, hint=hint)
    return devices[:ranks]
