"""What of the state not every device has all of, from one step to the next."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxfleet.analysis.labels.label import REPLICATED, SUM, Label
from jaxfleet.ir import Program

SCATTER = "scatter"  # how a sum is completed of which each device keeps its rows


@dataclass(frozen=True)
class Held:
    """How state lies when a step begins and when it ends.

    Attributes:
        state: its labels, where they are not `REPLICATED`: rows of a leaf that is cut over the
            devices, a summand or a value of a device's own.
        gradients: those of which each device gets its rows only, and the axis.
    """

    state: Mapping[str, Label] = field(default_factory=dict)
    gradients: Mapping[str, int] = field(default_factory=dict)

    def label(self, name: str) -> Label:
        """Returns how a variable of the state lies between steps."""
        return self.state.get(name, REPLICATED)


def own_state(program: Program) -> tuple[str, ...]:
    """Returns the state of which every device has a value of its own."""
    names = program.attrs.get("own", ())
    assert isinstance(names, tuple)
    return tuple(map(str, names))


def summed(program: Program) -> Held:
    """Returns how the state of a one-device program lies: `sums` names what is added up in it.

    Each device then adds up its summands, and they are summed when they are read.
    """
    names = program.attrs.get("sums", ())
    assert isinstance(names, tuple)
    return Held({str(name): SUM for name in names})
