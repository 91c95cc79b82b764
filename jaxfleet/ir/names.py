"""Derived variable names, each form made in one place, in fluid's spelling."""

import re
from collections.abc import Iterable

PLAIN_NAME = re.compile(r"[A-Za-z_][\w./@$~+-]*")
RESERVED = frozenset({"true", "false", "none", "nan", "inf"})


def grad_name(name: str) -> str:
    """Returns the name of a variable's gradient: `w@GRAD`."""
    return f"{name}@GRAD"


def block_name(name: str, index: int) -> str:
    """Returns the name of a variable's slice along axis 0: `w.block0`."""
    return f"{name}.block{index}"


def trainer_name(name: str, trainer_id: int) -> str:
    """Returns the name of one trainer's copy of a gradient: `w@GRAD.trainer_1`."""
    return f"{name}.trainer_{trainer_id}"


def is_plain(name: str) -> bool:
    """Tells whether a name prints bare; any other is quoted in IR text."""
    return PLAIN_NAME.fullmatch(name) is not None and name not in RESERVED


def unique(name: str, taken: Iterable[str]) -> str:
    """Returns the name, with `~1`, `~2`, ... added where it is taken."""
    taken = taken if isinstance(taken, set | frozenset | dict) else set(taken)
    if name not in taken:
        return name
    count = 1
    while f"{name}~{count}" in taken:
        count += 1
    return f"{name}~{count}"
