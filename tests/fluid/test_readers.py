"""Readers yield transformed samples, anew on each pass."""

import itertools
import random
import threading
from collections.abc import Iterator

import pytest

from jaxfleet.errors import ProgramError
from jaxfleet.fluid import readers


def five() -> Iterator[int]:
    return iter(range(5))


def pairs() -> Iterator[tuple[int, int]]:
    return ((n, 10 * n) for n in range(5))


@pytest.mark.parametrize(("drop", "last"), [(False, [[4]]), (True, [])])
def test_a_batch_keeps_or_drops_what_is_left(drop: bool, last: list[list[int]]) -> None:
    reader = readers.batch(five, 2, drop_last=drop)
    assert list(reader()) == [[0, 1], [2, 3], *last]
    assert list(reader()) == [[0, 1], [2, 3], *last]


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_a_batch_of_no_size_is_refused(size: int) -> None:
    with pytest.raises(ProgramError, match="batch_size is"):
        readers.batch(five, size)


def test_a_shuffle_mixes_within_its_buffer_and_by_pythons_seed() -> None:
    reader = readers.shuffle(lambda: iter(range(100)), 50)
    random.seed(7)
    first = list(reader())
    assert sorted(first[:50]) == list(range(50))
    assert sorted(first) == list(range(100)) != first
    random.seed(7)
    assert list(reader()) == first


def test_readers_are_mapped_chained_and_cut() -> None:
    assert list(readers.map_readers(lambda a, b: a + b[1], five, pairs)()) == [0, 11, 22, 33, 44]
    assert list(readers.chain(five, five)()) == [*range(5), *range(5)]
    assert list(readers.firstn(five, 3)()) == [0, 1, 2]


def test_composed_samples_are_flat() -> None:
    assert next(iter(readers.compose(five, pairs)())) == (0, 0, 0)


def test_composed_readers_of_other_lengths_are_an_error_unless_that_is_said() -> None:
    short = readers.firstn(five, 2)
    with pytest.raises(readers.ComposeNotAligned):
        list(readers.compose(five, short)())
    assert list(readers.compose(five, short, check_alignment=False)()) == [(0, 0), (1, 1)]


def test_a_cache_reads_once() -> None:
    passes = itertools.count()
    reader = readers.cache(lambda: iter([next(passes)]))
    assert list(reader()) == list(reader()) == [0]


def test_a_buffer_gives_the_samples_in_order_and_what_the_reader_raised() -> None:
    def fails() -> Iterator[int]:
        yield 1
        raise OSError("the disk went")

    assert list(readers.buffered(five, 2)()) == list(range(5))
    reading = readers.buffered(fails, 1)()
    assert next(iter(reading)) == 1
    with pytest.raises(OSError, match="the disk went"):
        list(reading)


def test_a_buffer_that_nobody_reads_on_ends_its_thread() -> None:
    ended = threading.Event()

    def endless() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            ended.set()

    reading = iter(readers.buffered(endless, 1)())
    next(reading)
    reading.close()  # type: ignore[attr-defined]
    assert ended.wait(5)
