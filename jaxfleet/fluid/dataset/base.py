"""What all datasets have: files, slots, a batch size, threads that read."""

import warnings
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from jaxfleet.errors import UnsupportedError
from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.dataset.files import words_of
from jaxfleet.fluid.dataset.reading import batches, read_files
from jaxfleet.fluid.dataset.slots import Samples, Slot
from jaxfleet.fluid.no_effect import warn_no_effect
from jaxfleet.fluid.variable import Variable


class DatasetBase:
    """Files of MultiSlot text that a program is trained on by `Executor.train_from_dataset`.

    Attributes:
        thread_num: how many files are read at once.
        filelist: the files.
        use_slots: what a line's values go to, in order.
    """

    def __init__(self) -> None:
        self.thread_num = 1
        self.filelist: list[str] = []
        self._has_filelist = False
        self.use_slots: tuple[Slot, ...] = ()
        self._batch_size = 1
        self._command = "cat"
        self._words = words_of(self._command)
        self._said: dict[str, Any] = {}  # what changes nothing here

    def set_pipe_command(self, pipe_command: str) -> None:
        """Sets what each file is piped through before it is read; `cat` unless set.

        It is run by its words, which quotes keep together; no shell reads it.

        Raises:
            ProgramError: it needs a shell, or is empty.
        """
        check_type(pipe_command, "a pipe command", str)
        self._words = words_of(pipe_command)
        self._command = pipe_command

    def set_batch_size(self, batch_size: int) -> None:
        """Sets how many samples a step has; the last step of all has what is left."""
        self._batch_size = _positive(batch_size, "batch_size")

    def set_thread(self, thread_num: int) -> None:
        """Sets how many files are read at once; 0 leaves it to who trains."""
        self.thread_num = thread_num and _positive(thread_num, "thread_num")

    def set_filelist(self, filelist: Sequence[str]) -> None:
        """Sets the files; they are read when samples are wanted.

        An empty list, of a worker for which no file is left, is trained on for no step at all.
        """
        check_type(filelist, "a file list", (list, tuple))
        for path in filelist:
            check_type(path, "a file of the list", str)
        self.filelist, self._has_filelist = list(filelist), True

    def set_use_var(self, var_list: Sequence[Variable]) -> None:
        """Sets what the slots of a line are fed to, in their order.

        Raises:
            ValueError: a variable's dtype is neither int64 nor float32.
        """
        check_type(var_list, "what set_use_var lists", (list, tuple))
        self.use_slots = tuple(map(Slot.of, var_list))

    def set_hdfs_config(self, fs_name: str, fs_ugi: str) -> None:
        """Takes where HDFS is, with a warning: files are read where this process sees them."""
        del fs_name, fs_ugi
        what = "set_hdfs_config does nothing: files are read where this process sees them"
        hint = "set_pipe_command may read others: hadoop fs -cat ..."
        warnings.warn(f"{what}; {hint}", stacklevel=2)

    def set_rank_offset(self, rank_offset: str) -> None:
        """Keeps a name, with a warning that it changes nothing here."""
        reason = "no layer here ranks the samples of a page"
        warn_no_effect("set_rank_offset", reason)
        self._said["rank_offset"] = rank_offset

    def set_fea_eval(self, record_candidate_size: int, fea_eval: bool = True) -> None:
        """Sets whether `slots_shuffle` acts; the other number changes nothing here."""
        self._said["fea_eval"] = (record_candidate_size, fea_eval)

    def slots_shuffle(self, slots: Sequence[str]) -> None:
        """Mixes the values of some slots among the samples, each slot by itself.

        It does so where `set_fea_eval` has said that features are evaluated, as in fluid; without,
        it does nothing. `InMemoryDataset` alone holds the samples that it needs.

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
        """Keeps a command that is not run: `set_pipe_command` has that place."""
        self._said["download_cmd"] = download_cmd

    def _prepare_to_run(self) -> None:
        """Does nothing: files are opened when samples are wanted."""

    def _finish_to_run(self) -> None:
        """Does nothing, as that: files are closed when they were read."""

    def _dynamic_adjust_before_train(self, thread_num: int) -> None:
        """Does nothing: who trains says how many threads read."""

    def _dynamic_adjust_after_train(self) -> None:
        """Does nothing, as that."""

    def desc(self) -> str:
        """Returns what was set, as text."""
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
        """Yields what each step is fed; files are read ahead in threads.

        Args:
            threads: how many files are read at once; what `set_thread` said unless given.

        Raises:
            ProgramError: nothing says what a line holds, or there are no files.
            FeedError: a file cannot be read, or holds something else.
        """
        for samples in batches(self._parts(threads or self.thread_num), self._batch_size):
            yield samples.feed()

    def _parts(self, threads: int) -> Iterator[Samples]:
        """Yields the samples, some at a time."""
        return self._read(threads)

    def _read(self, threads: int) -> Iterator[Samples]:
        if not self.use_slots:
            raise mistake("nothing says what a line of the dataset holds", "call set_use_var")
        if not self._has_filelist:
            raise mistake("the dataset has no files", "call set_filelist")
        if not self.filelist:
            warnings.warn("the dataset's list of files is empty: no step is run", stacklevel=2)
            return iter(())
        return read_files(self.filelist, self.use_slots, self._words, threads, self._groups)

    @property
    def _groups(self) -> int:
        """How many words with their counts stand before the slots of a line."""
        return 0


def _positive(value: int, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise mistake(f"{name} is {value!r}", "it is 1 or more")
    return value
