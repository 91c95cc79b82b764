"""Lowers a training step: the user's pytrees in and out, one compiled function between."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxfleet.errors import FeedError
from jaxfleet.ir import Program
from jaxfleet.lower.blocks import ExecutableCache
from jaxfleet.lower.function import ProgramFunction, cut_axes, device_count
from jaxfleet.lower.part_layout import layout_for
from jaxfleet.lower.part_step import PartStep
from jaxfleet.lower.spmd import (
    AXIS,
    Body,
    Layout,
    device_mesh,
    shardings,
    with_pmap,
    with_shard_map,
)


@dataclass(frozen=True)
class Interface:
    """Says how the user's pytrees map to a program's variables.

    Attributes:
        state: variables of the state's leaves, in order.
        batch: variables of the batch's leaves, in order.
        metrics: variables of the metrics' leaves, in order.
        state_tree: the structure of the state.
        batch_tree: the structure of the batch.
        metrics_tree: the structure of the metrics.
    """

    state: tuple[str, ...]
    batch: tuple[str, ...]
    metrics: tuple[str, ...]
    state_tree: Any
    batch_tree: Any
    metrics_tree: Any


@dataclass(frozen=True)
class Shares:
    """Says what becomes of the leaves of the state, by their places.

    What a program only reads is no output: it comes back as the array that went in.

    Attributes:
        given: donated; their memory goes to what is written.
        kept: the others.
        written: those that come out new.
    """

    given: tuple[int, ...]
    kept: tuple[int, ...]
    written: tuple[int, ...]

    @classmethod
    def of(cls, program: Program, state: Sequence[str], *, donate: bool) -> "Shares":
        """Reads them off a program: `donate` holds the variables that its attribute names."""
        named = program.attrs.get("donate", ()) if donate else ()
        assert isinstance(named, tuple)
        ops = (op for block in program.blocks for op in block.ops)
        changed = {name for op in ops for name in op.writes}
        places = range(len(state))
        return cls(
            tuple(place for place in places if state[place] in named),
            tuple(place for place in places if state[place] not in named),
            tuple(place for place in places if state[place] in changed),
        )

    def split(self, leaves: list[Any]) -> tuple[list[Any], list[Any]]:
        """Returns what is given and what is kept."""
        if not self.kept:
            return leaves, []
        return [leaves[place] for place in self.given], [leaves[place] for place in self.kept]

    def merged(self, given: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
        """Returns the leaves in order."""
        places = (*self.given, *self.kept)
        found = dict(zip(places, (*given, *kept), strict=True))
        return [found[place] for place in range(len(places))]

    def updated(self, leaves: list[Any], new: list[Any]) -> list[Any]:
        """Returns the leaves of the new state."""
        if len(new) == len(leaves):
            return new
        leaves = leaves.copy()
        for place, value in zip(self.written, new, strict=True):
            leaves[place] = value
        return leaves


@dataclass(frozen=True)
class LoweredStep:
    """A step that is ready to run.

    Attributes:
        function: jitted, on pytrees: `(state, batch) -> (state, metrics)`.
        flat: jitted, on lists of leaves: `(given, kept, data) -> (written, metrics)`. Who has
            flattened the state anyway saves its being flattened again, which costs some percent of
            a small step.
        run: what a step calls: `flat`, or the same in parts where the program says `cut`.
        shares: which leaf of the state goes where in `flat`.
        state_sharding: where the state lies.
        batch_shardings: where each leaf of the batch lies.
    """

    function: Any
    flat: Any
    run: Any
    shares: Shares
    state_sharding: Any
    batch_shardings: tuple[Any, ...]

    def lower(self, state: Sequence[jax.ShapeDtypeStruct], data: Sequence[Any]) -> Any:
        """Returns jax's `Lowered` of `flat` for these types of the leaves.

        The state's lie where a step's arrays do, and the data's nowhere, as a batch of numpy's:
        then jax compiles once for all who ask and for the calls.
        """
        whole = self.state_sharding
        types = [x.update(sharding=whole, weak_type=bool(x.weak_type)) for x in state]
        return self.flat.lower(*self.shares.split(types), data)


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
        devices: what it runs on.
        lowering: `shard_map` or `pmap`.
        donate: let the new state take the place of the old, as the program's `donate` says.
        cache: where the executables of a step in parts are kept; its own, unless given.
    """
    shares = Shares.of(program, interface.state, donate=donate)
    if device_count(program) == 1:
        body = _body(program, interface, shares, None)
        whole: Any = SingleDeviceSharding(devices[0])
        rows = [whole] * len(interface.batch)
    else:
        axes = cut_axes(program)
        layout = Layout(
            tuple(axes.get(name) for name in interface.batch),
            tuple(axes.get(name) for name in interface.metrics),
        )
        mesh = device_mesh(devices)
        body = _body(program, interface, shares, AXIS)
        if lowering == "pmap":
            body = with_pmap(body, devices, layout)
        else:
            body = with_shard_map(body, mesh, layout)
        whole, rows = shardings(mesh, [None])[0], shardings(mesh, layout.data)
    on_trees, flat = _on_trees(body, interface, shares), _on_leaves(body)
    on_trees.__name__ = flat.__name__ = program.name  # profiles and HLO then say whose step it is
    batch = jax.tree_util.tree_unflatten(interface.batch_tree, rows)
    jitted = _jit(flat, shares, (whole, whole, rows))
    return LoweredStep(
        _jit(on_trees, shares, (whole, batch)),
        jitted,
        _in_parts(program, interface, shares, devices, cache) or jitted,
        shares,
        whole,
        tuple(rows),
    )


