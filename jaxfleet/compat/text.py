"""`paddle.compat`: helpers for scripts on Python 2 and 3, with Python 3's meaning."""

import math
from collections.abc import Callable
from typing import Any

int_type = int
long_type = int


def to_text(obj: Any, encoding: str = "utf-8", inplace: bool = False) -> Any:
    """Decodes bytes, alone or in a list or set, optionally `inplace`; others stay unchanged."""
    return _each(
        obj, lambda item: item.decode(encoding) if isinstance(item, bytes) else item, inplace
    )


def to_bytes(obj: Any, encoding: str = "utf-8", inplace: bool = False) -> Any:
    """Encodes strings, alone or in a list or set, optionally `inplace`; others stay unchanged."""
    return _each(
        obj, lambda item: item.encode(encoding) if isinstance(item, str) else item, inplace
    )


def round(x: float, d: int = 0) -> float:  # paddle's name
    """Rounds to `d` decimals, halves away from zero as Python 2 did."""
    scale: float = 10**d
    return math.copysign(math.floor(abs(x) * scale + 0.5) / scale, x)


def floor_division(x: float, y: float) -> float:
    """Divides and rounds down."""
    return x // y


def get_exception_message(exc: BaseException) -> str:
    """Returns an exception's message."""
    return str(exc)


def _each(obj: Any, change: Callable[[Any], Any], inplace: bool) -> Any:
    if not isinstance(obj, list | set):
        return change(obj)
    changed = type(obj)(change(item) for item in obj)
    if not inplace:
        return changed
    obj.clear()
    if isinstance(obj, list):
        obj.extend(changed)
    else:
        obj.update(changed)
    return obj
