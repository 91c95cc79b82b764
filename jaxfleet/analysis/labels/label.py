"""Labels: how a value of the one-device program lies on the devices.

A value is replicated (every device has all of it), sharded along an axis (each device has its
rows, in the order of the devices), partial (each device has a summand, or a candidate for the
maximum, of it), or varying (each device has a value of its own, as local statistics are).
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Layout(enum.Enum):
    """The four ways a value can lie on the devices."""

    REPLICATED = "replicated"
    SHARDED = "sharded"
    PARTIAL = "partial"
    VARYING = "varying"


@dataclass(frozen=True, slots=True)
class Label:
    """How one value lies on the devices.

    Attributes:
        layout: which of the four ways.
        axis: the axis that is cut, for `SHARDED`.
        how: what completes it, for `PARTIAL`: sum, max, min, prod, and, or.
    """

    layout: Layout
    axis: int = -1
    how: str = ""

    def __str__(self) -> str:
        detail = str(self.axis) if self.layout is Layout.SHARDED else self.how
        return f"{self.layout.value}({detail})" if detail else self.layout.value

    @property
    def is_partial(self) -> bool:
        """Tells whether each device has a part that says nothing alone."""
        return self.layout is Layout.PARTIAL

    @property
    def is_sum(self) -> bool:
        """Tells whether this is a summand."""
        return self.layout is Layout.PARTIAL and self.how == "sum"

    @property
    def is_sharded(self) -> bool:
        """Tells whether each device has its own rows."""
        return self.layout is Layout.SHARDED


REPLICATED = Label(Layout.REPLICATED)
VARYING = Label(Layout.VARYING)
SUM = Label(Layout.PARTIAL, how="sum")


def sharded(axis: int) -> Label:
    """Returns the label of a value cut along an axis."""
    return Label(Layout.SHARDED, axis=axis)


def partial(how: str) -> Label:
    """Returns the label of a summand, or of a candidate for another reduction."""
    return Label(Layout.PARTIAL, how=how)


def settle(label: Label) -> Label:
    """Returns the label that a value has once it is complete."""
    return VARYING if label.layout is Layout.VARYING else REPLICATED


def agreed(labels: Iterable[Label]) -> Label:
    """Returns the label that values, of which one will be taken, can all be brought to.

    What every device has can become rows or a summand; rows and summands only meet complete.
    """
    found = set(labels) - {REPLICATED}
    if len(found) == 1:
        return found.pop()
    return VARYING if VARYING in found else REPLICATED
