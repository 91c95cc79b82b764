"""Reading ahead is bounded, keeps the order, and ends with its consumer."""

import gc
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from jaxfleet.data import Batches, Loader
from jaxfleet.data.prefetch import Prefetcher
from jaxfleet.errors import ProgramError
from jaxfleet.observability import notices


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("jaxfleet-data")]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Any:
    wait_until(lambda: not threads())
    yield
    gc.collect()
    wait_until(lambda: not threads())


@pytest.mark.parametrize("workers", [1, 3])
def test_no_more_than_the_bound_is_read_ahead(workers: int) -> None:
    read: list[int] = []

    def note(step: int) -> int:
        read.append(step)
        return step

    prefetcher = Prefetcher(note, 5, None, ahead=3, workers=workers)
    wait_until(lambda: len(read) == 3)
    time.sleep(0.02)  # for a batch too many to come
    assert sorted(read) == [5, 6, 7]
    assert [prefetcher.take() for _ in range(4)] == [5, 6, 7, 8]
    wait_until(lambda: len(read) == 7)
    prefetcher.close()


def test_batches_keep_their_order_whichever_is_ready_first() -> None:
    is_late = threading.Event()

    def read(step: int) -> int:
        if step == 0:
            assert is_late.wait(30)
        if step == 2:
            is_late.set()
        return step

    prefetcher = Prefetcher(read, 0, 4, ahead=3, workers=2)
    assert [prefetcher.take() for _ in range(4)] == [0, 1, 2, 3]


def test_threads_end_with_the_last_batch() -> None:
    loader = Loader(list(range(8)), 2, prefetch=3, workers=2)
    assert len(list(loader)) == 4
    wait_until(lambda: not threads())


def test_threads_end_when_the_batches_are_closed_or_forgotten() -> None:
    loader = Loader(list(range(8)), 2, epochs=None)
    with iter(loader) as batches:
        next(batches)
    assert list(batches) == []
    wait_until(lambda: not threads())
    batches = iter(loader)
    next(batches)
    assert threads()
    del batches
    gc.collect()
    wait_until(lambda: not threads())


def test_a_loop_that_breaks_leaves_no_thread() -> None:
    for _ in Loader(list(range(8)), 2, epochs=None):
        break
    gc.collect()
    wait_until(lambda: not threads())


def test_closing_wakes_a_consumer_that_waits() -> None:
    release = threading.Event()

    class Slow:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            release.wait(30)
            return index

    batches = iter(Loader(Slow(), 2))
    left: list[Any] = []
    consumer = threading.Thread(target=lambda: left.extend(batches))
    consumer.start()
    batches.close()
    consumer.join(30)
    assert not consumer.is_alive()
    assert left == []
    release.set()


def test_a_source_that_hangs_is_reported_with_its_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notices, "LOGGED_AFTER_S", 0.02)
    release = threading.Event()

    def read(step: int) -> int:
        assert step == 6 or release.wait(30)
        return step

    prefetcher = Prefetcher(read, 6, 8, ahead=1, workers=1)
    assert prefetcher.take() == 6
    with caplog.at_level(logging.WARNING):
        taken: list[int] = []
        consumer = threading.Thread(target=lambda: taken.append(prefetcher.take()))
        consumer.start()
        wait_until(lambda: bool(caplog.records))
        release.set()
        consumer.join(30)
    assert taken == [7]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "waiting for the source's batch of step 7" in caplog.text


def test_a_batch_in_time_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    prefetcher = Prefetcher(lambda step: step, 0, 3, ahead=1, workers=1)
    assert [prefetcher.take() for _ in range(3)] == [0, 1, 2]
    assert caplog.records == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:.*fork:RuntimeWarning")
def test_a_fork_is_told_to_begin_its_own_batches() -> None:
    batches = Loader(list(range(8)), 2, epochs=None, shuffle=False).from_step(0)
    next(batches)
    ours, theirs = os.pipe()
    lock = batches._prefetcher._shared.changed  # type: ignore[union-attr]  # noqa: SLF001
    with lock:  # as a thread of the parent may have it when the process forks
        child = os.fork()
        if child == 0:
            os.write(theirs, _told_in_the_fork(batches).encode())
            os._exit(0)
    try:
        assert select.select([ours], [], [], 30)[0], "the fork waits"
        told = os.read(ours, 1000).decode()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ours)
        os.close(theirs)
    assert f"batch 1 is read by threads of process {os.getpid()}" in told
    assert "loader.from_step(batches.step)" in told
    assert next(batches).tolist() == [2, 3]
    batches.close()


def _told_in_the_fork(batches: Batches) -> str:
    try:
        next(batches)
    except ProgramError as error:
        return f"{error}; {error.hint}"
    return "a batch"
