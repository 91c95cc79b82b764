"""Rules for the collectives themselves, so that a rewritten program can be checked."""

from collections.abc import Callable, Mapping

from jaxfleet.analysis.labels.label import REPLICATED, SUM, VARYING, partial, settle, sharded
from jaxfleet.analysis.labels.placing import Placing, View, along, whole


def _reduced(how: str) -> Callable[[View], Placing]:
    def rule(view: View) -> Placing:
        count = len(view.labels)
        return along(view, (partial(how),) * count, *[REPLICATED] * count)

    return rule


def average(view: View) -> Placing:
    """What devices have each for itself becomes their average."""
    return along(view, [settle(x) for x in view.labels], *[REPLICATED] * len(view.labels))


def allgather(view: View) -> Placing:
    """Rows become whole."""
    return along(view, (sharded(view.number("axis")),), REPLICATED)


def reducescatter(view: View) -> Placing:
    """Summands become complete rows."""
    return along(view, (SUM,), sharded(view.number("axis")))


def alltoall(view: View) -> Placing:
    """Rows along one axis become rows along another."""
    inputs = (sharded(view.number("from_axis")),)
    return along(view, inputs, sharded(view.number("axis")))


def split(view: View) -> Placing:
    """Each device takes its rows."""
    return along(view, (settle(view.labels[0]),), sharded(view.number("axis")))


def summand(view: View) -> Placing:
    """What every device has becomes a sum that it has once."""
    return along(view, (REPLICATED,), SUM)


def local(view: View) -> Placing:
    """A summand stands for the whole sum."""
    return along(view, (SUM,), VARYING)


def iota(view: View) -> Placing:
    """Counts a device's rows."""
    return along(view, (), sharded(view.number("dimension")))


def random_rows(view: View) -> Placing:
    """Draws a device's rows."""
    axis = len(view.shapes[0]) + view.number("rows_axis")
    return along(view, (settle(view.labels[0]),), sharded(axis))


_REDUCTIONS = ("sum", "max", "min", "prod", "and", "or", "xor")
RULES: Mapping[str, Callable[[View], Placing]] = {
    **{f"c_allreduce_{how}": _reduced(how) for how in _REDUCTIONS},
    "c_allreduce_avg": average,
    "c_allgather": allgather,
    "c_reducescatter": reducescatter,
    "c_alltoall": alltoall,
    "c_split": split,
    "c_summand": summand,
    "c_local": local,
    "c_complete": whole,
    "c_iota": iota,
    "c_random_bits": random_rows,
    "c_random_split": random_rows,
}
