"""Layers that declare, make and move arrays."""

from collections.abc import Sequence
from typing import Any

from jaxfleet.errors import ProgramError
from jaxfleet.fluid import unique_name
from jaxfleet.fluid.dtypes import dtype_name
from jaxfleet.fluid.initializer import Initializer
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.param_attr import ParamAttr
from jaxfleet.fluid.program import default_main_program
from jaxfleet.fluid.variable import Parameter, Variable


def data(
    name: str,
    shape: Sequence[int],
    append_batch_size: bool = True,
    dtype: Any = "float32",
    lod_level: int = 0,
    type: Any = None,
    stop_gradient: bool = True,
) -> Variable:
    """Declares what is fed: `[-1, *shape]` unless `append_batch_size` is False."""
    del type
    has_batch = append_batch_size and all(size is not None and size >= 0 for size in shape)
    return default_main_program().global_block().create_var(
        name=name,
        shape=[-1, *shape] if has_batch else list(shape),
        dtype=dtype,
        lod_level=lod_level,
        stop_gradient=stop_gradient,
        is_data=True,
    )  # fmt: skip


def create_parameter(
    shape: Sequence[int],
    dtype: Any,
    name: str | None = None,
    attr: Any = None,
    is_bias: bool = False,
    default_initializer: Initializer | None = None,
) -> Parameter:
    """Makes a parameter."""
    helper = LayerHelper("create_parameter")
    found = ParamAttr.of(attr if attr is not None else ParamAttr(name=name))
    if found is None:
        raise ProgramError("a parameter that is not wanted", hint="leave attr=False to layers")
    return helper.parameter(
        found,
        shape,
        dtype_name(dtype),
        is_bias=is_bias,
        default_initializer=default_initializer,
    )


def create_global_var(
    shape: Sequence[int],
    value: float,
    dtype: Any,
    persistable: bool = False,
    force_cpu: bool = False,
    name: str | None = None,
) -> Variable:
    """Makes a variable with a first value, which lives from run to run."""
    del persistable, force_cpu
    helper = LayerHelper("global_var")
    found = name if name is not None else unique_name.generate(f"{helper.name}.tmp")
    return helper.global_variable(found, shape, dtype_name(dtype), value)


def fill_constant(
    shape: Sequence[int],
    dtype: Any,
    value: float,
    force_cpu: bool = False,
    out: Variable | None = None,
) -> Variable:
    """Makes an array of one value."""
    helper = LayerHelper("fill_constant")
    dtype = dtype_name(dtype)
    made = out if out is not None else helper.output(dtype, stop_gradient=True)
    attrs = {"shape": list(shape), "dtype": dtype, "value": value, "force_cpu": force_cpu}
    helper.append_op("fill_constant", outputs={"Out": made}, attrs=attrs)
    return made


def assign(input: Variable, output: Variable | None = None) -> Variable:
    """Copies."""
    helper = LayerHelper("assign")
    made = output if output is not None else helper.output(input.dtype)
    helper.append_op("assign", {"X": input}, {"Out": made})
    return made


def cast(x: Variable, dtype: Any) -> Variable:
    """Converts to another dtype."""
    helper = LayerHelper("cast")
    dtype = dtype_name(dtype)
    out = helper.output(dtype, stop_gradient=x.stop_gradient)
    helper.append_op("cast", {"X": x}, {"Out": out}, {"in_dtype": x.dtype, "out_dtype": dtype})
    return out


def concat(input: Sequence[Variable], axis: int = 0, name: str | None = None) -> Variable:
    """Joins along an axis."""
    helper = LayerHelper("concat", name)
    out = helper.output(input[0].dtype)
    helper.append_op("concat", {"X": list(input)}, {"Out": out}, {"axis": axis})
    return out


def sums(input: Sequence[Variable], out: Variable | None = None) -> Variable:
    """Adds."""
    helper = LayerHelper("sum")
    made = out if out is not None else helper.output(input[0].dtype)
    helper.append_op("sum", {"X": list(input)}, {"Out": made})
    return made


def reshape(
    x: Variable,
    shape: Sequence[int],
    actual_shape: Any = None,
    act: str | None = None,
    inplace: bool = False,
    name: str | None = None,
) -> Variable:
    """Gives another shape; 0 keeps an axis, -1 is what is left."""
    del actual_shape, inplace
    helper = LayerHelper("reshape2", name)
    out, record = helper.output(x.dtype), helper.output(x.dtype, stop_gradient=True)
    helper.append_op("reshape2", {"X": x}, {"Out": out, "XShape": record}, {"shape": list(shape)})
    return helper.with_activation(out, act)


def transpose(x: Variable, perm: Sequence[int], name: str | None = None) -> Variable:
    """Puts axes in another order."""
    helper = LayerHelper("transpose2", name)
    out, record = helper.output(x.dtype), helper.output(x.dtype, stop_gradient=True)
    helper.append_op("transpose2", {"X": x}, {"Out": out, "XShape": record}, {"axis": list(perm)})
    return out
