"""Reshaping, joining, splitting, indexing and sorting of tensors."""

from collections.abc import Sequence
from typing import Any

from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.layer_function import one_operator, variables


@one_operator("one_hot", X="input", dtype="float32", frozen=True)
def one_hot(input: Variable, depth: int, allow_out_of_range: bool = False) -> Variable:
    """One-hot rows: of `[..., 1]`, `[..., depth]`.

    An index out of range gives a row of NaN, or of zeros with `allow_out_of_range`.
    """


def topk(input: Variable, k: int, name: str | None = None) -> tuple[Variable, Variable]:
    """The `k` largest elements along the last axis, and their indices."""
    (x,) = variables("topk", "input", input)
    if isinstance(k, int) and x.shape and 0 < x.shape[-1] < k:
        raise mistake(f"topk of {k} elements, and a row of '{x.name}' has {x.shape[-1]}")
    helper = LayerHelper("top_k", name)
    values, places = helper.add({"X": x}, {"Out": x.dtype, "Indices": "int64"}, {"k": k})
    places.stop_gradient = True
    return values, places


def argsort(
    input: Variable, axis: int = -1, descending: bool = False, name: str | None = None
) -> tuple[Variable, Variable]:
    """Sorts along an axis; returns also the indices."""
    (x,) = variables("argsort", "input", input)
    helper = LayerHelper("argsort", name)
    attrs = {"axis": axis, "descending": descending}
    values, places = helper.add({"X": x}, {"Out": x.dtype, "Indices": "int64"}, attrs)
    places.stop_gradient = True
    return values, places


@one_operator("arg_max", X="x", dtype="int64", frozen=True)
def argmax(x: Variable, axis: int = 0) -> Variable:
    """Index of the largest element along an axis."""


@one_operator("arg_min", X="x", dtype="int64", frozen=True)
def argmin(x: Variable, axis: int = 0) -> Variable:
    """Index of the smallest element along an axis."""


@one_operator("gather", X="input", Index="index")
def gather(input: Variable, index: Variable, overwrite: bool = True) -> Variable:
    """Selects rows by index."""


@one_operator("gather_nd", X="input", Index="index")
def gather_nd(input: Variable, index: Variable, name: str | None = None) -> Variable:
    """Selects elements or slices by the index tuples along the last axis."""


@one_operator("scatter", X="input", Ids="index", Updates="updates")
def scatter(
    input: Variable,
    index: Variable,
    updates: Variable,
    name: str | None = None,
    overwrite: bool = True,
) -> Variable:
    """Overwrites rows, or adds to them; updates of the same row are summed."""


@one_operator("slice", Input="input")
def slice(
    input: Variable, axes: Sequence[int], starts: Sequence[int], ends: Sequence[int]
) -> Variable:
    """Slices along axes."""


@one_operator("strided_slice", Input="input")
def strided_slice(
    input: Variable,
    axes: Sequence[int],
    starts: Sequence[int],
    ends: Sequence[int],
    strides: Sequence[int],
) -> Variable:
    """Slices along axes, with strides."""


@one_operator("shape", Input="input", dtype="int32", frozen=True)
def shape(input: Variable) -> Variable:
    """The shape of an array."""


_RECORD = {"XShape": ""}  # input of the gradient operator, which reads only its shape


@one_operator("reshape2", X="x", aside=_RECORD, unused=("inplace",), refused=("actual_shape",))
def reshape(
    x: Variable,
    shape: Sequence[int],
    actual_shape: Any = None,
    act: str | None = None,
    inplace: bool = False,
    name: str | None = None,
) -> Variable:
    """Changes the shape; 0 keeps an axis, -1 is inferred."""


@one_operator("transpose2", X="x", aside=_RECORD, renamed={"perm": "axis"})
def transpose(x: Variable, perm: Sequence[int], name: str | None = None) -> Variable:
    """Permutes the axes."""


@one_operator("squeeze2", X="input", aside=_RECORD)
def squeeze(input: Variable, axes: Sequence[int], name: str | None = None) -> Variable:
    """Removes axes of size 1; all of them if `axes` is empty."""


@one_operator("unsqueeze2", X="input", aside=_RECORD)
def unsqueeze(input: Variable, axes: int | Sequence[int], name: str | None = None) -> Variable:
    """Inserts axes of size 1."""


@one_operator("flatten2", X="x", aside=_RECORD)
def flatten(x: Variable, axis: int = 1, name: str | None = None) -> Variable:
    """Flattens to a matrix whose rows are the axes before `axis`."""


@one_operator("concat", X="input")
def concat(input: Sequence[Variable], axis: int = 0, name: str | None = None) -> Variable:
    """Concatenates along an axis."""


@one_operator("stack", X="x", out="Y")
def stack(x: Sequence[Variable], axis: int = 0, name: str | None = None) -> Variable:
    """Stacks along a new axis."""


@one_operator("expand", X="x")
def expand(x: Variable, expand_times: Sequence[int], name: str | None = None) -> Variable:
    """Tiles an array along its axes."""


@one_operator("pad", X="x")
def pad(
    x: Variable, paddings: Sequence[int], pad_value: float = 0.0, name: str | None = None
) -> Variable:
    """Pads with a value: two numbers per axis, before and after."""


@one_operator("reverse", X="x")
def reverse(x: Variable, axis: int | Sequence[int]) -> Variable:
    """Reverses the order along axes."""


def split(
    input: Variable, num_or_sections: int | Sequence[int], dim: int = -1, name: str | None = None
) -> list[Variable]:
    """Splits along an axis into equal parts, or into given sizes, of which -1 is inferred.

    Raises:
        ProgramError: the sizes do not add up to the axis.
    """
    (x,) = variables("split", "input", input)
    axis = dim if dim >= 0 else dim + len(x.shape)
    if isinstance(num_or_sections, int):
        count, attrs = num_or_sections, {"num": num_or_sections, "sections": [], "axis": axis}
    else:
        sections = _sections(x, list(num_or_sections), axis)
        count, attrs = len(sections), {"num": 0, "sections": sections, "axis": axis}
    return _several("split", x, "Out", count, attrs, name)


def _sections(x: Variable, sections: list[int], axis: int) -> list[int]:
    size = x.shape[axis]
    if sections.count(-1) > 1:
        raise mistake(f"split: one section at most is what is left, not {sections}")
    if -1 in sections and size >= 0:
        rest = size - (sum(sections) + 1)
        sections = [rest if each == -1 else each for each in sections]
    if size >= 0 and sum(sections) != size:
        raise mistake(f"split: sections {sections} are not the {size} of axis {axis}")
    return sections


def unstack(x: Variable, axis: int = 0, num: int | None = None) -> list[Variable]:
    """Splits an axis into arrays without it; `num` is needed if its size is unknown."""
    (given,) = variables("unstack", "x", x)
    count = num if num is not None else given.shape[axis]
    if count < 0:
        raise mistake(f"unstack: the size of axis {axis} is not known", hint="give num")
    return _several("unstack", given, "Y", count, {"axis": axis, "num": count}, None)


def _several(
    op_type: str, x: Variable, slot: str, count: int, attrs: dict[str, Any], name: str | None
) -> list[Variable]:
    helper = LayerHelper(op_type, name)
    made = [helper.output(x.dtype) for _ in range(count)]
    helper.append_op(op_type, {"X": x}, {slot: made}, attrs)
    return made
