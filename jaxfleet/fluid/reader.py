"""Loaders: a script's generators of samples as feeds, which a thread makes ahead of the steps.

A loader is *iterable*, and gives feeds to a loop of the script; or it belongs to the program whose
data it was made for, and each run takes the next batch from it, between `start` and `reset`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np

from jaxfleet.errors import AssertedError, EndOfDataError, FeedError, UnsupportedError
from jaxfleet.fluid.ahead import Ahead
from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.data_feeder import DataFeeder
from jaxfleet.fluid.dataset.base import DatasetBase
from jaxfleet.fluid.lod_tensor import LoDTensor
from jaxfleet.fluid.readers import Reader, batch
from jaxfleet.fluid.variable import Variable

if TYPE_CHECKING:
    from jaxfleet.fluid.program import Program

OneFeed: TypeAlias = dict[str, Any]

_CAPACITY = 2  # batches that lie ready where the script does not say how many


class GeneratorLoader:
    """Feeds that are made of what a generator gives; see `DataLoader.from_generator`."""

    def __init__(
        self,
        feed_list: Sequence[Variable] | None = None,
        capacity: int | None = None,
        use_double_buffer: bool = True,
        iterable: bool = True,
        return_list: bool = False,
        drop_last: bool = True,
    ) -> None:
        del use_double_buffer  # JAX moves a feed while the step before runs
        check_type(feed_list, "feed_list", (list, tuple), "the variables that are fed: [x, y]")
        assert feed_list is not None
        for variable in feed_list:
            check_type(variable, "a member of feed_list", Variable)
        check_type(capacity, "capacity", (int, type(None)))
        self._variables, self._capacity = (
            list(feed_list),
            _CAPACITY if capacity is None else capacity,
        )
        if not self._variables or self._capacity < 1:
            raise mistake(f"a loader of {len(feed_list)} variables, with capacity {capacity}")
        self._iterable, self._return_list, self._drop_last = iterable, return_list, drop_last
        self._feeds: Callable[[], Iterable[OneFeed]] | None = None
        self._devices = 1
        self._running: Ahead[OneFeed] | None = None
        self._passes: Iterator[Any] | None = None
        if not iterable:
            self._variables[0].block.program._readers.append(self)

    @property
    def iterable(self) -> bool:
        """Whether it gives feeds to a loop, rather than to runs of the program."""
        return self._iterable

    @property
    def names(self) -> list[str]:
        """What is fed."""
        return [variable.name for variable in self._variables]

    @property
    def variables(self) -> list[Variable]:
        """The variables that are fed."""
        return list(self._variables)

    # --- what it reads -----------------------------------------------------------------------

    def set_sample_generator(
        self, reader: Reader, batch_size: int, drop_last: bool = True, places: Any = None
    ) -> "GeneratorLoader":
        """Reads samples, one at a time, and makes batches of them.

        Args:
            reader: returns an iterator over samples, each with a field for every variable.
            batch_size: how many samples are a batch.
            drop_last: leave out samples at the end that are fewer.
            places: devices, each of which gets a batch of its own; one unless given.
        """
        check_type(batch_size, "batch_size", int)

        def whole() -> Iterator[tuple[Any, ...]]:
            for sample in reader():
                yield sample if isinstance(sample, tuple | list) else (sample,)  # type: ignore[misc]

        return self.set_sample_list_generator(batch(whole, batch_size, drop_last), places)

    def set_sample_list_generator(self, reader: Reader, places: Any = None) -> "GeneratorLoader":
        """Reads lists of samples, each of which is a batch."""
        feeder = DataFeeder(self._variables, None)
        return self._reads(lambda: map(feeder.feed, reader()), places)

    def set_batch_generator(self, reader: Reader, places: Any = None) -> "GeneratorLoader":
        """Reads batches: an array, or a LoDTensor, for each variable."""
        return self._reads(lambda: map(self._named, reader()), places)

    def _reads(self, feeds: Callable[[], Iterable[OneFeed]], places: Any) -> "GeneratorLoader":
        self._feeds = feeds
        self._devices = len(places) if isinstance(places, list | tuple) else 1
        return self

    def _named(self, arrays: Any) -> OneFeed:
        if isinstance(arrays, Mapping):
            return dict(arrays)
        given = arrays if isinstance(arrays, list | tuple) else [arrays]
        if len(given) != len(self._variables):
            what = (
                f"a batch has {len(given)} arrays, and feed_list {len(self._variables)} variables"
            )
            raise FeedError(what, hint=f"a batch holds {', '.join(self.names)}")
        kept = (LoDTensor, np.ndarray, jax.Array)
        arrays = [one if isinstance(one, kept) else np.asarray(one) for one in given]
        return dict(zip(self.names, arrays, strict=True))

    def _ahead(self) -> Ahead[OneFeed]:
        if self._feeds is None:
            hint = "call set_sample_generator, set_sample_list_generator or set_batch_generator"
            raise mistake("a loader has no generator to read", hint, AssertedError)
        return Ahead(self._feeds, self._capacity)

    # --- for a loop of the script ------------------------------------------------------------

    def __call__(self) -> "GeneratorLoader":
        return self

    def __iter__(self) -> Iterator[Any]:
        """Begins a pass: gives a list with a dict for each device, or with a list of arrays.

        Raises:
            AssertionError: the loader is not iterable, or reads nothing.
        """
        if not self._iterable:
            hint = "call start(), run the program without a feed, and reset() at EOFException"
            raise mistake("a loader with iterable=False is iterated over", hint, AssertedError)
        return self._pass(self._ahead())

    def __next__(self) -> Any:
        """Returns the next of a pass, the first of a new one after the last."""
        if self._passes is None:
            self._passes = iter(self)
        try:
            return next(self._passes)
        except BaseException:
            self._passes = None
            raise

    def _pass(self, ahead: Ahead[OneFeed]) -> Iterator[Any]:
        try:
            while feeds := self._some(ahead, self._devices):
                names = self.names
                yield [[feed[n] for n in names] for feed in feeds] if self._return_list else feeds
        finally:
            ahead.stop()

    def _some(self, ahead: Ahead[OneFeed], count: int) -> list[OneFeed]:
        """Returns a feed for each device; none where the data end."""
        feeds: list[OneFeed] = []
        while len(feeds) < count:
            try:
                feeds.append(ahead.take())
            except StopIteration:
                return [] if self._drop_last and len(feeds) < count else feeds
        return feeds

    # --- for a program -----------------------------------------------------------------------

    def start(self) -> None:
        """Begins a pass, whose batches the program's runs take.

        Raises:
            AssertionError: the loader is iterable, reads nothing, or has started.
        """
        if self._iterable:
            what = "start() is for a loader with iterable=False"
            raise mistake(what, "iterate over it, and feed what it gives", AssertedError)
        if self._running is not None:
            raise mistake("a loader is started that runs", "call reset() first", AssertedError)
        self._running = self._ahead()

    def reset(self) -> None:
        """Ends a pass; the next one begins by `start`."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()

    def next_feeds(self, count: int) -> list[OneFeed]:
        """Returns what a run takes: a feed for each device.

        Raises:
            FeedError: the loader was not started.
            EndOfDataError: there is no more.
        """
        names = ", ".join(self.names)
        if self._running is None:
            what = f"{names} come from a loader that was not started"
            raise FeedError(what, hint="call its start() before a pass over the data")
        feeds = self._some(self._running, count)
        if not feeds:
            what = f"the data of {names} have ended"
            raise EndOfDataError(what, hint="catch fluid.core.EOFException, and reset() the loader")
        return feeds


