"""Derived variable names in fluid's spelling, each form made in one place."""

import json
import re
from collections.abc import Iterable
from functools import lru_cache

# `nan+1.0i` would parse as a complex number.
PLAIN_NAME = re.compile(r"(?!(?:inf|nan)\+)[A-Za-z_][\w./@$~+-]*")
# Words and dtypes: a plain name, and jax's additions to some: `key<fry>`.
PLAIN_WORD = re.compile(rf"{PLAIN_NAME.pattern}(?:<[^<>\[\]\s]*>)?")
GRAD = "@GRAD"
_TRAINER = ".trainer_"
LR_COUNTER = "@LR_DECAY_COUNTER@"  # counts the runs that learning rates depend on
CLIP_MARK = "@CLIP"  # in the name scope of clipping that trainers do instead of servers
LOCAL_STEPS = "@LOCAL_SGD_STEPS@"  # number of steps that a rank has run by itself
INSTEAD_OF = "instead_of"  # an operator's attribute: pairs of a variable and the original one
GRADIENTS_FINITE = "gradients.finite"  # decides whether a step is skipped
RESERVED = frozenset({"true", "false", "none", "nan", "inf"})


def grad_name(name: str) -> str:
    """Returns the name of a variable's gradient: `w@GRAD`."""
    return name + GRAD


def block_name(name: str, index: int) -> str:
    """Returns the name of a variable's slice along axis 0: `w.block0`."""
    return f"{name}.block{index}"


def snapshot_name(name: str) -> str:
    """Returns the name of a parameter's last value common to all ranks: `w@SNAPSHOT`."""
    return f"{name}@SNAPSHOT"


def recomputed_name(name: str) -> str:
    """Returns the name of a value recomputed for backward: `h@RECOMPUTE`."""
    return f"{name}@RECOMPUTE"


def host_name(name: str) -> str:
    """Returns the name of a value's copy in host memory: `h@HOST`."""
    return f"{name}@HOST"


def back_name(name: str) -> str:
    """Returns the name of a value copied back from host memory: `h@BACK`."""
    return f"{name}@BACK"


def next_name(name: str) -> str:
    """Returns the name of a variable's value at the end of the step: `m@NEXT`."""
    return f"{name}@NEXT"


def trainer_name(name: str, trainer_id: int) -> str:
    """Returns the name of one trainer's copy of a gradient: `w@GRAD.trainer_1`."""
    return f"{name}{_TRAINER}{trainer_id}"


def trainer_of(name: str) -> int | None:
    """Returns the trainer of a gradient's copy: 1 for `w@GRAD.trainer_1`, else None."""
    _, found, number = name.rpartition(_TRAINER)
    return int(number) if found and number.isdigit() else None


def is_plain(name: str) -> bool:
    """Whether a name prints bare; any other is quoted in IR text."""
    return PLAIN_NAME.fullmatch(name) is not None and name not in RESERVED


@lru_cache(maxsize=1 << 16)
def name_text(name: str) -> str:
    """Returns a name as it prints: bare if possible, else quoted."""
    return name if is_plain(name) else json.dumps(name)


def dtype_text(dtype: str) -> str:
    """Returns a dtype as it prints: `f32`, `key<fry>`; an unusual one is quoted."""
    plain = PLAIN_WORD.fullmatch(dtype) is not None and dtype not in RESERVED
    return dtype if plain else json.dumps(dtype)


def unique(name: str, taken: Iterable[str]) -> str:
    """Returns the name, with `~1`, `~2`, ... appended if it is taken."""
    taken = taken if isinstance(taken, set | frozenset | dict) else set(taken)
    if name not in taken:
        return name
    count = 1
    while f"{name}~{count}" in taken:
        count += 1
    return f"{name}~{count}"
