"""DataFeeder: converts lists of samples to feeds."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from jaxfleet.errors import AssertedError, FeedError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.framework.program import Program, default_main_program
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.lowering.lod_values import lod_tensor_of
from jaxfleet.fluid.places import CPUPlace, CUDAPlace, Place, cpu_places, cuda_places
from jaxfleet.fluid.readers import Reader
from jaxfleet.ops.jax_adapter import numpy_dtype

Sample: TypeAlias = Sequence[Any]
Fed: TypeAlias = Any  # an array, or a LoDTensor


class DataFeeder:
    """Converts batches of samples to arrays by name.

    ::

        feeder = fluid.DataFeeder([x, y], fluid.CPUPlace())
        exe.run(feed=feeder.feed([(row, label) for row, label in batch]))

    Args:
        feed_list: variables or their names, in the order of a sample's fields.
        place: the device of the run, which moves the arrays there; None for any.
        program: the program for looking up names; the default main program unless given.

    Raises:
        TypeError: the list has an item of another type.
        ValueError: the program has no such variable.

    Examples:
        >>> from jaxfleet import fluid
        >>> with fluid.program_guard(fluid.Program(), fluid.Program()):
        ...     x, y = fluid.data("x", [None, 2]), fluid.data("y", [None, 1], dtype="int64")
        ...     feeder = fluid.DataFeeder([x, y], fluid.CPUPlace())
        >>> fed = feeder.feed([([0.5, 1.0], 3), ([1.5, 2.0], 4)])
        >>> fed["x"].shape, fed["y"].shape
        ((2, 2), (2, 1))
    """

    def __init__(
        self,
        feed_list: Sequence[Variable | str],
        place: Place | None,
        program: Program | None = None,
    ) -> None:
        check_type(feed_list, "feed_list", (list, tuple))
        check_type(program, "program", (Program, type(None)))
        block = (program or default_main_program()).global_block()
        found = [block.var(x) if isinstance(x, str) else x for x in feed_list]
        for variable in found:
            check_type(variable, "a member of feed_list", Variable)
        self.feed_vars, self.place = found, place

    @property
    def feed_names(self) -> list[str]:
        return [variable.name for variable in self.feed_vars]

    def feed(self, iterable: Iterable[Sample]) -> dict[str, Fed]:
        """Returns a batch as arrays by name; sequences as LoDTensors.

        Raises:
            AssertionError: a sample has more or fewer fields than there are variables.
            FeedError: shapes differ between samples, or from those declared in the program.
        """
        samples = list(iterable)
        for sample in samples:
            if len(sample) != len(self.feed_vars):
                what = f"a sample has {len(sample)} fields, and feed_list {len(self.feed_vars)}"
                raise mistake(what, f"a sample holds {', '.join(self.feed_names)}", AssertedError)
        columns = zip(*samples, strict=True) if samples else [()] * len(self.feed_vars)
        return {
            v.name: lod_tensor_of(v, rows) if v.lod_level else _column(v, rows)
            for v, rows in zip(self.feed_vars, columns, strict=True)
        }

    def feed_parallel(
        self, iterable: Iterable[Iterable[Sample]], num_places: int | None = None
    ) -> Iterator[dict[str, Fed]]:
        """Yields the feed of each of several devices, from a batch for each.

        There are `num_places` devices; by default all GPUs, or `CPU_NUM`. Raises ValueError if
        there are more or fewer batches than devices.
        """
        batches, count = list(iterable), self._count(num_places)
        if len(batches) != count:
            what = f"feed_parallel takes a mini-batch for each of {count} devices"
            raise mistake(f"{what}, not {len(batches)}", kind=FeedError)
        for batch in batches:
            yield self.feed(batch)

    def decorate_reader(
        self,
        reader: Reader,
        multi_devices: bool,
        num_places: int | None = None,
        drop_last: bool = True,
    ) -> Callable[[], Iterator[Any]]:
        """Returns a reader of feeds.

        Args:
            reader: of batches of samples.
            multi_devices: yield a list of feeds, one for each device.
            num_places: the number of devices; all of the place's kind unless given.
            drop_last: drop batches at the end that are too few for all devices.

        Raises:
            ValueError: while reading, if batches are left over and `drop_last` is False.
        """
        if not multi_devices:
            return lambda: (self.feed(batch) for batch in reader())

        def feeds() -> Iterator[list[dict[str, Fed]]]:
            count, waiting = self._count(num_places), []
            for batch in reader():
                waiting.append(batch)
                if len(waiting) == count:
                    yield list(self.feed_parallel(waiting, count))
                    waiting = []
            if waiting and not drop_last:
                what = f"{len(waiting)} batches are left for {count} devices"
                raise mistake(what, "say drop_last=True, or give as many", FeedError)

        return feeds

    def _count(self, num_places: int | None) -> int:
        if num_places is not None:
            return int(num_places)
        check_type(self.place, "place", (CPUPlace, CUDAPlace, type(None)))
        return len(cuda_places() if isinstance(self.place, CUDAPlace) else cpu_places())


def _column(variable: Variable, rows: Sequence[Any]) -> np.ndarray:
    """Returns one field of all samples as the fed array of a variable."""
    shape, dtype = variable.shape, numpy_dtype(variable.dtype)
    arrays = [_array(variable, row, dtype) for row in rows]
    if len({array.shape for array in arrays}) > 1:
        shapes = ", ".join(str(list(array.shape)) for array in arrays[:3])
        what = f"samples of '{variable.name}' differ in shape: {shapes}"
        raise mistake(what, "rows of different lengths need lod_level=1", FeedError)
    made = np.stack(arrays) if arrays else np.zeros((0, *_sizes(shape[1:])), dtype)
    return _fitted(variable, made, shape)


def _array(variable: Variable, row: Any, dtype: np.dtype) -> np.ndarray:
    """Returns one field of one sample; FeedError if it is not an array of the declared dtype."""
    try:
        return np.asarray(row, dtype)
    except (TypeError, ValueError) as error:
        what = f"a sample of '{variable.name}' is no array of {variable.dtype}: {error}"
        raise mistake(what, kind=FeedError) from error


def _fitted(variable: Variable, made: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Adapts an array to the declared number of axes; FeedError if that is not possible."""
    what = f"samples of '{variable.name}' are {list(made.shape)}, and declared {list(shape)}"
    if made.ndim != len(shape):
        try:
            made = made.reshape(shape)
        except ValueError as error:
            raise mistake(f"{what}: they cannot be reshaped", kind=FeedError) from error
    if any(want not in {-1, size} for want, size in zip(shape, made.shape, strict=True)):
        raise mistake(what, kind=FeedError)
    return made


def _sizes(shape: Sequence[int]) -> list[int]:
    return [max(size, 0) for size in shape]
