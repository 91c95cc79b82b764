"""Distributed tables that a program begins whole, in this process."""

import math

from jaxfleet.errors import ProgramError
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.variable import Parameter
from jaxfleet.ir import Program as IrProgram
from jaxfleet.ops.jax_adapter import numpy_dtype

# Until a job is made of a program, `is_distributed` says nothing: the table is a parameter like any
# other, and small nets are tried so. In fluid no variable is longer than one message may be.
_MOST_BYTES = 1 << 31


def refuse_whole_tables(program: Program, runs: IrProgram) -> None:
    """Refuses to begin all rows of a distributed table in one process, where they are many.

    Args:
        program: whose table it is.
        runs: what of it is run here.

    Raises:
        ProgramError: a distributed table of more than 2 GiB is written.
    """
    for table in program.all_parameters():
        if table.is_distributed:
            _refuse_whole(table, runs)


def _refuse_whole(table: Parameter, runs: IrProgram) -> None:
    found = runs.lookup(table.name)
    sizes = [size for size in found.shape if isinstance(size, int)]
    size = math.prod(sizes) * numpy_dtype(found.dtype).itemsize
    begins = next((op for op in runs.root.ops if table.name in op.writes), None)
    if begins is None or size <= _MOST_BYTES:
        return
    what = (
        f"'{table.name}' is a distributed table, and '{begins.type}' makes all its rows here: "
        f"{size / (1 << 30):,.1f} GiB"
    )
    hint = (
        "let servers hold them: fluid.DistributeTranspiler().transpile(...), or "
        "fluid.distributed.DownpourSGD and train_from_dataset, before the startup program runs; "
        "a parameter of this process is is_distributed=False"
    )
    raise ProgramError(what, op=begins, hint=hint)
