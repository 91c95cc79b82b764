"""Sharding rules for collectives, used to check a rewritten program."""

from collections.abc import Callable, Mapping

from jaxfleet.analysis.sharding.rule_api import OperatorSharding, OperatorView, along, whole
from jaxfleet.analysis.sharding.spec import REPLICATED, SUM, VARYING, completed, partial, sharded


def _reduced(how: str) -> Callable[[OperatorView], OperatorSharding]:
    def rule(view: OperatorView) -> OperatorSharding:
        count = len(view.labels)
        return along(view, (partial(how),) * count, *[REPLICATED] * count)

    return rule


def average(view: OperatorView) -> OperatorSharding:
    """Averages the devices' own values."""
    return along(view, [completed(x) for x in view.labels], *[REPLICATED] * len(view.labels))


def allgather(view: OperatorView) -> OperatorSharding:
    """Gathers rows to the whole."""
    return along(view, (sharded(view.number("axis")),), REPLICATED)


def reducescatter(view: OperatorView) -> OperatorSharding:
    """Sums summands to complete rows."""
    return along(view, (SUM,), sharded(view.number("axis")))


def alltoall(view: OperatorView) -> OperatorSharding:
    """Moves the cut from one axis to another."""
    inputs = (sharded(view.number("from_axis")),)
    return along(view, inputs, sharded(view.number("axis")))


def split(view: OperatorView) -> OperatorSharding:
    """Splits a value into each device's rows."""
    return along(view, (completed(view.labels[0]),), sharded(view.number("axis")))


def summand(view: OperatorView) -> OperatorSharding:
    """Turns a replicated value into a summand that counts once."""
    return along(view, (REPLICATED,), SUM)


def local(view: OperatorView) -> OperatorSharding:
    """Takes a summand for the whole sum."""
    return along(view, (SUM,), VARYING)


def iota(view: OperatorView) -> OperatorSharding:
    """Counts a device's rows."""
    return along(view, (), sharded(view.number("dimension")))


def random_rows(view: OperatorView) -> OperatorSharding:
    """Draws a device's rows."""
    axis = len(view.shapes[0]) + view.number("rows_axis")
    return along(view, (completed(view.labels[0]),), sharded(axis))


_REDUCTIONS = ("sum", "max", "min", "prod", "and", "or", "xor")
RULES: Mapping[str, Callable[[OperatorView], OperatorSharding]] = {
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
