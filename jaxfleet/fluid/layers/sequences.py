"""Layers on sequences of unequal lengths: pooling, convolution, padding, slicing, joining.

`jaxfleet.fluid.framework.sequence_lengths` describes how sequences are fed and stored.
"""

import math
from collections.abc import Sequence
from typing import Any

from jaxfleet.fluid.argument_checks import mistake, warn_no_effect
from jaxfleet.fluid.framework.nested_sequences import levels_for
from jaxfleet.fluid.framework.sequence_lengths import (
    longest_of,
    ragged_data,
    source_of,
    spare_rows,
    spare_rows_needed,
)
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.layer_function import variables
from jaxfleet.fluid.param_attr import ParamAttr
from jaxfleet.ir import Size
from jaxfleet.ir.dims import call, letter

_POOLINGS = ("sum", "average", "sqrt", "max", "last", "first")


def sequence_pool(
    input: Variable, pool_type: str, is_test: bool = False, pad_value: float = 0.0
) -> Variable:
    """Pools each sequence to one row.

    Args:
        input: sequences.
        pool_type: `sum`, `average`, `sqrt` (the sum over the root of the length), `max`, `last`
            or `first`.
        is_test: no effect; an output for the gradient is not computed if unused.
        pad_value: the result for an empty sequence.

    Raises:
        ProgramError: the input has no sequences, or there is no such pooling.
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
    """First row of each sequence."""
    return sequence_pool(input, "first")


def sequence_last_step(input: Variable) -> Variable:
    """Last row of each sequence."""
    return sequence_pool(input, "last")


def sequence_softmax(input: Variable, use_cudnn: bool = False, name: str | None = None) -> Variable:
    """Softmax over the elements of each sequence."""
    (x,) = sequences("sequence_softmax", "input", input)
    helper = LayerHelper("sequence_softmax", name)
    return _rows_as_before(helper, {"X": x}, x, {"use_cudnn": use_cudnn}, x.shape[1:])


def sequence_expand(
    x: Variable, y: Variable, ref_level: int = -1, name: str | None = None
) -> Variable:
    """Repeats each row of `x` by the length of the sequence of `y` of the same number.

    Args:
        x: rows, without sequences.
        y: sequences, or beams of two levels.
        ref_level: of two levels, 0 for a row of `x` per source, else one per prefix.
        name: of the layer.

    Raises:
        ProgramError: `y` has no sequences or no such level, or `x` has sequences.
    """
    (given,), (wide,) = variables("sequence_expand", "x", x), variables("sequence_expand", "y", y)
    levels = levels_for(wide)
    if levels is None:
        sequences("sequence_expand", "y", wide)
    if ref_level not in ({-1, 0} if levels is None else {-1, 0, 1}):
        raise mistake(f"sequence_expand: '{wide.name}' has no level {ref_level}", "ref_level=-1")
    if source_of(given, ragged_data(given.block.program)) is not None:
        raise mistake("sequence_expand: 'x' is sequences itself, and must be one row each")
    helper = LayerHelper("sequence_expand", name)
    aside = {} if levels is None else {"YLevels": levels}
    inputs = {"X": given, "Y": wide, **aside}
    return _rows_as_before(helper, inputs, wide, {"ref_level": ref_level}, given.shape[1:])


def lod_reset(
    x: Variable, y: Variable | None = None, target_lod: Sequence[int] | None = None
) -> Variable:
    """Divides the rows of `x` into the sequences of `y`, of one level or two.

    Args:
        x: as many rows as those sequences have, or a variable with these sequences already.
        y: sequences.
        target_lod: unsupported: the offsets of sequences are always those of a feed.

    Raises:
        ProgramError: `y` is not given, or has no sequences.
    """
    (given,) = variables("lod_reset", "x", x)
    if y is None or target_lod is not None:
        what = "lod_reset: sequences are those of a variable here, and not of 'target_lod'"
        raise mistake(what, "declare what is fed with lod_level=1, and give it as y=")
    (like,) = variables("lod_reset", "y", y)
    if levels_for(like) is None:
        sequences("lod_reset", "y", like)
    row, helper = (given.sizes or ())[1:], LayerHelper("lod_reset")
    made = _rows_as_before(helper, {"X": given, "Y": like}, like, {}, given.shape[1:])
    made.sizes = ((like.sizes or ())[0], *row)
    return made


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
    """Multiplies the context of each row in its sequence by a matrix, and adds a bias.

    Args:
        input: sequences `[rows, width]`.
        num_filters: width of the result.
        filter_size: rows of a context, including the row itself.
        filter_stride: 1.
        padding: warned of unless True: as in fluid, a context beyond a sequence is always 0.
        padding_start: offset of the context, `-filter_size // 2` unless given.
        bias_attr: of the bias.
        param_attr: of the matrix.
        act: an activation.
        name: of the layer.

    Raises:
        ProgramError: the input has no sequences, or the stride is not 1.
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
    """The argument as a list of sequences."""
    found = variables(layer, argument, given)
    for one in found:
        if source_of(one, ragged_data(one.block.program)) is None:
            what = f"{layer}: '{one.name}' is no sequences"
            raise mistake(what, "declare what is fed with lod_level=1")
    return found


