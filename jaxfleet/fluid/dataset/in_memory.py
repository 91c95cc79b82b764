"""InMemoryDataset: files are read once, and their samples mixed before each pass."""

import threading
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxfleet.errors import ClosedError
from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.dataset.base import DatasetBase
from jaxfleet.fluid.dataset.slots import Samples

_AT_ONCE = 4096  # samples that are taken from memory at a time


class InMemoryDataset(DatasetBase):
    """Samples that are held in memory, in an order that may be mixed."""

    def __init__(self) -> None:
        super().__init__()
        self._samples: Samples | None = None
        self._loading: _Loading | None = None
        self._drawn = np.random.default_rng()

    def load_into_memory(self) -> None:
        """Reads all files.

        Raises:
            FeedError: a file cannot be read, or holds something else.
        """
        parts = list(self._read(self.thread_num))
        self._samples = Samples.joined(parts) if parts else Samples.none(self.use_slots)

    def preload_into_memory(self, thread_num: int | None = None) -> None:
        """Begins to read all files, while the caller does something else."""
        if thread_num is not None:
            self.set_thread(thread_num)
        self._loading = _Loading(self)
        self._loading.start()

    def wait_preload_done(self) -> None:
        """Waits until what `preload_into_memory` began is done.

        Raises:
            ClosedError: it was not called.
            FeedError: a file cannot be read, or holds something else.
        """
        if self._loading is None:
            raise ClosedError("nothing is being read", hint="call preload_into_memory first")
        loading, self._loading = self._loading, None
        loading.join()
        if loading.error is not None:
            raise loading.error

    def set_shuffle_seed(self, seed: int) -> None:
        """Makes the orders to come the same in every run: ours, beside fluid's methods."""
        self._drawn = np.random.default_rng(seed)

    def local_shuffle(self) -> None:
        """Mixes the samples of this process.

        Raises:
            ProgramError: nothing was loaded.
        """
        samples = self._held()
        self._samples = samples.in_order(self._drawn.permutation(len(samples)))

    def global_shuffle(self, fleet: Any = None, thread_num: int = 12) -> None:
        """Mixes the samples of this process; with several trainers each keeps its own files'.

        Fluid's sends samples from trainer to trainer. Here a warning says that it is not done:
        files that are themselves mixed, and another list for each trainer in each pass, come to
        nearly the same.

        Args:
            fleet: who knows how many trainers there are; one unless given.
            thread_num: taken.

        Raises:
            ProgramError: nothing was loaded.
        """
        del thread_num
        trainers = 1 if fleet is None else int(fleet.worker_num())
        if trainers > 1:
            what = f"global_shuffle mixes each of {trainers} trainers' own samples"
            warnings.warn(f"{what}: none goes to another trainer", stacklevel=2)
        self.local_shuffle()

    def release_memory(self) -> None:
        """Lets the samples go."""
        self._samples = None

    def get_memory_data_size(self, fleet: Any = None) -> int:
        """Returns how many samples are held here; `fleet` is taken."""
        del fleet
        return 0 if self._samples is None else len(self._samples)

    def get_shuffle_data_size(self, fleet: Any = None) -> int:
        """Returns how many samples there are after a shuffle: as many as before."""
        return self.get_memory_data_size(fleet)

    def set_queue_num(self, queue_num: int) -> None:
        """Keeps a number that changes nothing here."""
        self._said["queue_num"] = queue_num

    def _parts(self, threads: int) -> Iterator[Samples]:
        del threads  # the files were read
        samples = self._held()
        at_once = -(-_AT_ONCE // self._batch_size) * self._batch_size
        return (samples.part(at, at + at_once) for at in range(0, len(samples), at_once))

    def _held(self) -> Samples:
        if self._samples is None:
            raise mistake("the dataset holds no samples", "call load_into_memory first")
        return self._samples


class _Loading(threading.Thread):
    """Reads a dataset's files, and keeps what was raised."""

    def __init__(self, dataset: InMemoryDataset) -> None:
        super().__init__(daemon=True)
        self._dataset = dataset
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._dataset.load_into_memory()
        except Exception as error:  # noqa: BLE001  # who waits gets it
            self.error = error
