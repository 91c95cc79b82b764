"""Declaration of data, parameters and variables, and creation of tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxfleet.fluid import unique_name
from jaxfleet.fluid.argument_checks import check_type, mistake, warn_no_effect
from jaxfleet.fluid.framework.program import default_main_program
from jaxfleet.fluid.framework.types import VarType, dtype_name
from jaxfleet.fluid.framework.variable import Parameter, Variable
from jaxfleet.fluid.initializer import Initializer
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.layer_function import one_operator, variables
from jaxfleet.fluid.param_attr import ParamAttr

# Python's own numbers have 64 bits, but a script means fluid's 32.
_AS_WRITTEN = {"float64": "float32", "int64": "int32"}


def data(
    name: str,
    shape: Sequence[int],
    append_batch_size: bool = True,
    dtype: Any = "float32",
    lod_level: int = 0,
    type: Any = VarType.LOD_TENSOR,
    stop_gradient: bool = True,
) -> Variable:
    """Declares fed data: `[-1, *shape]` unless `append_batch_size` is False."""
    if type != VarType.LOD_TENSOR:
        warn_no_effect("data's type", "what is fed is an array, or sequences where lod_level is 1")
    _check_fed(name, shape)
    has_batch = append_batch_size and all(size is not None and size >= 0 for size in shape)
    whole = [-1, *shape] if has_batch else list(shape)
    return declare_data(name, whole, dtype, lod_level, stop_gradient=stop_gradient)


def declare_data(
    name: str,
    shape: Sequence[int | None],
    dtype: Any,
    lod_level: int,
    *,
    stop_gradient: bool = True,
    is_checked: bool = False,
) -> Variable:
    """Declares fed data in block 0.

    Args:
        name: key in the feed.
        shape: None or -1 is an axis known at run time.
        dtype: of its elements.
        lod_level: 1 for sequences of unequal lengths.
        stop_gradient: gradients stop at it.
        is_checked: fed values must have the declared shape and dtype.

    Raises:
        WrongTypeError: the name is not a string, or the shape not a list.
    """
    _check_fed(name, shape)
    return default_main_program().global_block().create_var(
        name=name,
        shape=[-1 if size is None else size for size in shape],
        dtype=dtype,
        lod_level=lod_level,
        stop_gradient=stop_gradient,
        is_data=True,
        need_check_feed=is_checked,
    )  # fmt: skip


def _check_fed(name: object, shape: object) -> None:
    check_type(name, "the name of what is fed", str)
    check_type(shape, f"the shape of '{name}'", (list, tuple), "one size for each axis: [4]")


def create_parameter(
    shape: Sequence[int],
    dtype: Any,
    name: str | None = None,
    attr: Any = None,
    is_bias: bool = False,
    default_initializer: Initializer | None = None,
) -> Parameter:
    """Creates a parameter."""
    helper = LayerHelper("create_parameter")
    found = ParamAttr.of(attr if attr is not None else ParamAttr(name=name))
    if found is None:
        raise mistake("a parameter that is not wanted", hint="leave attr=False to layers")
    return helper.parameter(
        found, shape, dtype_name(dtype), is_bias=is_bias, default_initializer=default_initializer
    )


def create_global_var(
    shape: Sequence[int],
    value: float,
    dtype: Any,
    persistable: bool = False,
    force_cpu: bool = False,
    name: str | None = None,
) -> Variable:
    """Creates an initialized variable that persists from run to run.

    In fluid one without `persistable` lost its value; `force_cpu` is a hint.
    """
    del persistable, force_cpu
    helper = LayerHelper("global_var")
    found = name if name is not None else unique_name.generate(f"{helper.name}.tmp")
    return helper.global_variable(found, shape, dtype_name(dtype), value)


def create_tensor(dtype: Any, name: str | None = None, persistable: bool = False) -> Variable:
    """Declares a variable for an operator to write."""
    helper = LayerHelper("create_tensor", name)
    dtype = dtype_name(dtype)
    return helper.block.create_var(name=helper.name, dtype=dtype, persistable=persistable)


def fill_constant(
    shape: Sequence[int],
    dtype: Any,
    value: float,
    force_cpu: bool = False,
    out: Variable | None = None,
) -> Variable:
    """Array filled with one value."""
    dtype = dtype_name(dtype)
    attrs = {"shape": list(shape), "dtype": dtype, "value": value, "force_cpu": force_cpu}
    return _made("fill_constant", out or dtype, attrs)


def zeros(shape: Sequence[int], dtype: Any, force_cpu: bool = False) -> Variable:
    """Array of zeros."""
    return fill_constant(shape, dtype, 0.0, force_cpu)


def ones(shape: Sequence[int], dtype: Any, force_cpu: bool = False) -> Variable:
    """Array of ones."""
    return fill_constant(shape, dtype, 1.0, force_cpu)


@one_operator("fill_constant_batch_size_like", Input="input", frozen=True, typed="dtype")
def fill_constant_batch_size_like(
    input: Variable,
    shape: Sequence[int],
    dtype: Any,
    value: float,
    input_dim_idx: int = 0,
    output_dim_idx: int = 0,
    force_cpu: bool = False,
) -> Variable:
    """Array filled with one value, with as many rows as another array."""


@one_operator("fill_zeros_like", X="x", into="out", frozen=True)
def zeros_like(x: Variable, out: Variable | None = None) -> Variable:
    """Zeros of the shape of another array."""


def ones_like(x: Variable, out: Variable | None = None) -> Variable:
    """Ones of the shape of another array."""
    (like,) = variables("ones_like", "x", x)
    helper = LayerHelper("ones_like")
    attrs = {"value": 1.0}
    (made,) = helper.add({"X": like}, {"Out": out or like.dtype}, attrs, op_type="fill_any_like")
    made.stop_gradient = True
    return made


def uniform_random(
    shape: Sequence[int],
    dtype: Any = "float32",
    min: float = -1.0,
    max: float = 1.0,
    seed: int = 0,
    name: str | None = None,
) -> Variable:
    """Uniform samples from `min` to `max`; the same in every run if `seed` is not 0."""
    del name
    dtype = dtype_name(dtype)
    attrs = {"shape": list(shape), "dtype": dtype, "min": min, "max": max, "seed": seed}
    return _made("uniform_random", dtype, attrs)


def gaussian_random(
    shape: Sequence[int], mean: float = 0.0, std: float = 1.0, seed: int = 0, dtype: Any = "float32"
) -> Variable:
    """Normal samples; the same in every run if `seed` is not 0."""
    dtype = dtype_name(dtype)
    attrs = {"shape": list(shape), "dtype": dtype, "mean": mean, "std": std, "seed": seed}
    return _made("gaussian_random", dtype, attrs)


def _made(op_type: str, out: str | Variable, attrs: Mapping[str, Any]) -> Variable:
    """Adds an operator without inputs."""
    (made,) = LayerHelper(op_type).add({}, {"Out": out}, attrs, frozen=True)
    return made


def assign(
    input: Variable | np.ndarray | Sequence[float], output: Variable | None = None
) -> Variable:
    """Copies a variable, or converts values of the script to an array."""
    if isinstance(input, Variable):
        (made,) = LayerHelper("assign").add({"X": input}, {"Out": output or input.dtype})
        return made
    values = np.asarray(input)
    dtype = _AS_WRITTEN.get(values.dtype.name, values.dtype.name)
    attrs = {"shape": list(values.shape), "dtype": dtype, "values": values.reshape(-1).tolist()}
    (made,) = LayerHelper("assign").add({}, {"Out": output or dtype}, attrs, op_type="assign_value")
    return made


def cast(x: Variable, dtype: Any) -> Variable:
    """Converts to another dtype."""
    (given,) = variables("cast", "x", x)
    dtype = dtype_name(dtype)
    attrs = {"in_dtype": given.dtype, "out_dtype": dtype}
    (out,) = LayerHelper("cast").add(
        {"X": given}, {"Out": dtype}, attrs, frozen=given.stop_gradient
    )
    return out
