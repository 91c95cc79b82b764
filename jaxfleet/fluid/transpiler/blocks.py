"""How variables are cut in blocks, as fluid's functions say it."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxfleet.analysis.slicing import block_sizes
from jaxfleet.fluid.variable import Variable


@dataclass(frozen=True)
class VarBlock:
    """A block of a variable.

    Attributes:
        varname: the variable's.
        offset: the block's number among the variable's.
        size: how many elements it has.
    """

    varname: str
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.varname}:{self.offset}:{self.size}"


def slice_variable(
    var_list: Sequence[Variable], slice_count: int, min_block_size: int
) -> list[str]:
    """Returns the blocks of variables, as `name:number:elements`.

    There are as many as `slice_count`, or fewer where one would have less than `min_block_size`
    elements; rows are never cut.

    Args:
        var_list: the variables.
        slice_count: the most blocks of each.
        min_block_size: the fewest elements of a block, but for what rounding leaves.
    """
    return [
        str(VarBlock(var.name, index, size))
        for var in var_list
        for index, size in enumerate(block_sizes(var.shape, slice_count, min_block_size))
    ]


def same_or_split_var(p_name: str, var_name: str) -> bool:
    """Tells whether a name is a variable's, or that of a block of it."""
    return p_name == var_name or p_name.startswith(var_name + ".block")
