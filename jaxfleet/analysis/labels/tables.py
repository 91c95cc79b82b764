"""Rules for look-ups in tables: rows of keys go with their keys, and their gradients add up."""

from jaxfleet.analysis.labels.label import SUM, settle
from jaxfleet.analysis.labels.placing import Placing, View, along, gathered, whole


def lookup(view: View) -> Placing:
    """Each device looks up the keys that it has."""
    handle, keys = settle(view.labels[0]), view.labels[1]
    if not keys.is_sharded:
        return whole(view)
    return along(view, (handle, keys), keys)


def lookup_grad(view: View) -> Placing:
    """A device with some of the keys has a summand of their rows' gradient.

    `summed` says so to who makes rows of it: the handle's own gradient is 0 either way.
    """
    keys, gradient = view.labels
    if keys.is_sharded:
        return along(view, (keys, keys), SUM, summed=True)
    if gradient.is_sum:
        return along(view, (settle(keys), SUM), SUM, summed=True)
    return gathered(view, "the keys are not cut, so every device needs all rows of the gradient")


def rows(view: View) -> Placing:
    """Each device takes the rows of its own part of the index."""
    index = view.labels[1]
    if not index.is_sharded:
        return whole(view)
    return along(view, (settle(view.labels[0]), index), index)


def rows_grad(view: View) -> Placing:
    """A device with part of the index has a summand of the rows."""
    index, gradient = view.labels
    if index.is_sharded:
        return along(view, (index, index), SUM)
    if gradient.is_sum:
        return along(view, (settle(index), SUM), SUM)
    return gathered(view, "the index is not cut, so every device needs all rows of the gradient")


RULES = {
    "table_lookup": lookup,
    "table_lookup_grad": lookup_grad,
    "lookup_rows": rows,
    "lookup_rows_grad": rows_grad,
}