class DataLoader:
    """Makes loaders: `DataLoader.from_generator`, `DataLoader.from_dataset`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        what = "a DataLoader of a dataset with workers"
        raise UnsupportedError(what, hint="use DataLoader.from_generator or from_dataset")

    @staticmethod
    def from_generator(
        feed_list: Sequence[Variable] | None = None,
        capacity: int | None = None,
        use_double_buffer: bool = True,
        iterable: bool = True,
        return_list: bool = False,
        use_multiprocess: bool = False,
        drop_last: bool = True,
    ) -> GeneratorLoader:
        """Returns a loader that reads what a generator of the script gives.

        Args:
            feed_list: what is fed, in the order of a sample's fields.
            capacity: how many batches may lie ready.
            use_double_buffer: taken; JAX moves what is fed while the step before runs.
            iterable: it gives feeds to a loop; otherwise runs of the program take them.
            return_list: give arrays in the order of `feed_list`, in the place of dicts.
            use_multiprocess: taken; a thread reads.
            drop_last: leave out batches at the end that are fewer than devices.

        Raises:
            TypeError: `feed_list` is no list of variables.
            ProgramError: it is empty, or the capacity below 1.
        """
        del use_multiprocess
        return GeneratorLoader(
            feed_list, capacity, use_double_buffer, iterable, return_list, drop_last
        )

    @staticmethod
    def from_dataset(dataset: DatasetBase, places: Any, drop_last: bool = True) -> "DatasetLoader":
        """Returns a loader that reads a dataset.

        Args:
            dataset: what `DatasetFactory` made, with its files and variables set.
            places: devices, each of which gets a batch of its own.
            drop_last: leave out a last batch that has fewer samples than the others.

        Raises:
            AssertionError: it is not a dataset.
        """
        return DatasetLoader(dataset, places, drop_last)


class DatasetLoader:
    """Feeds that are made of a dataset; see `DataLoader.from_dataset`."""

    def __init__(self, dataset: DatasetBase, places: Any, drop_last: bool) -> None:
        if not isinstance(dataset, DatasetBase):
            what = f"a loader reads a dataset, not a {type(dataset).__name__}"
            raise mistake(what, "fluid.DatasetFactory().create_dataset()", AssertedError)
        self._dataset, self._drop_last = dataset, drop_last
        self._places = list(places) if isinstance(places, list | tuple) else [places]

    def __call__(self) -> "DatasetLoader":
        return self

    def __iter__(self) -> Iterator[list[dict[str, LoDTensor]]]:
        """Gives a list with a dict of LoDTensors for each device.

        Batches at the end that are fewer than the devices are left out.

        Raises:
            FeedError: a file cannot be read, or holds something else.
        """
        feeds, size = list[dict[str, LoDTensor]](), self._dataset._batch_size
        batches = self._dataset.batches(self._dataset.thread_num or len(self._places))
        try:
            for feed in batches:
                made = self._tensors(feed, self._places[len(feeds)])
                if self._drop_last and any(_samples(one) != size for one in made.values()):
                    continue
                feeds.append(made)
                if len(feeds) == len(self._places):
                    yield feeds
                    feeds = []
        finally:
            batches.close()

    def _tensors(self, feed: OneFeed, place: Any) -> dict[str, LoDTensor]:
        made = {}
        for name, value in feed.items():
            tensor = LoDTensor()
            tensor.set(np.asarray(value), place)
            if isinstance(value, LoDTensor):
                tensor.set_recursive_sequence_lengths(value.recursive_sequence_lengths())
            made[name] = tensor
        return made


def _samples(tensor: LoDTensor) -> int:
    """Returns of how many samples a tensor is."""
    lengths = tensor.recursive_sequence_lengths()
    return len(lengths[0]) if lengths else len(tensor)


class PyReader(GeneratorLoader):
    """A loader under its older name, and with older names for what it reads."""

    def __init__(
        self,
        feed_list: Sequence[Variable] | None = None,
        capacity: int | None = None,
        use_double_buffer: bool = True,
        iterable: bool = True,
        return_list: bool = False,
    ) -> None:
        super().__init__(feed_list, capacity, use_double_buffer, iterable, return_list)

    def decorate_sample_generator(
        self, sample_generator: Reader, batch_size: int, drop_last: bool = True, places: Any = None
    ) -> None:
        """Reads samples; see `set_sample_generator`."""
        self.set_sample_generator(sample_generator, batch_size, drop_last, places)

    def decorate_sample_list_generator(self, reader: Reader, places: Any = None) -> None:
        """Reads lists of samples; see `set_sample_list_generator`."""
        self.set_sample_list_generator(reader, places)

    def decorate_batch_generator(self, reader: Reader, places: Any = None) -> None:
        """Reads batches; see `set_batch_generator`."""
        self.set_batch_generator(reader, places)

    decorate_paddle_reader = decorate_sample_list_generator
    decorate_tensor_provider = decorate_batch_generator


def fed_by_readers(program: "Program", feed: Any, count: int) -> Any:
    """Returns what a run is fed, with the next batch of the program's loaders.

    Args:
        program: it.
        feed: what the script feeds; a loader whose variables are among it is not asked.
        count: on how many devices it runs.

    Raises:
        FeedError: a loader was not started.
        EndOfDataError: a loader has no more.
    """
    declared, given = program.global_block().vars, feed or {}
    named = given[0] if isinstance(given, list | tuple) and given else given
    found: list[OneFeed] = [{} for _ in range(count)]
    for reader in program._readers:
        if any(n in named for n in reader.names) or any(n not in declared for n in reader.names):
            continue
        for one, more in zip(found, reader.next_feeds(count), strict=False):
            one.update(more)
    if not any(found):
        return feed
    many = given if isinstance(given, list | tuple) else [given] * count
    made = [{**one, **more} for one, more in zip(many or [{}] * count, found, strict=False)]
    return made if count > 1 else made[0]
