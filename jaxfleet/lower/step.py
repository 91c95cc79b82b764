"""Lowering of a training step: the user's pytrees in and out, one compiled function between."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxfleet.analysis.sharding import own_state
from jaxfleet.errors import FeedError
from jaxfleet.ir import Operands, Operator, Program, Variable
from jaxfleet.lower.blocks import ExecutableCache
from jaxfleet.lower.finite import Part, Watched
from jaxfleet.lower.function import Interface, ProgramFunction, Shares, cut_axes, device_count
from jaxfleet.lower.host_transfer import check_moves, device_dtype
from jaxfleet.lower.spmd import (
    AXIS,
    OWN,
    Body,
    Layout,
    device_mesh,
    shardings,
    with_pmap,
    with_shard_map,
)
from jaxfleet.lower.staged import StagedStep
from jaxfleet.lower.staged_sharding import layout_for


@dataclass(frozen=True)
class LoweredStep:
    """A step that is ready to run.

    Attributes:
        function: jitted, on pytrees: `(state, batch) -> (state, metrics)`; None if variables are
            kept beside the state, which no such function has.
        flat: jitted, on lists of leaves: `(given, kept, data) -> (written, metrics, finite)`.
            Callers with flattened state avoid flattening it again, which costs some percent of a
            small step. `finite` is one array, `bool[devices]`: whether each device's part of the
            new parameters is finite, or the gradients if a step with non-finite ones is skipped.
            The devices of a process check all of them.
        run: the function that a step calls: `flat`, or the same in parts if the program contains
            `cut`, which returns `(written, metrics)`, followed by the decision if it may skip
            steps.
        takes_trees: `flat` is called as `(state, [], data) -> (state, metrics, finite)` with the
            user's state, so that no leaf costs time in Python.
        shares: the role of each kept leaf in `flat`.
        state_shardings: of each kept leaf.
        state_axes: the cut of each: an axis, None, or `OWN`.
        beside: types of the values beside the user's leaves, as one device has them.
        batch_shardings: of each leaf of the batch.
        check: of a step in parts that skips none: computes `finite` from the new state.
    """

    function: Any
    flat: Any
    run: Any
    takes_trees: bool
    shares: Shares
    state_tree: Any
    state_shardings: tuple[Any, ...]
    state_axes: tuple[int | None, ...]
    beside: tuple[jax.ShapeDtypeStruct, ...]
    batch_shardings: tuple[Any, ...]
    check: Callable[..., Any] | None = None

    def split(self, written: Sequence[Any], fetched: list[Any]) -> tuple[list[Any], Any]:
        """Returns the metrics and the `finite` of `flat`, for a step in parts."""
        if self.check is not None:
            return fetched, self.check(written)
        return fetched[:-1], fetched[-1]

    def lower(self, state: Sequence[jax.ShapeDtypeStruct], data: Sequence[Any]) -> Any:
        """Returns jax's `Lowered` of `flat` for these types of the user's leaves.

        The state's are placed as a step's arrays are, and the data's nowhere, as a numpy batch:
        then jax compiles once for analyses and calls.
        """
        lies = zip((*state, *self.beside), self.state_shardings, self.state_axes, strict=True)
        types = [_held_type(x, sharding, axis) for x, sharding, axis in lies]
        if self.takes_trees:
            return self.flat.lower(jax.tree_util.tree_unflatten(self.state_tree, types), [], data)
        return self.flat.lower(*self.shares.split(types), data)


def _held_type(x: jax.ShapeDtypeStruct, sharding: Any, axis: int | None) -> jax.ShapeDtypeStruct:
    shape, weak = x.shape, bool(x.weak_type) and axis != OWN
    if axis == OWN:
        shape = (len(sharding.device_set), *shape)
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding, weak_type=weak)


def lower_step(
    program: Program,
    interface: Interface,
    *,
    devices: Sequence[Any],
    lowering: str,
    donate: bool,
    cache: ExecutableCache | None = None,
) -> LoweredStep:
    """Lowers a step for devices.

    Args:
        program: for one device, or rewritten for as many as are given.
        interface: how pytrees map to its variables.
        devices: the devices to run on.
        lowering: `shard_map` or `pmap`.
        donate: let the new state reuse the memory of the old, per the program's `donate`.
        cache: for the executables of a step in parts; a private one by default.
    """
    held = interface.held
    shares = Shares.of(program, held, donate=donate)
    state_axes: tuple[int | None, ...] = (None,) * len(held)
    layout: Layout | None = None
    if device_count(program) == 1:
        watched = Watched.of(program, [held[place] for place in shares.written])
        body = _body(program, interface, shares, watched)
        whole: Any = SingleDeviceSharding(devices[0])
        rows = [whole] * len(interface.batch)
        state = [whole] * len(held)
    else:
        axes, mesh = cut_axes(program), device_mesh(devices)
        state_axes = tuple(OWN if name in own_state(program) else axes.get(name) for name in held)
        layout = Layout(
            tuple(axes.get(name) for name in interface.batch),
            (*(axes.get(name) for name in interface.metrics), 0),
            shares.of_each(state_axes),
            tuple(state_axes[place] for place in shares.written),
        )
        watched = Watched.of(program, [held[at] for at in shares.written], layout.written)
        part = Part.of(AXIS, devices)
        body = _body(program, interface, shares, watched, part=part, axis_name=AXIS)
        if lowering == "pmap":
            body = with_pmap(body, devices, layout)
        else:
            body = with_shard_map(body, mesh, layout)
        state, rows = shardings(mesh, state_axes), shardings(mesh, layout.data)
    parts = _in_parts(program, interface, shares, devices, cache)
    takes_trees = parts is None and _takes_trees(program, interface, shares)
    flat = _on_leaves(body, takes_trees=takes_trees)
    flat.__name__ = program.name  # names the step in profiles and HLO
    jitted = _jit(flat, shares, (*map(list, shares.of_each(state)), rows))
    return LoweredStep(
        _function(body, program, interface, shares, (state, rows)),
        jitted,
        parts or jitted,
        takes_trees,
        shares,
        interface.state_tree,
        tuple(state),
        state_axes,
        tuple(_type_of(program.variables[name]) for name in interface.beside),
        tuple(rows),
        None
        if parts is None or watched.decision
        else _check(shares, watched, held, devices, layout),
    )


def _type_of(variable: Variable) -> jax.ShapeDtypeStruct:
    shape: Any = variable.shape
    return jax.ShapeDtypeStruct(shape, device_dtype(variable.dtype))


def _function(
    body: Body,
    program: Program,
    interface: Interface,
    shares: Shares,
    lies: tuple[list[Any], list[Any]],
) -> Any:
    """Returns the step as a function of the user's pytrees, or None if it has other state."""
    if interface.beside or own_state(program):
        return None
    on_trees = _on_trees(body, interface, shares)
    on_trees.__name__ = program.name
    state, batch = lies
    trees = _prefix(interface.state_tree, state), _prefix(interface.batch_tree, batch)
    return _jit(on_trees, shares, trees)


