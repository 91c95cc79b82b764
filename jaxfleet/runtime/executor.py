"""Executor: runs any Program, feeding and fetching by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfleet.errors import FeedError
from jaxfleet.ir import Kind, Program, Variable
from jaxfleet.ir.types import long_dtype
from jaxfleet.lower import (
    AXIS,
    Layout,
    ProgramFunction,
    cut_axes,
    device_count,
    device_mesh,
    with_shard_map,
)
from jaxfleet.runtime.devices import choose_devices, steps_must_not_overlap
from jaxfleet.runtime.scope import Scope


@dataclass(frozen=True)
class _Compiled:
    """A program made ready for one choice of what is fetched.

    Attributes:
        program: kept so that its id stays its own.
        function: jitted; state to reuse, state to keep and data in, fetched and new state out.
        data: the variables to feed.
        state: the persistable variables that must be in the scope.
        donated: those of them whose memory the run may reuse.
        written: the persistable variables that it writes.
    """

    program: Program
    function: Any
    data: tuple[Variable, ...]
    state: tuple[Variable, ...]
    donated: frozenset[str]
    written: tuple[str, ...]


class Executor:
    """Runs programs over a scope that holds their state.

    A program that was rewritten for several devices runs on as many; feeds and fetches are those of
    the whole batch. A compiled program is kept as long as the executor.

    Args:
        scope: where state lives between runs; a new one, unless given.
    """

    def __init__(self, scope: Scope | None = None) -> None:
        self.scope = scope if scope is not None else Scope()
        self._compiled: dict[tuple[int, tuple[str, ...]], _Compiled] = {}

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
            fetch: variables to return, as they are when the program ends.
            scope: another scope than the executor's own.
            return_numpy: return numpy arrays; jax arrays if not.

        Raises:
            FeedError: something that the program needs is not fed or not in the scope, or what is
                fed or fetched is not its own.
        """
        values = scope if scope is not None else self.scope
        compiled = self._compile(program, tuple(fetch))
        data = _checked_feed(compiled, feed or {})
        state = {v.name: _from_scope(v, values, program) for v in compiled.state}
        reused = {name: state.pop(name) for name in compiled.donated}
        fetched, new_state = compiled.function(reused, state, data)
        values.update(new_state)
        if steps_must_not_overlap(choose_devices(device_count(program))):
            jax.block_until_ready([fetched, new_state])
        return [np.asarray(value) for value in fetched] if return_numpy else list(fetched)

    def close(self) -> None:
        """Forgets the compiled programs; the scope stays."""
        self._compiled.clear()

    def _compile(self, program: Program, fetch: tuple[str, ...]) -> _Compiled:
        key = (id(program), fetch)
        if key not in self._compiled:
            self._compiled[key] = _prepare(program, fetch)
        return self._compiled[key]


def _prepare(program: Program, fetch: tuple[str, ...]) -> _Compiled:
    known = {*program.variables, *program.root.variables}
    for name in fetch:
        if name not in known:
            what = f"'{name}' is fetched, but program '{program.name}' has no such variable"
            raise FeedError(what, hint="fetch a variable of block 0 or of the program")
    if device_count(program) > 1:
        _check_complete(program, fetch)
    read = _read_before_written(program)
    written = {name for block in program.blocks for op in block.ops for name in op.writes}
    data = tuple(v for v in program.of_kind(Kind.DATA) if v.name in read or v.name in fetch)
    persistable = program.of_kind(Kind.PARAM, Kind.STATE)
    kept = {*fetch} - written
    state = tuple(v for v in persistable if v.name in read or v.name in kept)
    outputs = tuple(v.name for v in persistable if v.name in written)
    wanted = program.attrs.get("donate", ())
    assert isinstance(wanted, tuple)
    donated = frozenset(str(name) for name in wanted) & {v.name for v in state}
    function = _function(program, fetch, outputs, data)
    return _Compiled(program, function, data, state, donated, outputs)


