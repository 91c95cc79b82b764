"""Keys that are all in one bucket, where a bound of a table is felt with few of them."""

import numpy as np

from jaxfleet.tables.buckets import BUCKETS, bucket_of


def crowd(count: int, bucket: int = 7) -> np.ndarray:
    """Returns so many keys of a bucket, in ascending order."""
    keys = np.arange(2 * count * BUCKETS)
    found: np.ndarray = keys[bucket_of(keys) == bucket][:count]
    assert len(found) == count
    return found