def _prefix(structure: Any, shardings: list[Any]) -> Any:
    """Returns shardings as jax takes them for a tree: a single one if all are equal.

    A user's class may make arrays of its leaves, and then cannot hold a sharding.
    """
    if all(sharding == shardings[0] for sharding in shardings[1:]):
        return shardings[0] if shardings else None
    return jax.tree_util.tree_unflatten(structure, shardings)


def _in_parts(
    program: Program,
    interface: Interface,
    shares: Shares,
    devices: Sequence[Any],
    cache: ExecutableCache | None,
) -> StagedStep | None:
    """Returns the step in parts, if the program contains `cut`."""
    if not any(op.type == "cut" for op in program.root.ops):
        return None
    several = device_count(program) > 1
    check_moves(program, devices if several else devices[:1])
    decision = Watched.of(program, ()).decision
    if decision:  # fetched values live until the end of the step
        fetch = Operator("fetch", Operands.of(*decision))
        program = program.with_block(program.root.with_ops((*program.root.ops, fetch)))
    return StagedStep(
        program,
        given=tuple(interface.held[place] for place in shares.given),
        kept=tuple(interface.held[place] for place in shares.kept),
        data=interface.batch,
        written=tuple(interface.held[place] for place in shares.written),
        fetched=(*interface.metrics, *decision),
        layout=layout_for(
            devices if several else devices[:1], cut_axes(program), own_state(program)
        ),
        waits=several and devices[0].platform == "cpu",
        cache=cache if cache is not None else ExecutableCache(),
    )