def _check_complete(program: Program, fetch: tuple[str, ...]) -> None:
    """Refuses to fetch what may be a device's own part of a value."""
    complete = {v.name for v in program.of_kind(Kind.PARAM, Kind.STATE)}
    for op in program.root.ops:
        if op.type == "fetch":
            complete.update(op.reads)
        elif op.type.startswith("c_allreduce_"):
            complete.update(op.writes)
        else:
            complete.difference_update(name for name in op.writes if name not in program.variables)
    for name in fetch:
        if name not in complete:
            what = f"'{name}' is fetched, but each device has only its part of it"
            hint = "name it in a fetch operator before grad_allreduce, which then completes it"
            raise FeedError(what, hint=hint)


def _function(
    program: Program,
    fetch: tuple[str, ...],
    written: tuple[str, ...],
    data: tuple[Variable, ...],
) -> Any:
    devices = choose_devices(device_count(program))
    several = len(devices) > 1
    run = ProgramFunction(program, (*fetch, *written), AXIS if several else None)

    def flat(state: Any, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        fed = dict(zip((v.name for v in data), values, strict=True))
        _, results = run(state, fed)
        return results[len(fetch) :], results[: len(fetch)]

    body: Callable[[Any, Any], tuple[Any, Any]] = flat
    if several:
        axes = cut_axes(program)
        cut = tuple(axes.get(v.name) for v in data)
        layout = Layout(cut, tuple(axes.get(name) for name in fetch))
        body = with_shard_map(flat, device_mesh(devices), layout)

    def step(reused: Any, kept: Any, fed: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        new_state, fetched = body({**reused, **kept}, [fed[v.name] for v in data])
        return fetched, dict(zip(written, new_state, strict=True))

    return jax.jit(step, donate_argnums=(0,))


def _read_before_written(program: Program) -> set[str]:
    """Returns the variables whose values at the start the program needs."""
    needed: set[str] = set()
    written: set[str] = set()
    for op in program.root.ops:
        inner = [o for index in op.blocks for o in _ops_within(program, index)]
        reads = {name for o in (op, *inner) for name in o.reads}
        # A sub-block may not run, so what only it writes may keep its old value.
        needed |= (reads | {name for o in inner for name in o.writes}) - written
        written.update(op.writes)
    return needed


def _ops_within(program: Program, index: int) -> list[Any]:
    block = program.blocks[index]
    inner = [op for child in block.ops for number in child.blocks
             for op in _ops_within(program, number)]  # fmt: skip
    return [*block.ops, *inner]


def _checked_feed(compiled: _Compiled, feed: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the feed with the dtypes that the program declares."""
    names = {variable.name for variable in compiled.program.of_kind(Kind.DATA)}
    unknown = sorted(set(feed) - names)
    if unknown:
        what = f"'{unknown[0]}' is fed, but program '{compiled.program.name}' has no such data"
        raise FeedError(what, hint=f"its data are {', '.join(sorted(names)) or 'none'}")
    missing = [variable for variable in compiled.data if variable.name not in feed]
    if missing:
        what = f"'{missing[0].name}' ({missing[0].type}) is not fed"
        raise FeedError(what, hint=f"feed all of {', '.join(v.name for v in compiled.data)}")
    return {v.name: _as_array(v, feed[v.name]) for v in compiled.data}


def _as_array(variable: Variable, value: Any) -> Any:
    """Returns a fed value as an array; a Python number takes the variable's dtype."""
    if isinstance(value, bool | int | float | list | tuple):
        return np.asarray(value, dtype=long_dtype(variable.dtype))
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def _from_scope(variable: Variable, scope: Scope, program: Program) -> Any:
    if variable.name in scope:
        return scope[variable.name]
    what = f"'{variable.name}' ({variable.type}) is not in the scope, and '{program.name}' reads it"
    raise FeedError(what, hint="run the startup program first, or set scope[name]")
