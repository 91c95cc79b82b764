"""Moves values between the memory of a device and pinned memory of its host, between executables.

A move is started and not waited for: `jax.device_put` returns at once, and what reads its result
waits for it on the device.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxfleet.errors import UnsupportedError
from jaxfleet.ir import Operator, Program
from jaxfleet.ops import Array

PINNED = "pinned_host"  # jax's name of it
MOVES = frozenset({"to_host", "to_device"})


@dataclass(frozen=True)
class Move:
    """One value's way.

    Attributes:
        of: the variable that holds it.
        to: the variable that will.
        leaves: whether it goes to the host, or comes back.
    """

    of: str
    to: str
    leaves: bool


def moves_of(ops: Iterable[Operator]) -> tuple[Move, ...]:
    """Returns the moves among operators, in order."""
    return tuple(
        Move(op.reads[0], op.writes[0], op.type == "to_host") for op in ops if op.type in MOVES
    )


def start(moves: Sequence[Move], values: dict[str, Any]) -> list[Array]:
    """Starts moves.

    Args:
        moves: them.
        values: what variables hold; what moves make is added.

    Returns:
        What arrives on the host, once it is there.
    """
    if not moves:
        return []
    given = [values[move.of] for move in moves]
    goals = [_goal(value, move) for value, move in zip(given, moves, strict=True)]
    made = jax.device_put(given, goals)  # all in one call, which costs little more than one of them
    values.update(zip((move.to for move in moves), made, strict=True))
    return [values[move.to] for move in moves if move.leaves]


def finish(arrays: Sequence[Array]) -> None:
    """Waits until what leaves is on the host; only then may its memory on the device be let go."""
    jax.block_until_ready(list(arrays))


def memory_kinds(device: Any) -> tuple[str, ...]:
    """Returns jax's names of the memories that a device reaches, its own first."""
    usual = device.default_memory().kind
    kinds = {memory.kind for memory in device.addressable_memories()}
    return (usual, *sorted(kinds - {usual}))


def host_memory_is_apart(device: Any) -> bool:
    """Tells whether a device reaches pinned memory of the host, and has memory of its own."""
    return device.platform != "cpu" and PINNED in memory_kinds(device)


def check_moves(program: Program, devices: Sequence[Any] = ()) -> None:
    """Refuses a program that moves values where there is no memory to move them to.

    Args:
        program: it.
        devices: what it runs on; jax's first one, unless given.

    Raises:
        UnsupportedError: it names the memories that there are.
    """
    if not any(op.type in MOVES for op in program.root.ops):
        return
    for device in devices or jax.devices()[:1]:
        if device.process_index != jax.process_index():
            what = "offload: values that lie on the devices of several processes do not move"
            raise UnsupportedError(what, hint="leave offload out")
        kinds = memory_kinds(device)
        if PINNED not in kinds:
            what = f"offload: {device} has no memory of the kind '{PINNED}'"
            hint = f"it has {', '.join(kinds)}; leave offload out"
            raise UnsupportedError(what, hint=hint)


def _goal(value: Array, move: Move) -> Any:
    device: Any = next(iter(value.sharding.device_set))
    kind = PINNED if move.leaves else device.default_memory().kind
    return value.sharding.with_memory_kind(kind)
