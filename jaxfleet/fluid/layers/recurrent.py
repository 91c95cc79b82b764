"""Recurrent layers, and sequence labeling: CRF, CTC loss, edit distance."""

from collections.abc import Sequence
from typing import Any

from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.framework.sequence_lengths import join_rows, room_for
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.layer_function import variables
from jaxfleet.fluid.layers.sequences import sequences, without_tokens
from jaxfleet.fluid.param_attr import ParamAttr
from jaxfleet.ir.dims import letter

_ACTIVATIONS = ("sigmoid", "tanh", "relu", "identity")


def dynamic_lstm(
    input: Variable,
    size: int,
    h_0: Variable | None = None,
    c_0: Variable | None = None,
    param_attr: Any = None,
    bias_attr: Any = None,
    use_peepholes: bool = True,
    is_reverse: bool = False,
    gate_activation: str = "sigmoid",
    cell_activation: str = "tanh",
    candidate_activation: str = "tanh",
    dtype: str = "float32",
    name: str | None = None,
) -> tuple[Variable, Variable]:
    """LSTM over sequences of rows projected by an `fc`: hidden states and cells.

    Args:
        input: f32[rows,4*d]: projections for the candidate and the input, forget and output gates.
        size: `4*d`.
        h_0: f32[b,d], initial hidden states; zero unless given.
        c_0: f32[b,d], initial cells; given if and only if `h_0` is.
        param_attr: of the weight, f32[d,4*d].
        bias_attr: of the bias, f32[1,7*d], or f32[1,4*d] without peepholes.
        use_peepholes: gates read the cell.
        is_reverse: start at the end of each sequence.
        gate_activation: `sigmoid`, `tanh`, `relu` or `identity`, as the next two.
        cell_activation: of the cell, in the hidden state.
        candidate_activation: of the candidate.
        dtype: `float32`.
        name: of the layer.

    Returns:
        f32[rows,d] twice.

    Raises:
        ProgramError: the input has no sequences, or arguments are inconsistent.
    """
    (x,) = sequences("dynamic_lstm", "input", input)
    activations = {
        "gate_activation": gate_activation,
        "cell_activation": cell_activation,
        "candidate_activation": candidate_activation,
    }
    _check("dynamic_lstm", x, size, 4, activations)
    if (h_0 is None) != (c_0 is None):
        raise mistake("dynamic_lstm: one of h_0 and c_0 is given without the other")
    helper, width = LayerHelper("lstm", name), size // 4
    weight = helper.parameter(ParamAttr.of(param_attr) or ParamAttr(), [width, size], dtype)
    shape = [1, width * (7 if use_peepholes else 4)]
    bias = helper.parameter(ParamAttr.of(bias_attr) or ParamAttr(), shape, dtype, is_bias=True)
    widths = {"Hidden": width, "Cell": width, "BatchGate": size, "BatchCellPreAct": width}
    made = {slot: _rows_like(helper, x, wide) for slot, wide in widths.items()}
    inputs = {"Input": x, "Weight": weight, "Bias": bias}
    if h_0 is not None and c_0 is not None:
        inputs |= {"H0": h_0, "C0": c_0}
    attrs = {"use_peepholes": use_peepholes, "is_reverse": is_reverse, **activations}
    helper.append_op("lstm", inputs, made, attrs)
    return made["Hidden"], made["Cell"]


def dynamic_gru(
    input: Variable,
    size: int,
    param_attr: Any = None,
    bias_attr: Any = None,
    is_reverse: bool = False,
    gate_activation: str = "sigmoid",
    candidate_activation: str = "tanh",
    h_0: Variable | None = None,
    origin_mode: bool = False,
) -> Variable:
    """GRU over sequences of rows projected by an `fc`: hidden states, f32[rows,d].

    Args:
        input: f32[rows,3*d]: projections for the update gate, the reset gate and the candidate.
        size: `d`.
        param_attr: of the weight, f32[d,3*d].
        bias_attr: of the bias, f32[1,3*d].
        is_reverse: start at the end of each sequence.
        gate_activation: `sigmoid`, `tanh`, `relu` or `identity`.
        candidate_activation: of the candidate.
        h_0: f32[b,d], initial hidden states; zero unless given.
        origin_mode: the update gate is the share kept (Cho et al., 2014), not the share replaced.

    Raises:
        ProgramError: the input has no sequences, or arguments are inconsistent.
    """
    (x,) = sequences("dynamic_gru", "input", input)
    activations = {"gate_activation": gate_activation, "activation": candidate_activation}
    _check("dynamic_gru", x, 3 * size, 3, activations)
    helper = LayerHelper("gru")
    weight = helper.parameter(ParamAttr.of(param_attr) or ParamAttr(), [size, 3 * size], x.dtype)
    inputs = {"Input": x, "Weight": weight}
    if (attr := ParamAttr.of(bias_attr)) is not None:
        inputs["Bias"] = helper.parameter(attr, [1, 3 * size], x.dtype, is_bias=True)
    if h_0 is not None:
        inputs["H0"] = h_0
    slots = ("BatchGate", "BatchResetHiddenPrev", "BatchHidden", "Hidden")
    widths = (3 * size, size, size, size)
    made = {s: _rows_like(helper, x, wide) for s, wide in zip(slots, widths, strict=True)}
    attrs = {"is_reverse": is_reverse, "origin_mode": origin_mode, **activations}
    helper.append_op("gru", inputs, made, attrs)
    return made["Hidden"]


