"""Buffers are reused, but never while their content is still referenced."""

import jax
import numpy as np

from jaxfleet.transport.buffers import BufferPool, keep_freed_memory

F32 = np.dtype(np.float32)
SHAPE = (64, 100)


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_a_buffer_that_nothing_holds_is_used_again() -> None:
    buffers = BufferPool()
    first = address(buffers.take(SHAPE, F32))
    assert address(buffers.take(SHAPE, F32)) == first


def test_a_buffer_that_is_held_is_left_alone() -> None:
    buffers = BufferPool()
    held = buffers.take(SHAPE, F32)
    assert address(buffers.take(SHAPE, F32)) != address(held)


def test_a_view_keeps_its_buffer() -> None:
    buffers = BufferPool()
    view = buffers.take(SHAPE, F32)[3:5]
    assert address(buffers.take(SHAPE, F32)) != address(view) - 3 * 400


def test_an_array_on_the_device_keeps_its_buffer() -> None:
    buffers = BufferPool()
    buffer = buffers.take(SHAPE, F32)
    buffer[...] = 7
    first, array = address(buffer), jax.device_put(buffer)
    del buffer
    assert address(buffers.take(SHAPE, F32)) != first
    seen = np.asarray(array)
    del array
    assert address(buffers.take(SHAPE, F32)) != first  # a numpy view of the device's memory
    assert (seen == 7).all()


def test_shapes_and_dtypes_have_buffers_of_their_own() -> None:
    buffers = BufferPool()
    assert buffers.take((2, 3), F32).shape == (2, 3)
    assert buffers.take((2, 3), np.dtype(np.int8)).dtype == np.int8
    assert address(buffers.take(SHAPE, F32)) % 64 == 0


def test_the_c_library_is_told_to_keep_memory() -> None:
    assert isinstance(keep_freed_memory(), bool)  # glibc supports it, others have no such call
