"""Reads single variables, and refuses what they cannot be."""

import math
import os
from typing import NoReturn

from jaxfleet.errors import StrategyError


def get(name: str) -> str:
    """Returns a variable without the space around it; an unset one is as an empty one."""
    return os.environ.get(name, "").strip()


def read_number(name: str, *, least: int, hint: str = "every process of a job needs it") -> int:
    """Returns a variable that is to be a whole number.

    Raises:
        StrategyError: it is not set, or no number from `least` on.
    """
    text = get(name)
    number = whole(text)
    if number is None or number < least:
        what = f"is {text!r}, not a whole number from {least} on" if text else "is not set"
        refuse(name, what, hint)
    return number


def read_seconds(name: str) -> float:
    """Returns a variable that is to be a time, 0 where it is not set.

    Raises:
        StrategyError: it is none.
    """
    text = get(name)
    try:
        seconds = float(text or 0.0)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        refuse(name, f"is {text!r}, not a time", "it is a number of seconds, such as 60")
    return seconds


def whole(text: str) -> int | None:
    """Returns the number that plain digits write, None for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def refuse(name: str, what: str, hint: str) -> NoReturn:
    """Raises what a variable's value, or its lack, is worth.

    Raises:
        StrategyError: always.
    """
    raise StrategyError(f"environment variable {name} {what}", hint=hint)
