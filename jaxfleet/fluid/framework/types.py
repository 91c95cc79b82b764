"""Variable types under fluid's numbers, and the `desc` views of variables and operators."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.ir.variable import short_dtype
from jaxfleet.ops.fluid.arrays import ON_DEVICE

if TYPE_CHECKING:
    from jaxfleet.fluid.framework.operator import Operator
    from jaxfleet.fluid.framework.variable import Variable


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
    """Returns a dtype's name; ProgramError if fluid has no such dtype."""
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if name not in _DTYPES:
        raise ProgramError(
            f"there is no dtype {dtype!r}", hint=f"one of {', '.join(sorted(_DTYPES))}"
        )
    return name


def ir_dtype(name: str) -> str:
    """Returns the dtype, in the IR's spelling, with which a device computes."""
    return short_dtype(ON_DEVICE.get(name, name))


@dataclass(frozen=True)
class VariableDesc:
    """Fluid's description interface of a variable; setters modify the variable."""

    variable: "Variable"

    def name(self) -> str:
        return self.variable.name

    def type(self) -> str:
        return self.variable.type

    def dtype(self) -> str:
        return self.variable.dtype

    def shape(self) -> list[int]:
        return list(self.variable.shape)

    def lod_level(self) -> int:
        return self.variable.lod_level

    def persistable(self) -> bool:
        return self.variable.persistable

    def need_check_feed(self) -> bool:
        return self.variable.need_check_feed

    def set_type(self, type: str) -> None:
        self.variable.type = type
        self.variable.block.program.version += 1

    def set_dtype(self, dtype: Any) -> None:
        self.variable.dtype = dtype_name(dtype)
        self.variable.block.program.version += 1

    def set_shape(self, shape: Sequence[int | None]) -> None:
        self.variable._set_shape(shape)

    def set_persistable(self, persistable: bool) -> None:
        self.variable.persistable = persistable


@dataclass(frozen=True)
class OperatorDesc:
    """Fluid's description interface of an operator; setters modify the operator."""

    operator: "Operator"

    def type(self) -> str:
        return self.operator.type

    def input(self, name: str) -> list[str]:
        return self.operator.input(name)

    def output(self, name: str) -> list[str]:
        return self.operator.output(name)

    def input_names(self) -> list[str]:
        return self.operator.input_names

    def output_names(self) -> list[str]:
        return self.operator.output_names

    def input_arg_names(self) -> list[str]:
        return self.operator.input_arg_names

    def output_arg_names(self) -> list[str]:
        return self.operator.output_arg_names

    def attr(self, name: str) -> Any:
        return self.operator.attr(name)

    def attr_names(self) -> list[str]:
        return self.operator.attr_names

    def has_attr(self, name: str) -> bool:
        return self.operator.has_attr(name)

    def set_attr(self, name: str, value: Any) -> None:
        self.operator._set_attr(name, value)
