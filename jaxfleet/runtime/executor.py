"""Executor: runs any Program, feeding and fetching by name."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfleet.errors import FeedError
from jaxfleet.ir import Kind, Program, Variable
from jaxfleet.ir.variable import long_dtype
from jaxfleet.lower import device_count
from jaxfleet.observability import Progress
from jaxfleet.runtime.compiled_program import CompiledProgram, missing_state, not_fed, prepare
from jaxfleet.runtime.devices import choose_devices, steps_must_not_overlap
from jaxfleet.runtime.rank_executor import RanksProgram, rank_count
from jaxfleet.runtime.scope import Scope


class Executor:
    """Runs programs over a scope that holds their state.

    A program that was rewritten for several devices runs on as many; feeds and fetches are those of
    the whole batch. A program for ranks runs on a device for each rank: feeds are the rows of all
    ranks, and fetches the values of all ranks, concatenated. A compiled program is kept as long as
    the executor.

    Args:
        scope: where state lives between runs; by default a new one.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jaxfleet as jf
        >>> from jaxfleet.ir import parse
        >>> program = parse('''
        ... program count
        ...   data  x: f32[]
        ...   state total: f32[]
        ...   block 0
        ...     forward
        ...       total = jax.add(total, x)
        ... ''')
        >>> executor = jf.Executor()
        >>> executor.scope["total"] = jnp.float32(1)
        >>> executor.run(program, feed={"x": 2.0}, fetch=["total"])
        [array(3., dtype=float32)]
    """

    def __init__(self, scope: Scope | None = None) -> None:
        self.scope = scope if scope is not None else Scope()
        self._compiled: dict[tuple[int, tuple[str, ...]], CompiledProgram] = {}
        self._on_ranks: dict[tuple[int, tuple[str, ...]], RanksProgram] = {}

    def run(
        self,
        program: Program,
        *,
        feed: Mapping[str, Any] | None = None,
        fetch: Sequence[str] = (),
        scope: Scope | None = None,
        return_numpy: bool = True,
    ) -> list[Any]:
        """Runs a program once.

        Args:
            program: any program; its state is read from the scope and written back.
            feed: an array for each data variable that the program reads.
            fetch: variables to return, with their values at the end of the program.
            scope: overrides the executor's own.
            return_numpy: return numpy arrays; jax arrays if not.

        Raises:
            FeedError: an input of the program is neither fed nor in the scope, or a fed or fetched
                name is unknown.
        """
        values = scope if scope is not None else self.scope
        if rank_count(program) > 1:
            ready = self._for_ranks(program, tuple(fetch))
            made = ready.run(_checked_feed(program, ready.uses.data, feed or {}), values)
            return [np.asarray(value) for value in made] if return_numpy else made
        is_first = (id(program), tuple(fetch)) not in self._compiled
        compiled = self._compile(program, tuple(fetch))
        data = _checked_feed(program, compiled.data, feed or {})
        state = {v.name: _from_scope(v, values, program) for v in compiled.state}
        reused = {name: state.pop(name) for name in compiled.donated}
        with _first_run(program) if is_first else nullcontext():
            fetched, new_state = compiled.function(reused, state, data)
        values.update(new_state)
        if steps_must_not_overlap(choose_devices(device_count(program))):
            jax.block_until_ready([fetched, new_state])
        return [np.asarray(value) for value in fetched] if return_numpy else list(fetched)

    def close(self) -> None:
        """Drops the compiled programs; the scope stays."""
        self._compiled.clear()
        self._on_ranks.clear()

    def _compile(self, program: Program, fetch: tuple[str, ...]) -> CompiledProgram:
        key = (id(program), fetch)
        if key not in self._compiled:
            self._compiled[key] = prepare(program, fetch)
        return self._compiled[key]

    def _for_ranks(self, program: Program, fetch: tuple[str, ...]) -> RanksProgram:
        key = (id(program), fetch)
        if key not in self._on_ranks:
            self._on_ranks[key] = RanksProgram.of(program, fetch)
        return self._on_ranks[key]


@contextmanager
def _first_run(program: Program) -> Iterator[None]:
    with Progress(f"first run of '{program.name}'") as progress:
        progress.show("compiling and running it")
        yield


def _checked_feed(
    program: Program, data: Sequence[Variable], feed: Mapping[str, Any]
) -> dict[str, Any]:
    names = {variable.name for variable in program.of_kind(Kind.DATA)}
    unknown = sorted(set(feed) - names)
    if unknown:
        what = f"'{unknown[0]}' is fed, but program '{program.name}' has no such data"
        raise FeedError(what, hint=f"its data are {', '.join(sorted(names)) or 'none'}")
    missing = [variable for variable in data if variable.name not in feed]
    if missing:
        raise not_fed(program, missing[0].name, [v.name for v in data])
    return {v.name: _as_array(v, feed[v.name]) for v in data}


def _as_array(variable: Variable, value: Any) -> Any:
    """Returns a fed value as an array; a Python number takes the variable's dtype."""
    if isinstance(value, bool | int | float | list | tuple):
        return np.asarray(value, dtype=long_dtype(variable.dtype))
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def _from_scope(variable: Variable, scope: Scope, program: Program) -> Any:
    if variable.name in scope:
        return scope[variable.name]
    raise missing_state(program, variable.name)
