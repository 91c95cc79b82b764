"""Keys in a single bucket, in which few of them reach a table's limits."""

import numpy as np

from jaxfleet.tables.buckets import BUCKETS, bucket_of


def crowd(count: int, bucket: int = 7) -> np.ndarray:
    """Returns `count` keys of a bucket, in ascending order."""
    keys = np.arange(2 * count * BUCKETS)
    found: np.ndarray = keys[bucket_of(keys) == bucket][:count]
    assert len(found) == count
    return found
