"""An estimate of a program's memory from the declared outputs of its operators."""

from math import prod

import numpy as np

from jaxfleet.errors import WrongTypeError
from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.types import VarType
from jaxfleet.ops.fluid import EMPTY
from jaxfleet.ops.jax_adapter import numpy_dtype

_UNITS = ("B", "KB", "MB")


def memory_usage(program: Program, batch_size: int) -> tuple[float, float, str]:
    """Returns the minimum and maximum estimate of a program's memory, and their unit.

    It sums the outputs of operators, each variable once, as fluid does: reused memory counts twice.
    `BuildStrategy.memory_budget` plans with the real use of a run. `batch_size` is the value of an
    unknown size.

    Raises:
        TypeError: it is not a Program.
        ValueError: the batch size is not positive, or a variable has two unknown sizes.
    """
    if not isinstance(program, Program):
        what = f"memory_usage takes a Program, not a {type(program).__name__}"
        raise WrongTypeError(what)
    if batch_size <= 0:
        raise mistake(f"batch_size is {batch_size}", "it is 1 or more")
    block = program.global_block()
    written = dict.fromkeys(name for op in block.ops for name in op.output_arg_names)
    total = 0.0
    for name in written:
        variable = block.vars.get(name)
        if name == EMPTY or variable is None or variable.type != VarType.LOD_TENSOR:
            continue
        if variable.shape.count(-1) > 1:
            what = f"'{name}' has more than one open size: {list(variable.shape)}"
            raise mistake(what, "one batch_size stands for one of them")
        sizes = [batch_size * -size if size < 0 else size for size in variable.shape]
        total += prod(sizes) * np.dtype(numpy_dtype(variable.dtype)).itemsize
    unit = 0
    while total > 1024 and unit < len(_UNITS) - 1:  # bytes in a KB
        total, unit = total / 1024, unit + 1
    return total * 1.05, total * 1.1, _UNITS[unit]
