"""DatasetBase (files, slots, batch size, reader threads) and QueueDataset, which streams."""

import warnings
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from jaxfleet.errors import UnsupportedError
from jaxfleet.fluid.argument_checks import check_type, mistake, warn_no_effect
from jaxfleet.fluid.dataset.reading import batches, read_files, split_command
from jaxfleet.fluid.dataset.slots import Samples, Slot
from jaxfleet.fluid.framework.variable import Variable


class DatasetBase:
    """Files of MultiSlot text for `Executor.train_from_dataset`."""

    def __init__(self) -> None:
        self.thread_num = 1
        self.filelist: list[str] = []
        self._has_filelist = False
        self.use_slots: tuple[Slot, ...] = ()
        self._batch_size = 1
        self._command = "cat"
        self._words = split_command(self._command)
        self._said: dict[str, Any] = {}  # settings without effect

    def set_pipe_command(self, pipe_command: str) -> None:
        """Sets the command through which each file is piped; `cat` by default.

        It runs without a shell; quotes group words.

        Raises:
            ProgramError: it needs a shell, or is empty.
        """
        check_type(pipe_command, "a pipe command", str)
        self._words = split_command(pipe_command)
        self._command = pipe_command

    def set_batch_size(self, batch_size: int) -> None:
        """Sets the number of samples in a step; the last step has the remainder."""
        self._batch_size = _positive(batch_size, "batch_size")

    def set_thread(self, thread_num: int) -> None:
        """Sets the number of files read at once; 0 leaves it to the caller of the training."""
        self.thread_num = thread_num and _positive(thread_num, "thread_num")

    def set_filelist(self, filelist: Sequence[str]) -> None:
        """Sets the files, which are read when samples are requested.

        An empty list, of a worker that got no files, yields no steps.
        """
        check_type(filelist, "a file list", (list, tuple))
        for path in filelist:
            check_type(path, "a file of the list", str)
        self.filelist, self._has_filelist = list(filelist), True

    def set_use_var(self, var_list: Sequence[Variable]) -> None:
        """Sets the variables to which the slots of a line are fed, in order.

        Raises:
            ValueError: a variable's dtype is neither int64 nor float32.
        """
        check_type(var_list, "what set_use_var lists", (list, tuple))
        self.use_slots = tuple(map(Slot.of, var_list))

    def set_hdfs_config(self, fs_name: str, fs_ugi: str) -> None:
        """Warns and ignores the address: files are read from this process's file system."""
        del fs_name, fs_ugi
        what = "set_hdfs_config does nothing: files are read where this process sees them"
        hint = "set_pipe_command may read others: hadoop fs -cat ..."
        warnings.warn(f"{what}; {hint}", stacklevel=2)

    def set_rank_offset(self, rank_offset: str) -> None:
        """Stores a name, with a warning that it has no effect."""
        reason = "no layer here ranks the samples of a page"
        warn_no_effect("set_rank_offset", reason)
        self._said["rank_offset"] = rank_offset

    def set_fea_eval(self, record_candidate_size: int, fea_eval: bool = True) -> None:
        """Sets whether `slots_shuffle` acts; `record_candidate_size` has no effect."""
        self._said["fea_eval"] = (record_candidate_size, fea_eval)

    def slots_shuffle(self, slots: Sequence[str]) -> None:
        """Shuffles the values of some slots among the samples, each slot independently.

        It acts only if `set_fea_eval` has enabled it, as in fluid. Only `InMemoryDataset` holds the
        samples that it needs.

        Raises:
            NotImplementedError: the dataset holds no samples.
        """
        if not self._said.get("fea_eval", (0, False))[1]:
            return
        check_type(slots, "what slots_shuffle lists", (list, tuple, set))
        self._mix_slots(set(slots))

    def _mix_slots(self, slots: set[str]) -> None:
        del slots
        what = f"{type(self).__name__} holds no samples, whose slots could be mixed"
        raise UnsupportedError(what, hint="create_dataset('InMemoryDataset')")

    def set_download_cmd(self, download_cmd: str) -> None:
        """Stores a command that is never run: `set_pipe_command` replaces it."""
        self._said["download_cmd"] = download_cmd

    def _prepare_to_run(self) -> None:
        """Does nothing: files are opened when samples are requested."""

    def _finish_to_run(self) -> None:
        """Does nothing: files are closed at their end."""

    def _dynamic_adjust_before_train(self, thread_num: int) -> None:
        """Does nothing: the caller of the training sets the number of threads."""

    def _dynamic_adjust_after_train(self) -> None:
        """Does nothing, likewise."""

    def desc(self) -> str:
        """Returns the settings as text."""
        lines = [
            f"name: {type(self).__name__!r}",
            f"batch_size: {self._batch_size}",
            f"thread_num: {self.thread_num}",
            f"pipe_command: {self._command!r}",
        ]
        for slot in self.use_slots:
            kind = "uint64" if slot.dtype == "int64" else "float"
            is_dense = str(not slot.is_sequence).lower()
            lines.append(f"slots {{ name: {slot.name!r} type: {kind!r} is_dense: {is_dense} }}")
        return "\n".join(lines) + "\n"

    def batches(self, threads: int = 0) -> Generator[dict[str, Any]]:
        """Yields the feed of each step; reads `threads` files at once, or as many as `set_thread`.

        Raises:
            ProgramError: the slots of a line or the files are not set.
            FeedError: a file cannot be read, or has an invalid line.
        """
        for samples in batches(self._parts(threads or self.thread_num), self._batch_size):
            yield samples.feed()

    def _parts(self, threads: int) -> Iterator[Samples]:
        return self._read(threads)

    def _read(self, threads: int) -> Iterator[Samples]:
        if not self.use_slots:
            raise mistake(
                "the dataset has no variables for the values of a line", "call set_use_var"
            )
        if not self._has_filelist:
            raise mistake("the dataset has no files", "call set_filelist")
        if not self.filelist:
            warnings.warn("the dataset's list of files is empty: no step is run", stacklevel=2)
            return iter(())
        return read_files(self.filelist, self.use_slots, self._words, threads, self._groups)

    @property
    def _groups(self) -> int:
        """The number of counted words before the slots of a line."""
        return 0


def _positive(value: int, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise mistake(f"{name} is {value!r}", "it is 1 or more")
    return value


class QueueDataset(DatasetBase):
    """Streams samples in the order of the files."""

    def local_shuffle(self) -> None:
        """Raises NotImplementedError: samples are not held in memory."""
        raise self._refusal("local_shuffle")

    def global_shuffle(self, fleet: Any = None) -> None:
        """Raises NotImplementedError, like `local_shuffle`."""
        del fleet
        raise self._refusal("global_shuffle")

    def _refusal(self, what: str) -> UnsupportedError:
        said = f"{type(self).__name__} does not support {what}: it holds no samples"
        return UnsupportedError(said, hint="create_dataset('InMemoryDataset')")


class FileInstantDataset(QueueDataset):
    """The same as `QueueDataset`: fluid's other name for pipelines."""
