"""What all programs of a job of trainers and servers agree on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxfleet.analysis.slices import Slice
from jaxfleet.ir import Operator, block_name
from jaxfleet.passes._mode import Mode

Mark = Callable[[Operator], Operator]


@dataclass(frozen=True)
class Job:
    """What all programs of a job agree on.

    Attributes:
        trainers: how many there are.
        endpoints: of the servers, in order.
        slices: of all parameters.
        placement: the endpoint of each slice, by its name.
        summed: the gradients of which every trainer has a summand; of another, trainer 0 has all.
        exports: by parameter, what servers make for trainers besides it; under "", what is made
            of several parameters.
        mode: how trainers and servers go together.
    """

    trainers: int
    endpoints: tuple[str, ...]
    slices: tuple[Slice, ...]
    placement: Mapping[str, str]
    summed: frozenset[str]
    exports: Mapping[str, tuple[str, ...]]
    mode: Mode = field(default_factory=Mode)

    def of(self, param: str) -> tuple[Slice, ...]:
        """Returns the slices of a parameter."""
        return tuple(cut for cut in self.slices if cut.param == param)

    def name(self, name: str, cut: Slice) -> str:
        """Returns what a leaf or a gradient of a parameter is called in a slice of it."""
        return name if cut.is_whole else block_name(name, cut.index)

    def senders(self, gradient: str) -> range:
        """Returns the trainers that send a gradient."""
        own = gradient in self.summed or not self.mode.is_sync
        return range(self.trainers if own else 1)

    def sharers(self) -> tuple[str, ...]:
        """Returns the servers that hold anything, and so take part in exchanges."""
        held = set(self.placement.values())
        return tuple(endpoint for endpoint in self.endpoints if endpoint in held)