def sequence_pad(
    x: Variable, pad_value: Variable, maxlen: int | None = None, name: str | None = None
) -> tuple[Variable, Variable]:
    """Pads sequences to an array: `[b,maxlen,...]`, and their lengths, i64[b].

    Args:
        x: sequences `[rows,...]`.
        pad_value: the padding: `[1]`, or one row.
        maxlen: size of the second axis; the longest fed length unless given.
        name: of the layer.

    Raises:
        ProgramError: the input has no sequences, or is computed, so that its longest length is
            known only at run time, and `maxlen` is not given.
    """
    (rows,) = sequences("sequence_pad", "x", x)
    (fill,) = variables("sequence_pad", "pad_value", pad_value)
    source = source_of(rows, ragged_data(rows.block.program))
    assert source is not None
    assert rows.sizes
    if maxlen is None and not source.is_data:
        what = f"sequence_pad: how long the longest sequence of '{rows.name}' is is not known"
        raise mistake(what, "give maxlen; an operator of the program makes these sequences")
    if maxlen is not None and maxlen < 1:
        raise mistake(f"sequence_pad: maxlen is 1 or more, not {maxlen}")
    helper = LayerHelper("sequence_pad", name)
    made, length = helper.output(rows.dtype), helper.output("int64", stop_gradient=True)
    most = longest_of(source) if maxlen is None else maxlen
    made.sizes, length.sizes = (letter("b"), most, *rows.sizes[1:]), (letter("b"),)
    inputs = {"X": rows, "PadValue": fill}
    attrs = {"padded_length": -1 if maxlen is None else maxlen}
    helper.append_op("sequence_pad", inputs, {"Out": made, "Length": length}, attrs)
    return made, length


def sequence_unpad(x: Variable, length: Variable, name: str | None = None) -> Variable:
    """Removes padding: `[b,most,...]` -> sequences `[rows,...]`.

    Args:
        x: padded sequences, with any values as padding.
        length: i64[b], their lengths. Lengths from `sequence_pad` give sequences with as many rows
            as its input, with which they can be combined.
        name: of the layer.

    Raises:
        ProgramError: the array has fewer than two axes.
    """
    (wide,), (own,) = variables("sequence_unpad", "x", x), variables("", "length", length)
    if len(wide.shape) < 2:
        raise mistake(f"sequence_unpad takes an array of 2 axes or more, not {list(wide.shape)}")
    assert wide.sizes
    helper, inputs = LayerHelper("sequence_unpad", name), {"X": wide, "Length": own}
    maker, row = own.op, wide.sizes[2:]
    if maker is not None and maker.type == "sequence_pad":
        like = inputs["Like"] = maker.block._var_recursive(maker.input("X")[0])
        assert like.sizes
        return _made(helper, inputs, wide, (like.sizes[0], *row), 0)
    rows = wide.sizes[0] * wide.sizes[1]
    return _made(helper, inputs, wide, (rows, *row), spare_rows_needed(wide.block.program, rows))


def sequence_concat(input: Sequence[Variable], name: str | None = None) -> Variable:
    """Joins the first sequences of some variables, then the second ones, and so on."""
    found = sequences("sequence_concat", "input", input)
    sizes = [x.sizes[0] for x in found if x.sizes]
    rows: Size = sum(sizes[1:], start=sizes[0])
    first = found[0]
    assert first.sizes
    more = spare_rows_needed(first.block.program, rows) if any(map(spare_rows, sizes)) else 0
    helper = LayerHelper("sequence_concat", name)
    return _made(helper, {"X": found}, first, (rows, *first.sizes[1:]), more)


def sequence_slice(
    input: Variable, offset: Variable, length: Variable, name: str | None = None
) -> Variable:
    """Slices each sequence.

    Args:
        input: sequences.
        offset: i64[b,1], first row of each slice.
        length: i64[b,1], rows of each slice; a shorter sequence gives NaN.
        name: of the layer.

    Raises:
        ProgramError: the input has no sequences.
    """
    (x,) = sequences("sequence_slice", "input", input)
    (first,) = variables("sequence_slice", "offset", offset)
    (own,) = variables("sequence_slice", "length", length)
    assert x.sizes
    more = spare_rows_needed(x.block.program, x.sizes[0])
    helper = LayerHelper("sequence_slice", name)
    return _made(helper, {"X": x, "Offset": first, "Length": own}, x, x.sizes, more)


def sequence_reshape(input: Variable, new_dim: int) -> Variable:
    """Reshapes the elements of each sequence to rows of another width: `[rows,width]`."""
    (x,) = sequences("sequence_reshape", "input", input)
    if len(x.shape) != 2 or new_dim < 1:
        what = f"sequence_reshape takes rows of one axis and a width, not {list(x.shape)}"
        raise mistake(f"{what} and {new_dim}")
    assert x.sizes
    wide = x.shape[1]
    same = math.gcd(wide, new_dim)
    rows = call("floordiv", x.sizes[0] * (wide // same), new_dim // same)
    more = spare_rows_needed(x.block.program, rows) if spare_rows(x.sizes[0]) else 0
    helper = LayerHelper("sequence_reshape")
    return _made(helper, {"X": x}, x, (rows, new_dim), more, new_dim=new_dim)


def without_tokens(x: Variable, tokens: Sequence[int]) -> Variable:
    """Removes some numbers from each sequence."""
    (ids,) = sequences("sequence_erase", "x", x)
    assert ids.sizes
    more = spare_rows_needed(ids.block.program, ids.sizes[0])
    helper = LayerHelper("sequence_erase")
    return _made(helper, {"X": ids}, ids, ids.sizes, more, tokens=list(tokens))


def _made(
    helper: LayerHelper,
    inputs: Any,
    like: Variable,
    sizes: tuple[Size, ...],
    spare: int,
    **attrs: Any,
) -> Variable:
    """Adds an operator whose sequences may leave rows unused."""
    made = helper.output(like.dtype)
    made.sizes, made.lod_level = (sizes[0] + spare, *sizes[1:]), 1
    helper.append_op(helper.layer_type, inputs, {"Out": made}, {**attrs, "spare_rows": spare})
    return made
