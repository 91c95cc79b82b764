"""Puts what a step is called with where the step wants it."""

from collections.abc import Container, Sequence
from typing import Any

import jax

from jaxfleet.group.arrays import on_all_ranks
from jaxfleet.runtime.feed import used_before


def place_state(
    values: Sequence[Any], shardings: Sequence[Any], *, given: Sequence[int], beside: Sequence[Any]
) -> list[Any]:
    """Returns the leaves of a state on a step's devices, so that it may have their memory.

    No two of them are then in one buffer. On several devices XLA does not refuse a buffer that it
    is given twice, it crashes; and averaged parameters do start as the parameters themselves.

    Args:
        values: the leaves; numpy arrays and numbers too, on any device.
        shardings: where they go.
        given: the places of those whose memory the step takes.
        beside: what else the step is called with.
    """
    if all(sharding.is_fully_addressable for sharding in shardings):
        placed: list[Any] = jax.device_put(list(values), list(shardings))
    else:
        placed = [on_all_ranks(*pair) for pair in zip(values, shardings, strict=True)]
    if not given:
        return placed
    kept = set(range(len(placed))).difference(given)
    others = (value for value in beside if isinstance(value, jax.Array))
    taken = {_buffer(array) for array in (*others, *(placed[place] for place in kept))}
    for place in given:
        if _buffer(placed[place]) in taken:
            placed[place] = placed[place].copy()
        taken.add(_buffer(placed[place]))
    return placed


def place_batch(values: list[Any], shardings: Sequence[Any], *, state: Container[Any]) -> list[Any]:
    """Returns the leaves of a batch such that `jit` takes them.

    Arrays that were put elsewhere on purpose are moved. What lies on no device yet stays: `jit`
    places it in less time than `device_put`.

    Args:
        values: the leaves.
        shardings: where each of them goes.
        state: the arrays whose memory the step takes.

    Raises:
        FeedError: an array's memory is gone.
    """
    for place, sharding in enumerate(shardings):
        value = values[place]
        if isinstance(value, jax.Array):
            if value.is_deleted():
                raise used_before("batch")
            if value.committed and not _lies_so(value, sharding):
                value = jax.device_put(value, sharding)
            values[place] = value.copy() if value in state else value
    return values


def _lies_so(value: jax.Array, sharding: Any) -> bool:
    """Tells whether an array lies as wanted; its mesh may go by another name."""
    found = value.sharding
    return found == sharding or found.is_equivalent_to(sharding, value.ndim)


def _buffer(array: Any) -> int:
    """Returns the address of an array's memory on its first device."""
    address: int = array.addressable_data(0).unsafe_buffer_pointer()
    return address