def _in_parts(
    program: Program,
    interface: Interface,
    shares: Shares,
    devices: Sequence[Any],
    cache: ExecutableCache | None,
) -> PartStep | None:
    """Returns the step in parts, where the program says `cut`."""
    if not any(op.type == "cut" for op in program.root.ops):
        return None
    several = device_count(program) > 1
    return PartStep(
        program,
        given=tuple(interface.state[place] for place in shares.given),
        kept=tuple(interface.state[place] for place in shares.kept),
        data=interface.batch,
        written=tuple(interface.state[place] for place in shares.written),
        fetched=interface.metrics,
        layout=layout_for(devices if several else devices[:1], cut_axes(program)),
        waits=several and devices[0].platform == "cpu",
        cache=cache if cache is not None else ExecutableCache(),
    )


def _jit(function: Callable[..., Any], shares: Shares, in_shardings: tuple[Any, ...]) -> Any:
    donated = (0,) if shares.given else ()
    if isinstance(in_shardings[0], SingleDeviceSharding):
        # One device needs no shardings said, and without them takes an array on any mesh of one.
        return jax.jit(function, donate_argnums=donated)
    return jax.jit(function, donate_argnums=donated, in_shardings=in_shardings)


def _body(program: Program, interface: Interface, shares: Shares, axis_name: str | None) -> Body:
    """Returns the program as a function of what is given and kept, and of the data."""
    run = ProgramFunction(program, interface.metrics, axis_name)
    written = [interface.state[place] for place in shares.written]

    def body(state: tuple[Any, Any], data: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        values = dict(zip(interface.state, shares.merged(*state), strict=True))
        new, fetched = run(values, dict(zip(interface.batch, data, strict=True)))
        return [new[name] for name in written], fetched

    return body


def _on_leaves(body: Body) -> Callable[..., tuple[Any, Any]]:
    def step(given: list[Any], kept: list[Any], data: list[Any]) -> tuple[Any, Any]:
        return body((given, kept), data)

    return step


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
        metrics = unflatten(interface.metrics_tree, fetched)
        return unflatten(interface.state_tree, shares.updated(leaves, new)), metrics

    return step


def _check_structure(what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        message = f"the {what} has another structure than the example: {found} instead of {wanted}"
        if len(message) > _LONGEST:
            message = message[:_LONGEST] + "..."
        raise FeedError(message, hint=f"distribute the step again with an example of this {what}")


_LONGEST = 600  # characters; the tree of a big model fills the screen