def _check(
    shares: Shares,
    watched: Watched,
    held: Sequence[str],
    devices: Sequence[Any],
    layout: Layout | None,
) -> Callable[..., Any]:
    """Returns the check of the new parameters as a separate executable, for a step in parts."""
    places = [n for n, at in enumerate(shares.written) if held[at] in watched.parameters]
    part = None if layout is None else Part.of(AXIS, devices)

    def body(state: tuple[list[Any], list[Any]], _: Any) -> tuple[list[Any], list[Any]]:
        new = dict(zip(watched.parameters, state[0], strict=True))
        return [], [watched.flag((), new, part)]

    made: Body = body
    if layout is not None:
        axes = tuple(layout.written[n] for n in places)
        made = with_shard_map(body, device_mesh(devices), Layout((), (0,), (axes, ()), ()))
    check = jax.jit(lambda values: made((values, []), [])[1][0])
    return lambda written: check([written[n] for n in places])


def _jit(function: Callable[..., Any], shares: Shares, in_shardings: tuple[Any, ...]) -> Any:
    donated = (0,) if shares.given else ()
    first = jax.tree_util.tree_leaves(in_shardings)[0]
    if isinstance(first, SingleDeviceSharding):
        # One device needs no explicit shardings, and without them accepts an array on any mesh of
        # one.
        return jax.jit(function, donate_argnums=donated)
    return jax.jit(function, donate_argnums=donated, in_shardings=in_shardings)


def _body(
    program: Program,
    interface: Interface,
    shares: Shares,
    watched: Watched,
    *,
    part: Part | None = None,
    axis_name: str | None = None,
) -> Body:
    """Returns the program as a function of given and kept state, and of the data.

    The fetched values are followed by the flag of whether this device's part is finite.
    """
    count = len(interface.metrics)
    run = ProgramFunction(program, (*interface.metrics, *watched.decision), axis_name)
    written = [interface.held[place] for place in shares.written]

    def body(state: tuple[Any, Any], data: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        values = dict(zip(interface.held, shares.merged(*state), strict=True))
        new, fetched = run(values, dict(zip(interface.batch, data, strict=True)))
        flag = watched.flag(fetched[count:], new, part)
        return [new[name] for name in written], [*fetched[:count], flag]

    return body


def _on_leaves(body: Body, *, takes_trees: bool) -> Callable[..., tuple[Any, Any, Any]]:
    def step(given: Any, kept: list[Any], data: list[Any]) -> tuple[Any, Any, Any]:
        leaves, tree = jax.tree_util.tree_flatten(given)
        written, fetched = body((leaves, kept), data)
        if takes_trees:
            written = jax.tree_util.tree_unflatten(tree, written)
        return written, fetched[:-1], fetched[-1]

    return step


def _takes_trees(program: Program, interface: Interface, shares: Shares) -> bool:
    """Whether a step needs no list of its state's leaves: all are donated, and none is beside.

    Steps of several devices are left out: XLA crashes if it is given an array that was deleted.
    """
    count = len(interface.held)
    if device_count(program) > 1 or interface.beside or not 0 < count == len(shares.given):
        return False
    marks = [_Mark() for _ in range(count)]
    try:  # a user's class may make arrays of its leaves
        tree = jax.tree_util.tree_unflatten(interface.state_tree, marks)
        found = jax.tree_util.tree_leaves(tree)
    except Exception:  # noqa: BLE001  # whatever that class raises
        return False
    return len(shares.written) == len(found) and all(map(operator.is_, found, marks))


class _Mark:
    """A leaf without a value."""


def _on_trees(
    body: Body, interface: Interface, shares: Shares
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Returns a body that takes and returns the user's pytrees."""
    flatten, unflatten = jax.tree_util.tree_flatten, jax.tree_util.tree_unflatten

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        leaves, tree = flatten(state)
        _check_structure("state", tree, interface.state_tree)
        data, batch_tree = flatten(batch)
        _check_structure("batch", batch_tree, interface.batch_tree)
        new, fetched = body(shares.split(leaves), data)
        metrics = unflatten(interface.metrics_tree, fetched[:-1])
        return unflatten(interface.state_tree, shares.updated(leaves, new)), metrics

    return step


def _check_structure(what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        message = f"the {what} has another structure than the example: {found} instead of {wanted}"
        if len(message) > _LONGEST:
            message = message[:_LONGEST] + "..."
        raise FeedError(message, hint=f"distribute the step again with an example of this {what}")


_LONGEST = 600  # characters; the tree of a large model fills the screen
