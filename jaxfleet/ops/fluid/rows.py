"""Operators on gradients of rows (`SELECTED_ROWS`), which are whole arrays on a device here.

So what joins rows that stand twice, and what makes them an array, finds both done.
"""

from collections.abc import Mapping
from typing import Any

from jaxfleet.ops.fluid.schema import fluid_op
from jaxfleet.ops.registry import Array


@fluid_op("merge_selected_rows", inputs="X")
def merge_selected_rows(attrs: Mapping[str, Any], x: Array) -> Array:
    """Adds up rows that stand twice."""
    del attrs
    return x


@fluid_op("get_tensor_from_selected_rows", inputs="X")
def get_tensor_from_selected_rows(attrs: Mapping[str, Any], x: Array) -> Array:
    """Makes rows an array."""
    del attrs
    return x
