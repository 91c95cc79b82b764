"""Arrays over the devices of all ranks, built from each rank's own rows."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfleet.cluster.process_group import ProcessGroup
from jaxfleet.lower import to_host

_AXIS = "ranks"
_WORDS = 1 << 24  # of 4 bytes, sent at a time
_MOST_COMPILED = 256


def on_all_ranks(value: Any, sharding: NamedSharding) -> jax.Array:
    """Returns a global array; each rank fills the parts on its own devices.

    Args:
        value: the whole array, on the host or on devices of this rank; or an array that is already
            global.
        sharding: of the result.
    """
    if isinstance(value, jax.Array) and value.sharding == sharding:
        return value
    if _is_key(value):
        return _as_key(on_all_ranks(jax.random.key_data(value), sharding), value)
    host = _on_host(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _on_host(value: Any) -> np.ndarray:
    """Returns a value as a numpy array of the dtype that jax gives it."""
    host = np.asarray(value)
    return host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)


def of_each_rank(value: Any, sharding: NamedSharding) -> jax.Array:
    """Returns a global array whose shards are the ranks' own rows, along the sharded axis.

    Args:
        value: this rank's, of the same shape on all ranks; or an array that is already global.
        sharding: of the result.
    """
    if sharding.is_fully_replicated or getattr(value, "sharding", None) == sharding:
        return on_all_ranks(value, sharding)
    if _is_key(value):
        return _as_key(of_each_rank(jax.random.key_data(value), sharding), value)
    made = jax.make_array_from_process_local_data(sharding, _on_host(value))
    assert isinstance(made, jax.Array)
    return made


def local_rows(value: jax.Array) -> jax.Array:
    """Returns this rank's part of an array that is sharded over all devices, on its own devices."""
    sharding = value.sharding
    assert isinstance(sharding, NamedSharding)
    own = Mesh(np.asarray(sharding.mesh.local_devices), sharding.mesh.axis_names)
    shards = [shard.data for shard in value.addressable_shards]
    axis = next(n for n, name in enumerate(sharding.spec) if name is not None)
    shape = list(value.shape)
    shape[axis] = sum(shard.shape[axis] for shard in shards)
    local = NamedSharding(own, sharding.spec)
    return jax.make_array_from_single_device_arrays(tuple(shape), local, shards)


def whole_array(joined: ProcessGroup, value: jax.Array, *, timeout_s: float) -> jax.Array:
    """Returns an array that is sharded over the devices of all ranks, whole on each of them."""
    sharding = value.sharding
    assert isinstance(sharding, NamedSharding)
    gather = gathering(sharding, value.shape, value.dtype)
    found = joined.run("an array of all ranks", lambda: gather(value), timeout_s=timeout_s)
    assert isinstance(found, jax.Array)
    return found


@lru_cache(_MOST_COMPILED)
def gathering(sharding: NamedSharding, shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns a compiled function that replicates arrays of this sharding."""
    given = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.jit(lambda x: x, out_shardings=whole).lower(given).compile()


def digest(value: Any) -> str:
    """Returns a short digest of an array."""
    data = jax.random.key_data(value) if _is_key(value) else value
    if isinstance(data, jax.Array) and not (data.is_fully_addressable or data.is_fully_replicated):
        return "cut over all devices"  # nothing to compare: each rank has its own part
    host = np.ascontiguousarray(_on_host(data))
    return hashlib.sha256(host.view(np.uint8).data if host.size else b"").hexdigest()[:16]


def of_rank_0(joined: ProcessGroup, values: Sequence[Any], *, timeout_s: float) -> list[Any]:
    """Returns rank 0's values on every rank; on the host, except for random keys.

    They travel as bits, summed with zeros: exact for every dtype, and a collective that all of
    jax's CPU and GPU transports implement.
    """
    hosts = [np.asarray(to_host(jax.numpy.asarray(value))[0], order="C") for value in values]
    sizes = [host.nbytes for host in hosts]
    words = np.zeros(-(-sum(sizes) // 4), np.uint32)
    if joined.rank == 0:
        flat = words.view(np.uint8)
        at = 0
        for host in hosts:
            flat[at : at + host.nbytes] = host.reshape(-1).view(np.uint8)
            at += host.nbytes
    for start in range(0, len(words), _WORDS):
        part = words[start : start + _WORDS]
        part[:] = _summed(joined, part, timeout_s)
    flat = words.view(np.uint8)
    ends = np.cumsum([0, *sizes])
    found = []
    for n, (host, value) in enumerate(zip(hosts, values, strict=True)):
        array: Any = flat[ends[n] : ends[n + 1]].view(host.dtype).reshape(host.shape)
        found.append(_as_key(array, value) if _is_key(value) else array)
    return found


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and not isinstance(value.dtype, np.dtype)


def _as_key(data: Any, key: Any) -> jax.Array:
    """Wraps key data as a random key of the same kind."""
    made: jax.Array = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
    return made


def _summed(joined: ProcessGroup, part: np.ndarray, timeout_s: float) -> np.ndarray:
    """Returns the sum over all ranks of the values on their first devices."""
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh([firsts[rank] for rank in sorted(firsts)], (_AXIS,))
    cut = NamedSharding(mesh, PartitionSpec(_AXIS))
    own = jax.device_put(part[None], firsts[joined.rank])
    shape = (joined.size, *part.shape)
    given = jax.make_array_from_single_device_arrays(shape, cut, [own])
    add = _adding(cut, shape)
    total = joined.run("taking rank 0's state", lambda: add(given), timeout_s=timeout_s)
    return np.asarray(total.addressable_data(0))


@lru_cache(2)  # the chunk size and the remainder
def _adding(cut: NamedSharding, shape: tuple[int, ...]) -> Any:
    """Returns a compiled sum of one row per rank."""
    function = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x[0], _AXIS),
            mesh=cut.mesh,
            in_specs=PartitionSpec(_AXIS),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
    return function.lower(jax.ShapeDtypeStruct(shape, np.uint32, sharding=cut)).compile()
