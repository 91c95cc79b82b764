"""Fluid's later spellings: `fluid.data`, `fluid.embedding`, `fluid.one_hot` add no axes."""

from collections.abc import Sequence
from typing import Any

from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.layers.layer_function import one_operator
from jaxfleet.fluid.layers.nn import rows_of_table
from jaxfleet.fluid.layers.tensor import declare_data


def data(
    name: str, shape: Sequence[int | None], dtype: Any = "float32", lod_level: int = 0
) -> Variable:
    """Declares a fed variable; None or -1 is an axis that is known only at run time.

    Examples:
        >>> from jaxfleet import fluid
        >>> with fluid.program_guard(fluid.Program(), fluid.Program()):
        ...     x = fluid.data("x", [None, 4])
        >>> x.name, x.shape
        ('x', (-1, 4))
    """
    return declare_data(name, shape, dtype, lod_level, is_checked=True)


def embedding(
    input: Variable,
    size: Sequence[int],
    is_sparse: bool = False,
    is_distributed: bool = False,
    padding_idx: int | None = None,
    param_attr: Any = None,
    dtype: Any = "float32",
) -> Variable:
    """Looks up rows of a table like `layers.embedding`: of `[...]`, `[..., width]`."""
    return rows_of_table("lookup_table_v2", input, size, is_sparse, is_distributed, padding_idx,
                         param_attr, dtype)  # fmt: skip


@one_operator("one_hot_v2", X="input", dtype="float32", frozen=True)
def one_hot(input: Variable, depth: int, allow_out_of_range: bool = False) -> Variable:
    """Converts indices to one-hot rows: of `[...]`, `[..., depth]`."""
