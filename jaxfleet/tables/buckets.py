"""Mapping of keys to buckets, and of buckets to servers.

A key's bucket never changes, so a table moves to another number of servers bucket by bucket.
"""

import numpy as np

from jaxfleet.tables.numba_jit import inlined

BUCKETS = 1024
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(keys: np.ndarray) -> np.ndarray:
    """Hashes int64[n] to uint64[n]; each bit depends on every bit of the key.

    The finalizer of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
    generators, 2014).
    """
    mixed = keys.astype(np.int64, copy=False).view(np.uint64) + GOLDEN
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@inlined
def mixed(number: np.uint64) -> np.uint64:
    """`mix` of one number, for compiled functions."""
    number += GOLDEN
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return number ^ (number >> np.uint64(31))


def bucket_of(keys: np.ndarray) -> np.ndarray:
    """Returns int32[n], the bucket of each key: the upper ten bits of its mix.

    The lower bits place a key in its server's index, so the two are independent.
    """
    return (mix(keys) >> np.uint64(54)).astype(np.int32)


def server_of(keys: np.ndarray, servers: int) -> np.ndarray:
    """Returns int32[n], the server of each key, of 1 to `BUCKETS` servers."""
    return bucket_of(keys) * np.int32(servers) // np.int32(BUCKETS)


def buckets_of(server: int, servers: int) -> range:
    """Returns the buckets of one of `servers` servers."""
    return range(-(-server * BUCKETS // servers), -(-(server + 1) * BUCKETS // servers))
