"""Fed values: checked against the program, converted for a device, split over devices.

The split follows fluid's documents, which describe the behavior up to 1.7: every device gets the
same number of rows, and the last also the remainder, so 3 rows on 2 devices are [0] and [1, 2].
Version 1.8 rejected 5 rows on 4 devices.
"""

import math
import numbers
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import jax
import numpy as np

from jaxfleet.errors import AssertedError, FeedError, RaggedError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.sequence_lengths import data_by_rows
from jaxfleet.fluid.framework.types import dtype_name
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.lowering.lod_values import (
    check_counts,
    check_equal_lengths,
    fed_sequences,
    sequences_of,
)
from jaxfleet.ops.fluid.arrays import ON_DEVICE
from jaxfleet.ops.jax_adapter import numpy_dtype
from jaxfleet.ops.user_frames import warn_at_caller

Feed = Mapping[str, Any]
_ON_EACH = "these are the rows of each device; -1 stands for any size"
_NARROW = {np.dtype(wide): np.dtype(narrow) for wide, narrow in ON_DEVICE.items()}


def one_feed(feed: Any) -> Feed:
    """Returns the feed of a program on one device, which is a dict."""
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
    """Returns the fed variables of a program as arrays for a device.

    Unknown names are dropped with a warning. Names in `wide` go to no device, and keep 64 bits.
    Raises FeedError if a value does not match its declaration in `fluid.data`, and RaggedError if a
    value is a list.
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
            # For a persistable variable each device has a row of its own, or all share one value.
            among = np.size(value, 0) if variable.persistable and np.ndim(value) else devices
            found[name] = rule.checked(value, devices if devices == 1 else among)
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
    """How a variable is fed; it does not refer to the program, which may be freed earlier."""

    name: str  # the variable's
    dtype: np.dtype[Any]  # as declared
    # the dtype with which devices compute instead if JAX's 64-bit types are off
    narrow: np.dtype[Any] | None
    sizes: tuple[int, ...] | None  # of the axes, -1 for any; None for no check
    is_wide: bool = False  # it keeps its dtype, since no device computes with it
    # the sizes of one row, if such a row may be fed alone; else None
    sample: tuple[int, ...] | None = None

    @classmethod
    def of(cls, variable: Variable, *, is_wide: bool = False) -> "Rule":
        dtype = numpy_dtype(variable.dtype)
        sizes = variable.shape if variable.need_check_feed else None
        is_of_rows = sizes is None and variable.is_data and variable.shape[:1] == (-1,)
        sample = variable.shape[1:] if is_of_rows and not variable.lod_level else None
        return cls(variable.name, dtype, _NARROW.get(dtype), sizes, is_wide, sample)

    def take(self, value: Any) -> Any:
        """Returns a value as a device takes it, with a fast path for an array as declared."""
        if type(value) is not np.ndarray or value.dtype != self.dtype:
            return self.checked(value)
        if self.sizes is not None and not _fit(self.sizes, value.shape):
            return self.checked(value)
        if value.shape == self.sample:
            return self.checked(value)
        return value if self.narrow is None else self.narrowed(value)

    def checked(self, value: Any, devices: int = 1) -> Any:
        """Returns any value as a device takes it; raises like `take`."""
        if not isinstance(value, np.ndarray) and not isinstance(value, jax.Array):
            value = as_tensor(value, self.dtype.name, name=self.name)
        if value.shape == self.sample and devices == 1:
            value = value[None]  # fluid accepts a single row without the batch axis
        if self.sizes is not None:
            self._check_dtype(value)
            self._check_shape(self.sizes, value.shape, devices)
        stays = self.is_wide or value.dtype not in _NARROW
        return value if stays else self.narrowed(value)

    def narrowed(self, value: np.ndarray) -> np.ndarray:
        """Converts an array to the dtype of devices; FeedError if a number exceeds 32 bits."""
        made = value.astype(_NARROW[value.dtype])
        if made.dtype.kind != "i":
            return made
        # One pass establishes that all are from 0 to 2**31, as ids and labels are.
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
    """Returns the hint to reshape an array with the declared rows but other axes."""
    known = math.prod(size for size in sizes if size != -1)
    is_rows = sizes[:1] == (-1,) and sizes.count(-1) == 1 and len(sizes) != len(shape)
    if not is_rows or not known or math.prod(shape) % known:
        return None
    return f"feed value.reshape({', '.join(map(str, sizes))})"


def as_tensor(value: Any, dtype: str | None, *, name: str = "the value") -> Any:
    """Converts a value to an array if it is not one; a number gets the shape `[1]`.

    A number needs a dtype. A list is a RaggedError: fluid takes it for sequences of different
    lengths.
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
    """Warns that a fed name is not a variable of the program."""
    warn_at_caller(f"'{name}' is fed, and the program has no such variable: it is left out")


