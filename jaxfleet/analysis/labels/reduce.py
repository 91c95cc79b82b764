"""Rules for reductions: reducing the cut axis leaves each device a part of the result."""

from jaxfleet.analysis.labels.label import SUM, partial, sharded
from jaxfleet.analysis.labels.placing import Placing, View, along, gathered, whole

REDUCTIONS = frozenset(
    f"jax.reduce_{name}" for name in ("sum", "max", "min", "prod", "and", "or", "xor")
)


def reduction(view: View) -> Placing:
    """Reduces rows to a part of the result."""
    axes, label, axis = view.ints("axes"), view.labels[0], view.axis(0)
    how = view.op.type.removeprefix("jax.reduce_")
    if axis is None:
        is_sum = label.is_sum and how == "sum"
        return along(view, (SUM,), SUM) if is_sum else whole(view)
    if axis in axes:
        return along(view, (label,), partial(how))
    return along(view, (label,), sharded(axis - sum(place < axis for place in axes)))


def arg_reduction(view: View) -> Placing:
    """Finds the place of an extreme; over rows that takes all of them."""
    axes, axis = view.ints("axes"), view.axis(0)
    if axis is None:
        return whole(view)
    if axis in axes:
        return gathered(view, f"{view.op.type} looks for a row among all rows")
    return along(view, view.labels, sharded(axis - sum(place < axis for place in axes)))
