"""What is fed: checked against what the program declares, and made ready for a device."""

import math
import numbers
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np

from jaxfleet.errors import AssertedError, FeedError, RaggedError
from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.dtypes import dtype_name
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.ragged_values import check_counts, check_equal_lengths, fed_sequences
from jaxfleet.fluid.variable import Variable
from jaxfleet.ops.fluid.arrays import ON_DEVICE
from jaxfleet.ops.frames import warn_at_caller
from jaxfleet.ops.jax_adapter import numpy_dtype

Feed = Mapping[str, Any]
_ON_EACH = "these are the rows of each device; -1 stands for any size"
_NARROW = {np.dtype(wide): np.dtype(narrow) for wide, narrow in ON_DEVICE.items()}


def one_feed(feed: Any) -> Feed:
    """Returns the one dict that a program on one device is fed.

    Raises:
        AssertionError: there is one for each of several devices.
        TypeError: it is no dict.
    """
    if type(feed) is dict:
        return feed
    if feed is None:
        return {}
    if isinstance(feed, list | tuple):
        if len(feed) != 1:
            what = f"{len(feed)} feeds are given to a program that runs on one device"
            hint = f"feed one dict, or set CPU_NUM={len(feed)} and compile the program for several"
            raise mistake(what, hint, AssertedError)
        feed = feed[0]
    check_type(feed, "a feed", Mapping, "feed={'x': array}")
    return cast("Feed", feed)


def fed_values(
    program: Program, feed: Feed, *, devices: int = 1, wide: Collection[str] = ()
) -> dict[str, Any]:
    """Returns what of a feed the program knows, as arrays that a device takes.

    Args:
        program: what names which variables.
        feed: values by name; what the program does not have is left out, with a warning.
        devices: among how many of them axis 0 will be divided.
        wide: the names of what goes to no device, and stays the 64 bits that it is.

    Raises:
        FeedError: a value is not what `fluid.data` declared.
        RaggedError: a value is a list.
    """
    declared = program.global_block().vars
    found: dict[str, Any] = {}
    has_sequences = False
    for name, value in feed.items():
        variable = declared.get(name)
        if variable is None:
            warn_unknown(name)
        elif variable.lod_level and variable.is_data:
            found |= _sequences(program, variable, value, devices)
            has_sequences = True
        else:
            rule = Rule.of(variable, is_wide=name in wide)
            found[name] = rule.checked(value, devices)
    if has_sequences:
        check_counts(declared, found)
        check_equal_lengths(program, found)
    return found


def _sequences(program: Program, variable: Variable, value: Any, devices: int) -> dict[str, Any]:
    if devices > 1:
        what = f"'{variable.name}' is sequences, which {devices} ranks do not share"
        raise FeedError(what, hint="CompiledProgram.with_data_parallel shares them out")
    fed = fed_sequences(program, variable, value)
    return {**fed, variable.name: Rule.of(variable).checked(fed[variable.name])}


