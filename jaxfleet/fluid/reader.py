"""Loaders, which convert samples from generators to feeds in a thread ahead of the steps.

An *iterable* loader yields feeds to a loop of the script; any other belongs to the program of its
variables, and each run takes the next batch from it, between `start` and `reset`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np

from jaxfleet.errors import AssertedError, EndOfDataError, FeedError, UnsupportedError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.data_feeder import DataFeeder
from jaxfleet.fluid.dataset.base import DatasetBase
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.lod_tensor import LoDTensor
from jaxfleet.fluid.readers import Prefetcher, Reader, batch

if TYPE_CHECKING:
    from jaxfleet.fluid.framework.program import Program

OneFeed: TypeAlias = dict[str, Any]

_CAPACITY = 2  # batches read ahead by default


class GeneratorLoader:
    """Feeds from a generator; see `DataLoader.from_generator`."""

    def __init__(
        self,
        feed_list: Sequence[Variable] | None = None,
        capacity: int | None = None,
        use_double_buffer: bool = True,
        iterable: bool = True,
        return_list: bool = False,
        drop_last: bool = True,
    ) -> None:
        del use_double_buffer  # JAX moves a feed during the previous step
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
        self._running: Prefetcher[OneFeed] | None = None
        self._passes: Iterator[Any] | None = None
        if not iterable:
            self._variables[0].block.program._readers.append(self)

    @property
    def iterable(self) -> bool:
        """Whether it yields feeds to a loop, rather than to runs of the program."""
        return self._iterable

    @property
    def names(self) -> list[str]:
        return [variable.name for variable in self._variables]

    @property
    def variables(self) -> list[Variable]:
        return list(self._variables)

    # --- sources -----------------------------------------------------------------------------

    def set_sample_generator(
        self, reader: Reader, batch_size: int, drop_last: bool = True, places: Any = None
    ) -> "GeneratorLoader":
        """Sets a generator of single samples, which are combined into batches.

        `reader` returns an iterator over samples, each with a field for every variable. Each of the
        `places` gets its own batch; `drop_last` drops an incomplete batch at the end.
        """
        check_type(batch_size, "batch_size", int)

        def whole() -> Iterator[tuple[Any, ...]]:
            for sample in reader():
                yield sample if isinstance(sample, tuple | list) else (sample,)  # type: ignore[misc]

        return self.set_sample_list_generator(batch(whole, batch_size, drop_last), places)

    def set_sample_list_generator(self, reader: Reader, places: Any = None) -> "GeneratorLoader":
        """Sets a generator of lists of samples, each of which is a batch."""
        feeder = DataFeeder(self._variables, None)
        return self._reads(lambda: map(feeder.feed, reader()), places)

    def set_batch_generator(self, reader: Reader, places: Any = None) -> "GeneratorLoader":
        """Sets a generator of batches: an array, or a LoDTensor, for each variable."""
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

    def _ahead(self) -> Prefetcher[OneFeed]:
        if self._feeds is None:
            hint = "call set_sample_generator, set_sample_list_generator or set_batch_generator"
            raise mistake("a loader has no generator to read", hint, AssertedError)
        return Prefetcher(self._feeds, self._capacity)

    # --- for a loop of the script ------------------------------------------------------------

    def __call__(self) -> "GeneratorLoader":
        return self

    def __iter__(self) -> Iterator[Any]:
        """Starts a pass over lists with a dict for each device or, with `return_list`, of arrays.

        Raises AssertionError if the loader is not iterable, or has no source.
        """
        if not self._iterable:
            hint = "call start(), run the program without a feed, and reset() at EOFException"
            raise mistake("a loader with iterable=False is iterated over", hint, AssertedError)
        return self._pass(self._ahead())

    def __next__(self) -> Any:
        """Returns the next item; after the last one, the first of a new pass."""
        if self._passes is None:
            self._passes = iter(self)
        try:
            return next(self._passes)
        except BaseException:
            self._passes = None
            raise

    def _pass(self, ahead: Prefetcher[OneFeed]) -> Iterator[Any]:
        try:
            while feeds := self._some(ahead, self._devices):
                names = self.names
                yield [[feed[n] for n in names] for feed in feeds] if self._return_list else feeds
        finally:
            ahead.stop()

    def _some(self, ahead: Prefetcher[OneFeed], count: int) -> list[OneFeed]:
        """Returns a feed for each device; an empty list at the end of the data."""
        feeds: list[OneFeed] = []
        while len(feeds) < count:
            try:
                feeds.append(ahead.take())
            except StopIteration:
                return [] if self._drop_last and len(feeds) < count else feeds
        return feeds

    # --- for a program -----------------------------------------------------------------------

    def start(self) -> None:
        """Starts a pass, from which the program's runs take batches.

        Raises:
            AssertionError: the loader is iterable, has no source, or has started.
        """
        if self._iterable:
            what = "start() is for a loader with iterable=False"
            raise mistake(what, "iterate over it, and feed what it gives", AssertedError)
        if self._running is not None:
            raise mistake("a loader is started that runs", "call reset() first", AssertedError)
        self._running = self._ahead()

    def reset(self) -> None:
        """Ends a pass; `start` begins the next one."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()

    def next_feeds(self, count: int) -> list[OneFeed]:
        """Returns the feeds of a run, one for each device.

        Raises:
            FeedError: the loader was not started.
            EndOfDataError: there is no more data.
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
    """Creates loaders: `DataLoader.from_generator`, `DataLoader.from_dataset`."""

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
        """Returns a loader for a generator of the script.

        Args:
            feed_list: the fed variables, in the order of a sample's fields.
            capacity: the number of batches read ahead.
            use_double_buffer: ignored; JAX moves a feed during the previous step.
            iterable: yield feeds to a loop; otherwise runs of the program take them.
            return_list: yield arrays in the order of `feed_list`, instead of dicts.
            use_multiprocess: ignored; a thread reads.
            drop_last: drop batches at the end that are fewer than devices.

        Raises:
            TypeError: `feed_list` is not a list of variables.
            ProgramError: it is empty, or the capacity is below 1.
        """
        del use_multiprocess
        return GeneratorLoader(
            feed_list, capacity, use_double_buffer, iterable, return_list, drop_last
        )

    @staticmethod
    def from_dataset(dataset: DatasetBase, places: Any, drop_last: bool = True) -> "DatasetLoader":
        """Returns a loader for a dataset, of which each of the places gets its own batches.

        `drop_last` drops an incomplete batch at the end.

        Raises:
            AssertionError: it is not a dataset.
        """
        return DatasetLoader(dataset, places, drop_last)


class DatasetLoader:
    """Feeds from a dataset; see `DataLoader.from_dataset`."""

    def __init__(self, dataset: DatasetBase, places: Any, drop_last: bool) -> None:
        if not isinstance(dataset, DatasetBase):
            what = f"a loader reads a dataset, not a {type(dataset).__name__}"
            raise mistake(what, "fluid.DatasetFactory().create_dataset()", AssertedError)
        self._dataset, self._drop_last = dataset, drop_last
        self._places = list(places) if isinstance(places, list | tuple) else [places]

    def __call__(self) -> "DatasetLoader":
        return self

    def __iter__(self) -> Iterator[list[dict[str, LoDTensor]]]:
        """Yields a list with a dict of LoDTensors for each device.

        Batches at the end that are fewer than the devices are dropped. Raises FeedError if a file
        cannot be read, or has an invalid line.
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
    """Returns the number of samples in a tensor."""
    lengths = tensor.recursive_sequence_lengths()
    return len(lengths[0]) if lengths else len(tensor)


