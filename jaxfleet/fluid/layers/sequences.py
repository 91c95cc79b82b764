"""Layers on sequences: what is declared with `lod_level=1`, and what has as many rows.

How they are fed and what they are on a device is told in `jaxfleet.fluid.ragged`.
"""

from typing import Any

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.one_operator import variables
from jaxfleet.fluid.no_effect import warn_no_effect
from jaxfleet.fluid.param_attr import ParamAttr
from jaxfleet.fluid.ragged import ragged_data, source_of
from jaxfleet.fluid.variable import Variable
from jaxfleet.ir.dims import letter

_POOLINGS = ("sum", "average", "sqrt", "max", "last", "first")


def sequence_pool(
    input: Variable, pool_type: str, is_test: bool = False, pad_value: float = 0.0
) -> Variable:
    """Makes one row of each sequence.

    Args:
        input: sequences.
        pool_type: `sum`, `average`, `sqrt` (the sum over the root of the length), `max`, `last`
            or `first`.
        is_test: taken; what only the gradient needs is then not computed.
        pad_value: what an empty sequence becomes.

    Raises:
        ProgramError: the input is no sequences, or there is no such pooling.
    """
    (x,) = sequences("sequence_pool", "input", input)
    if pool_type.lower() not in _POOLINGS:
        what = f"sequence_pool: there is no pool_type {pool_type!r}"
        raise mistake(what, f"one of {', '.join(_POOLINGS)}")
    helper = LayerHelper("sequence_pool")
    attrs = {"pooltype": pool_type.upper(), "is_test": is_test, "pad_value": float(pad_value)}
    made, index = helper.output(x.dtype), helper.output("int32", stop_gradient=True)
    assert x.sizes is not None
    made.sizes = index.sizes = (letter("b"), *x.sizes[1:])
    helper.append_op("sequence_pool", {"X": x}, {"Out": made, "MaxIndex": index}, attrs)
    return made


def sequence_first_step(input: Variable) -> Variable:
    """Takes the first row of each sequence."""
    return sequence_pool(input, "first")


def sequence_last_step(input: Variable) -> Variable:
    """Takes the last row of each sequence."""
    return sequence_pool(input, "last")


def sequence_softmax(input: Variable, use_cudnn: bool = False, name: str | None = None) -> Variable:
    """Makes the elements of each sequence positive, with sum 1."""
    (x,) = sequences("sequence_softmax", "input", input)
    helper = LayerHelper("sequence_softmax", name)
    return _rows_as_before(helper, {"X": x}, x, {"use_cudnn": use_cudnn}, x.shape[1:])


def sequence_expand(
    x: Variable, y: Variable, ref_level: int = -1, name: str | None = None
) -> Variable:
    """Repeats each row of `x` as often as the sequence of `y` of its number has rows."""
    (given,), (wide,) = variables("sequence_expand", "x", x), sequences("sequence_expand", "y", y)
    if source_of(given, ragged_data(given.block.program)) is not None:
        raise mistake("sequence_expand: 'x' is sequences itself, and must be one row each")
    helper = LayerHelper("sequence_expand", name)
    attrs = {"ref_level": ref_level}
    return _rows_as_before(helper, {"X": given, "Y": wide}, wide, attrs, given.shape[1:])


def sequence_conv(
    input: Variable,
    num_filters: int,
    filter_size: int = 3,
    filter_stride: int = 1,
    padding: bool = True,
    padding_start: int | None = None,
    bias_attr: Any = None,
    param_attr: Any = None,
    act: str | None = None,
    name: str | None = None,
) -> Variable:
    """Multiplies what stands around each row of a sequence by a matrix, and adds a bias.

    Args:
        input: sequences `[rows, width]`.
        num_filters: the width of the result.
        filter_size: how many rows stand around one, itself among them.
        filter_stride: 1.
        padding: warned of where it is not True: beyond the ends of a sequence is always 0, as in
            fluid.
        padding_start: where they begin, `-filter_size // 2` unless given.
        bias_attr: of the bias.
        param_attr: of the matrix.
        act: an activation.
        name: of the layer.

    Raises:
        ProgramError: the input is no sequences, or the stride is not 1.
    """
    if padding is not True:
        reason = "beyond the ends of a sequence is always 0, as in fluid"
        warn_no_effect("sequence_conv's padding", reason)
    (x,) = sequences("sequence_conv", "input", input)
    if filter_stride != 1:
        raise mistake(f"sequence_conv: filter_stride is 1, not {filter_stride}")
    helper = LayerHelper("sequence_conv", name)
    shape = [filter_size * x.shape[1], num_filters]
    weight = helper.parameter(ParamAttr.of(param_attr) or ParamAttr(), shape, x.dtype)
    start = -int(filter_size // 2) if padding_start is None else padding_start
    attrs = {"contextLength": filter_size, "contextStart": start, "contextStride": filter_stride}
    made = _rows_as_before(helper, {"X": x, "Filter": weight}, x, attrs, (num_filters,))
    made = helper.with_bias(made, bias_attr, num_filters, 1)
    return helper.with_activation(made, act)


def _rows_as_before(
    helper: LayerHelper,
    inputs: dict[str, Variable],
    like: Variable,
    attrs: dict[str, Any],
    shape: tuple[int, ...],
) -> Variable:
    """Adds an operator whose result has the rows of a variable."""
    made = helper.output(next(iter(inputs.values())).dtype)
    assert like.sizes is not None
    made.sizes, made.lod_level = (like.sizes[0], *shape), like.lod_level
    helper.append_op(helper.layer_type, inputs, {"Out": made}, attrs)
    return made


def sequences(layer: str, argument: str, given: Any) -> list[Variable]:
    """Returns what a layer is given as a list.

    Raises:
        ProgramError: it is no sequences.
    """
    found = variables(layer, argument, given)
    for one in found:
        if source_of(one, ragged_data(one.block.program)) is None:
            what = f"{layer}: '{one.name}' is no sequences"
            raise mistake(what, "declare what is fed with lod_level=1")
    return found
