"""Rules for the collectives themselves, so that a rewritten program can be checked."""

from collections.abc import Callable, Mapping

from jaxfleet.analysis.labels.label import REPLICATED, Placing, View, along, partial, sharded


def _reduced(how: str) -> Callable[[View], Placing]:
    def rule(view: View) -> Placing:
        count = len(view.labels)
        return along(view, (partial(how),) * count, *[REPLICATED] * count)

    return rule


def _axis(view: View) -> int:
    return int(str(view.op.attrs["axis"]))


def allgather(view: View) -> Placing:
    """Rows become whole."""
    return along(view, (sharded(_axis(view)),), REPLICATED)


def reducescatter(view: View) -> Placing:
    """Summands become complete rows."""
    return along(view, (partial("sum"),), sharded(_axis(view)))


def split(view: View) -> Placing:
    """Each device takes its rows."""
    return along(view, (REPLICATED,), sharded(_axis(view)))


def summand(view: View) -> Placing:
    """What every device has becomes a sum that it has once."""
    return along(view, (REPLICATED,), partial("sum"))


RULES: Mapping[str, Callable[[View], Placing]] = {
    **{f"c_allreduce_{how}": _reduced(how) for how in ("sum", "max", "min", "prod", "and", "or")},
    "c_allgather": allgather,
    "c_reducescatter": reducescatter,
    "c_split": split,
    "c_summand": summand,
}
