"""Batches of samples that a trainer leases from server 0, in the relaxed modes."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from jaxfleet.data import Loader
from jaxfleet.observability import LongWait
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.data_leases import DataLeases, LeaseAnswer
from jaxfleet.ps.client.lease_log import Lease
from jaxfleet.ps.membership import MembershipChangedError


class LeasedBatches(Iterator[Any]):
    """The batches that this trainer leases until all samples of all epochs are accounted for.

    Leases are requested and batches are read while steps run. A batch belongs to the step that is
    called after it was taken, whose push to server 0 acknowledges it. If a batch is skipped, or
    several are taken before a step, that step acknowledges all of them.

    Without samples to lease, the trainer sends what it has merged and waits: those of a lost
    trainer may be leased again. Meanwhile it advances to the step of the others, so that neither
    the staleness bound nor a periodic checkpoint waits for it.

    Args:
        loader: with the batch `local`.
        connect: returns the client of the servers.
        flush: completes all updates of this trainer on the servers.
        advance: goes on to a step, without gradients.
        done: steps of the whole job before the first, if its servers have no ledger yet.
    """

    def __init__(
        self,
        loader: Loader,
        connect: Callable[[], Client],
        *,
        flush: Callable[[], None],
        advance: Callable[[int], None],
        done: int,
    ) -> None:
        self._loader, self._connected = loader, connect
        self._flush, self._advance, self._done = flush, advance, done
        self._leases: DataLeases | None = None
        self._queue: deque[tuple[Lease, Future[Any]]] = deque()
        self._readers = ThreadPoolExecutor(loader.workers, thread_name_prefix="jaxfleet-data")
        self._is_closed = False

    def __next__(self) -> Any:
        if self._is_closed or not self._is_filled():
            self.close()
            raise StopIteration
        lease, reading = self._queue.popleft()
        try:
            batch = self._read(lease, reading)
        except BaseException:
            self.close()
            raise
        self._connect().leases.take(lease)
        return batch

    def _connect(self) -> Client:
        client = self._connected()
        if self._leases is not None:
            self._leases.follow(client)
        return client

    def _is_filled(self) -> bool:
        """Waits until there is a batch, in whichever place of the job this trainer then has."""
        while True:
            try:
                return self._fill(self._opened())
            except MembershipChangedError as change:
                if change.membership is None:
                    raise

    def _opened(self) -> DataLeases:
        if self._leases is None:
            order = {**self._loader.order, "done": self._done}
            rows, epochs = self._loader.own_rows, self._loader.epochs
            client = self._connect()
            self._leases = DataLeases(client, order, rows, epochs)
            if client.former is not None and client.may_repeat():
                # Servers drop gradients of steps that they have of a former process, and these
                # will be of other samples.
                self._advance(client.former.seen)
        self._connect()
        if self._leases.is_void:
            self._cancel()
            self._leases.restart()
        return self._leases

    def _fill(self, leases: DataLeases) -> bool:
        """Leases ahead; waits until there is a batch, and returns False at the end of the data."""
        ahead = max(self._loader.prefetch, 1)
        answer = leases.answer(wait=False)
        while True:
            self._start_reading(answer)
            if (lacking := ahead + 1 - len(self._queue)) > 0:
                leases.ask(lacking)
            if self._queue:
                return True
            answer = leases.answer(wait=True)
            assert answer is not None
            if not answer.leases and not self._go_on_without(answer):
                return False

    def _go_on_without(self, answer: LeaseAnswer) -> bool:
        """Advances to the others' step, as there is nothing to lease; returns False at the end."""
        client = self._connect()
        client.doing("waiting for samples")
        self._flush()
        level, log = answer.level, client.leases
        if log.taken or log.trained:  # skipped batches, which no step has trained on
            log.train()
            level = max(level, client.step + 1)
        if level > client.step:
            self._advance(level)
        return not answer.has_ended

    def _start_reading(self, answer: LeaseAnswer | None) -> None:
        for lease in answer.leases if answer is not None else ():
            self._queue.append((lease, self._readers.submit(self._loader.read, lease)))

    def _read(self, lease: Lease, reading: "Future[Any]") -> Any:
        wait = LongWait()
        while True:
            left_s = wait.left_s
            try:
                return reading.result(left_s if left_s < float("inf") else None)
            except TimeoutError:
                if reading.done():
                    raise
                wait.look(lambda: f"waiting for the source's samples at positions {lease}")

    def _cancel(self) -> None:
        for _, reading in self._queue:
            reading.cancel()
        self._queue.clear()

    def state(self) -> None:
        """Returns None, for `step.save(path, state, data=...)`: the position is the servers'."""

    def close(self) -> None:
        """Ends the background threads; no more batches come."""
        self._is_closed = True
        self._cancel()
        self._readers.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
