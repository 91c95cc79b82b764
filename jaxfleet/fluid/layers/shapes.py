"""Layers that give what an array holds another shape, or another order."""

from collections.abc import Sequence
from typing import Any

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.one_operator import one_operator, variables
from jaxfleet.fluid.variable import Variable

_RECORD = {"XShape": ""}  # what the gradient operator reads a shape from


@one_operator("reshape2", X="x", aside=_RECORD, unused=("inplace",), refused=("actual_shape",))
def reshape(
    x: Variable,
    shape: Sequence[int],
    actual_shape: Any = None,
    act: str | None = None,
    inplace: bool = False,
    name: str | None = None,
) -> Variable:
    """Gives another shape; 0 keeps an axis, -1 is what is left."""


@one_operator("transpose2", X="x", aside=_RECORD, renamed={"perm": "axis"})
def transpose(x: Variable, perm: Sequence[int], name: str | None = None) -> Variable:
    """Puts axes in another order."""


@one_operator("squeeze2", X="input", aside=_RECORD)
def squeeze(input: Variable, axes: Sequence[int], name: str | None = None) -> Variable:
    """Drops axes of size 1; all of them if `axes` is empty."""


@one_operator("unsqueeze2", X="input", aside=_RECORD)
def unsqueeze(input: Variable, axes: int | Sequence[int], name: str | None = None) -> Variable:
    """Adds axes of size 1."""


@one_operator("flatten2", X="x", aside=_RECORD)
def flatten(x: Variable, axis: int = 1, name: str | None = None) -> Variable:
    """Makes a matrix: the axes before `axis` are its rows."""


@one_operator("concat", X="input")
def concat(input: Sequence[Variable], axis: int = 0, name: str | None = None) -> Variable:
    """Joins along an axis."""


@one_operator("stack", X="x", out="Y")
def stack(x: Sequence[Variable], axis: int = 0, name: str | None = None) -> Variable:
    """Joins along a new axis."""


@one_operator("expand", X="x")
def expand(x: Variable, expand_times: Sequence[int], name: str | None = None) -> Variable:
    """Repeats an array along its axes."""


@one_operator("pad", X="x")
def pad(
    x: Variable, paddings: Sequence[int], pad_value: float = 0.0, name: str | None = None
) -> Variable:
    """Adds elements before and after, two numbers an axis."""


@one_operator("reverse", X="x")
def reverse(x: Variable, axis: int | Sequence[int]) -> Variable:
    """Turns the order along axes around."""


def split(
    input: Variable, num_or_sections: int | Sequence[int], dim: int = -1, name: str | None = None
) -> list[Variable]:
    """Cuts along an axis: into as many parts, or into parts of given sizes; -1 is what is left.

    Raises:
        ProgramError: the axis cannot be cut so.
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
    """Takes an axis apart.

    Raises:
        ProgramError: its size is not known, and `num` does not say it.
    """
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
