"""Recurrent layers on sequences, and conditional random fields that tag them."""

from typing import Any

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.one_operator import variables
from jaxfleet.fluid.layers.sequences import sequences
from jaxfleet.fluid.param_attr import ParamAttr
from jaxfleet.fluid.ragged import join_rows
from jaxfleet.fluid.variable import Variable
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
    """Runs an LSTM over sequences whose rows an `fc` has multiplied: hidden states and cells.

    Args:
        input: f32[rows,4*d]: parts of the candidate, and of the input, forget and output gates.
        size: `4*d`.
        h_0: f32[b,d], the hidden states that sequences begin with; zero unless given.
        c_0: f32[b,d], the cells; given exactly where `h_0` is.
        param_attr: of the weight, f32[d,4*d].
        bias_attr: of the bias, f32[1,7*d], or f32[1,4*d] without peepholes.
        use_peepholes: let gates see the cell.
        is_reverse: begin at the end of each sequence.
        gate_activation: `sigmoid`, `tanh`, `relu` or `identity`, as the next two.
        cell_activation: of the cell, in the hidden state.
        candidate_activation: of what enters the cell.
        dtype: `float32`.
        name: of the layer.

    Returns:
        f32[rows,d] twice.

    Raises:
        ProgramError: the input has no sequences, or an argument does not fit the others.
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
    """Runs a GRU over sequences whose rows an `fc` has multiplied: hidden states, f32[rows,d].

    Args:
        input: f32[rows,3*d]: parts of the update gate, the reset gate and the candidate.
        size: `d`.
        param_attr: of the weight, f32[d,3*d].
        bias_attr: of the bias, f32[1,3*d].
        is_reverse: begin at the end of each sequence.
        gate_activation: `sigmoid`, `tanh`, `relu` or `identity`.
        candidate_activation: of the candidate.
        h_0: f32[b,d], the hidden states that sequences begin with; zero unless given.
        origin_mode: let the update gate say what is kept (Cho et al., 2014), not what is replaced.

    Raises:
        ProgramError: the input has no sequences, or an argument does not fit the others.
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
    """Takes the cost of each sequence's tags under a linear-chain CRF: f32[b,1].

    Args:
        input: f32[rows,tags], a score for each tag of each row.
        label: i64[rows,1], the tags; sequences of the same lengths.
        param_attr: of the transition weights, f32[tags+2,tags]: of the first tag, of the last, and
            from each tag to the next.
        length: refused; lengths come with the sequences.

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
    """Finds the best tags of each sequence by Viterbi's algorithm: i64[rows,1].

    Args:
        input: f32[rows,tags], as `linear_chain_crf` takes it.
        param_attr: names the transition weights of the `linear_chain_crf`.
        label: i64[rows,1]; given, the result is 1 where the best tag is the label's, else 0.
        length: refused; lengths come with the sequences.

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
    """Declares what has the sequences of a variable, and a width of its own."""
    made = helper.output(dtype or x.dtype)
    assert x.sizes is not None
    made.sizes, made.lod_level = (x.sizes[0], width), x.lod_level
    return made


def _check(layer: str, x: Variable, size: int, parts: int, activations: dict[str, str]) -> None:
    """Checks the widths and activations of a recurrent layer.

    Raises:
        ProgramError: one is wrong.
    """
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
