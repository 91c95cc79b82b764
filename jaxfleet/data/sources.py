"""Reads samples by their indices, from arrays or from a sequence of examples."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np

from jaxfleet.errors import FeedError

Sample = Any  # a pytree of arrays and numbers
Change = Callable[[Sample, int], Sample]  # of a sample with this index

_METHODS = ("__len__", "__getitem__")
_SHOWN = 8  # indices in a note


class RandomAccess(Protocol):
    """A source of samples: what has a length and gives a sample by its index.

    numpy's arrays, lists, and grain's `RandomAccessDataSource` and `MapDataset` are such sources.
    A method `__getitems__`, which gives several samples at once, is used if there is one.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


class ArrayRows:
    """Samples that are the rows of arrays, which form one pytree.

    Raises:
        FeedError: the arrays have different numbers of rows.
    """

    def __init__(self, arrays: Any) -> None:
        self._arrays = arrays
        lengths = {
            jax.tree_util.keystr(path): int(leaf.shape[0])
            for path, leaf in jax.tree_util.tree_leaves_with_path(arrays)
        }
        self._length = next(iter(lengths.values()))
        for path, length in lengths.items():
            if length != self._length:
                first = next(iter(lengths))
                what = f"the source has {self._length} rows at {first} and {length} at {path}"
                raise FeedError(what, hint="every array of a source has one row for each sample")

    def __len__(self) -> int:
        return self._length

    def read(self, indices: np.ndarray, change: Change | None) -> Any:
        """Returns a batch of some rows."""
        if change is None:
            return jax.tree_util.tree_map(lambda leaf: leaf[indices], self._arrays)
        return stacked([self._changed(int(index), change) for index in indices], indices)

    def _changed(self, index: int, change: Change) -> Sample:
        with _naming(index):
            return change(jax.tree_util.tree_map(lambda leaf: leaf[index], self._arrays), index)


class Examples:
    """Samples of a source that gives them one by one, such as a list of dicts."""

    def __init__(self, source: RandomAccess) -> None:
        self._source = source
        self._several: Callable[[list[int]], Sequence[Sample]] | None = getattr(
            source, "__getitems__", None
        )

    def __len__(self) -> int:
        return len(self._source)

    def read(self, indices: np.ndarray, change: Change | None) -> Any:
        """Returns a batch of some samples, stacked leaf by leaf."""
        wanted = [int(index) for index in indices]
        if self._several is None:
            samples = []
            for index in wanted:
                with _naming(index):
                    samples.append(self._source[index])
        else:
            with _naming(*wanted):
                samples = list(self._several(wanted))
        if change is not None:
            for at, index in enumerate(wanted):
                with _naming(index):
                    samples[at] = change(samples[at], index)
        return stacked(samples, indices)


def open_source(source: Any) -> ArrayRows | Examples:
    """Returns a reader of a source.

    A pytree of arrays has its samples in their rows. A list, or any other object with a length and
    `[index]`, has one in each element.

    Raises:
        FeedError: it is neither.
    """
    if isinstance(source, Iterator):
        kind = type(source).__name__
        hint = "its samples must be known by number; write a stream to files, or into arrays"
        raise FeedError(f"the source is a {kind}, which can be read only once", hint=hint)
    if not isinstance(source, list):
        leaves = jax.tree_util.tree_leaves(source)
        if leaves and all(map(_has_rows, leaves)):
            return ArrayRows(source)
    if isinstance(source, dict) or not all(map(partial(hasattr, source), _METHODS)):
        what = f"a {type(source).__name__} is neither arrays nor a sequence of samples"
        hint = "pass arrays with one row for each sample, or an object with len() and [index]"
        raise FeedError(what, hint=hint)
    return Examples(source)


def stacked(samples: Sequence[Sample], indices: np.ndarray) -> Any:
    """Returns one batch of samples of one structure.

    Raises:
        FeedError: two of them differ in structure or in the shape of a leaf.
    """
    flat = [jax.tree_util.tree_flatten_with_path(sample) for sample in samples]
    leaves: list[tuple[Any, Any]] = flat[0][0]
    tree: Any = flat[0][1]
    for (others, other_tree), index in zip(flat, indices, strict=True):
        if other_tree != tree:
            what = f"sample {index} of the source is {other_tree}, and sample {indices[0]} {tree}"
            raise FeedError(what, hint="all samples of a batch must have one structure")
        for (path, leaf), (_, other) in zip(leaves, others, strict=True):
            if np.shape(leaf) != np.shape(other):
                at = jax.tree_util.keystr(path)
                what = f"sample {index} of the source has shape {np.shape(other)}"
                what = f"{what}{f' at {at}' if at else ''}, and sample {indices[0]} has"
                hint = "pad or crop samples with a function in `transforms`"
                raise FeedError(f"{what} {np.shape(leaf)}", hint=hint)
    if not leaves:
        what = f"sample {indices[0]} of the source is {samples[0]!r}, which has no arrays"
        raise FeedError(what, hint="a source that filters samples must do so before it is loaded")
    columns = zip(*([leaf for _, leaf in each] for each, _ in flat), strict=True)
    return jax.tree_util.tree_unflatten(tree, [np.stack(column) for column in columns])


@contextmanager
def _naming(*indices: int) -> Iterator[None]:
    """Adds to an exception which samples were read."""
    try:
        yield
    except BaseException as error:
        shown = ", ".join(map(str, indices[:_SHOWN]))
        more = f" and {len(indices) - _SHOWN} more" if len(indices) > _SHOWN else ""
        error.add_note(f"sample{'s' * (len(indices) > 1)} {shown}{more} of the source")
        raise


def _has_rows(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(getattr(leaf, "shape", ()))
