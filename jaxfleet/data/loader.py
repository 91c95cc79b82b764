"""Loader: batches of a source in an order that the seed and the step determine."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from jaxfleet.checkpoint import read_position
from jaxfleet.data.order import Order
from jaxfleet.data.parts import check_part, own_part
from jaxfleet.data.position import Position
from jaxfleet.data.prefetch import Prefetcher
from jaxfleet.data.sources import Change, Sample, open_source
from jaxfleet.errors import ClosedError, FeedError, StrategyError

Augment = Callable[[Sample, np.random.Generator], Sample]


class Loader:
    """Batches of a source, in an order that is a function of the seed alone.

    The batch of a step depends on nothing but the arguments and the number of the step. So a
    process that returns, or another number of processes, reads the same samples without asking
    any other process: `loader[step]`, or `loader.from_step(done)` for all that follow.

    Args:
        source: arrays of one row for each sample, as one array or a pytree of them (a dict, a
            tuple); or a list of samples, or any object with `len(source)` and `source[index]`,
            such as grain's `RandomAccessDataSource`. Samples are pytrees of arrays and numbers.
        batch_size: samples in a batch of the whole job.
        seed: determines the order, and the numbers that `augment` draws.
        shuffle: every epoch has the samples in another order; False for the source's order.
        epochs: how often the source is read; None for no end.
        drop_last: leave out the last batch of an epoch if it is smaller.
        batch: `global` gives the whole batch, `local` this process's rows of it, as the strategy's
            option of this name.
        part: for `local`, the number of this process and the number of processes;
            `(jf.rank(), jf.size())` by default.
        transforms: functions of a sample, applied in this order before samples become a batch.
        augment: a function of a sample and a random generator, applied after `transforms`. The
            generator depends on the seed, the epoch and the sample's index.
        batch_transforms: functions of a batch. If it is `local`, they must treat rows alike.
        prefetch: the most batches that are read in the background and not yet used; 0 reads each
            when it is asked for.
        workers: the number of background threads.

    Raises:
        FeedError: the source has too few samples, or arrays of different lengths.
        StrategyError: an argument is out of range.

    Examples:
        >>> import numpy as np
        >>> import jaxfleet as jf
        >>> source = {"x": np.arange(20.0).reshape(10, 2), "y": np.arange(10)}
        >>> loader = jf.data.Loader(source, batch_size=4, epochs=2)
        >>> len(loader)
        4
        >>> loader[2]["y"]
        array([4, 2, 3, 1])
        >>> [batch["y"].tolist() for batch in loader.from_step(2)]
        [[4, 2, 3, 1], [0, 7, 5, 8]]
        >>> jf.data.Loader(source, 4, batch="local", part=(1, 2))[0]["y"]
        array([0, 3])
    """

    def __init__(
        self,
        source: Any,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = 1,
        drop_last: bool = True,
        batch: Literal["global", "local"] = "global",
        part: tuple[int, int] | None = None,
        transforms: Sequence[Callable[[Sample], Sample]] = (),
        augment: Augment | None = None,
        batch_transforms: Sequence[Callable[[Any], Any]] = (),
        prefetch: int = 2,
        workers: int = 1,
    ) -> None:
        self._source = open_source(source)
        self._order = Order(
            len(self._source), batch_size, seed, shuffle=shuffle, drop_last=drop_last, epochs=epochs
        )
        self._part = None
        if batch == "local":
            self._part = own_part() if part is None else check_part(part)
            for step in (0, self.steps_per_epoch - 1):  # the first and the smallest
                self._part.cut(self._order.rows(step))
        elif batch != "global":
            raise StrategyError(f"batch is {batch!r}", hint="write 'global' or 'local'")
        elif part is not None:
            what = f"part is {tuple(part)}, and batch='global' reads the whole batch"
            raise StrategyError(what, hint="write batch='local', or leave part out")
        if prefetch < 0 or workers < 1:
            what = f"prefetch is {prefetch} and workers {workers}"
            raise StrategyError(what, hint="prefetch must be 0 or more, and workers 1 or more")
        self._transforms, self._augment = tuple(transforms), augment
        self._batch_transforms = tuple(batch_transforms)
        self.prefetch, self.workers = prefetch, workers

    @property
    def steps_per_epoch(self) -> int:
        return self._order.steps_per_epoch

    @property
    def epochs(self) -> int | None:
        """How often the source is read; None for no end."""
        return self._order.epochs

    @property
    def is_local(self) -> bool:
        """Whether a process reads only its own rows of a batch."""
        return self._part is not None

    @property
    def own_rows(self) -> int:
        """The number of samples that this process reads for a batch."""
        rows = self._order.batch_size
        return rows if self._part is None else len(self._part.cut(range(rows)))

    @property
    def order(self) -> dict[str, int]:
        """All that determines the order of the samples, as plain numbers."""
        order = self.state(0)
        del order["step"]
        return order

    def epoch(self, step: int) -> int:
        """Returns the number of the epoch that a step belongs to, from 0."""
        return self._order.epoch(step)

    def __len__(self) -> int:
        """The number of steps of all epochs.

        Raises:
            TypeError: the epochs have no end.
        """
        if self._order.steps is None:
            raise TypeError("a loader with epochs=None has no length; see steps_per_epoch")
        return self._order.steps

    def indices(self, step: int) -> np.ndarray:
        """Returns the indices in the source of a step's samples, int64.

        Raises:
            IndexError: there is no such step.

        Examples:
            >>> import jaxfleet as jf
            >>> jf.data.Loader(["a", "b", "c", "d"], 2, shuffle=False, epochs=None).indices(3)
            array([2, 3])
        """
        step = operator.index(step)
        if step < 0 or (self._order.steps is not None and step >= self._order.steps):
            raise IndexError(f"a loader of {self._order.steps} steps has no step {step}")
        rows = self._order.rows(step)
        return self._order.indices(step, rows if self._part is None else self._part.cut(rows))

    def __getitem__(self, step: int) -> Any:
        """Returns the batch of a step.

        Raises:
            IndexError: there is no such step.
            FeedError: samples of the batch differ in structure or shape.
        """
        return self._batch(self.indices(step), self.epoch(step), f"step {step}")

    def read(self, positions: Sequence[tuple[int, int]]) -> Any:
        """Returns the batch at some positions of one epoch, for trainers that lease them.

        Args:
            positions: intervals `[start, stop)`; sample k of epoch e is at e * rows + k, where an
                epoch has `rows` samples, less an incomplete last batch that is dropped.

        Examples:
            >>> import jaxfleet as jf
            >>> loader = jf.data.Loader(list(range(5)), 2, shuffle=False, epochs=2)
            >>> loader.read([(4, 5), (6, 8)])
            array([0, 2, 3])
        """
        order = self._order
        epoch = positions[0][0] // order.epoch_rows
        first, start = epoch * order.steps_per_epoch, epoch * order.epoch_rows
        indices = np.concatenate([
            order.indices(first, range(low - start, high - start)) for low, high in positions
        ])  # fmt: skip
        return self._batch(indices, epoch, f"positions {list(positions)}")

    def _batch(self, indices: np.ndarray, epoch: int, where: str) -> Any:
        try:
            batch = self._source.read(indices, self._change(epoch))
            for transform in self._batch_transforms:
                batch = transform(batch)
        except StopIteration as error:  # it would end the consumer's loop without a word
            what = f"the source or a transform raised {error!r} at {where}"
            raise FeedError(what, hint="a source raises IndexError past its end") from error
        except BaseException as error:
            error.add_note(f"in the batch of {where}, epoch {epoch}")
            raise
        return batch

    def _change(self, epoch: int) -> Change | None:
        """Returns what happens to each sample of an epoch."""
        augment, seed = self._augment, self._order.seed
        if augment is None and not self._transforms:
            return None

        def change(sample: Sample, index: int) -> Sample:
            for transform in self._transforms:
                sample = transform(sample)
            if augment is not None:
                sample = augment(sample, np.random.default_rng([seed, epoch, index]))
            return sample

        return change

    def __iter__(self) -> "Batches":
        return self.from_step(0)

    def from_step(self, done: int) -> "Batches":
        """Returns the batches from a step on: those that are left after `done` steps.

        Raises:
            IndexError: there are fewer steps.
        """
        if done < 0 or (self._order.steps is not None and done > self._order.steps):
            raise IndexError(f"a loader of {self._order.steps} steps cannot begin at step {done}")
        return Batches(self, done, self._order.steps, ahead=self.prefetch, workers=self.workers)

    def state(self, step: int) -> dict[str, int]:
        """Returns the position before a step as plain numbers, for a checkpoint.

        Examples:
            >>> import jaxfleet as jf
            >>> loader = jf.data.Loader(list(range(100)), 10, epochs=None)
            >>> loader.restore(loader.state(7)).step
            7
        """
        return Position.of(self._order, step).plain()

    def restore(self, state: Mapping[str, object]) -> "Batches":
        """Returns the batches from a saved position on.

        Args:
            state: what `state` of a loader or of its batches returned, in a job of any number of
                processes.

        Raises:
            FeedError: the position is of another source length, seed or batch size.
        """
        return self.from_step(Position.read(state, self._order).step)

    def from_checkpoint(self, path: str | Path) -> "Batches":
        """Returns the batches after those that led to a checkpoint.

        Args:
            path: of a checkpoint written by `step.save(path, state, data=batches.state())`.

        Raises:
            CheckpointError: it is missing, damaged, or was saved without a position.
            FeedError: its position is of another source length, seed or batch size.
        """
        return self.restore(read_position(path))

    def __repr__(self) -> str:
        order = self._order
        part = "" if self._part is None else f", part={tuple(self._part)}"
        return (
            f"Loader({order.samples} samples, batch_size={order.batch_size}, seed={order.seed}, "
            f"epochs={order.epochs}{part})"
        )


class Batches(Iterator[Any]):
    """The batches of successive steps, read ahead; `Loader.from_step` makes it.

    It ends its threads when it is exhausted, closed, left as a context manager, or forgotten.

    Attributes:
        step: the step whose batch comes next.

    Examples:
        >>> import jaxfleet as jf
        >>> with jf.data.Loader([1, 2, 3, 4], 2, shuffle=False).from_step(0) as batches:
        ...     batch = next(batches)
        >>> batch, batches.step
        (array([1, 2]), 1)
    """

    def __init__(
        self, loader: Loader, step: int, end: int | None, *, ahead: int, workers: int
    ) -> None:
        self.step = step
        self._loader, self._end = loader, end
        self._is_closed = False
        self._prefetcher = (
            Prefetcher(loader.__getitem__, step, end, ahead=ahead, workers=workers)
            if ahead
            else None
        )

    def __next__(self) -> Any:
        if self._is_closed or self.step == self._end:
            self.close()
            raise StopIteration
        try:
            prefetcher = self._prefetcher
            batch = self._loader[self.step] if prefetcher is None else prefetcher.take()
        except ClosedError:
            if self._is_closed:
                raise StopIteration from None
            raise
        except BaseException:
            self.close()
            raise
        self.step += 1
        return batch

    def state(self) -> dict[str, int]:
        """Returns the position after the batches that were taken, for `Loader.restore`."""
        return self._loader.state(self.step)

    def close(self) -> None:
        """Ends the background threads; no more batches come."""
        self._is_closed = True
        if self._prefetcher is not None:
            self._prefetcher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
