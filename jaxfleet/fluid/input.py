"""`fluid.data`: the later spelling, which adds no axes of its own."""

from collections.abc import Sequence
from typing import Any

from jaxfleet.fluid.program import default_main_program
from jaxfleet.fluid.variable import Variable


def data(
    name: str, shape: Sequence[int | None], dtype: Any = "float32", lod_level: int = 0
) -> Variable:
    """Declares what is fed; None or -1 is an axis that is known when the program runs."""
    block = default_main_program().global_block()
    return block.create_var(
        name=name,
        shape=[-1 if size is None else size for size in shape],
        dtype=dtype,
        lod_level=lod_level,
        stop_gradient=True,
        is_data=True,
        need_check_feed=True,
    )
