"""Compiled programs: one function for each choice of fetches."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jaxfleet.analysis.memory.final_variables import final_variables
from jaxfleet.analysis.sharding import own_state
from jaxfleet.errors import FeedError
from jaxfleet.ir import Kind, Program, Variable
from jaxfleet.lower import (
    AXIS,
    Layout,
    OnOne,
    ProgramFunction,
    StagedStep,
    cut_axes,
    device_count,
    device_mesh,
    with_shard_map,
)
from jaxfleet.runtime.devices import choose_devices

Names: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class CompiledProgram:
    """A program compiled for one choice of fetches."""

    program: Program  # kept alive, since the cache is keyed by its id
    function: Any  # jitted; from donated state, kept state and data to fetches and new state
    data: tuple[Variable, ...]  # the variables to feed
    state: tuple[Variable, ...]  # the persistable variables that must be in the scope
    donated: frozenset[str]  # those of them whose memory the run may reuse
    written: tuple[str, ...]  # the persistable variables that it writes


@dataclass(frozen=True)
class Uses:
    """Inputs and outputs of a program, for one choice of fetches."""

    data: tuple[Variable, ...]  # the variables to feed
    state: tuple[Variable, ...]  # the persistable variables that must be in the scope
    written: tuple[Variable, ...]  # those that it writes


def uses_of(program: Program, fetch: tuple[str, ...]) -> Uses:
    """Returns a program's inputs and outputs; rejects fetches that do not exist."""
    known = {*program.variables, *program.root.variables}
    for name in fetch:
        if name not in known:
            what = f"'{name}' is fetched, but program '{program.name}' has no such variable"
            raise FeedError(what, hint=_near(name, known))
    read = read_before_written(program)
    written = {name for block in program.blocks for op in block.ops for name in op.writes}
    data = tuple(v for v in program.of_kind(Kind.DATA) if v.name in read or v.name in fetch)
    persistable = program.of_kind(Kind.PARAM, Kind.STATE)
    kept = {*fetch} - written
    state = tuple(v for v in persistable if v.name in read or v.name in kept)
    return Uses(data, state, tuple(v for v in persistable if v.name in written))


def _near(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, known)
    if found:
        return f"did you mean {', '.join(found)}?"
    return "fetch a variable of block 0 or of the program"


def missing_state(program: Program, name: str) -> FeedError:
    """Error for state that a program needs and a scope lacks."""
    op = next((op for op in program.root.ops if name in op.reads), None)
    used = "fetches it" if op is None else f"reads it in '{op.type}'"
    what = f"'{name}' ({program.variables[name].type}) is not in the scope, and '{program.name}'"
    hint = "run the startup program first, in the same scope, or set it there"
    return FeedError(f"{what} {used}", op=op, hint=hint)


def not_fed(
    program: Program, name: str, data: Iterable[str], unknown: Sequence[str] = ()
) -> FeedError:
    """Error for data that a program needs and that is not fed.

    `data` are all variables to feed, `unknown` the fed names that the program lacks.
    """
    what = f"'{name}' ({program.variables[name].type}) is not fed"
    if unknown:
        what += f", and there is no {', '.join(map(repr, unknown))}, which is"
    return FeedError(what, hint=f"feed all of {', '.join(data)}")


def donated(program: Program) -> frozenset[str]:
    """Returns the state whose memory a program's run may take."""
    wanted = program.attrs.get("donate", ())
    assert isinstance(wanted, tuple)
    return frozenset(str(name) for name in wanted)


def prepare(program: Program, fetch: tuple[str, ...]) -> CompiledProgram:
    """Compiles a program, for one device or rewritten for several.

    Raises:
        FeedError: a fetched variable does not exist, exists only in parts, or is dead at the end.
    """
    fetch = final_variables(program, fetch)
    uses = uses_of(program, fetch)
    if device_count(program) > 1:
        _check_complete(program, fetch)
    reused = donated(program) & {v.name for v in uses.state}
    outputs = tuple(v.name for v in uses.written)
    if device_count(program) == 1 and says_cut(program):
        function: Any = _in_parts(program, fetch, outputs, uses, reused)
    else:
        function = _function(program, fetch, outputs, uses.data)
    return CompiledProgram(program, function, uses.data, uses.state, reused, outputs)


def says_cut(program: Program) -> bool:
    """Whether a program is to run as several executables."""
    return any(op.type == "cut" for op in program.root.ops)


def _check_complete(program: Program, fetch: tuple[str, ...]) -> None:
    """Rejects fetches of values that may be local to a device."""
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
    program: Program, fetch: tuple[str, ...], written: tuple[str, ...], data: tuple[Variable, ...]
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
        _check_state_is_whole(program)
        cut = tuple(axes.get(v.name) for v in data)
        layout = Layout(cut, tuple(axes.get(name) for name in fetch))
        body = with_shard_map(flat, device_mesh(devices), layout)

    def step(reused: Any, kept: Any, fed: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        new_state, fetched = body({**reused, **kept}, [fed[v.name] for v in data])
        return fetched, dict(zip(written, new_state, strict=True))

    return jax.jit(step, donate_argnums=(0,))


def _in_parts(
    program: Program, fetch: Names, written: Names, uses: Uses, reused: frozenset[str]
) -> Any:
    """Returns the function of a program that runs as several executables on one device."""
    (device,) = choose_devices(1)
    kept = tuple(v.name for v in uses.state if v.name not in reused)
    data = tuple(v.name for v in uses.data)
    parts = StagedStep(program, tuple(reused), kept, data, written, fetch, OnOne(device))
    lent = [program.lookup(name).kind is not Kind.TEMP for name in fetch]

    def step(
        taken: Mapping[str, Any], others: Mapping[str, Any], fed: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        fetched, written = run_by_name(parts, taken, others, fed)
        # State may also be held elsewhere, where its memory may be donated.
        own = [jnp.array(x, copy=True) if is_lent else x
               for x, is_lent in zip(fetched, lent, strict=True)]  # fmt: skip
        return own, written

    return step


def run_by_name(
    parts: StagedStep, given: Mapping[str, Any], kept: Mapping[str, Any], data: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Runs a program in several executables; returns the fetches and the new state."""
    new, fetched = parts(
        [given[name] for name in parts.given],
        [kept[name] for name in parts.kept],
        [data[name] for name in parts.data],
    )
    return fetched, dict(zip(parts.written, new, strict=True))


def _check_state_is_whole(program: Program) -> None:
    state = {v.name for v in program.of_kind(Kind.PARAM, Kind.STATE)}
    apart = [name for name in (*cut_axes(program), *own_state(program)) if name in state]
    if apart:
        what = f"'{apart[0]}' lies in parts on the devices, and an Executor holds what is whole"
        raise FeedError(what, hint="jf.distribute makes a step that holds it")


def read_before_written(program: Program) -> set[str]:
    """Returns the variables whose initial values the program needs."""
    needed: set[str] = set()
    written: set[str] = set()
    for op in program.root.ops:
        inner = [o for index in op.blocks for o in _ops_within(program, index)]
        reads = {name for o in (op, *inner) for name in o.reads}
        # A sub-block may not run, so variables that only it writes may keep their old values.
        needed |= (reads | {name for o in inner for name in o.writes}) - written
        written.update(op.writes)
    return needed


def _ops_within(program: Program, index: int) -> list[Any]:
    block = program.blocks[index]
    inner = [op for child in block.ops for number in child.blocks
             for op in _ops_within(program, number)]  # fmt: skip
    return [*block.ops, *inner]
