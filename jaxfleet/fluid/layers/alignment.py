"""Layers that compare two sequences of unequal lengths: CTC's loss, and edit distances."""

from collections.abc import Sequence

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.one_operator import variables
from jaxfleet.fluid.layers.sequence_shapes import without_tokens
from jaxfleet.fluid.layers.sequences import sequences
from jaxfleet.fluid.ragged import room_for
from jaxfleet.fluid.variable import Variable
from jaxfleet.ir.dims import letter


def warpctc(
    input: Variable,
    label: Variable,
    blank: int = 0,
    norm_by_times: bool = False,
    input_length: Variable | None = None,
    label_length: Variable | None = None,
) -> Variable:
    """Takes CTC's loss (Graves and others, 2006) of scores that no softmax has seen: f32[b,1].

    Args:
        input: sequences f32[rows,classes]; or f32[time,b,classes], with lengths.
        label: sequences i32[rows,1]; or i32[b,most], with lengths.
        blank: the class that stands for nothing.
        norm_by_times: divide gradients, not the loss, by lengths; of sequences alone, as in fluid.
        input_length: i64[b], given with `label_length`.
        label_length: i64[b].

    Raises:
        ProgramError: an input has neither sequences nor a length, or there is no such class.
    """
    x, tags, inputs = _both("warpctc", ("Logits", "Label"), (input, label),
                            (input_length, label_length))  # fmt: skip
    if not 0 <= blank < x.shape[-1]:
        raise mistake(f"warpctc: blank is {blank}, and there are {x.shape[-1]} classes")
    if tags.dtype not in {"int32", "int64"}:
        raise mistake(f"warpctc: '{tags.name}' is {tags.dtype}", "labels are int32")
    helper = LayerHelper("warpctc")
    slope, loss = helper.output(x.dtype, stop_gradient=True), helper.output(x.dtype)
    assert x.sizes
    is_padded = "LogitsLength" in inputs
    rows = x.sizes[1] if is_padded else letter("b")
    loss.sizes = (rows, 1)
    slope.sizes = x.sizes if is_padded else (room_for(x), rows, x.sizes[1])
    attrs = {"blank": blank, "norm_by_times": norm_by_times}
    helper.append_op("warpctc", inputs, {"WarpCTCGrad": slope, "Loss": loss}, attrs)
    return loss


def edit_distance(
    input: Variable,
    label: Variable,
    normalized: bool = True,
    ignored_tokens: Sequence[int] | None = None,
    input_length: Variable | None = None,
    label_length: Variable | None = None,
) -> tuple[Variable, Variable]:
    """Counts what turns each sequence into another: f32[b,1], and i64[1], how many there are.

    Args:
        input: sequences i64[rows,1]; or i64[b,most], with lengths.
        label: what they are compared with, likewise.
        normalized: divide by the lengths of the labels; that of an empty one is NaN or infinite.
        ignored_tokens: numbers that are left out first, of sequences alone.
        input_length: i64[b], given with `label_length`.
        label_length: i64[b].

    Raises:
        ProgramError: an input has neither sequences nor a length, or tokens are left out of padded
            ones.
    """
    if ignored_tokens and input_length is not None:
        what = "edit_distance: tokens cannot be left out of what is padded"
        raise mistake(what, "declare what is fed with lod_level=1, and give no lengths")
    if ignored_tokens:
        input, label = (without_tokens(x, ignored_tokens) for x in (input, label))
    x, _, inputs = _both("edit_distance", ("Hyps", "Refs"), (input, label),
                         (input_length, label_length))  # fmt: skip
    helper = LayerHelper("edit_distance")
    made, count = (helper.output(dtype, stop_gradient=True) for dtype in ("float32", "int64"))
    assert x.sizes
    made.sizes, count.sizes = (x.sizes[0] if "HypsLength" in inputs else letter("b"), 1), (1,)
    helper.append_op("edit_distance", inputs, {"Out": made, "SequenceNum": count},
                     {"normalized": normalized})  # fmt: skip
    return made, count


def _both(
    layer: str,
    slots: tuple[str, str],
    given: tuple[Variable, Variable],
    lengths: tuple[Variable | None, Variable | None],
) -> tuple[Variable, Variable, dict[str, Variable]]:
    """Returns what a layer compares, and both by slot, with their lengths where these are given.

    Raises:
        ProgramError: an input has neither sequences nor a length.
    """
    own, others = lengths
    if (own is None) != (others is None):
        raise mistake(f"{layer}: one of input_length and label_length is given without the other")
    if own is None or others is None:
        (x,), (y,) = sequences(layer, "input", given[0]), sequences(layer, "label", given[1])
        return x, y, dict(zip(slots, (x, y), strict=True))
    (x,), (y,) = variables(layer, "input", given[0]), variables(layer, "label", given[1])
    more = {f"{slots[0]}Length": own, f"{slots[1]}Length": others}
    return x, y, {slots[0]: x, slots[1]: y, **more}
