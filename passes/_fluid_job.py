"""What the programs of a job in fluid's dialect agree on: where slices live, how they travel."""

from dataclasses import dataclass, replace

from jaxfleet.analysis.slices import Slice
from jaxfleet.analysis.updates import Updates
from jaxfleet.errors import PassError
from jaxfleet.ir import Kind, Variable, trainer_name
from jaxfleet.ir.names import LR_COUNTER
from jaxfleet.passes._job import Job

MODES = ("sync", "async", "half_async")  # at the place of each, fluid's number of it


@dataclass(frozen=True)
class Exchange:
    """How gradients and parameters travel.

    Attributes:
        mode: `sync`: servers wait for the gradients of all trainers, and take their mean. `async`:
            they take each as it comes. `half_async`: as it comes, in blocks that trainers cut.
        runtime_split: whoever sends or receives cuts and joins; no operators do.
        local_barrier: a trainer waits until what it sent has gone.
    """

    mode: str = "sync"
    runtime_split: bool = False
    local_barrier: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            what = f"insert_send_recv: mode is '{self.mode}'"
            raise PassError(what, hint=f"choose one of {', '.join(MODES)}")

    @property
    def is_plain(self) -> bool:
        """Whether it is what is done unless asked otherwise."""
        return self == Exchange()

    @property
    def has_barriers(self) -> bool:
        """Whether all trainers wait for each other in a step."""
        return self.mode == "sync" and not self.runtime_split


@dataclass(frozen=True)
class FluidJob:
    """A job, of a program whose roles say what updates what.

    Attributes:
        updates: of the program.
        job: where everything is.
        exchange: how it travels.
    """

    updates: Updates
    job: Job
    exchange: Exchange

    @property
    def merges(self) -> bool:
        """Whether a server adds up what trainers sent; one whose trainer is alone need not."""
        alone = self.exchange.runtime_split and self.job.trainers == 1
        return self.exchange.mode == "sync" and not alone

    @property
    def counts_steps(self) -> bool:
        """Whether servers cannot see steps, and trainers tell them, for the learning rate."""
        made = {name for op in self.updates.schedule for name in op.writes}
        return self.exchange.mode != "sync" and LR_COUNTER in made

    def names(self, gradient: str, cuts: tuple[Slice, ...], trainer_id: int) -> list[str]:
        """Returns what a trainer calls the slices of a gradient that it sends."""
        own = self.exchange.mode == "sync" and self.job.trainers > 1
        names = [self.job.name(gradient, cut) for cut in cuts]
        return [trainer_name(name, trainer_id) for name in names] if own else names

    def endpoints(self, cuts: tuple[Slice, ...]) -> tuple[str, ...]:
        """Returns the server of each slice."""
        return tuple(self.job.placement[cut.name] for cut in cuts)

    def like(self, variable: str, name: str, cut: Slice, kind: Kind = Kind.TEMP) -> Variable:
        """Returns a slice of a variable, under another name."""
        whole = self.updates.variable(variable)
        shape = whole.shape if cut.is_whole else (cut.rows, *whole.shape[1:])
        return replace(whole, name=name, shape=shape, kind=kind)