def warn_empty(data: Mapping[str, Any]) -> None:
    """Warns that a fed value has no rows."""
    name = next((name for name, value in data.items() if np.shape(value)[:1] == (0,)), None)
    if name is not None:
        why = "a mean over no rows is NaN, and so is what is trained by it"
        warn_at_caller(f"'{name.partition('@')[0]}' is fed no rows: {why}; leave such a batch out")


def part_sizes(rows: int, devices: int) -> list[int]:
    """Returns the number of rows of each device; with fewer rows than devices, one each."""
    parts = min(rows, devices)
    if parts == 0:
        return []
    step = rows // parts
    return [step] * (parts - 1) + [rows - step * (parts - 1)]


def split_feed(
    fed: Mapping[str, Any], declared: Mapping[str, Variable], devices: int, *, trains: bool
) -> list[dict[str, Any]]:
    """Divides the feed of all devices into one for each.

    If `trains` is set, the program computes gradients, and each device needs rows.
    """
    rows = {name: value for name, value in fed.items() if not declared[name].persistable}
    parts = {name: _rows(name, value, devices, trains=trains) for name, value in rows.items()}
    counts = {len(each) for each in parts.values()} or {devices}
    if len(counts) > 1:
        sizes = ", ".join(f"'{name}' is {len(each)}" for name, each in parts.items())
        what = f"what is fed goes to different numbers of devices: {sizes}"
        raise FeedError(what, hint="feed all variables equally many rows")
    used = counts.pop()
    kept = [name for name in fed if name not in rows]
    parts |= {name: _kept(name, fed[name], used, devices) for name in kept}
    return [{name: parts[name][device] for name in fed} for device in range(used)]


def share_sequences(program: Program, feed: Any, devices: int) -> Any:
    """Divides a dict that contains sequences over the devices; returns other feeds unchanged.

    Each sequence stays whole, like a row.
    """
    ragged = {v.name: v for same in data_by_rows(program).values() for v in same}
    if not isinstance(feed, Mapping) or ragged.keys().isdisjoint(feed):
        return feed
    values = {n: sequences_of(ragged[n], v) if n in ragged else v for n, v in feed.items()}
    sizes = {name: part_sizes(len(values[name]), devices) for name in values if name in ragged}
    count = min(map(len, sizes.values()))
    declared = program.global_block().vars
    parts: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in values.items():
        is_state = name in declared and declared[name].persistable
        if name not in ragged and (is_state or np.ndim(value) == 0):
            shared = [value] * count
        else:
            ends = np.cumsum(part_sizes(len(value), count)).tolist()
            shared = [value[start:end] for start, end in pairwise([0, *ends])]
        for part, own in zip(parts, shared, strict=True):
            part[name] = own
    return parts


def _rows(name: str, value: Any, devices: int, *, trains: bool) -> list[Any]:
    if np.ndim(value) == 0:
        return [value] * devices
    sizes = part_sizes(len(value), devices)
    if not sizes or (trains and len(sizes) < devices):
        raise too_few(name, len(value), devices)
    ends = np.cumsum(sizes)
    return [value[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _kept(name: str, value: Any, used: int, devices: int) -> list[Any]:
    """Returns a persistable value for each device: a shared one, or one each."""
    count = len(value) if np.ndim(value) else 1
    if count == 1:
        return [value] * used
    if count in {used, devices}:
        return [value[device : device + 1] for device in range(used)]
    what = f"'{name}' is persistable and fed {count} values"
    raise FeedError(what, hint=f"feed 1 for all devices, or {used}, one for each")


def too_few(name: str, rows: int, devices: int) -> FeedError:
    """Returns the error for fewer rows than devices."""
    what = f"'{name}' is fed {rows} rows for {devices} devices, and each needs one to train on"
    return FeedError(what, hint="leave a last batch out that is so small, or use fewer devices")
