"""Lowers a training step: the user's pytrees in and out, one compiled function between."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxfleet.errors import FeedError
from jaxfleet.ir import Program
from jaxfleet.lower.function import ProgramFunction, cut_axes, device_count
from jaxfleet.lower.spmd import (
    AXIS,
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
class LoweredStep:
    """A step that is ready to run.

    Attributes:
        function: the jitted function, `(state, batch) -> (state, metrics)`.
        state_sharding: where the state lies, or None on one device.
        batch_shardings: where each leaf of the batch lies, or None on one device.
    """

    function: Any
    state_sharding: Any
    batch_shardings: Any


def lower_step(
    program: Program, interface: Interface, *, devices: Sequence[Any], lowering: str, donate: bool
) -> LoweredStep:
    """Lowers a step for devices.

    Args:
        program: for one device, or rewritten for as many as are given.
        interface: how pytrees map to its variables.
        devices: what it runs on.
        lowering: `shard_map` or `pmap`.
        donate: let the new state take the place of the old.
    """
    donated = (0,) if donate else ()
    if device_count(program) == 1:
        body = _flat_body(program, interface, None)
        function = jax.jit(_on_trees(body, interface), donate_argnums=donated)
        return LoweredStep(function, None, None)
    axes = cut_axes(program)
    layout = Layout(
        tuple(axes.get(name) for name in interface.batch),
        tuple(axes.get(name) for name in interface.metrics),
    )
    body = _flat_body(program, interface, AXIS)
    if lowering == "pmap":
        mapped = with_pmap(body, devices, layout)
        return LoweredStep(_on_trees(mapped, interface), None, None)
    mesh = device_mesh(devices)
    whole = shardings(mesh, [None])[0]
    batch = jax.tree_util.tree_unflatten(interface.batch_tree, shardings(mesh, layout.data))
    function = jax.jit(
        _on_trees(with_shard_map(body, mesh, layout), interface),
        donate_argnums=donated,
        in_shardings=(whole, batch),
    )
    return LoweredStep(function, whole, batch)


def _flat_body(
    program: Program, interface: Interface, axis_name: str | None
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Returns the program as a function of flat lists of leaves."""
    run = ProgramFunction(program, interface.metrics, axis_name)

    def body(state: Sequence[Any], data: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        values = dict(zip(interface.state, state, strict=True))
        new_state, fetched = run(values, dict(zip(interface.batch, data, strict=True)))
        return [new_state[name] for name in interface.state], fetched

    return body


def _on_trees(body: Callable[[Any, Any], tuple[Any, Any]], interface: Interface) -> Any:
    """Returns a body that takes and returns the user's pytrees."""
    flatten, unflatten = jax.tree_util.tree_flatten, jax.tree_util.tree_unflatten

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        leaves, tree = flatten(state)
        if tree != interface.state_tree:
            raise _other_structure("state", tree, interface.state_tree)
        data, batch_tree = flatten(batch)
        if batch_tree != interface.batch_tree:
            raise _other_structure("batch", batch_tree, interface.batch_tree)
        new_state, fetched = body(leaves, data)
        metrics = unflatten(interface.metrics_tree, fetched)
        return unflatten(interface.state_tree, new_state), metrics

    return step


def _other_structure(what: str, found: Any, wanted: Any) -> FeedError:
    message = f"the {what} has another structure than the example: {found} instead of {wanted}"
    if len(message) > 600:  # noqa: PLR2004  # a tree of a big model fills the screen
        message = message[:600] + "..."
    return FeedError(message, hint=f"distribute the step again with an example of this {what}")
