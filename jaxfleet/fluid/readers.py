"""Readers: functions that return an iterator over samples, and what is made of them.

A reader is called once a pass over the data, so that each pass begins anew.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from jaxfleet.errors import ProgramError
from jaxfleet.fluid.ahead import Ahead

Reader: TypeAlias = Callable[[], Iterable[Any]]

_SHORT = object()  # stands for the sample of a reader that has ended before the others


class ComposeNotAligned(ProgramError):  # noqa: N818  # fluid's name
    """One of several readers has ended before the others."""


def batch(reader: Reader, batch_size: int, drop_last: bool = False) -> Reader:
    """Gives lists of `batch_size` samples; what is left at the end is shorter, or dropped.

    Raises:
        ProgramError: the size is none.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ProgramError(f"batch_size is {batch_size!r}", hint="it is 1 or more")

    def batches() -> Iterator[list[Any]]:
        samples = iter(reader())
        while rows := list(itertools.islice(samples, batch_size)):
            if len(rows) == batch_size or not drop_last:
                yield rows

    return batches


def shuffle(reader: Reader, buf_size: int) -> Reader:
    """Mixes every `buf_size` samples, by Python's own random numbers."""

    def shuffled() -> Iterator[Any]:
        samples = iter(reader())
        while rows := list(itertools.islice(samples, buf_size)):
            random.shuffle(rows)
            yield from rows

    return shuffled


def map_readers(func: Callable[..., Any], *readers: Reader) -> Reader:
    """Gives what a function makes of one sample of each reader."""
    return lambda: map(func, *(reader() for reader in readers))


def chain(*readers: Reader) -> Reader:
    """Gives the samples of one reader after another."""
    return lambda: itertools.chain.from_iterable(reader() for reader in readers)


def compose(*readers: Reader, check_alignment: bool = True) -> Reader:
    """Gives tuples of one sample of each reader; samples that are tuples are flattened.

    Raises:
        ComposeNotAligned: when read, if one ends before the others and that is checked.
    """

    def composed() -> Iterator[tuple[Any, ...]]:
        for samples in itertools.zip_longest(*(reader() for reader in readers), fillvalue=_SHORT):
            if _SHORT not in samples:
                yield sum((x if isinstance(x, tuple) else (x,) for x in samples), ())
            elif check_alignment:
                raise ComposeNotAligned("one of the composed readers has fewer samples")
            else:
                return

    return composed


def firstn(reader: Reader, n: int) -> Reader:
    """Gives the first `n` samples."""
    return lambda: itertools.islice(reader(), n)


def cache(reader: Reader) -> Reader:
    """Reads all samples now, and gives them from memory."""
    samples = tuple(reader())
    return lambda: iter(samples)


def buffered(reader: Reader, size: int) -> Reader:
    """Reads up to `size` samples ahead, in a thread."""

    def samples() -> Iterator[Any]:
        ahead = Ahead(reader, size)
        try:
            while True:
                try:
                    sample = ahead.take()
                except StopIteration:
                    return
                yield sample
        finally:
            ahead.stop()

    return samples
