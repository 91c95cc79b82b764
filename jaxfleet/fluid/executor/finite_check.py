"""`FLAGS_check_nan_inf`: a run that makes NaN or Inf is an error that names the operator.

What the operators of block 0 make is fetched besides what the script asks for, so such a run is
slow and keeps all of it in memory, as fluid's was.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxfleet.errors import NonFiniteError
from jaxfleet.fluid.dtypes import VarType
from jaxfleet.fluid.flags import flag
from jaxfleet.fluid.operator import ROLE
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.ragged_values import is_sequences
from jaxfleet.fluid.roles import OpRole
from jaxfleet.fluid.variable import Variable
from jaxfleet.fluid.versions import PerVersion

_FLAG = "FLAGS_check_nan_inf"
_LOSS = OpRole.LOSS
_COMPUTES = (OpRole.FORWARD, OpRole.BACKWARD, OpRole.FORWARD | _LOSS, OpRole.BACKWARD | _LOSS)
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


def is_on() -> bool:
    """Whether runs are checked."""
    return bool(flag(_FLAG))


def checked_names(program: Program) -> tuple[str, ...]:
    """Returns the variables that a run is checked by, in the order in which they are made.

    Of a program whose names share memory these are only the ones that outlive the run, since a
    fetch of the others would find what was written over them. Sequences are left out: what is made
    of them shows their values.
    """
    return _NAMES.get(program)


def _names(program: Program) -> tuple[str, ...]:
    declared = program.global_block().vars
    ops = program.global_block().ops
    if program._is_distributed:  # what is sent and received has names of its own
        ops = [op for op in ops if op.attr(ROLE) in _COMPUTES]
    written = dict.fromkeys(name for op in ops for name in op.output_arg_names)
    found = [declared[name] for name in written if name in declared]
    checked = [v for v in found if _is_checked(v, keeps=not program._is_mem_optimized)]
    return tuple(v.name for v in checked if not is_sequences(program, v.name))


_NAMES: PerVersion[tuple[str, ...]] = PerVersion(_names)


def _is_checked(variable: Variable, *, keeps: bool) -> bool:
    is_array = variable.type == VarType.LOD_TENSOR and not variable.lod_level
    return is_array and variable.dtype in _FLOATS and (keeps or variable.persistable)


def check_finite(program: Program, names: Iterable[str], values: Sequence[Any]) -> None:
    """Checks what a run has made.

    Args:
        program: what ran.
        names: of the values, in the order in which they are made.
        values: arrays, or a list of the devices' arrays each.

    Raises:
        NonFiniteError: one of them has NaN or Inf.
    """
    for name, value in zip(names, values, strict=True):
        for part in value if isinstance(value, list) else [value]:
            array = np.asarray(part)
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise _found(program, name, array)


def _found(program: Program, name: str, array: np.ndarray) -> NonFiniteError:
    makers = [op for op in program.global_block().ops if name in op.output_arg_names]
    op = makers[-1] if makers else None
    maker = f"operator '{op.type}'" if op is not None else "the run"
    nans, infs = int(np.isnan(array).sum()), int(np.isinf(array).sum())
    what = f"{_FLAG}: {maker} made {nans} NaN and {infs} Inf of {array.size} in '{name}'"
    hint = "it is the first in the program's order; the state has been written all the same"
    return NonFiniteError(what, op=op, hint=hint)
