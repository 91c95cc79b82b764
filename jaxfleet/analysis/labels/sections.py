"""Rules for operators that mix elements along some axes: sorting, padding, windows, transforms."""

from jaxfleet.analysis.labels.label import SUM, settle, sharded
from jaxfleet.analysis.labels.placing import Placing, View, along, as_sizes, gathered, whole

LINEAR = frozenset({"jax.rev", "jax.cumsum", "jax.split"})
OTHERS = frozenset(
    f"jax.{name}"
    for name in (
        *("cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "top_k", "approx_top_k"),
        *("fft", "reduce_window", "reduce_window_sum", "reduce_window_max"),
        *("reduce_window_min", "select_and_scatter_add", "select_and_gather_add"),
        *("select_and_scatter", "cholesky", "triangular_solve", "eigh", "svd", "qr", "lu"),
    )
)


def apart(view: View) -> Placing:
    """Keeps rows where other axes than the cut one are mixed."""
    axes = {label.axis for label in view.labels if label.is_sharded}
    if not axes:
        return whole(view)
    axis = axes.pop()
    if axes or axis in mixed_axes(view):
        return gathered(view, f"{view.op.type} works along the batch axis")
    rank = len(view.shapes[0])
    inputs = [
        sharded(axis) if len(shape) == rank else settle(label)
        for shape, label in zip(view.shapes, view.labels, strict=True)
    ]
    return along(view, inputs, *[sharded(axis)] * len(view.out_shapes))


def apart_linear(view: View) -> Placing:
    """As `apart`, and keeps summands: `rev`, `cumsum`, `split`."""
    if view.labels[0].is_sum:
        return along(view, view.labels, *view.labels * len(view.out_shapes))
    return apart(view)


def pad(view: View) -> Placing:
    """As `apart`, and keeps a summand that is padded with a summand, or with zero."""
    parts = [label.is_sum or place in view.zeros for place, label in enumerate(view.labels)]
    if SUM in view.labels and all(parts):
        return along(view, (SUM, SUM), SUM)
    return apart(view)


def mixed_axes(view: View) -> set[int]:
    """Returns the axes along which an operator mixes elements."""
    rank = len(view.shapes[0])
    match view.op.type.removeprefix("jax."):
        case "rev":
            return set(view.ints("dimensions"))
        case "sort":
            return {view.number("dimension")}
        case "top_k":
            return {view.number("axis") % rank if "axis" in view.op.attrs else rank - 1}
        case "approx_top_k":
            return {view.number("reduction_dimension") % rank}
        case "pad":
            return _padded(view)
        case "fft":
            return set(range(rank - len(as_sizes(view.op.attrs["fft_lengths"])), rank))
        case "split" | "cumsum" | "cumprod" | "cummax" | "cummin" | "cumlogsumexp":
            return {view.number("axis")}
        case name if name.startswith(("reduce_window", "select_and_")):
            return _windowed(view)
    return {rank - 1, rank - 2}  # linear algebra: the last two axes are a matrix


def _padded(view: View) -> set[int]:
    config = view.op.attrs["padding_config"]
    assert isinstance(config, tuple)
    return {axis for axis, edges in enumerate(config) if edges != (0, 0, 0)}


def _windowed(view: View) -> set[int]:
    """Returns the axes along which a window is wider than one element, moves or pads."""
    attrs, count = view.op.attrs, len(view.shapes[0])
    ones, none = (1,) * count, ((0, 0),) * count
    touched: set[int] = set()
    for name, still in (
        ("window_dimensions", ones),
        ("window_strides", ones),
        ("padding", none),
        ("base_dilation", ones),
        ("window_dilation", ones),
    ):
        found = attrs.get(name, still)
        assert isinstance(found, tuple)
        touched |= {axis for axis in range(count) if found[axis] != still[axis]}
    return touched