def linear_chain_crf(
    input: Variable, label: Variable, param_attr: Any = None, length: Variable | None = None
) -> Variable:
    """Cost of each sequence's tags under a linear-chain CRF: f32[b,1].

    Args:
        input: f32[rows,tags], score of each tag.
        label: i64[rows,1], the tags; sequences of the same lengths.
        param_attr: of the transition weights, f32[tags+2,tags]: of the first tag, of the last, and
            from each tag to the next.
        length: unsupported; sequences have their lengths.

    Raises:
        ProgramError: the input has no sequences, or lengths are given as a variable.
    """
    (x,) = sequences("linear_chain_crf", "input", input)
    _refuse_length("linear_chain_crf", length)
    (tags,) = variables("linear_chain_crf", "label", label)
    helper = LayerHelper("linear_chain_crf")
    count = x.shape[-1]
    attr = ParamAttr.of(param_attr) or ParamAttr()
    transition = helper.parameter(attr, [count + 2, count], x.dtype)
    join_rows(x.block.program, [x, tags])
    made = {slot: _rows_like(helper, x, count) for slot in ("Alpha", "EmissionExps")}
    made |= {slot: helper.output(x.dtype) for slot in ("TransitionExps", "LogLikelihood")}
    made["TransitionExps"].sizes, made["LogLikelihood"].sizes = transition.sizes, (letter("b"), 1)
    inputs = {"Emission": x, "Transition": transition, "Label": tags}
    helper.append_op("linear_chain_crf", inputs, made)
    return made["LogLikelihood"]


def crf_decoding(
    input: Variable, param_attr: Any, label: Variable | None = None, length: Variable | None = None
) -> Variable:
    """The best tags of each sequence by Viterbi's algorithm: i64[rows,1].

    Args:
        input: f32[rows,tags], as in `linear_chain_crf`.
        param_attr: names the transition weights of the `linear_chain_crf`.
        label: i64[rows,1]; if given, the result is 1 where the best tag equals it, else 0.
        length: unsupported; sequences have their lengths.

    Raises:
        ProgramError: the input has no sequences, or there are no such weights.
    """
    (x,) = sequences("crf_decoding", "input", input)
    _refuse_length("crf_decoding", length)
    attr = ParamAttr.of(param_attr)
    block = x.block.program.global_block()
    if attr is None or attr.name is None or not block.has_var(attr.name):
        hint = "name the param_attr of linear_chain_crf, and pass the same here"
        raise mistake("crf_decoding: 'param_attr' names no transition weights", hint)
    helper = LayerHelper("crf_decoding")
    made = _rows_like(helper, x, 1, "int64")
    made.stop_gradient = True
    inputs = {"Emission": x, "Transition": block.var(attr.name)}
    if label is not None:
        join_rows(x.block.program, [x, label])
        inputs["Label"] = label
    helper.append_op("crf_decoding", inputs, {"ViterbiPath": made})
    return made


def _rows_like(helper: LayerHelper, x: Variable, width: int, dtype: str = "") -> Variable:
    """Declares a variable with the sequences of another, and its own width."""
    made = helper.output(dtype or x.dtype)
    assert x.sizes is not None
    made.sizes, made.lod_level = (x.sizes[0], width), x.lod_level
    return made


def _check(layer: str, x: Variable, size: int, parts: int, activations: dict[str, str]) -> None:
    """Checks the widths and activations of a recurrent layer."""
    if size % parts or x.shape[-1] != size:
        message = f"{layer}: '{x.name}' is {x.shape[-1]} wide, where {parts} parts make {size}"
        raise mistake(message, f"put fc(..., size={size}, bias_attr=False) before it")
    for argument, activation in activations.items():
        if activation not in _ACTIVATIONS:
            message = f"{layer}: there is no {argument} {activation!r}"
            raise mistake(message, f"one of {', '.join(_ACTIVATIONS)}")


def _refuse_length(layer: str, length: Variable | None) -> None:
    if length is not None:
        message = f"{layer}: padded rows with a 'length' are not supported"
        raise mistake(message, "declare what is fed with lod_level=1; lengths then come with it")


def warpctc(
    input: Variable,
    label: Variable,
    blank: int = 0,
    norm_by_times: bool = False,
    input_length: Variable | None = None,
    label_length: Variable | None = None,
) -> Variable:
    """CTC loss (Graves et al., 2006) of unnormalized scores: f32[b,1].

    Args:
        input: sequences f32[rows,classes]; or f32[time,b,classes], with lengths.
        label: sequences i32[rows,1]; or i32[b,most], with lengths.
        blank: the blank class.
        norm_by_times: divide gradients, not the loss, by lengths; only for sequences, as in fluid.
        input_length: i64[b], given with `label_length`.
        label_length: i64[b].

    Raises:
        ProgramError: an input has neither sequences nor lengths, or there is no such class.
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
    """Edit distance of each pair of sequences: f32[b,1], and their number i64[1].

    Args:
        input: sequences i64[rows,1]; or i64[b,most], with lengths.
        label: the sequences to compare with, likewise.
        normalized: divide by the lengths of the labels; NaN or infinite for an empty one.
        ignored_tokens: numbers to leave out first; only for sequences.
        input_length: i64[b], given with `label_length`.
        label_length: i64[b].

    Raises:
        ProgramError: an input has neither sequences nor lengths, or tokens are ignored in padded
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
    """Both operands as a layer takes them, with their lengths by slot if given."""
    own, others = lengths
    if (own is None) != (others is None):
        raise mistake(f"{layer}: one of input_length and label_length is given without the other")
    if own is None or others is None:
        (x,), (y,) = sequences(layer, "input", given[0]), sequences(layer, "label", given[1])
        return x, y, dict(zip(slots, (x, y), strict=True))
    (x,), (y,) = variables(layer, "input", given[0]), variables(layer, "label", given[1])
    more = {f"{slots[0]}Length": own, f"{slots[1]}Length": others}
    return x, y, {slots[0]: x, slots[1]: y, **more}
