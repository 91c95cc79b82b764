"""Permutation: a keyed shuffle of a range, computed index by index instead of stored."""

from dataclasses import dataclass, field

import numpy as np

_ROUNDS = 16  # half rounds; with 14 all orders of 6 are equally frequent, with 10 they are not
_LARGEST = 2**62  # so that an index and its neighbours fit int64

_ADD = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFT = (np.uint64(30), np.uint64(27), np.uint64(31))


@dataclass(frozen=True)
class Permutation:
    """A permutation of `range(length)` that depends on two numbers alone.

    A Feistel network over the smallest range of 2**b numbers that contains the indices; a result
    outside them is permuted again until it is inside ("cycle walking": Black and Rogaway, Ciphers
    with Arbitrary Finite Domains, CT-RSA 2002). The halves have b/2 bits, rounded up and down. The
    function of a round is the finalizer of SplitMix64 (Steele, Lea and Flood, Fast Splittable
    Pseudorandom Number Generators, OOPSLA 2014) of the half plus the round's key. The keys come
    from `numpy.random.SeedSequence`, whose numbers numpy keeps from version to version.

    It is a shuffle, not a cipher.

    Attributes:
        length: the number of indices, from 1 on.
        seed: any number from 0 on.
        epoch: any number from 0 on; every epoch has another order.

    Examples:
        >>> order = Permutation(10, seed=0, epoch=0)
        >>> order(np.arange(10)).tolist()
        [8, 2, 0, 3, 6, 1, 5, 4, 9, 7]
    """

    length: int
    seed: int
    epoch: int
    _keys: np.ndarray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.length <= _LARGEST:
            raise ValueError(f"a permutation of {self.length} indices")
        keys = np.random.SeedSequence([self.seed, self.epoch]).generate_state(_ROUNDS, np.uint64)
        object.__setattr__(self, "_keys", keys)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Returns the indices at some positions, int64, in an array of the same shape."""
        found = self._encrypted(positions.astype(np.uint64).ravel())
        outside = np.flatnonzero(found >= self.length)
        while outside.size:
            walked = self._encrypted(found[outside])
            found[outside] = walked
            outside = outside[walked >= self.length]
        return found.astype(np.int64).reshape(positions.shape)

    def _encrypted(self, x: np.ndarray) -> np.ndarray:
        bits = max(2, (self.length - 1).bit_length())  # each half has one bit at least
        low = np.uint64(bits // 2)
        low_mask = np.uint64((1 << bits // 2) - 1)
        high_mask = np.uint64((1 << bits - bits // 2) - 1)
        left, right = x >> low, x & low_mask
        for one, other in self._keys.reshape(-1, 2):
            left ^= _mixed(right, one) & high_mask
            right ^= _mixed(left, other) & low_mask
        encrypted: np.ndarray = left << low | right
        return encrypted


def _mixed(x: np.ndarray, key: np.uint64) -> np.ndarray:
    """Returns the finalizer of SplitMix64; uint64 arithmetic of arrays wraps around."""
    z = x + key
    z += _ADD
    for shift, factor in zip(_SHIFT[:2], _MULTIPLY, strict=True):
        z ^= z >> shift
        z *= factor
    z ^= z >> _SHIFT[2]
    return z
