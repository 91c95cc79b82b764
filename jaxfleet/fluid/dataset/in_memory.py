"""InMemoryDataset, which shuffles samples before each pass, and DatasetFactory."""

import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxfleet.errors import ClosedError
from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.dataset.base import DatasetBase, FileInstantDataset, QueueDataset
from jaxfleet.fluid.dataset.slots import Samples, merge_by_id

_CORE_KINDS = ("MultiSlotDataset",)
_AT_ONCE = 4096  # samples taken from memory at a time


class InMemoryDataset(DatasetBase):
    """Samples held in memory, which can be shuffled."""

    def __init__(self) -> None:
        super().__init__()
        self.parse_ins_id = self.parse_content = self.merge_by_lineid = False
        self.queue_num: int | None = None
        self.fleet_send_batch_size: int | None = None
        self.fleet_send_sleep_seconds: float | None = None
        self.trainer_num = -1
        self._merge_size = 0
        self._samples: Samples | None = None
        self._loading: _Loading | None = None
        self._drawn = np.random.default_rng()

    @property
    def dataset(self) -> "CoreDataset":
        """The same dataset with methods of fluid's core: `dataset.dataset.merge_by_lineid()`."""
        return CoreDataset(dataset=self)

    def load_into_memory(self) -> None:
        """Reads all files; FeedError if a file cannot be read, or has an invalid line."""
        parts = list(self._read(self.thread_num))
        self._samples = Samples.joined(parts) if parts else Samples.none(self.use_slots)

    def preload_into_memory(self, thread_num: int | None = None) -> None:
        """Starts to read all files in the background."""
        if thread_num is not None:
            self.set_thread(thread_num)
        self._loading = _Loading(self)
        self._loading.start()

    def wait_preload_done(self) -> None:
        """Waits for the read that `preload_into_memory` started.

        Raises:
            ClosedError: it was not called.
            FeedError: a file cannot be read, or has an invalid line.
        """
        if self._loading is None:
            raise ClosedError("nothing is being read", hint="call preload_into_memory first")
        loading, self._loading = self._loading, None
        loading.join()
        if loading.error is not None:
            raise loading.error

    def set_shuffle_seed(self, seed: int) -> None:
        """Makes later shuffles reproducible; an addition to fluid's methods."""
        self._drawn = np.random.default_rng(seed)

    def local_shuffle(self) -> None:
        """Shuffles the samples of this process; ProgramError if the samples are not loaded."""
        samples = self._held()
        self._samples = samples.in_order(self._drawn.permutation(len(samples)))

    def _merged(self) -> None:
        """Merges the samples of each id, if enabled."""
        samples = self._held()
        if self.merge_by_lineid and samples.ids is not None:
            self._samples = merge_by_id(samples, self._merge_size)

    def _mix_slots(self, slots: set[str]) -> None:
        samples = self._held()
        orders = {name: self._drawn.permutation(len(samples)) for name in sorted(slots)}
        self._samples = samples.with_slots_in_order(orders)

    def global_shuffle(self, fleet: Any = None, thread_num: int = 12) -> None:
        """Shuffles the samples of this process; each trainer keeps those of its files.

        Fluid sends samples between trainers. Here a warning reports that this is not done: files
        that are already shuffled, and a different list for each trainer in each pass, have nearly
        the same effect. `fleet` provides the number of trainers, one unless given.

        Raises:
            ProgramError: the samples are not loaded.
        """
        del thread_num
        trainers = 1 if fleet is None else int(fleet.worker_num())
        if trainers > 1:
            what = f"global_shuffle mixes each of {trainers} trainers' own samples"
            warnings.warn(f"{what}: none goes to another trainer", stacklevel=2)
        self.local_shuffle()
        self._merged()

    def release_memory(self) -> None:
        self._samples = None

    def get_memory_data_size(self, fleet: Any = None) -> int:
        """Returns the number of samples held here or, given a fleet, by all of its workers."""
        own = 0 if self._samples is None else len(self._samples)
        if fleet is None or int(fleet.worker_num()) == 1:
            return own
        found = np.zeros(1, np.int64)
        fleet.all_reduce_worker(np.array([own], np.int64), found)
        return int(found[0])

    def get_shuffle_data_size(self, fleet: Any = None) -> int:
        """Returns the number of samples after a shuffle, which does not change it."""
        return self.get_memory_data_size(fleet)

    def set_queue_num(self, queue_num: int) -> None:
        """Stores a number without effect: there is one queue."""
        self.queue_num = queue_num

    def set_parse_ins_id(self, parse_ins_id: bool) -> None:
        """Sets whether lines begin with `1 <id>`, the name of the sample."""
        self.parse_ins_id = bool(parse_ins_id)

    def set_parse_content(self, parse_content: bool) -> None:
        """Sets whether `1 <content>` follows the id; it is skipped."""
        self.parse_content = bool(parse_content)

    def set_merge_by_lineid(self, merge_size: int = 2) -> None:
        """Makes `global_shuffle` merge samples of one id, with which lines then begin.

        Each slot of sequences comes from the one sample with nonzero values in it. A dense slot
        keeps the last values that are not all 0. Ids without `merge_size` samples are dropped, with
        a warning; 0 allows any number.
        """
        if isinstance(merge_size, bool) or not isinstance(merge_size, int) or merge_size < 0:
            raise mistake(f"merge_size is {merge_size!r}", "it is a number of samples, or 0")
        self.merge_by_lineid = self.parse_ins_id = True
        self._merge_size = merge_size

    def set_fleet_send_batch_size(self, fleet_send_batch_size: int = 1024) -> None:
        """Stores a number without effect: samples are not sent to other trainers."""
        self.fleet_send_batch_size = fleet_send_batch_size

    def set_fleet_send_sleep_seconds(self, fleet_send_sleep_seconds: float = 0) -> None:
        """Stores a number without effect, likewise."""
        self.fleet_send_sleep_seconds = fleet_send_sleep_seconds

    def set_generate_unique_feasigns(self, generate_uni_feasigns: bool, shard_num: int) -> None:
        """Stores settings without effect: each step requests its own rows."""
        self._said["unique_feasigns"] = (generate_uni_feasigns, shard_num)

    def generate_local_tables_unlock(
        self, table_id: int, fea_dim: int, read_thread_num: int, consume_thread_num: int,
        shard_num: int,
    ) -> None:  # fmt: skip
        """Stores settings of fluid's initialization of a table; here lookups create rows."""
        threads = read_thread_num, consume_thread_num
        self._said["local_tables"] = (table_id, fea_dim, *threads, shard_num)

    def _set_trainer_num(self, trainer_num: int) -> None:
        self.trainer_num = trainer_num

    @property
    def _groups(self) -> int:
        return self.parse_ins_id + self.parse_content

    def _parts(self, threads: int) -> Iterator[Samples]:
        del threads  # the files are read already
        samples = self._held()
        at_once = -(-_AT_ONCE // self._batch_size) * self._batch_size
        return (samples.part(at, at + at_once) for at in range(0, len(samples), at_once))

    def _held(self) -> Samples:
        if self._samples is None:
            raise mistake("the dataset holds no samples", "call load_into_memory first")
        return self._samples


class _Loading(threading.Thread):
    """Reads a dataset's files, and stores the exception if one is raised."""

    def __init__(self, dataset: InMemoryDataset) -> None:
        super().__init__(daemon=True)
        self._dataset = dataset
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._dataset.load_into_memory()
        except Exception as error:  # noqa: BLE001  # raised again in the waiting thread
            self.error = error


class CoreDataset:
    """Settings of a dataset in memory, and the operations on samples that only fluid's core has.

    It accesses a new dataset unless one is given. Raises ValueError if there is no kind `name`.
    """

    def __init__(self, name: str = _CORE_KINDS[0], dataset: InMemoryDataset | None = None) -> None:
        if name not in _CORE_KINDS:
            raise mistake(
                f"dataset class {name} does not exist", f"one of {', '.join(_CORE_KINDS)}"
            )
        self._dataset = InMemoryDataset() if dataset is None else dataset
        self._hdfs = ("", "")

    def set_filelist(self, filelist: Sequence[str]) -> None:
        self._dataset.set_filelist(filelist)

    def get_filelist(self) -> list[str]:
        return list(self._dataset.filelist)

    def set_thread_num(self, thread_num: int) -> None:
        self._dataset.set_thread(thread_num)

    def get_thread_num(self) -> int:
        return self._dataset.thread_num

    def set_trainer_num(self, trainer_num: int) -> None:
        self._dataset._set_trainer_num(trainer_num)

    def get_trainer_num(self) -> int:
        return self._dataset.trainer_num

    def set_hdfs_config(self, fs_name: str, fs_ugi: str) -> None:
        """Stores the HDFS address, with the dataset's warning."""
        self._dataset.set_hdfs_config(fs_name, fs_ugi)
        self._hdfs = (fs_name, fs_ugi)

    def get_hdfs_config(self) -> tuple[str, str]:
        return self._hdfs

    def set_download_cmd(self, download_cmd: str) -> None:
        """Stores a command that is never run."""
        self._dataset.set_download_cmd(download_cmd)

    def get_download_cmd(self) -> str:
        return str(self._dataset._said.get("download_cmd", ""))

    def load_into_memory(self) -> None:
        self._dataset.load_into_memory()

    def local_shuffle(self) -> None:
        self._dataset.local_shuffle()

    def merge_by_lineid(self) -> None:
        """Merges samples of one id now; see `InMemoryDataset.set_merge_by_lineid`."""
        self._dataset._merged()

    def release_memory(self) -> None:
        self._dataset.release_memory()

    def get_memory_data_size(self) -> int:
        return self._dataset.get_memory_data_size()


_KINDS: dict[str, type[DatasetBase]] = {
    "FileInstantDataset": FileInstantDataset,
    "InMemoryDataset": InMemoryDataset,
    "QueueDataset": QueueDataset,
}


class DatasetFactory:
    """Creates datasets by the name of their class."""

    def create_dataset(self, datafeed_class: str = "QueueDataset") -> DatasetBase:
        """Creates a `QueueDataset`, `InMemoryDataset` or `FileInstantDataset`.

        Raises:
            ValueError: there is no such class.
        """
        if datafeed_class not in _KINDS:
            what = f"datafeed class {datafeed_class} does not exist"
            raise mistake(what, f"one of {', '.join(sorted(_KINDS))}")
        return _KINDS[datafeed_class]()
