"""Which device gets which rows of what is fed.

By the rule of the documents, which was fluid's up to 1.7: every device gets the same number of
rows and the last gets what is left over too, so 3 rows on 2 devices are [0] and [1, 2]. The rule
of 1.8 refused 5 rows on 4 devices.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from jaxfleet.errors import FeedError
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.ragged import data_by_rows
from jaxfleet.fluid.ragged_values import sequences_of
from jaxfleet.fluid.variable import Variable


def part_sizes(rows: int, devices: int) -> list[int]:
    """Returns how many rows each device gets; fewer rows than devices go to so many of them."""
    parts = min(rows, devices)
    if parts == 0:
        return []
    step = rows // parts
    return [step] * (parts - 1) + [rows - step * (parts - 1)]


def split_feed(
    fed: Mapping[str, Any], declared: Mapping[str, Variable], devices: int, *, trains: bool
) -> list[dict[str, Any]]:
    """Returns what each device is fed, of what all of them are.

    Args:
        fed: arrays by name.
        declared: the program's variables.
        devices: how many there are.
        trains: the program computes gradients, so that no device may go without rows.

    Raises:
        FeedError: a value cannot be shared out.
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
    """Returns what each device is fed, where a dict has sequences in it; else the feed as it is.

    Sequences are shared out whole, as rows are.
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
    """Returns a persistable value for each device: one for all, or one each."""
    count = len(value) if np.ndim(value) else 1
    if count == 1:
        return [value] * used
    if count == devices:
        return [value[device : device + 1] for device in range(used)]
    what = f"'{name}' is persistable and fed {count} values"
    raise FeedError(what, hint=f"feed 1 for all devices, or {devices}, one for each")


def too_few(name: str, rows: int, devices: int) -> FeedError:
    """Returns the error about fewer rows than devices."""
    what = f"'{name}' is fed {rows} rows for {devices} devices, and each needs one to train on"
    return FeedError(what, hint="leave a last batch out that is so small, or use fewer devices")