class PyReader(GeneratorLoader):
    """A loader under its older name, with the older names of its methods."""

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
        self.set_sample_generator(sample_generator, batch_size, drop_last, places)

    def decorate_sample_list_generator(self, reader: Reader, places: Any = None) -> None:
        self.set_sample_list_generator(reader, places)

    def decorate_batch_generator(self, reader: Reader, places: Any = None) -> None:
        self.set_batch_generator(reader, places)

    decorate_paddle_reader = decorate_sample_list_generator
    decorate_tensor_provider = decorate_batch_generator


def fed_by_readers(program: "Program", feed: Any, count: int) -> Any:
    """Adds the next batch of a program's loaders to the feed of a run.

    A loader is skipped if its variables are in the feed. `count` is the number of devices. Raises
    FeedError if a loader was not started, and EndOfDataError if a loader has no more data.
    """
    declared, given = program.global_block().vars, feed or {}
    named = given[0] if isinstance(given, list | tuple) and given else given
    found: list[OneFeed] = [{} for _ in range(count)]
    used = 0  # devices with a batch: the last batches may be fewer
    for reader in program._readers:
        if any(n in named for n in reader.names) or any(n not in declared for n in reader.names):
            continue
        feeds = reader.next_feeds(count)
        used = max(used, len(feeds))
        for one, more in zip(found, feeds, strict=False):
            one.update(more)
    if not any(found):
        return feed
    many = given if isinstance(given, list | tuple) and given else [given or {}] * used
    made = [{**one, **more} for one, more in zip(many, found, strict=False)]
    return made if count > 1 else made[0]
