"""Transfers between host and device: arrays, and values offloaded to pinned host memory.

On a CPU an array whose memory is aligned to 64 bytes is shared, both ways. Random keys are
represented on the host by their data: `u32` with an additional axis.

Moves are asynchronous: `jax.device_put` returns at once, and readers of its result wait for it on
the device.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxfleet.errors import ProgramError, UnsupportedError
from jaxfleet.ir import Operator, Program, Variable
from jaxfleet.ops import Array
from jaxfleet.ops.jax_adapter import numpy_dtype

# The IR's name of a key's dtype: its implementation, and the length of a key.
_KEYS: Mapping[str, tuple[str, int]] = {
    "key<fry>": ("threefry2x32", 2),
    "key<rbg>": ("rbg", 4),
    "key<urbg>": ("unsafe_rbg", 4),
}


@dataclass(frozen=True)
class HostType:
    """The host array of a variable."""

    dtype: np.dtype[Any]  # numpy's
    shape: tuple[int, ...]  # numbers


def host_type(variable: Variable) -> HostType:
    """Returns the type of a variable's host arrays; its sizes must be numbers."""
    sizes = [size for size in variable.shape if isinstance(size, int)]
    if len(sizes) != len(variable.shape):
        raise ProgramError(f"'{variable.name}' is {variable.type}, which has letters for sizes")
    if is_key(variable.dtype):
        return HostType(np.dtype(np.uint32), (*sizes, _KEYS[variable.dtype][1]))
    return HostType(numpy_dtype(variable.dtype), tuple(sizes))


def is_key(dtype: str) -> bool:
    """Whether an IR dtype is that of random keys, which the host lacks."""
    return dtype in _KEYS


def device_dtype(dtype: str) -> Any:
    """Returns jax's dtype of an IR name, random keys included."""
    if is_key(dtype):
        return jax.random.key(0, impl=_KEYS[dtype][0]).dtype
    return numpy_dtype(dtype)


def to_device(array: np.ndarray, dtype: str) -> tuple[Array, bool]:
    """Returns an array on the device, and whether it was copied.

    A shared array must not change while the device's array is in use.
    """
    ((value, copied),) = all_to_device([(array, dtype)])
    return value, copied


def all_to_device(arrays: Sequence[tuple[np.ndarray, str]]) -> list[tuple[Array, bool]]:
    """Applies `to_device` to each array in one call, which is faster."""
    if not arrays:
        return []  # `device_put` of nothing takes 40 us
    found: list[tuple[Array, bool]] = []
    values = jax.device_put([array for array, _ in arrays])
    for value, (array, dtype) in zip(values, arrays, strict=True):
        if is_key(dtype):
            found.append((jax.random.wrap_key_data(value, impl=_KEYS[dtype][0]), True))
        else:
            found.append((value, _is_apart(value, array)))
    return found


def to_host(value: Array) -> tuple[np.ndarray, bool]:
    """Returns a device's array on the host, read-only, and whether it was copied.

    Waits until it is computed.
    """
    if not isinstance(value.dtype, np.dtype):  # a key's is jax's own
        return np.asarray(jax.random.key_data(value)), True
    array = np.asarray(value)
    return array, _is_apart(value, array)


def wait_for_device(values: Sequence[Any]) -> None:
    """Waits until values are computed; host arrays are."""
    jax.block_until_ready(values)


def _is_apart(value: Array, array: np.ndarray) -> bool:
    """Whether a device's array and a host array have separate memory."""
    if not array.size:
        return False
    try:
        address = value.unsafe_buffer_pointer()
    except (ValueError, RuntimeError):  # several devices, or one that does not expose it
        return True
    return bool(address != array.__array_interface__["data"][0])


PINNED = "pinned_host"  # jax's name of the memory kind
MOVES = frozenset({"to_host", "to_device"})


@dataclass(frozen=True)
class Move:
    """The move of one value."""

    of: str  # the source variable
    to: str  # the target variable
    leaves: bool  # whether it goes to the host, or comes back


def moves_of(ops: Iterable[Operator]) -> tuple[Move, ...]:
    """Returns the moves among operators, in order."""
    return tuple(
        Move(op.reads[0], op.writes[0], op.type == "to_host") for op in ops if op.type in MOVES
    )


def start_moves(moves: Sequence[Move], values: dict[str, Any]) -> list[Array]:
    """Starts moves, adds their results to `values`, and returns the arrays for the host."""
    if not moves:
        return []
    given = [values[move.of] for move in moves]
    goals = [_goal(value, move) for value, move in zip(given, moves, strict=True)]
    made = jax.device_put(given, goals)  # all in one call, which costs little more than one of them
    values.update(zip((move.to for move in moves), made, strict=True))
    return [values[move.to] for move in moves if move.leaves]


def finish_moves(arrays: Sequence[Array]) -> None:
    """Waits until the arrays are on the host; only then may their device memory be released."""
    jax.block_until_ready(list(arrays))


def memory_kinds(device: Any) -> tuple[str, ...]:
    """Returns jax's names of the memories of a device, its default first."""
    usual = device.default_memory().kind
    kinds = {memory.kind for memory in device.addressable_memories()}
    return (usual, *sorted(kinds - {usual}))


def host_memory_is_apart(device: Any) -> bool:
    """Whether a device has its own memory and reaches pinned memory of the host."""
    return device.platform != "cpu" and PINNED in memory_kinds(device)


def check_moves(program: Program, devices: Sequence[Any] = ()) -> None:
    """Raises an UnsupportedError for a program with moves if there is no separate host memory.

    The devices are jax's first one by default.
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