@dataclass(frozen=True, slots=True)
class Rule:
    """How a variable is fed; it holds none of the program, which may go before it.

    Attributes:
        name: the variable's.
        dtype: what it declares.
        narrow: what devices compute with in its place, where JAX's 64-bit types are off.
        sizes: those of its axes, -1 where any will do; None if nothing is checked.
        is_wide: it stays what it is, since no device computes with it.
        sample: the sizes of one row of it, where such a row may be fed alone; None if not.
    """

    name: str
    dtype: np.dtype[Any]
    narrow: np.dtype[Any] | None
    sizes: tuple[int, ...] | None
    is_wide: bool = False
    sample: tuple[int, ...] | None = None

    @classmethod
    def of(cls, variable: Variable, *, is_wide: bool = False) -> "Rule":
        dtype = numpy_dtype(variable.dtype)
        sizes = variable.shape if variable.need_check_feed else None
        is_of_rows = sizes is None and variable.is_data and variable.shape[:1] == (-1,)
        sample = variable.shape[1:] if is_of_rows and not variable.lod_level else None
        return cls(variable.name, dtype, _NARROW.get(dtype), sizes, is_wide, sample)

    def take(self, value: Any) -> Any:
        """Returns a value as a device takes it; what is fed just as declared passes quickly.

        Raises:
            FeedError: it is not what `fluid.data` declared.
            RaggedError: it is a list.
        """
        if type(value) is not np.ndarray or value.dtype != self.dtype:
            return self.checked(value)
        if self.sizes is not None and not _fit(self.sizes, value.shape):
            return self.checked(value)
        if value.shape == self.sample:
            return self.checked(value)
        return value if self.narrow is None else self.narrowed(value)

    def checked(self, value: Any, devices: int = 1) -> Any:
        """Returns any value as a device takes it.

        Raises:
            FeedError: it is not what `fluid.data` declared.
            RaggedError: it is a list.
        """
        if not isinstance(value, np.ndarray) and not isinstance(value, jax.Array):
            value = as_tensor(value, self.dtype.name, name=self.name)
        if value.shape == self.sample and devices == 1:
            value = value[None]  # fluid computes with one row as it stands
        if self.sizes is not None:
            self._check_dtype(value)
            self._check_shape(self.sizes, value.shape, devices)
        stays = self.is_wide or value.dtype not in _NARROW
        return value if stays else self.narrowed(value)

    def narrowed(self, value: np.ndarray) -> np.ndarray:
        """Returns an array as devices compute with it.

        Raises:
            FeedError: a number of it does not fit into 32 bits.
        """
        made = value.astype(_NARROW[value.dtype])
        if made.dtype.kind != "i":
            return made
        # One pass finds that all are from 0 to 2**31, as ids and labels are.
        if np.bitwise_or.reduce(value, axis=None) >> 31 and not (made == value).all():
            far = value[made != value].flat[0]
            what = f"'{self.name}' is fed {far}, and devices compute with 32 bits"
            raise FeedError(what, hint="map such ids to numbers below 2**31 first")
        return made

    def _check_dtype(self, value: Any) -> None:
        found = value.dtype
        if found == self.dtype or (isinstance(value, jax.Array) and found == self.narrow):
            return
        what = f"'{self.name}' is fed {found}, and declared {self.dtype}"
        raise FeedError(what, hint=f"feed value.astype('{self.dtype}')")

    def _check_shape(self, sizes: tuple[int, ...], shape: tuple[int, ...], devices: int) -> None:
        each = (shape[0] // devices, *shape[1:]) if devices > 1 and shape else shape
        if _fit(sizes, each):
            return
        what = f"'{self.name}' is fed an array {list(each)}, and declared {list(sizes)}"
        usual = "-1 stands for any size" if devices == 1 else _ON_EACH
        raise FeedError(what, hint=_reshaped(sizes, shape) or usual)


def _fit(sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    if len(sizes) != len(shape):
        return False
    return all(wanted in {-1, found} for wanted, found in zip(sizes, shape, strict=True))


def _reshaped(sizes: tuple[int, ...], shape: tuple[int, ...]) -> str | None:
    """Returns the hint to reshape an array that has the rows that are declared, in other axes."""
    known = math.prod(size for size in sizes if size != -1)
    is_rows = sizes[:1] == (-1,) and sizes.count(-1) == 1 and len(sizes) != len(shape)
    if not is_rows or not known or math.prod(shape) % known:
        return None
    return f"feed value.reshape({', '.join(map(str, sizes))})"


def as_tensor(value: Any, dtype: str | None, *, name: str = "the value") -> Any:
    """Returns a value that is no array as one; a number gets the shape `[1]`.

    Raises:
        AssertionError: a number without a dtype.
        RaggedError: a list, which fluid takes for sequences of different lengths.
        FeedError: something that is neither a number nor like an array.
    """
    if isinstance(value, list | tuple):
        kind = type(value).__name__
        what = f"'{name}' is fed a {kind}, which stands for sequences of unequal lengths"
        raise RaggedError(what, hint="feed np.array(rows); sequences go by create_lod_tensor")
    if hasattr(value, "__array__") and not isinstance(value, np.generic):
        return np.asarray(value)
    if not isinstance(value, numbers.Number | np.generic):
        what = f"'{name}' is fed {value!r}, which is no number"
        raise FeedError(what, hint="feed a numpy array")
    if dtype is None:
        what = f"{name} is the number {value!r}, and of no dtype"
        raise mistake(what, "give a dtype, or an array", AssertedError)
    return np.array([value]).astype(dtype_name(dtype))


def warn_unknown(name: str) -> None:
    """Says that what is fed is no variable of the program."""
    warn_at_caller(f"'{name}' is fed, and the program has no such variable: it is left out")


def warn_empty(data: Mapping[str, Any]) -> None:
    """Says that something is fed without rows."""
    name = next((name for name, value in data.items() if np.shape(value)[:1] == (0,)), None)
    if name is not None:
        why = "a mean over no rows is NaN, and so is what is trained by it"
        warn_at_caller(f"'{name.partition('@')[0]}' is fed no rows: {why}; leave such a batch out")
