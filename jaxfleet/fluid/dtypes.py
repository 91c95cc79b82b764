"""Names of dtypes: fluid takes `"float32"`, numpy's, and its own numbers."""

from typing import Any

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.ir.types import short_dtype
from jaxfleet.ops.fluid.arrays import ON_DEVICE


class VarType:
    """Kinds of variables and dtypes, as scripts spell them: `core.VarDesc.VarType.FP32`."""

    BOOL, FP16, FP32, FP64 = "bool", "float16", "float32", "float64"
    INT8, INT16, INT32, INT64, UINT8 = "int8", "int16", "int32", "int64", "uint8"
    LOD_TENSOR, SELECTED_ROWS, RAW, READER = "lod_tensor", "selected_rows", "raw", "reader"
    LOD_TENSOR_ARRAY, STEP_SCOPES = "lod_tensor_array", "step_scopes"
    FEED_MINIBATCH, FETCH_LIST = "feed_minibatch", "fetch_list"
    LOD_RANK_TABLE, PLACE_LIST = "lod_rank_table", "place_list"


_DTYPES = frozenset(
    {"bool", "bfloat16"}
    | {f"float{bits}" for bits in (16, 32, 64)}
    | {f"int{bits}" for bits in (8, 16, 32, 64)}
    | {"uint8"}
)


def dtype_name(dtype: Any) -> str:
    """Returns a dtype's name.

    Raises:
        ProgramError: fluid has no such dtype.
    """
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name not in _DTYPES:
        raise ProgramError(
            f"there is no dtype {dtype!r}", hint=f"one of {', '.join(sorted(_DTYPES))}"
        )
    return name


def ir_dtype(name: str) -> str:
    """Returns the IR's name of what a device computes with for a dtype."""
    return short_dtype(ON_DEVICE.get(name, name))
