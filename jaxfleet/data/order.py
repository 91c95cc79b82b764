"""Order: which samples each step reads, as a function of the seed and the step."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxfleet.data.permutation import Permutation
from jaxfleet.errors import FeedError, StrategyError

_BLOCK = 2048  # positions whose indices are computed together


@dataclass(frozen=True)
class Order:
    """The order of a source's samples, cut into batches of the whole job.

    Every epoch is a permutation of its own, and no batch has samples of two epochs.

    Attributes:
        samples: the length of the source.
        batch_size: samples in a batch, over all processes.
        seed: the seed of the shuffle.
        shuffle: False keeps the source's order.
        drop_last: leave out the last batch of an epoch if it is smaller.
        epochs: None for no end.

    Raises:
        StrategyError: a number is out of range.
        FeedError: the source has not enough samples for one batch.
    """

    samples: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = True
    epochs: int | None = 1

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("seed", 0), ("epochs", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                what = f"{name} is {value}"
                raise StrategyError(what, hint=f"{name} must be {least} or more")
        if self.samples < 1:
            raise FeedError("the source has no samples")
        if self.steps_per_epoch == 0:
            what = f"the source has {self.samples} samples, fewer than a batch of {self.batch_size}"
            raise FeedError(what, hint="reduce batch_size, or set drop_last=False")

    @property
    def steps_per_epoch(self) -> int:
        full, rest = divmod(self.samples, self.batch_size)
        return full if self.drop_last or not rest else full + 1

    @property
    def epoch_rows(self) -> int:
        """The number of samples of an epoch that its steps read."""
        return min(self.steps_per_epoch * self.batch_size, self.samples)

    @property
    def steps(self) -> int | None:
        """The number of steps of all epochs; None without an end."""
        return None if self.epochs is None else self.epochs * self.steps_per_epoch

    def rows(self, step: int) -> range:
        """Returns the positions, in the order of its epoch, of a step's samples."""
        start = step % self.steps_per_epoch * self.batch_size
        return range(start, min(start + self.batch_size, self.samples))

    def indices(self, step: int, rows: range) -> np.ndarray:
        """Returns the indices of samples at some positions of a step's epoch, int64."""
        if not self.shuffle:
            return np.arange(rows.start, rows.stop, dtype=np.int64)
        epoch, first, last = self.epoch(step), rows.start // _BLOCK, (rows.stop - 1) // _BLOCK
        blocks = [_block(self.samples, self.seed, epoch, b) for b in range(first, last + 1)]
        start = rows.start - first * _BLOCK
        return np.concatenate(blocks)[start : start + len(rows)]

    def epoch(self, step: int) -> int:
        """Returns the number of the epoch that a step belongs to."""
        return step // self.steps_per_epoch


@lru_cache(maxsize=16)
def _block(samples: int, seed: int, epoch: int, block: int) -> np.ndarray:
    """Returns the indices of `_BLOCK` successive positions; a call has an overhead of 200 us."""
    start = block * _BLOCK
    positions = np.arange(start, min(start + _BLOCK, samples), dtype=np.int64)
    return Permutation(samples, seed, epoch)(positions)
