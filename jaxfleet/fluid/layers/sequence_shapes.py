"""Layers that make sequences of other lengths, put each on a row of an array, and take it back.

See `jaxfleet.fluid.made_sequences` for what such sequences are to a program.
"""

import math
from collections.abc import Sequence
from typing import Any

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.one_operator import variables
from jaxfleet.fluid.layers.sequences import sequences
from jaxfleet.fluid.made_sequences import spare_rows, told_apart
from jaxfleet.fluid.ragged import longest_of, ragged_data, source_of
from jaxfleet.fluid.variable import Variable
from jaxfleet.ir import Size
from jaxfleet.ir.dims import call, letter


def sequence_pad(
    x: Variable, pad_value: Variable, maxlen: int | None = None, name: str | None = None
) -> tuple[Variable, Variable]:
    """Puts each sequence on a row of an array: `[b,maxlen,...]`, and i64[b], their lengths.

    Args:
        x: sequences `[rows,...]`.
        pad_value: what stands behind their ends: `[1]`, or one row.
        maxlen: the size of a row; the length of the longest sequence that is fed, unless given.
        name: of the layer.

    Raises:
        ProgramError: the input has no sequences; or it is made by an operator, which says in a run
            alone how long the longest is, and there is no `maxlen`.
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
    """Takes sequences off the rows of an array: `[b,most,...]` -> `[rows,...]`.

    Args:
        x: them, with whatever behind their ends.
        length: i64[b], their lengths. Those that a `sequence_pad` returned make sequences of as
            many rows as it was given, which may stand beside those.
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
    return _made(helper, inputs, wide, (rows, *row), told_apart(wide.block.program, rows))


def sequence_concat(input: Sequence[Variable], name: str | None = None) -> Variable:
    """Joins the first sequences of some variables, then the second ones, and so on.

    Raises:
        ProgramError: one has no sequences.
    """
    found = sequences("sequence_concat", "input", input)
    sizes = [x.sizes[0] for x in found if x.sizes]
    rows: Size = sum(sizes[1:], start=sizes[0])
    first = found[0]
    assert first.sizes
    more = told_apart(first.block.program, rows) if any(map(spare_rows, sizes)) else 0
    helper = LayerHelper("sequence_concat", name)
    return _made(helper, {"X": found}, first, (rows, *first.sizes[1:]), more)


def sequence_slice(
    input: Variable, offset: Variable, length: Variable, name: str | None = None
) -> Variable:
    """Takes some rows of each sequence.

    Args:
        input: sequences.
        offset: i64[b,1], the first row that is taken of each.
        length: i64[b,1], how many; NaN is made of a sequence that has not so many.
        name: of the layer.

    Raises:
        ProgramError: the input has no sequences.
    """
    (x,) = sequences("sequence_slice", "input", input)
    (first,) = variables("sequence_slice", "offset", offset)
    (own,) = variables("sequence_slice", "length", length)
    assert x.sizes
    more = told_apart(x.block.program, x.sizes[0])
    helper = LayerHelper("sequence_slice", name)
    return _made(helper, {"X": x, "Offset": first, "Length": own}, x, x.sizes, more)


def sequence_reshape(input: Variable, new_dim: int) -> Variable:
    """Makes rows of another width of the elements of each sequence: `[rows,width]`.

    Raises:
        ProgramError: the input has no sequences of rows with one axis.
    """
    (x,) = sequences("sequence_reshape", "input", input)
    if len(x.shape) != 2 or new_dim < 1:
        what = f"sequence_reshape takes rows of one axis and a width, not {list(x.shape)}"
        raise mistake(f"{what} and {new_dim}")
    assert x.sizes
    wide = x.shape[1]
    same = math.gcd(wide, new_dim)
    rows = call("floordiv", x.sizes[0] * (wide // same), new_dim // same)
    more = told_apart(x.block.program, rows) if spare_rows(x.sizes[0]) else 0
    helper = LayerHelper("sequence_reshape")
    return _made(helper, {"X": x}, x, (rows, new_dim), more, new_dim=new_dim)


def without_tokens(x: Variable, tokens: Sequence[int]) -> Variable:
    """Leaves some numbers out of each sequence.

    Raises:
        ProgramError: the input has no sequences.
    """
    (ids,) = sequences("sequence_erase", "x", x)
    assert ids.sizes
    more = told_apart(ids.block.program, ids.sizes[0])
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
    """Adds an operator that makes sequences, with some rows to spare."""
    made = helper.output(like.dtype)
    made.sizes, made.lod_level = (sizes[0] + spare, *sizes[1:]), 1
    helper.append_op(helper.layer_type, inputs, {"Out": made}, {**attrs, "spare_rows": spare})
    return made
