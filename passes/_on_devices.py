"""What passes share that write down a plan of labels as the program of each device."""

from collections.abc import Mapping
from dataclasses import replace

from jaxfleet.analysis.labels import VARYING, Held, Layout, Mesh, Plan
from jaxfleet.errors import PassError
from jaxfleet.ir import Kind, Program
from jaxfleet.passes._place import Mark, place_blocks


def check_devices(program: Program, name: str, devices: int) -> None:
    """Refuses a program that is for devices already, or no devices.

    Raises:
        PassError: it says which.
    """
    if "devices" in program.attrs:
        raise PassError(f"{name}: the program is already rewritten for devices")
    if devices < 1:
        raise PassError(f"{name}: {devices} devices")


def on_devices(
    program: Program,
    plan: Plan,
    mesh: Mesh,
    cut: Mapping[str, int],
    mark: Mark,
    *,
    held: Held | None = None,
) -> Program:
    """Returns the program that each device runs.

    Args:
        program: the one-device program.
        plan: how its values lie.
        mesh: the devices.
        cut: data that is cut, with the axes.
        mark: says of an operator which pass made it.
        held: state that not every device has all of.
    """
    held = held or Held()
    placed = place_blocks(program, plan, mesh, mark, held)
    sharded = tuple((name, axis) for name, axis in _sharded(program, plan, cut, held))
    attrs = program.attrs.updated(devices=mesh.devices, sharded=sharded)
    own = tuple(n for n, x in held.state.items() if x == VARYING or x.is_sum)
    return replace(placed, attrs=attrs.updated(own=own) if own else attrs)


def _sharded(
    program: Program, plan: Plan, cut: Mapping[str, int], held: Held
) -> list[tuple[str, int]]:
    """Returns what goes in and comes out cut, with the axes."""
    state = {v.name for v in program.of_kind(Kind.PARAM, Kind.STATE)}
    found = list(cut.items())
    found += [(name, x.axis) for name, x in held.state.items() if x.is_sharded]
    for op in program.root.ops:
        if op.type == "fetch":
            names = [name for name in op.reads if name not in state]
            labels = [(name, plan.blocks[0].final[name]) for name in names]
            found += [(name, x.axis) for name, x in labels if x.layout is Layout.SHARDED]
    return found
