"""Unpacks a message's header, and reads the plain values that it holds.

Whatever is refused here raises `FrameError`.
"""

from collections.abc import Mapping
from typing import Any

import msgpack

from jaxfleet.ps.frames import Frame, FrameError, check_at_most, frame_bytes
from jaxfleet.ps.limits import Limits
from jaxfleet.ps.messages import PROTOCOL, Kind

_FIELDS = ("v", "kind", "sender", "step", "number", "body", "tensors")
_KINDS = {kind.value: kind for kind in Kind}
_NUMBERS_END = 1 << 63


def unpack_header(frame: Frame, limits: Limits) -> dict[str, Any]:
    """Returns a message's header, whose fields may hold anything yet.

    Raises:
        FrameError: it is no header, is in another protocol, or holds more than the limits let be.
    """
    check_at_most("the header", frame_bytes(frame), limits.max_body_bytes)
    counter = _Counter(limits.max_values)
    try:
        header = msgpack.unpackb(
            frame,
            ext_hook=_no_extensions,
            list_hook=counter.list_hook,
            object_pairs_hook=counter.pairs_hook,
            max_array_len=limits.max_values,
            max_map_len=limits.max_values,
        )
    except FrameError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise FrameError(f"the header is no msgpack: {type(error).__name__}: {error}") from error
    if not isinstance(header, dict) or header.keys() != set(_FIELDS):
        raise FrameError(f"a header is a map of {', '.join(_FIELDS)}")
    if type(header["v"]) is not int or header["v"] != PROTOCOL:
        what = f"the message is in protocol {header['v']!r:.20}, and this end speaks {PROTOCOL}"
        raise FrameError(what, hint="run the same jaxfleet everywhere")
    return header


class _Counter:
    """Counts what a header unpacks to while it does, and stops it in time."""

    def __init__(self, most: int) -> None:
        self._left = most

    def list_hook(self, values: list[Any]) -> list[Any]:
        self._take(len(values))
        return values

    def pairs_hook(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        self._take(len(pairs))
        values = dict(pairs)
        if len(values) != len(pairs):
            raise FrameError("a map in the header has a key twice")
        return values

    def _take(self, count: int) -> None:
        self._left -= count + 1
        if self._left < 0:
            raise FrameError("the header holds too many values", hint="set Limits higher")


def _no_extensions(code: int, data: bytes) -> Any:
    raise FrameError(f"the header holds an extension type, {code}, of {len(data)} bytes")


def read_integer(field: str, value: Any, least: int) -> int:
    """Returns a field that is a number from `least` on; refuses any other."""
    if type(value) is not int or not least <= value < _NUMBERS_END:
        raise FrameError(f"{field} is a number from {least}, not {value!r:.40}")
    return value


def read_name(field: str, value: Any, limits: Limits) -> str:
    """Returns a field that is text; refuses what is not, or is too long."""
    if not isinstance(value, str):
        raise FrameError(f"{field} is text, not a {type(value).__name__}")
    check_at_most(f"the length of {field}", len(value), limits.max_name)
    return value


def read_kind(value: Any) -> Kind:
    """Returns the kind of a message; refuses one that there is not."""
    kind = _KINDS.get(value) if isinstance(value, str) else None
    if kind is None:
        raise FrameError(f"there is no kind {value!r:.40}")
    return kind


def check_body(body: Any, depth: int) -> None:
    """Refuses a body that is no map of plain values, or is nested deeper than `depth`."""
    if not isinstance(body, Mapping):
        raise FrameError(f"a body is a map, not a {type(body).__name__}")
    _check_plain(body, depth)


def _check_plain(value: Any, depth: int) -> None:
    if value is None or isinstance(value, str | bool | int | float):
        return
    if depth <= 0:
        raise FrameError("the body is nested too deep")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise FrameError("a key in the body is no text")
        value = value.values()
    elif not isinstance(value, list | tuple):
        raise FrameError(f"the body holds a {type(value).__name__}")
    for entry in value:
        _check_plain(entry, depth - 1)
