"""What is fed: checked against what the program declares, and made ready for a device."""

import warnings
from collections.abc import Mapping
from typing import Any, cast

import jax
import numpy as np

from jaxfleet.errors import AssertedError, FeedError, RaggedError
from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.dtypes import dtype_name
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.ragged_values import fed_sequences
from jaxfleet.fluid.variable import Variable
from jaxfleet.ops.fluid.arrays import ON_DEVICE

Feed = Mapping[str, Any]
_ON_EACH = "these are the rows of each device; -1 stands for any size"


def one_feed(feed: Any) -> Feed:
    """Returns the one dict that a program on one device is fed.

    Raises:
        AssertionError: there is one for each of several devices.
        TypeError: it is no dict.
    """
    if feed is None:
        return {}
    if isinstance(feed, list | tuple):
        if len(feed) != 1:
            what = f"{len(feed)} feeds are given to a program that runs on one device"
            raise mistake(what, "feed one dict, or compile the program for several", AssertedError)
        feed = feed[0]
    check_type(feed, "a feed", Mapping, "feed={'x': array}")
    return cast("Feed", feed)


def fed_values(program: Program, feed: Feed, *, devices: int = 1) -> dict[str, Any]:
    """Returns what of a feed the program knows, as arrays that a device takes.

    Args:
        program: what names which variables.
        feed: values by name; what the program does not have is left out, with a warning.
        devices: among how many of them axis 0 will be divided.

    Raises:
        FeedError: a value is not what `fluid.data` declared.
        RaggedError: a value is a list.
    """
    declared = program.global_block().vars
    found: dict[str, Any] = {}
    for name, value in feed.items():
        variable = declared.get(name)
        if variable is None:
            _warn_unknown(name)
            continue
        if variable.lod_level and variable.is_data:
            found |= _sequences(program, variable, value, devices)
        else:
            found[name] = fed_value(variable, value, devices=devices)
    return found


def _sequences(program: Program, variable: Variable, value: Any, devices: int) -> dict[str, Any]:
    if devices > 1:
        what = f"'{variable.name}' is sequences, which {devices} ranks do not share"
        raise FeedError(what, hint="CompiledProgram.with_data_parallel shares them out")
    fed = fed_sequences(program, variable, value)
    return {**fed, variable.name: fed_value(variable, fed[variable.name])}


def fed_value(variable: Variable, value: Any, *, devices: int = 1) -> Any:
    """Returns one fed value, checked if `fluid.data` declared it."""
    if not isinstance(value, np.ndarray | jax.Array):
        value = as_tensor(value, variable.dtype, name=variable.name)
    if variable.need_check_feed:
        _check(variable, value, devices)
    return _on_device(variable, value) if isinstance(value, np.ndarray) else value


def as_tensor(value: Any, dtype: str | None, *, name: str = "the value") -> Any:
    """Returns a value that is no array as one; a number gets the shape `[1]`.

    Raises:
        AssertionError: a number without a dtype.
        RaggedError: a list, which fluid takes for sequences of different lengths.
    """
    if isinstance(value, list):
        what = f"'{name}' is fed a list, which stands for sequences of unequal lengths"
        raise RaggedError(what, hint="feed np.array(rows); sequences go by create_lod_tensor")
    if hasattr(value, "__array__") and not isinstance(value, np.generic):
        return np.asarray(value)
    if dtype is None:
        what = f"{name} is the number {value!r}, and of no dtype"
        raise mistake(what, "give a dtype, or an array", AssertedError)
    return np.array([value]).astype(dtype_name(dtype))


def _warn_unknown(name: str) -> None:
    text = f"'{name}' is fed, and the program has no such variable: it is left out"
    warnings.warn(text, stacklevel=6)


def _check(variable: Variable, value: Any, devices: int) -> None:
    found = dtype_name(value.dtype)
    narrow = isinstance(value, jax.Array) and ON_DEVICE.get(variable.dtype) == found
    if found != variable.dtype and not narrow:
        what = f"'{variable.name}' is fed {found}, and declared {variable.dtype}"
        raise FeedError(what, hint=f"feed value.astype('{variable.dtype}')")
    wanted, shape = variable.shape, value.shape
    if devices > 1 and shape:
        shape = (shape[0] // devices, *shape[1:])
    if len(wanted) != len(shape) or any(_differ(w, n) for w, n in zip(wanted, shape, strict=True)):
        what = f"'{variable.name}' is fed an array {list(shape)}, and declared {list(wanted)}"
        raise FeedError(what, hint="-1 stands for any size" if devices == 1 else _ON_EACH)


def _differ(wanted: int, found: int) -> bool:
    return wanted not in {-1, found}


def _on_device(variable: Variable, value: np.ndarray) -> np.ndarray:
    """Returns a fed array as a device takes it, where JAX's 64-bit types are off."""
    narrow = ON_DEVICE.get(value.dtype.name)
    if narrow is None:
        return value
    made = value.astype(narrow)
    if narrow == "int32" and not np.array_equal(made, value):
        far = value[made != value].flat[0]
        what = f"'{variable.name}' is fed {far}, and devices compute with 32 bits"
        raise FeedError(what, hint="map such ids to numbers below 2**31 first")
    return made
