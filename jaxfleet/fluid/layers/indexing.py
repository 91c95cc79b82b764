"""Layers that take elements by number, or find them."""

from collections.abc import Sequence

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.layers.one_operator import one_operator, variables
from jaxfleet.fluid.variable import Variable


@one_operator("one_hot", X="input", dtype="float32", frozen=True)
def one_hot(input: Variable, depth: int, allow_out_of_range: bool = False) -> Variable:
    """Makes rows that are 1 where they are named: of `[..., 1]`, `[..., depth]`.

    A number outside of them makes a row of NaN, or of zeros with `allow_out_of_range`.
    """


def topk(input: Variable, k: int, name: str | None = None) -> tuple[Variable, Variable]:
    """Finds the `k` largest along the last axis, and where they are."""
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
    """Sorts along an axis, and tells where each element was."""
    (x,) = variables("argsort", "input", input)
    helper = LayerHelper("argsort", name)
    attrs = {"axis": axis, "descending": descending}
    values, places = helper.add({"X": x}, {"Out": x.dtype, "Indices": "int64"}, attrs)
    places.stop_gradient = True
    return values, places


@one_operator("arg_max", X="x", dtype="int64", frozen=True)
def argmax(x: Variable, axis: int = 0) -> Variable:
    """Tells where the largest is, along an axis."""


@one_operator("arg_min", X="x", dtype="int64", frozen=True)
def argmin(x: Variable, axis: int = 0) -> Variable:
    """Tells where the smallest is, along an axis."""


@one_operator("gather", X="input", Index="index")
def gather(input: Variable, index: Variable, overwrite: bool = True) -> Variable:
    """Takes rows."""


@one_operator("gather_nd", X="input", Index="index")
def gather_nd(input: Variable, index: Variable, name: str | None = None) -> Variable:
    """Takes what the last axis of the index names."""


@one_operator("scatter", X="input", Ids="index", Updates="updates")
def scatter(
    input: Variable,
    index: Variable,
    updates: Variable,
    name: str | None = None,
    overwrite: bool = True,
) -> Variable:
    """Writes rows, or adds up those that go to one place."""


@one_operator("slice", Input="input")
def slice(
    input: Variable, axes: Sequence[int], starts: Sequence[int], ends: Sequence[int]
) -> Variable:
    """Takes a part along axes."""


@one_operator("strided_slice", Input="input")
def strided_slice(
    input: Variable,
    axes: Sequence[int],
    starts: Sequence[int],
    ends: Sequence[int],
    strides: Sequence[int],
) -> Variable:
    """Takes every so many elements of a part along axes."""


@one_operator("shape", Input="input", dtype="int32", frozen=True)
def shape(input: Variable) -> Variable:
    """Tells the sizes of an array."""
